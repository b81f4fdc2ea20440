#include "attention/cpu_operands.h"

#include <algorithm>

#include "base/threads.h"
#include "numerics/cpu.h"
#include "numerics/round_array.h"

namespace evenkeel {

const AttentionKernels& attention_kernels() { return EVENKEEL_OF_TARGET(cpu_target(), kAttentionKernels); }

void copy_strided(float* target, const float* source, int64_t stride, int64_t count) {
  if (stride == 1) {
    std::copy_n(source, count, target);
    return;
  }
  for (int64_t n = 0; n < count; ++n) target[n] = source[n * stride];
}

namespace {

// x[j][d] -= mean[d] with the mean over all keys, summed in FP64.
void centre(float* x, int64_t keys, int64_t D, int64_t stride, float* mean) {
  for (int64_t d = 0; d < D; ++d) {
    double sum = 0;
    for (int64_t j = 0; j < keys; ++j) sum += x[j * stride + d];
    mean[d] = static_cast<float>(sum / static_cast<double>(keys));
    for (int64_t j = 0; j < keys; ++j) x[j * stride + d] -= mean[d];
  }
}

bool spans_more_than_rows(const SharedScale& shared) {
  return shared.group >= ScaleGroup::head || shared.outer >= ScaleGroup::head;
}
bool spans_heads(const SharedScale& shared) {
  return shared.group == ScaleGroup::tensor || shared.outer == ScaleGroup::tensor;
}
bool by_tile(const SharedScale& shared) {
  return shared.group == ScaleGroup::tile || shared.outer == ScaleGroup::tile;
}

// rows [0, rows) of one head.
float largest_of(const View<const float>& x, int64_t b, int64_t h, int64_t rows) {
  float largest = 0;
  std::vector<float> row(static_cast<size_t>(x.shape[3]));
  for (int64_t i = 0; i < rows; ++i) {
    copy_strided(row.data(), x.at(b, h, i), x.stride[3], x.shape[3]);
    largest = std::max(largest, largest_finite({row.data(), 1, x.shape[3], 0, 1}));
  }
  return largest;
}

// One head's k or v as the products read it, but for the rounding.
void pack_head(const View<const float>& from, int64_t b, int64_t g, int64_t keys, bool centred, float* x,
               int64_t stride, float* mean) {
  const int64_t D = from.shape[3];
  for (int64_t j = 0; j < keys; ++j) copy_strided(x + j * stride, from.at(b, g, j), from.stride[3], D);
  if (centred && keys > 0) centre(x, keys, D, stride, mean);
}

// The largest magnitude of all heads of a sequence, packed.
float largest_of_sequence(const View<const float>& from, int64_t b, int64_t keys, bool centred) {
  const int64_t D = from.shape[3];
  std::vector<float> x(static_cast<size_t>(keys * D)), mean(static_cast<size_t>(D));
  float largest = 0;
  for (int64_t g = 0; g < from.shape[1]; ++g) {
    pack_head(from, b, g, keys, centred, x.data(), D, mean.data());
    largest = std::max(largest, largest_finite({x.data(), keys, D, D, 1}));
  }
  return largest;
}

}  // namespace

void round_rows(const Rounding& rounding, float* x, int64_t rows, int64_t columns, int64_t stride,
                float largest, const RandomKey& key, uint64_t first_element) {
  const SharedScale& shared = rounding.shared;
  const bool scaled = shared != SharedScale{};
  const Rounding element = scaled ? element_rounding(rounding) : rounding;
  if (!spans_more_than_rows(shared)) largest = -1;  // another head's plan asked for it
  const int64_t step = by_tile(shared) ? kScaleTileRows : std::max<int64_t>(rows, 1);
  for (int64_t first = 0; first < rows; first += step) {
    const ScaledMatrix m{x + first * stride, std::min(step, rows - first), columns, stride, 1};
    std::vector<float> scales;
    if (scaled) {
      scales = find_scales(rounding, m, largest);
      divide_by_scales(shared, m, scales);
    }
    for (int64_t i = first; i < first + m.rows; ++i)
      round_array(element, x + i * stride, x + i * stride, static_cast<size_t>(columns), key,
                  first_element + static_cast<uint64_t>(i * columns));
    if (scaled) multiply_by_scales(shared, m, scales);
  }
}

bool Call::needs_whole_tiles() const {
  return std::any_of(plans.begin(), plans.end(), [](const HeadPlan& head) {
    return head.plan.promote > 0 || std::any_of(head.plan.rounding.begin(), head.plan.rounding.end(),
                                                [](const Rounding& r) { return by_tile(r.shared); });
  });
}

void Operands::choose_copies(const AttentionProblem& problem, const std::vector<HeadPlan>& plans) {
  const int64_t group = problem.H / problem.G;
  for (int64_t h = 0; h < problem.H; ++h) {
    size_t copy = 0;
    while (copy < owner_.size() &&
           !(owner_[copy] / group == h / group &&
             read_keys_alike(plans[static_cast<size_t>(owner_[copy])], plans[static_cast<size_t>(h)])))
      ++copy;
    if (copy == owner_.size()) owner_.push_back(h);
    copy_of_head_[static_cast<size_t>(h)] = static_cast<int64_t>(copy);
  }
  copies_ = static_cast<int64_t>(owner_.size());
}

void Operands::find_largest(const AttentionProblem& problem, const std::vector<HeadPlan>& plans, Site site,
                            const View<const float>& x) {
  if (std::none_of(plans.begin(), plans.end(),
                   [&](const HeadPlan& head) { return spans_more_than_rows(head.plan.at(site).shared); }))
    return;
  std::vector<float>& values = largest_[static_cast<size_t>(site)];
  values.resize(static_cast<size_t>(problem.B * problem.H));
  parallel_for(problem.B, [&](int64_t b, int) {
    float* const of_head = values.data() + b * problem.H;
    float of_all = 0;
    for (int64_t h = 0; h < problem.H; ++h)
      of_all = std::max(of_all, of_head[h] = largest_of(x, b, h, problem.rows(b)));
    for (int64_t h = 0; h < problem.H; ++h)
      if (spans_heads(plans[static_cast<size_t>(h)].plan.at(site).shared)) of_head[h] = of_all;
  });
}

Operands::Operands(const AttentionProblem& problem, const std::vector<HeadPlan>& plans,
                   const AttentionInputs& in, View<const float> grad_output, Pass pass,
                   SiteObserver* observer)
    : pass_(pass),
      keys_(problem.N),
      stride_(round_up(std::max(problem.D, problem.Dv), kColumnStep)),
      copy_of_head_(static_cast<size_t>(problem.H)) {
  const int64_t group = problem.H / problem.G;
  choose_copies(problem, plans);
  k_.resize(static_cast<size_t>(problem.B * copies_ * keys_ * stride_));
  v_.resize(k_.size());
  mean_.resize(static_cast<size_t>(problem.B * copies_ * stride_));
  const bool backward = pass == Pass::backward;
  find_largest(problem, plans, backward ? Site::q_bwd : Site::q, in.q);
  if (backward)
    for (Site site : {Site::grad_output, Site::grad_output_for_dprobs})
      find_largest(problem, plans, site, grad_output);

  parallel_for(problem.B * copies_, [&](int64_t item, int) {
    const int64_t b = item / copies_, h = owner_[static_cast<size_t>(item % copies_)];
    const int64_t g = h / group, keys = problem.keys(b);
    const HeadPlan& head = plans[static_cast<size_t>(h)];
    const PrecisionPlan& plan = head.plan;
    for (Site of : {Site::k, Site::v}) {
      const Site site = !backward ? of : of == Site::k ? Site::k_bwd : Site::v_bwd;
      const View<const float>& from = of == Site::k ? in.k : in.v;
      const bool centred = of == Site::k && head.centres_keys;
      const int64_t D = from.shape[3];
      float* x = (of == Site::k ? k_ : v_).data() + offset(b, h, 0);
      pack_head(from, b, g, keys, centred, x, stride_, mean_.data() + item * stride_);
      const Rounding& rounding = plan.at(site);
      if (is_identity(rounding) && !observer) continue;
      std::vector<float> exact;
      if (observer) exact.assign(x, x + keys * stride_);
      const float largest =
          spans_heads(rounding.shared) ? largest_of_sequence(from, b, keys, centred) : -1.0f;
      round_rows(rounding, x, keys, D, stride_, largest, stream_key(problem, plan, static_cast<uint32_t>(of)),
                 static_cast<uint64_t>(((problem.first_sequence + b) * problem.G + g) * keys_ * D));
      if (observer) observer->observe({site, b, h, 0, 0, keys, D, stride_, 1, exact.data(), x});
    }
  });
}

}  // namespace evenkeel
