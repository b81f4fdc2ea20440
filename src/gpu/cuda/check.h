// CUDA's errors as exceptions.
#pragma once

#include <cuda_runtime_api.h>

namespace evenkeel {

// Throws DataError: what was being done, and CUDA's own words.
void check_cuda(cudaError_t status, const char* doing);
// The same for the kernel that was just launched.
inline void check_launch(const char* doing) { check_cuda(cudaGetLastError(), doing); }

}  // namespace evenkeel
