// The GPU at hand. Plain C++, in every build: one without CUDA says so.
#pragma once

#include <cstddef>
#include <string>

namespace evenkeel {

// `present` is false where there is no GPU, no driver, or no CUDA in this build: `why` says which.
struct CudaDevice {
  bool present = false;
  std::string why;   // why not present
  std::string name;  // "NVIDIA H200"
  int major = 0, minor = 0;
  int multiprocessors = 0;
  size_t shared_bytes = 0;  // of shared memory that a block can have
};
CudaDevice cuda_device();  // the calling thread's current device; asks once per device

inline constexpr int kLeastCudaMajor = 8;       // of the compute capability: tensor cores with BF16
void require_usable(const CudaDevice& device);  // DataError where it is absent or older
CudaDevice require_cuda_device();               // cuda_device, usable

}  // namespace evenkeel
