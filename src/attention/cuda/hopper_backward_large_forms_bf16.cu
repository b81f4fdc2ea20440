// Hopper's backward pass on BF16 tensors, of large heads with forms.
#include "attention/cuda/hopper_backward_large_launch.cuh"

namespace evenkeel::hopper::backward {

template <>
void launch_large_backward_forms<Bf16Pairs>(const AttentionProblem& problem, const PassInputs& in,
                                            const DeviceTensor& grad_output, const ForwardPass& saved,
                                            const BackwardPass& out, void* workspace, cudaStream_t stream) {
  launch_large<Bf16Pairs, true>(problem, in, grad_output, saved, out, workspace, stream);
}

}  // namespace evenkeel::hopper::backward
