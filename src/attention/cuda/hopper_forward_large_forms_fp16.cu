// Hopper's forward pass on FP16 tensors, of head sizes above 128 with forms.
#include "attention/cuda/hopper_forward_kernel.cuh"

namespace evenkeel::hopper::forward {

template <>
void launch_large_forward_forms<Fp16Pairs>(const AttentionProblem& problem, const PassInputs& in,
                                           const ForwardPass& out, const ForwardArguments& a, void* workspace,
                                           cudaStream_t stream) {
  launch_block<Fp16Pairs, true, true, false>(problem, in, out, a, workspace, stream);
}

}  // namespace evenkeel::hopper::forward
