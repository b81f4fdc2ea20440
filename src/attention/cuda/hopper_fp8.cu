// Hopper's FP8 kernels on the device. The forward pass multiplies E4M3 numbers. The backward pass is that of the BF16 kernels
// (hopper_backward.cu) on the same rounded q, k and v, which BF16 has exactly: it finds the forward's scores again, and its
// gradients are those of the rounded numbers. Neither pass leaves anything for the other but O and L: rounding q, k and v
// again takes less than keeping them.
#include <algorithm>

#include "attention/cuda/hopper_fp8_pass.h"
#include "attention/family_calls.h"
#include "gpu/cuda/stream_launch.cuh"

namespace evenkeel {
namespace {

StreamLaunch launch_on(void* stream) {
  return {static_cast<cudaStream_t>(stream), "starting a kernel of Hopper's FP8 passes"};
}
hopper_fp8::BackwardLayout backward_layout(const AttentionProblem& problem, void* workspace) {
  return hopper_fp8::lay_out_backward(problem, workspace, hopper_prepare(problem)->sizes.workspace);
}

}  // namespace

std::shared_ptr<const FamilyPlan> hopper_fp8_prepare(const AttentionProblem& problem) {
  auto plan = std::make_shared<FamilyPlan>();
  plan->sizes = {hopper_prepare(problem)->sizes.saved, std::max(hopper_fp8::lay_out(problem, nullptr).bytes,
                                                                backward_layout(problem, nullptr).bytes)};
  return plan;
}

void hopper_fp8_forward(const AttentionProblem& problem, const FamilyPlan&, const PassInputs& in,
                        const ForwardPass& out, void* workspace, void* stream) {
  StreamLaunch launch = launch_on(stream);
  hopper_fp8::forward_pass(problem, in, out, workspace, cuda_device().multiprocessors, launch);
}

void hopper_fp8_backward(const AttentionProblem& problem, const FamilyPlan& plan, const PassInputs& in,
                         const DeviceTensor& grad_output, const ForwardPass& saved, const BackwardPass& out,
                         void* workspace, void* stream) {
  StreamLaunch launch = launch_on(stream);
  const hopper_fp8::BackwardLayout layout = backward_layout(problem, workspace);
  hopper_fp8::quantise_rows(problem, in, layout, cuda_device().multiprocessors, launch);
  hopper_backward(problem, plan, layout.rounded, grad_output, saved, out, layout.rest, stream);
}

}  // namespace evenkeel
