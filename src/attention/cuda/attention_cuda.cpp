// Attention on a GPU: finds the device, checks the request, hands it to the chosen family of kernels.
#include "attention/attention_cuda.h"

#include <map>
#include <mutex>

#include "attention/cuda/kernels.h"
#include "attention/cuda_request.h"
#include "base/error.h"

namespace evenkeel {
namespace {

constexpr int kLeastMajor = 8;  // of the any-plan kernels: mma.sync on bf16

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

CudaDevice absent(std::string why) {
  CudaDevice device;
  device.why = std::move(why);
  return device;
}

CudaDevice ask(int ordinal) {
  CudaDevice device;
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, ordinal), "asking for the device's properties");
  device.present = true;
  device.name = properties.name;
  device.major = properties.major;
  device.minor = properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  return device;
}

// A problem that is complete, the device it runs on, and the family that takes it.
struct Request {
  Request(const CudaAttention& given, bool with_facts) : problem(complete(given)) {
    const CudaDevice device = cuda_device();
    require_data(device.present, "no GPU: {}", device.why);
    require_data(device.major >= kLeastMajor,
                 "expected a GPU of compute capability {}.0 or newer, found {} ({}.{})", kLeastMajor,
                 device.name, device.major, device.minor);
    choice = choose_kernel(device, problem, with_facts);
    sizes = choice.kernel == AttentionKernel::hopper ? hopper_sizes(problem)
                                                     : any_plan_sizes(problem, with_facts);
  }

  CudaAttention problem;
  KernelChoice choice;
  CudaSizes sizes;
};

}  // namespace

void check_cuda(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  throw DataError(
      fmt::format("CUDA: {}: {} ({})", doing, cudaGetErrorString(status), cudaGetErrorName(status)));
}

CudaDevice cuda_device() {
  static std::mutex mutex;
  static std::map<int, CudaDevice> known;
  int ordinal = 0;
  // Also the first call of the runtime in this process: without a driver it fails here, and says so.
  if (const cudaError_t status = cudaGetDevice(&ordinal); status != cudaSuccess) {
    int driver = 0;
    cudaGetLastError();  // the failure is reported here; a later call must not meet it
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return absent("no NVIDIA driver here");
    if (status == cudaErrorInsufficientDriver)
      return absent(fmt::format("the driver is of CUDA {}, this build of CUDA {}", version_text(driver),
                                version_text(CUDART_VERSION)));
    return absent(cudaGetErrorString(status));
  }
  const std::lock_guard lock(mutex);
  const auto found = known.find(ordinal);
  if (found != known.end()) return found->second;
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess || count == 0) {
    cudaGetLastError();
    return absent(status != cudaSuccess ? cudaGetErrorString(status) : "the driver sees no device");
  }
  return known.emplace(ordinal, ask(ordinal)).first->second;
}

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
