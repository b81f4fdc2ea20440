// Hopper's forward pass on FP16 tensors.
#include "attention/cuda/hopper_forward_kernel.cuh"

namespace evenkeel::hopper::forward {

template void launch_forward<Fp16Pairs>(const AttentionProblem&, const PassInputs&, const ForwardPass&,
                                        const ForwardArguments&, bool, void*, cudaStream_t);

}  // namespace evenkeel::hopper::forward
