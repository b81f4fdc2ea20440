// Hopper's backward pass on FP16 tensors.
#include "attention/cuda/hopper_backward_launch.cuh"

namespace evenkeel::hopper::backward {

template void launch_backward<Fp16Pairs>(const AttentionProblem&, const PassInputs&, const DeviceTensor&,
                                         Backward, const std::vector<KeyGroup>&, cudaStream_t);

}  // namespace evenkeel::hopper::backward
