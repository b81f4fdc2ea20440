// GPU memory and streams in a build without CUDA: every call says so. cmake/cuda.cmake chooses between this and cuda/.
#include "base/error.h"
#include "gpu/device.h"
#include "gpu/device_memory.h"

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

DeviceMemory::DeviceMemory(size_t) { refuse(); }
void DeviceMemory::give_back(const MemoryPiece&) {}
void DeviceMemory::upload(const void*, size_t, size_t) { refuse(); }
void DeviceMemory::download(void*, size_t, size_t) const { refuse(); }
void DeviceMemory::fill(uint8_t) { refuse(); }
DeviceStream::DeviceStream() { refuse(); }
DeviceStream::~DeviceStream() = default;
void device_wait() { refuse(); }
double device_seconds(const std::function<void(void*)>&) { refuse(); }

}  // namespace evenkeel
