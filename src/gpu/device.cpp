#include "gpu/device.h"

#include "base/error.h"

namespace evenkeel {

void require_usable(const CudaDevice& device) {
  require_data(device.present, "no GPU: {}", device.why);
  require_data(device.major >= kLeastCudaMajor,
               "expected a GPU of compute capability {}.0 or newer, found {} ({}.{})", kLeastCudaMajor,
               device.name, device.major, device.minor);
}

CudaDevice require_cuda_device() {
  CudaDevice device = cuda_device();
  require_usable(device);
  return device;
}

}  // namespace evenkeel
