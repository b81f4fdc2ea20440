#include "gpu/device.h"

#include "base/error.h"

namespace evenkeel {

CudaDevice require_cuda_device() {
  constexpr int kLeastMajor = 8;
  const CudaDevice device = cuda_device();
  require_data(device.present, "no GPU: {}", device.why);
  require_data(device.major >= kLeastMajor,
               "expected a GPU of compute capability {}.0 or newer, found {} ({}.{})", kLeastMajor,
               device.name, device.major, device.minor);
  return device;
}

}  // namespace evenkeel
