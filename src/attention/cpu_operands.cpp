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

}  // namespace

Operands::Operands(const AttentionProblem& problem, const std::vector<HeadPlan>& plans,
                   const AttentionInputs& in, SiteObserver* observer)
    : keys_(problem.N),
      stride_(round_up(problem.D, kColumnStep)),
      copy_of_head_(static_cast<size_t>(problem.H)) {
  const int64_t group = problem.H / problem.G;
  std::vector<int64_t> owner;  // of each copy: the first head that reads it
  for (int64_t h = 0; h < problem.H; ++h) {
    size_t copy = 0;
    while (copy < owner.size() &&
           !(owner[copy] / group == h / group &&
             read_keys_alike(plans[static_cast<size_t>(owner[copy])], plans[static_cast<size_t>(h)])))
      ++copy;
    if (copy == owner.size()) owner.push_back(h);
    copy_of_head_[static_cast<size_t>(h)] = static_cast<int64_t>(copy);
  }
  copies_ = static_cast<int64_t>(owner.size());
  k_.resize(static_cast<size_t>(problem.B * copies_ * keys_ * stride_));
  v_.resize(k_.size());
  mean_.resize(static_cast<size_t>(problem.B * copies_ * stride_));

  parallel_for(problem.B * copies_, [&](int64_t item, int) {
    const int64_t b = item / copies_, h = owner[static_cast<size_t>(item % copies_)];
    const int64_t g = h / group, keys = problem.keys(b), D = problem.D;
    const HeadPlan& head = plans[static_cast<size_t>(h)];
    const PrecisionPlan& plan = head.plan;
    for (Site site : {Site::k, Site::v}) {
      const View<const float>& from = site == Site::k ? in.k : in.v;
      float* x = (site == Site::k ? k_ : v_).data() + offset(b, h, 0);
      for (int64_t j = 0; j < keys; ++j) copy_strided(x + j * stride_, from.at(b, g, j), from.stride[3], D);
      if (site == Site::k && head.centres_keys && keys > 0)
        centre(x, keys, D, stride_, mean_.data() + item * stride_);
      const Rounding& rounding = plan.at(site);
      if (is_identity(rounding) && !observer) continue;
      std::vector<float> exact;
      if (observer) exact.assign(x, x + keys * stride_);
      for (int64_t j = 0; j < keys; ++j)
        round_array(rounding, x + j * stride_, x + j * stride_, static_cast<size_t>(D),
                    stream_key(problem, plan, static_cast<uint32_t>(site)),
                    static_cast<uint64_t>((((problem.first_sequence + b) * problem.G + g) * keys_ + j) * D));
      if (observer) observer->observe({site, b, h, 0, 0, keys, D, stride_, 1, exact.data(), x});
    }
  });
}

}  // namespace evenkeel
