// The backward pass of the Ampere class on the device.
#include "attention/cuda/ampere_launch.cuh"

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

}  // namespace evenkeel
