// Products of a warpgroup with E4M3 operands on the CPU: src/gpu/cuda/wgmma_e4m3.cuh by the definitions of its instructions.
// Operands are found by the bits of their descriptors, and sums are the chip's (numerics/tensor_core.h), so that a kernel's
// results should be those of an H200 but for its exponentials. A product reads its operands as late as it may: when the
// thread waits for it.
#pragma once

#include "gpu/cuda/wgmma.cuh"
#include "numerics/format.h"
#include "numerics/tensor_core.h"

namespace evenkeel::gpu {

template <int kLineBytes>
uint64_t operand_e4m3(const void* at) {
  static_assert(kLineBytes == 64 || kLineBytes == 128);
  constexpr uint64_t kSwizzle = kLineBytes == 128 ? 1 : 2;
  if (shared_address(at) % 1024 != 0) machine().fail("an operand that is not aligned to 1024 bytes");
  return uint64_t{shared_address(at)} >> 4 | uint64_t{1} << 16 |
         static_cast<uint64_t>(8 * kLineBytes >> 4) << 32 | kSwizzle << 62;
}

inline uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  const Rounding e4m3{kE4m3, RoundingMode::nearest_even, /*saturate=*/true};
  uint32_t packed = 0;
  for (float x : {x3, x2, x1, x0}) packed = packed << 8 | encode(kE4m3, round_to(e4m3, x));
  return packed;
}

namespace emulated {

inline float e4m3_value(uint32_t code) {
  static const auto table = [] {
    std::array<float, 256> values{};
    for (uint32_t n = 0; n < 256; ++n) values[n] = decode(kE4m3, n);
    return values;
  }();
  return table[code & 0xff];
}

// Byte `byte` of line `line` of an operand: the address of a plain matrix, whose bits 4.. are then changed by its bits 7..
inline float e4m3_operand(uint64_t descriptor, int line, int byte) {
  const auto start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const auto group = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  const auto swizzle = static_cast<uint32_t>(descriptor >> 62);
  const uint32_t line_bytes = swizzle == 1 ? 128 : swizzle == 2 ? 64 : 0, bits = swizzle == 1 ? 7 : 3;
  if (line_bytes == 0) machine().fail("an operand with another swizzle than that of 64 or 128 bytes");
  const auto n = static_cast<uint32_t>(line);
  uint32_t address = start + n / 8 * group + n % 8 * line_bytes + static_cast<uint32_t>(byte);
  address ^= (address >> 7 & bits) << 4;
  return e4m3_value(*machine().shared_at(address, 1));
}

// All lanes of a warp, whose rows are the warp's sixteen of 64.
inline void compute_e4m3(WarpgroupProduct& mine) {
  machine().meet("wgmma", mine, [](WarpgroupProduct** lanes) {
    static const TensorCoreModel& model = find_tensor_core_model(kE4m3);
    const WarpgroupProduct& first = *lanes[0];
    const int first_row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
    float a[16][32];
    for (int row = 0; row < 16; ++row)
      for (int term = 0; term < 32; ++term) {
        const int lane = row % 8 * 4 + term % 16 / 4, word = term / 16 * 2 + row / 8;
        a[row][term] = first.words[0]
                           ? e4m3_value(*lanes[lane]->words[static_cast<size_t>(word)] >> (term % 4 * 8))
                           : e4m3_operand(first.a, first_row + row, term);
      }
    for (int column = 0; column < first.columns; ++column) {
      float b[32];
      for (int term = 0; term < 32; ++term) b[term] = e4m3_operand(first.b, column, term);
      for (int row = 0; row < 16; ++row) {
        float& d = lanes[row % 8 * 4 + column % 8 / 2]->d[column / 8 * 4 + row / 8 * 2 + column % 2];
        d = tensor_core_dot(model, a[row], b, 32, first.add ? d : 0.0f);
      }
    }
  });
}

}  // namespace emulated

inline void unpack_e4m3(uint32_t packed, uint32_t& low, uint32_t& high) {
  low = pack_fp16(emulated::e4m3_value(packed), emulated::e4m3_value(packed >> 8));
  high = pack_fp16(emulated::e4m3_value(packed >> 16), emulated::e4m3_value(packed >> 24));
}

template <int N>
struct WgmmaE4m3 {
  static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
    emulated::Issued& mine = emulated::issued();
    mine.products.push_back({mine.group, N, d, {}, a, b, add, false, false, emulated::compute_e4m3});
  }
  static void rs(float (&d)[N / 2], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                 const uint32_t& a3, uint64_t b, bool add) {
    emulated::Issued& mine = emulated::issued();
    mine.products.push_back(
        {mine.group, N, d, {&a0, &a1, &a2, &a3}, 0, b, add, false, false, emulated::compute_e4m3});
  }
};

}  // namespace evenkeel::gpu
