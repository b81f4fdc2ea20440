// Attention on a GPU: checks the request, hands it to the chosen family of kernels.
#include "attention/attention_cuda.h"

#include "attention/cuda/kernels.h"
#include "attention/cuda_request.h"

namespace evenkeel {
namespace {

// A problem that is complete, the device it runs on, and the family that takes it.
struct Request {
  Request(const CudaAttention& given, bool with_facts) : problem(complete(given)) {
    choice = choose_kernel(require_cuda_device(), problem, with_facts);
    sizes = choice.kernel == AttentionKernel::hopper ? hopper_sizes(problem)
                                                     : any_plan_sizes(problem, with_facts);
  }

  CudaAttention problem;
  KernelChoice choice;
  CudaSizes sizes;
};

}  // namespace

CudaSizes cuda_attention_sizes(const CudaAttention& problem, bool with_facts) {
  return Request(problem, with_facts).sizes;
}

KernelChoice attention_forward_cuda(const CudaAttention& problem, const CudaInputs& in,
                                    const CudaForward& out, bool with_facts, void* workspace, void* stream) {
  const Request request(problem, with_facts);
  check_forward(request.problem, request.choice.kernel, request.sizes, in, out, with_facts, workspace);
  const auto forward = request.choice.kernel == AttentionKernel::hopper ? hopper_forward : any_plan_forward;
  forward(request.problem, in, out, workspace, static_cast<cudaStream_t>(stream));
  return request.choice;
}

KernelChoice attention_backward_cuda(const CudaAttention& problem, const CudaInputs& in,
                                     const DeviceTensor& grad_output, const CudaForward& saved,
                                     const CudaBackward& out, bool with_facts, void* workspace,
                                     void* stream) {
  const Request request(problem, with_facts);
  check_backward(request.problem, request.choice.kernel, request.sizes, in, grad_output, saved, out,
                 with_facts, workspace);
  const auto backward =
      request.choice.kernel == AttentionKernel::hopper ? hopper_backward : any_plan_backward;
  backward(request.problem, in, grad_output, saved, out, workspace, static_cast<cudaStream_t>(stream));
  return request.choice;
}

}  // namespace evenkeel
