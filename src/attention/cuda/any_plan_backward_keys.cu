// The instances of the any-plan backward kernel that owns keys, and which of them a pass runs.
#include "attention/cuda/any_plan_backward_keys.cuh"

#include "attention/cuda/any_plan_launch.cuh"

namespace evenkeel::any_plan {

void launch_backward_keys(const Launcher& launcher) {
  const Problem& p = launcher.p;
  launcher.for_variants(&DevicePlan::backward, [&]<int kD, Variant kVariant>() {
    using Shape = BackwardShape<kD, kVariant>;
    launcher.launch(backward_keys_kernel<kD, kVariant>, int64_t{p.B} * p.G, p.N, kOwnedRows, Shape::kThreads,
                    Shape::shared_bytes_keys(p), "dK and dV of the backward pass");
  });
}

}  // namespace evenkeel::any_plan
