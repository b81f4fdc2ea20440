// Launching kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/cuda/check.h"

namespace evenkeel {

inline unsigned grid(int64_t blocks) { return static_cast<unsigned>(blocks); }

// To be called before a launch with more than 48 KB of dynamic shared memory.
template <class Kernel>
void allow_shared_memory(Kernel kernel, size_t bytes) {
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "asking for shared memory");
}

}  // namespace evenkeel
