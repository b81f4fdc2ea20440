#include "gpu/device.h"

#include <map>
#include <mutex>

#include "base/error.h"
#include "gpu/cuda/check.h"

namespace evenkeel {
namespace {

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
  device.shared_bytes = properties.sharedMemPerBlockOptin;
  return device;
}

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

}  // namespace evenkeel
