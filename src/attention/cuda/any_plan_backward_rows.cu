// The instances of the any-plan backward kernel that owns rows, and which of them a pass runs.
#include "attention/cuda/any_plan_backward_rows.cuh"

#include "attention/cuda/any_plan_launch.cuh"

namespace evenkeel::any_plan {

void launch_backward_rows(const Launcher& launcher) {
  const Problem& p = launcher.p;
  launcher.for_variants(&DevicePlan::backward, [&]<int kD, Variant kVariant>() {
    const auto rows = [&]<RowTask kTask>() {
      using Shape = BackwardShape<kD, kVariant>;
      launcher.launch(backward_rows_kernel<kD, kVariant, kTask>, int64_t{p.B} * p.H, p.T, kOwnedRows,
                      Shape::kThreads, Shape::shared_bytes_rows(p), "dQ of the backward pass");
    };
    if (launcher.any([](const DevicePlan& d) { return d.backward == kVariant && d.probs_delta; }))
      rows.template operator()<RowTask::zero_sum_delta>();
    // As in the forward pass, the slowest has one instance for both.
    if (kVariant == Variant::any || tells_facts_of(p))
      return rows.template operator()<RowTask::gradients_and_facts>();
    if constexpr (kVariant != Variant::any) rows.template operator()<RowTask::gradients>();
  });
}

}  // namespace evenkeel::any_plan
