// The instances of the any-plan forward kernel, and which of them a pass runs.
#include "attention/cuda/any_plan_forward.cuh"

#include "attention/cuda/any_plan_launch.cuh"

namespace evenkeel::any_plan {

void launch_forward(const Launcher& launcher) {
  const Problem& p = launcher.p;
  launcher.for_variants(&DevicePlan::forward, [&]<int kD, Variant kVariant>() {
    using Shape = ForwardShape<kD, kVariant>;
    const auto run = [&](auto kernel) {
      launcher.launch(kernel, int64_t{p.B} * p.H, p.T, Shape::kRows, Shape::kThreads, Shape::shared_bytes(p),
                      "the forward pass");
    };
    // The slowest has one instance for both: it takes the compiler longest.
    if (kVariant == Variant::any || p.ties) return run(forward_kernel<kD, kVariant, true>);
    if constexpr (kVariant != Variant::any) run(forward_kernel<kD, kVariant, false>);
  });
}

}  // namespace evenkeel::any_plan
