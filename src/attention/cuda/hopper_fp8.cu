// Hopper's FP8 forward pass on the device.
#include <stdexcept>

#include "attention/cuda/hopper_fp8_pass.h"
#include "attention/family_calls.h"
#include "gpu/cuda/launch.h"

namespace evenkeel {
namespace hopper_fp8 {
namespace {

template <class Kernel, class Arguments>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksAtOnce)
    kernel_of(const __grid_constant__ Arguments arguments) {
  Kernel::run(arguments);
}

struct StreamLaunch {
  cudaStream_t stream;
  template <class Kernel, class Arguments>
  void run(int64_t blocks, const Arguments& arguments) {
    const auto kernel = kernel_of<Kernel, Arguments>;
    allow_shared_memory(kernel, Kernel::kSharedBytes);
    kernel<<<grid(blocks), Kernel::kThreads, Kernel::kSharedBytes, stream>>>(arguments);
    check_launch("starting a kernel of Hopper's FP8 forward pass");
  }
};

}  // namespace
}  // namespace hopper_fp8

std::shared_ptr<const FamilyPlan> hopper_fp8_prepare(const AttentionProblem& problem) {
  auto plan = std::make_shared<FamilyPlan>();
  plan->sizes = {0, hopper_fp8::lay_out(problem, nullptr).bytes};
  return plan;
}

void hopper_fp8_forward(const AttentionProblem& problem, const FamilyPlan&, const PassInputs& in,
                        const ForwardPass& out, void* workspace, void* stream) {
  hopper_fp8::StreamLaunch launch{static_cast<cudaStream_t>(stream)};
  hopper_fp8::forward_pass(problem, in, out, workspace, cuda_device().multiprocessors, launch);
}

void hopper_fp8_backward(const AttentionProblem&, const FamilyPlan&, const PassInputs&, const DeviceTensor&,
                         const ForwardPass&, const BackwardPass&, void*, void*) {
  throw std::invalid_argument(
      "[attention] expected a forward pass: the Hopper FP8 kernels have no backward pass; the any-plan "
      "kernels have both for this plan");
}

}  // namespace evenkeel
