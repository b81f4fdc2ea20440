// Maps of tensors for Hopper's copy engine, on the CPU: what the engine of copy_engine.cuh beside it needs to know.
#pragma once

#include <array>
#include <cstdint>

struct CUtensorMap {
  uint16_t* data;
  std::array<int64_t, 4> size, stride;  // batch, heads, rows, features; in elements
  int box_rows;
};

// A namespace of its own: the linker must not take the library's function of this name, which asks a driver, for this one.
namespace evenkeel::gpu {
inline namespace on_the_cpu {

inline constexpr int kBoxFeatures = 64;

inline CUtensorMap tensor_map(void* data, const std::array<int64_t, 4>& size,
                              const std::array<int64_t, 4>& stride, int box_rows) {
  return {static_cast<uint16_t*>(data), size, stride, box_rows};
}

}  // namespace on_the_cpu
}  // namespace evenkeel::gpu
