// Kernels of ranks_cuda.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace evenkeel {

// to = left + to, both (count).
void add_floats(float* to, const float* left, int64_t count, cudaStream_t stream);

}  // namespace evenkeel
