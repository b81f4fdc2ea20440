// Hopper's forward pass on BF16 tensors.
#include "attention/cuda/hopper_forward_kernel.cuh"

namespace evenkeel::hopper::forward {

template void launch_forward<Bf16Pairs>(const AttentionProblem&, const PassInputs&, const ForwardPass&,
                                        const ForwardArguments&, bool, void*, cudaStream_t);

}  // namespace evenkeel::hopper::forward
