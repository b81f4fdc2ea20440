// The backward pass of the Ampere class on the device.
#include "attention/cuda/ampere_launch.cuh"
#include "attention/cuda/ampere_row_facts.h"

namespace evenkeel {

void ampere_backward(const AttentionProblem& problem, const FamilyPlan& plan, const PassInputs& in,
                     const DeviceTensor& grad_output, const ForwardPass& saved, const BackwardPass& out,
                     void* workspace, void* stream) {
  StreamLaunch launch = ampere::stream_launch(stream);
  ampere::with_kernels_of(
      problem, static_cast<const ampere::Plan&>(plan).small, [&]<class Pairs, int kHead, bool kSmall>() {
        ampere::backward_pass<Pairs, kHead, kSmall>(problem, in, grad_output, saved, out, workspace, launch);
      });
}

namespace ampere {

PassSizes large_facts_sizes(const AttentionProblem& problem) { return large_pass_sizes(problem); }

Problem find_large_row_facts(const AttentionProblem& problem, const PassInputs& in,
                             const DeviceTensor& grad_output, const ForwardPass& saved,
                             const BackwardPass& out, void* workspace, void* stream) {
  StreamLaunch launch = stream_launch(stream);
  return (problem.type == TensorType::fp16
              ? find_row_facts<Fp16Pairs, 256, false, StreamLaunch>
              : find_row_facts<Bf16Pairs, 256, false, StreamLaunch>)(problem, in, grad_output, saved, out,
                                                                     workspace, launch, Parts::none);
}

}  // namespace ampere
}  // namespace evenkeel
