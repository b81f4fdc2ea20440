// Maps of tensors for Hopper's copy engine, on the CPU: what src/gpu/cuda/tensor_map.h tells the driver.
#pragma once

#include <array>
#include <cstdint>

struct CUtensorMap {
  const uint16_t* data;
  std::array<int64_t, 4> size, stride;  // (batch, heads, rows, D), in elements
  int box_rows;
};

namespace evenkeel::gpu {

inline constexpr int kBoxFeatures = 64;

inline CUtensorMap tensor_map(void* data, const std::array<int64_t, 4>& size,
                              const std::array<int64_t, 4>& stride, int box_rows) {
  return {static_cast<const uint16_t*>(data), size, stride, box_rows};
}

}  // namespace evenkeel::gpu
