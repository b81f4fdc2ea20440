// Maps of tensors for Hopper's copy engine: made on the host, passed to kernels by value.
#pragma once

#include <cudaTypedefs.h>

#include <array>
#include <cstdint>

namespace evenkeel::gpu {

inline constexpr int kBoxFeatures = 64;  // of a tile in shared memory (copy_engine.cuh)

// A BF16 tensor (batch, heads, rows, D) with strides in elements, the last of which is 1. The copy engine moves boxes
// of 64 features and `box_rows` rows of it. DataError where the driver makes no map of it.
CUtensorMap tensor_map(void* data, const std::array<int64_t, 4>& size, const std::array<int64_t, 4>& stride,
                       int box_rows);

}  // namespace evenkeel::gpu
