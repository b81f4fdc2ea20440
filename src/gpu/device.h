// The GPU at hand. Plain C++, in every build: one without CUDA says so.
#pragma once

#include <string>

namespace evenkeel {

// `present` is false where there is no GPU, no driver, or no CUDA in this build: `why` says which.
struct CudaDevice {
  bool present = false;
  std::string why;   // why not present
  std::string name;  // "NVIDIA H200"
  int major = 0, minor = 0;
  int multiprocessors = 0;
};
CudaDevice cuda_device();  // the calling thread's current device; asks once per device

// The same; DataError where there is none, or its tensor cores have no BF16 (compute capability below 8.0).
CudaDevice require_cuda_device();

}  // namespace evenkeel
