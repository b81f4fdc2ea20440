// Hopper's forward pass on BF16 tensors, of head sizes above 128.
#include "attention/cuda/hopper_forward_kernel.cuh"

namespace evenkeel::hopper::forward {

template <>
void launch_large_forward<Bf16Pairs>(const AttentionProblem& problem, const PassInputs& in,
                                     const ForwardPass& out, const std::vector<ForwardArguments>& groups,
                                     void* workspace, cudaStream_t stream) {
  launch_groups<Bf16Pairs, true, false, false>(problem, in, out, groups, workspace, stream);
}

}  // namespace evenkeel::hopper::forward
