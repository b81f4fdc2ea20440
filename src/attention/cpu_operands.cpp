#include "attention/cpu_operands.h"

#include <algorithm>

#include "base/threads.h"
#include "numerics/cpu.h"
#include "numerics/round_array.h"

namespace evenkeel {

const AttentionKernels& attention_kernels() {
#if defined(__x86_64__)
  switch (cpu_target()) {
    case CpuTarget::avx512:
      return avx512::kAttentionKernels;
    case CpuTarget::avx2:
      return avx2::kAttentionKernels;
    case CpuTarget::baseline:
      break;
  }
#endif
  return baseline::kAttentionKernels;
}

void copy_strided(float* target, const float* source, int64_t stride, int64_t count) {
  if (stride == 1) {
    std::copy_n(source, count, target);
    return;
  }
  for (int64_t n = 0; n < count; ++n) target[n] = source[n * stride];
}

HeadPlan::HeadPlan(const PrecisionPlan& asked) : plan(asked) {
  const Stabiliser s = plan.stabiliser;
  zero_sum = s == Stabiliser::zero_sum;
  consistent = s == Stabiliser::consistent;
  wide = consistent || s == Stabiliser::wide_output;
  max_first = consistent && !is_identity(plan.at(Site::shifted));
  power_shift = consistent && !max_first;
  shadow = wide && !(is_identity(plan.at(Site::pv)) && is_identity(plan.at(Site::row_sum)));
  if (wide && plan.at(Site::output_for_delta) == plan.at(Site::output))
    plan.at(Site::output_for_delta) = Rounding{};
  if (consistent) plan.at(Site::dprobs) = Rounding{};
  if (s == Stabiliser::stochastic_output)
    for (Site site : {Site::output, Site::output_for_delta}) plan.at(site).mode = RoundingMode::stochastic;
}

namespace {

bool read_alike(const AttentionShape& shape, const std::vector<HeadPlan>& plans, int64_t h1, int64_t h2) {
  const PrecisionPlan &a = plans[static_cast<size_t>(h1)].plan, &b = plans[static_cast<size_t>(h2)].plan;
  const int64_t group = shape.H / shape.G;
  return h1 / group == h2 / group && a.at(Site::k) == b.at(Site::k) && a.at(Site::v) == b.at(Site::v) &&
         a.seed == b.seed &&
         (a.stabiliser == Stabiliser::centre_keys) == (b.stabiliser == Stabiliser::centre_keys);
}

// x[j][d] -= mean[d] with the mean over all keys, summed in FP64.
void centre(float* x, int64_t keys, int64_t D, int64_t stride, float* mean) {
  for (int64_t d = 0; d < D; ++d) {
    double sum = 0;
    for (int64_t j = 0; j < keys; ++j) sum += x[j * stride + d];
    mean[d] = static_cast<float>(sum / static_cast<double>(keys));
    for (int64_t j = 0; j < keys; ++j) x[j * stride + d] -= mean[d];
  }
}

}  // namespace

Operands::Operands(const AttentionConfig& config, const AttentionShape& shape,
                   const std::vector<HeadPlan>& plans, const AttentionInputs& in, SiteObserver* observer)
    : keys_(shape.N), stride_(round_up(shape.D, kColumnStep)), copy_of_head_(static_cast<size_t>(shape.H)) {
  std::vector<int64_t> owner;  // of each copy: the first head that reads it
  for (int64_t h = 0; h < shape.H; ++h) {
    size_t copy = 0;
    while (copy < owner.size() && !read_alike(shape, plans, owner[copy], h)) ++copy;
    if (copy == owner.size()) owner.push_back(h);
    copy_of_head_[static_cast<size_t>(h)] = static_cast<int64_t>(copy);
  }
  copies_ = static_cast<int64_t>(owner.size());
  k_.resize(static_cast<size_t>(shape.B * copies_ * keys_ * stride_));
  v_.resize(k_.size());
  mean_.resize(static_cast<size_t>(shape.B * copies_ * stride_));

  parallel_for(shape.B * copies_, [&](int64_t item, int) {
    const int64_t b = item / copies_, h = owner[static_cast<size_t>(item % copies_)];
    const int64_t g = h / (shape.H / shape.G), keys = shape.keys(config.mask, b), D = shape.D;
    const PrecisionPlan& plan = plans[static_cast<size_t>(h)].plan;
    for (Site site : {Site::k, Site::v}) {
      const View<const float>& from = site == Site::k ? in.k : in.v;
      float* x = (site == Site::k ? k_ : v_).data() + offset(b, h, 0);
      for (int64_t j = 0; j < keys; ++j) copy_strided(x + j * stride_, from.at(b, g, j), from.stride[3], D);
      if (site == Site::k && plan.stabiliser == Stabiliser::centre_keys && keys > 0)
        centre(x, keys, D, stride_, mean_.data() + item * stride_);
      const Rounding& rounding = plan.at(site);
      if (is_identity(rounding) && !observer) continue;
      std::vector<float> exact;
      if (observer) exact.assign(x, x + keys * stride_);
      for (int64_t j = 0; j < keys; ++j)
        round_array(rounding, x + j * stride_, x + j * stride_, static_cast<size_t>(D),
                    stream_key(config, plan, static_cast<uint32_t>(site)),
                    static_cast<uint64_t>((((config.first_sequence + b) * shape.G + g) * keys_ + j) * D));
      if (observer) observer->observe({site, b, h, 0, 0, keys, D, stride_, 1, exact.data(), x});
    }
  });
}

}  // namespace evenkeel
