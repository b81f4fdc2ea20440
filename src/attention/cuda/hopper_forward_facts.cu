// Hopper's forward pass on BF16 tensors, with facts of its scores.
#include "attention/cuda/hopper_forward_kernel.cuh"

namespace evenkeel::hopper::forward {

void launch_forward_facts(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                          const std::vector<ForwardArguments>& groups, void* workspace, cudaStream_t stream) {
  launch_groups<Bf16Pairs, false, false, true>(problem, in, out, groups, workspace, stream);
}

}  // namespace evenkeel::hopper::forward
