// Which GPU kernel runs, and why. The only place that decides it; pure host code, in every build.
#include <algorithm>

#include "attention/attention_cuda.h"
#include "base/error.h"

namespace evenkeel {
namespace {

constexpr int64_t kLargestHead = 128, kHeadStep = 8;
constexpr uintptr_t kAlignmentBytes = 16;
constexpr int64_t kStrideStep = 8;  // elements of bf16 in kAlignmentBytes

// What the Hopper kernels do not take in this plan, or "".
std::string not_taken(const PrecisionPlan& plan) {
  const StabiliserRules& rules = rules_of(plan.stabiliser);
  // They sum rounded probabilities only with shifts by powers of two, and exact ones only with the others.
  const bool known = rules.sum == SumRule::rounded_probs
                         ? rules.shift == ShiftRule::power_of_two && rules.output == OutputRule::wide &&
                               rules.delta == DeltaRule::output
                         : rules.shift != ShiftRule::power_of_two && rules.shift != ShiftRule::paper;
  if (!known || rules.output == OutputRule::stochastic || rules.keys != KeyRule::given)
    return fmt::format("the stabiliser {}", rules.name);
  static const PrecisionPlan flash2 = parse_plan("flash2");
  for (int n = 0; n < kSiteCount; ++n) {
    const auto site = static_cast<Site>(n);
    if (plan.at(site) == flash2.at(site)) continue;
    // The O of delta is kept with 16 significand bits, rounded without bias: what is asked for, or nearly.
    if (site == Site::output_for_delta && rules.output == OutputRule::wide &&
        (is_identity(plan.at(site)) || plan.at(site) == Rounding{Format{8, 15}} ||
         plan.at(site) == Rounding{Format{8, 15}, RoundingMode::stochastic}))
      continue;
    return fmt::format("{}={} (flash2 has {})", name(site), to_string(plan.at(site)),
                       to_string(flash2.at(site)));
  }
  return "";
}

// What the Hopper kernels do not take in this problem, or "".
std::string not_taken(const CudaDevice& device, const CudaAttention& p, bool with_facts) {
  if (device.major != 9 || device.minor != 0)
    return fmt::format("compute capability {}.{} (they are built for exactly 9.0)", device.major,
                       device.minor);
  if (p.type != TensorType::bf16) return "fp32 tensors";
  if (p.D > kLargestHead || p.D % kHeadStep != 0)
    return fmt::format("head size {} (a multiple of {} up to {} is taken)", p.D, kHeadStep, kLargestHead);
  if (p.plans.empty()) return "a problem without a plan";
  if (std::any_of(p.plans.begin(), p.plans.end(), [&](const auto& plan) { return plan != p.plans[0]; }))
    return "plans that differ between heads";
  if (std::string plan = not_taken(p.plans[0]); !plan.empty()) return plan;
  if (p.softcap != 0) return "softcap";
  if (p.scale < 0) return "a negative scale";  // masked scores are -inf before they are scaled
  if (p.window_left >= 0 || p.window_right >= 0) return "a sliding window";
  if (p.visible.present()) return "a mask of its own";
  if (with_facts) return "ties, residuals or delta as outputs";
  if (!p.aligned) return "tensors that are not 16-byte aligned";
  return "";
}

}  // namespace

bool is_aligned(const DeviceTensor& tensor, const std::array<int64_t, 4>& sizes) {
  if (reinterpret_cast<uintptr_t>(tensor.data) % kAlignmentBytes != 0) return false;
  if (sizes[3] > 1 && tensor.stride[3] != 1) return false;
  for (size_t axis = 0; axis < 3; ++axis) {
    const int64_t stride = tensor.stride[axis];
    if (sizes[axis] > 1 && (stride % kStrideStep != 0 || stride < 0 || (stride == 0 && axis > 0)))
      return false;
  }
  return true;
}

KernelChoice choose_kernel(const CudaDevice& device, const CudaAttention& problem, bool with_facts) {
  if (const std::string what = not_taken(device, problem, with_facts); !what.empty())
    return {AttentionKernel::any_plan, "the Hopper kernels do not take " + what};
  const Stabiliser stabiliser = problem.plans[0].stabiliser;
  std::string why = fmt::format("bf16, head size {}, flash2 with stabiliser {} on compute capability 9.0",
                                problem.D, name(stabiliser));
  if (rules_of(stabiliser).output == OutputRule::wide)
    why += "; the O of delta has 16 significand bits, rounded stochastically";
  return {AttentionKernel::hopper, why};
}

}  // namespace evenkeel
