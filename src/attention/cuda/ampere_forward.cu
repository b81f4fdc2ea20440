// The forward pass of the Ampere class on the device.
#include "attention/cuda/ampere_launch.cuh"

namespace evenkeel {

std::shared_ptr<const FamilyPlan> ampere_prepare(const AttentionProblem& problem) {
  auto plan = std::make_shared<ampere::Plan>();
  plan->small = ampere::needs_small(problem, cuda_device().shared_bytes);
  plan->sizes = ampere::pass_sizes(problem, plan->small);
  return plan;
}

void ampere_forward(const AttentionProblem& problem, const FamilyPlan& plan, const PassInputs& in,
                    const ForwardPass& out, void* workspace, void* stream) {
  StreamLaunch launch = ampere::stream_launch(stream);
  ampere::with_kernels_of(problem, static_cast<const ampere::Plan&>(plan).small,
                          [&]<class Pairs, int kHead, bool kSmall>() {
                            ampere::forward_pass<Pairs, kHead, kSmall>(problem, in, out, workspace, launch);
                          });
}

}  // namespace evenkeel
