// Hopper's forward pass on FP16 tensors.
#include "attention/cuda/hopper_forward_kernel.cuh"

namespace evenkeel::hopper::forward {

template <>
void launch_forward<Fp16Pairs>(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                               const std::vector<ForwardArguments>& groups, bool forms, void* workspace,
                               cudaStream_t stream) {
  (forms ? launch_groups<Fp16Pairs, false, true, false>
         : launch_groups<Fp16Pairs, false, false, false>)(problem, in, out, groups, workspace, stream);
}

}  // namespace evenkeel::hopper::forward
