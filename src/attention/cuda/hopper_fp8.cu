// Hopper's FP8 forward pass on the device.
#include <stdexcept>

#include "attention/cuda/hopper_fp8_pass.h"
#include "attention/family_calls.h"
#include "gpu/cuda/stream_launch.cuh"

namespace evenkeel {

std::shared_ptr<const FamilyPlan> hopper_fp8_prepare(const AttentionProblem& problem) {
  auto plan = std::make_shared<FamilyPlan>();
  plan->sizes = {0, hopper_fp8::lay_out(problem, nullptr).bytes};
  return plan;
}

void hopper_fp8_forward(const AttentionProblem& problem, const FamilyPlan&, const PassInputs& in,
                        const ForwardPass& out, void* workspace, void* stream) {
  StreamLaunch launch{static_cast<cudaStream_t>(stream), "starting a kernel of Hopper's FP8 forward pass"};
  hopper_fp8::forward_pass(problem, in, out, workspace, cuda_device().multiprocessors, launch);
}

void hopper_fp8_backward(const AttentionProblem&, const FamilyPlan&, const PassInputs&, const DeviceTensor&,
                         const ForwardPass&, const BackwardPass&, void*, void*) {
  throw std::invalid_argument(
      "[attention] expected a forward pass: the Hopper FP8 kernels have no backward pass; the any-plan "
      "kernels have both for this plan");
}

}  // namespace evenkeel
