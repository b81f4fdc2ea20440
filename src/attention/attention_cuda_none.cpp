// Attention on a GPU in a build without CUDA: says so. cmake/cuda.cmake chooses between this and cuda/.
#include "attention/attention_cuda.h"
#include "attention/device_memory.h"
#include "base/error.h"

namespace evenkeel {
namespace {

constexpr const char* kWhy = "built without CUDA";
[[noreturn]] void refuse() { throw DataError(kWhy); }

}  // namespace

CudaDevice cuda_device() {
  CudaDevice device;
  device.why = kWhy;
  return device;
}
CudaSizes cuda_attention_sizes(const CudaAttention&, bool) { refuse(); }
KernelChoice attention_forward_cuda(const CudaAttention&, const CudaInputs&, const CudaForward&, bool, void*,
                                    void*) {
  refuse();
}
KernelChoice attention_backward_cuda(const CudaAttention&, const CudaInputs&, const DeviceTensor&,
                                     const CudaForward&, const CudaBackward&, bool, void*, void*) {
  refuse();
}

DeviceMemory::DeviceMemory(size_t) { refuse(); }
DeviceMemory::~DeviceMemory() = default;
void DeviceMemory::upload(const void*, size_t, size_t) { refuse(); }
void DeviceMemory::download(void*, size_t, size_t) const { refuse(); }
void DeviceMemory::fill(uint8_t) { refuse(); }
DeviceStream::DeviceStream() { refuse(); }
DeviceStream::~DeviceStream() = default;
void device_wait() { refuse(); }
double device_seconds(const std::function<void(void*)>&) { refuse(); }

}  // namespace evenkeel
