// The instances of the any-plan forward kernel, and which of them a pass runs.
#include "attention/cuda/any_plan_forward.cuh"

#include "attention/cuda/any_plan_launch.cuh"

namespace evenkeel::any_plan {

void launch_forward(const Launcher& launcher) {
  const Problem& p = launcher.p;
  launcher.for_variants(&DevicePlan::forward, [&]<int kD, Variant kVariant>() {
    using Shape = ForwardShape<kD, kVariant>;
    launcher.launch(p.ties ? forward_kernel<kD, kVariant, true> : forward_kernel<kD, kVariant, false>,
                    int64_t{p.B} * p.H, p.T, Shape::kRows, Shape::kThreads, Shape::shared_bytes(p),
                    "the forward pass");
  });
}

}  // namespace evenkeel::any_plan
