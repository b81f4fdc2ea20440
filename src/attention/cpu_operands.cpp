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

// x[j][d] -= mean[d] with the mean over all rows, summed in FP64.
void centre(float* x, int64_t rows, int64_t D, int64_t stride, float* mean) {
  for (int64_t d = 0; d < D; ++d) {
    double sum = 0;
    for (int64_t j = 0; j < rows; ++j) sum += x[j * stride + d];
    mean[d] = static_cast<float>(sum / static_cast<double>(rows));
    for (int64_t j = 0; j < rows; ++j) x[j * stride + d] -= mean[d];
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
bool by_column(const SharedScale& shared) {
  return shared.group == ScaleGroup::column || shared.outer == ScaleGroup::column;
}

// of_columns[d] of rows [0, rows) of one head, less their tiles' means where they are centred; and of them all.
float largest_of(const View<const float>& x, int64_t b, int64_t h, int64_t rows, bool centred,
                 float* of_columns) {
  const int64_t D = x.shape[3];
  std::vector<float> tile(static_cast<size_t>(kScaleTileRows * D)), mean(static_cast<size_t>(D));
  std::fill_n(of_columns, D, 0.0f);
  for (int64_t first = 0; first < rows; first += kScaleTileRows) {
    const int64_t count = std::min<int64_t>(kScaleTileRows, rows - first);
    pack_rows(x, b, h, first, count, tile.data(), D, centred ? mean.data() : nullptr);
    for (int64_t d = 0; d < D; ++d)
      of_columns[d] = std::max(of_columns[d], largest_finite({tile.data() + d, count, 1, D, 1}));
  }
  return largest_finite({of_columns, 1, D, 0, 1});
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

void pack_rows(const View<const float>& from, int64_t b, int64_t h, int64_t first, int64_t rows, float* x,
               int64_t stride, float* means) {
  const int64_t D = from.shape[3];
  for (int64_t i = 0; i < rows; ++i)
    copy_strided(x + i * stride, from.at(b, h, first + i), from.stride[3], D);
  for (int64_t i = 0; means && i < rows; i += kScaleTileRows)
    centre(x + i * stride, std::min<int64_t>(kScaleTileRows, rows - i), D, stride,
           means + i / kScaleTileRows * stride);
}

void round_rows(const Rounding& rounding, float* x, int64_t rows, int64_t columns, int64_t stride,
                LargestBeyond largest, const RandomKey& key, uint64_t first_element) {
  const SharedScale& shared = rounding.shared;
  const bool scaled = shared != SharedScale{};
  const Rounding element = scaled ? element_rounding(rounding) : rounding;
  if (!spans_more_than_rows(shared)) largest.of_all = -1;  // another head's plan asked for it
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
    return head.plan.promote > 0 || head.centres_queries ||
           std::any_of(head.plan.rounding.begin(), head.plan.rounding.end(), [](const Rounding& r) {
             return by_tile(r.shared) || r.shared.group == ScaleGroup::column_block;
           });
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
  if (std::none_of(plans.begin(), plans.end(), [&](const HeadPlan& head) {
        const SharedScale& shared = head.plan.at(site).shared;
        return spans_more_than_rows(shared) || by_column(shared);
      }))
    return;
  Largest& largest = largest_[static_cast<size_t>(site)];
  const int64_t D = x.shape[3];
  largest.of_head.resize(static_cast<size_t>(problem.B * problem.H));
  largest.of_columns.resize(static_cast<size_t>(problem.B * problem.H * D));
  const auto centres = [&](const HeadPlan& head) {
    return first_reading(site) == Site::q && head.centres_queries;
  };
  parallel_for(problem.B, [&](int64_t b, int) {
    float* const of_head = largest.of_head.data() + b * problem.H;
    std::vector<float> others(static_cast<size_t>(D));
    // A scale that all heads share is of all heads as this one's plan has them.
    for (const bool centred : {false, true}) {
      const auto is_meant = [&](const HeadPlan& head) { return centres(head) == centred; };
      if (std::none_of(plans.begin(), plans.end(), is_meant)) continue;
      float of_all = 0;
      for (int64_t h = 0; h < problem.H; ++h) {
        const bool meant = is_meant(plans[static_cast<size_t>(h)]);
        float* const of_columns = largest.of_columns.data() + (b * problem.H + h) * D;
        const float found = largest_of(x, b, h, problem.rows(b), centred, meant ? of_columns : others.data());
        if (meant) of_head[h] = found;
        of_all = std::max(of_all, found);
      }
      for (int64_t h = 0; h < problem.H; ++h)
        if (const HeadPlan& head = plans[static_cast<size_t>(h)];
            is_meant(head) && spans_heads(head.plan.at(site).shared))
          of_head[h] = of_all;
    }
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
