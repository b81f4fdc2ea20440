// The instructions of src/gpu/cuda/instructions.cuh on the CPU, by their definitions. Products of numbers of 16 bits are exact
// and are added in FP64; the sum is rounded to FP32 once. (A tensor core truncates; how, is numerics/tensor_core.h.)
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "cuda_bf16.h"
#include "cuda_runtime.h"
#include "numerics/rounding.h"

#define EK_DEVICE inline __attribute__((always_inline))

namespace evenkeel::gpu {

using cuda_emulator::machine;

// --- Shared memory

inline uint8_t* dynamic_shared() { return machine().shared_memory(); }
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - machine().shared_memory());
}

inline void store_shared(uint32_t address, uint16_t value) {
  std::memcpy(machine().shared_at(address, sizeof value), &value, sizeof value);
}

// --- Numbers

inline float max_or_nan(float x, float y) {
  if (std::isnan(x) || std::isnan(y)) return std::numeric_limits<float>::quiet_NaN();
  return x > y ? x : y;
}
inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline float reciprocal_approx(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(std::numeric_limits<float>::infinity(), x) : 1 / x;
}

inline float fp16_value(uint32_t bits) {
  const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size =
      exponent == 31
          ? (fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity())
      : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                      : std::ldexp(static_cast<float>(fraction + 1024), static_cast<int>(exponent) - 25);
  return bits & 0x8000 ? -size : size;
}
inline uint32_t fp16_bits(float x) {
  const float rounded = round_to(Rounding{kFp16}, x), size = std::fabs(rounded);
  const uint32_t sign = std::signbit(rounded) ? 0x8000u : 0u;
  if (std::isnan(rounded)) return 0x7fff;
  if (std::isinf(rounded)) return sign | 0x7c00u;
  if (size < 0x1p-14f) return sign | static_cast<uint32_t>(std::ldexp(size, 24));
  const int exponent = std::ilogb(size);
  return sign | static_cast<uint32_t>(exponent + 15) << 10 |
         (static_cast<uint32_t>(std::ldexp(size, 10 - exponent)) & 1023u);
}
inline uint32_t bf16_bits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float bf16_value(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

inline uint32_t pack_bf16(float low, float high) { return bf16_bits(high) << 16 | bf16_bits(low); }
inline uint32_t pack_fp16(float low, float high) { return fp16_bits(high) << 16 | fp16_bits(low); }
inline float low_fp16(uint32_t packed) { return fp16_value(packed & 0xffff); }
inline float high_fp16(uint32_t packed) { return fp16_value(packed >> 16); }

// --- Products of a warp and loads of their operands

namespace emulated {

struct Load {
  uint32_t (*to)[4];
  const uint8_t* row;
};
template <bool kTransposed>
void load_matrices(uint32_t (&r)[4], uint32_t address) {
  Load mine{&r, machine().shared_at(address, 16)};
  machine().meet(kTransposed ? "ldmatrix.trans" : "ldmatrix", mine, [](Load** lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t value[8][8];
      uint32_t banks = 0;
      for (int row = 0; row < 8; ++row) {
        const uint8_t* const from = lanes[8 * matrix + row]->row;
        std::memcpy(value[row], from, 16);
        const uint32_t bank = 1u << (reinterpret_cast<uintptr_t>(from) / 16 % 8);
        machine().matrix_conflicts += (banks & bank) != 0;
        banks |= bank;
      }
      ++machine().matrix_loads;
      for (int lane = 0; lane < 32; ++lane) {
        const int i = lane / 4, j = lane % 4 * 2;
        const uint32_t low = kTransposed ? value[j][i] : value[i][j],
                       high = kTransposed ? value[j + 1][i] : value[i][j + 1];
        (*lanes[lane]->to)[matrix] = high << 16 | low;
      }
    }
  });
}

inline const std::array<float, 65536>& fp16_values() {
  static const auto table = [] {
    std::array<float, 65536> values{};
    for (uint32_t bits = 0; bits < 65536; ++bits) values[bits] = fp16_value(bits);
    return values;
  }();
  return table;
}

struct Product {
  float (*c)[4];
  const uint32_t (*a)[4];
  uint32_t b[2];
};
template <bool kFp16>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product mine{&c, &a, {b0, b1}};
  machine().meet(kFp16 ? "mma of fp16" : "mma of bf16", mine, [](Product** lanes) {
    const auto value = [](uint32_t bits) { return kFp16 ? fp16_values()[bits] : bf16_value(bits); };
    double left[16][16], right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int n = 0; n < 4; ++n)
        for (int half = 0; half < 2; ++half)
          left[g + n % 2 * 8][n / 2 * 8 + 2 * t + half] =
              double{value((*lanes[lane]->a)[n] >> (16 * half) & 0xffff)};
      for (int n = 0; n < 2; ++n)
        for (int half = 0; half < 2; ++half)
          right[n * 8 + 2 * t + half][g] = double{value(lanes[lane]->b[n] >> (16 * half) & 0xffff)};
    }
    for (int row = 0; row < 16; ++row) {
      double sum[8];
      const auto at = [&](int column) -> float& {
        return (*lanes[row % 8 * 4 + column / 2]->c)[row / 8 * 2 + column % 2];
      };
      for (int column = 0; column < 8; ++column) sum[column] = double{at(column)};
      for (int k = 0; k < 16; ++k)
        for (int column = 0; column < 8; ++column) sum[column] += left[row][k] * right[k][column];
      for (int column = 0; column < 8; ++column) at(column) = static_cast<float>(sum[column]);
    }
  });
}

}  // namespace emulated

inline void load_matrices(uint32_t (&r)[4], uint32_t address) { emulated::load_matrices<false>(r, address); }
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  emulated::load_matrices<true>(r, address);
}
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::multiply_add<false>(c, a, b0, b1);
}
inline void multiply_add_fp16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::multiply_add<true>(c, a, b0, b1);
}

// --- Asynchronous copies into shared memory

inline void copy_16_async(uint32_t target, const void* source, bool present) {
  machine().copy_later(machine().shared_at(target, 16), present ? source : nullptr, 16);
}
inline void copy_4_async(uint32_t target, const void* source) {
  machine().copy_later(machine().shared_at(target, 4), source, 4);
}
inline void commit_copies() { machine().commit_copies(); }
template <int kPending = 0>
void wait_for_copies() {
  machine().may_switch();
  machine().wait_for_copies(kPending);
}

// --- Blocks that wait for each other

inline int load_acquire(const int* at) {
  machine().may_switch();
  return *at;
}
inline int load_relaxed(const int* at) { return *at; }
inline void store_relaxed(uint32_t* at, uint32_t value) { *at = value; }
inline constexpr int kAddedAtOnce = 4;
// Of `count` numbers side by side.
inline void expect_aligned(const float* at, int count) {
  if (reinterpret_cast<uintptr_t>(at) % (static_cast<size_t>(count) * sizeof(float)) != 0)
    machine().fail("an access to memory that is not aligned");
}
template <int kCount>
void load_past_cache(float (&value)[kCount], const float* at) {
  expect_aligned(at, kCount);
  std::copy(at, at + kCount, value);
}
template <int kCount>
void store(float* at, const float (&value)[kCount]) {
  expect_aligned(at, kCount);
  std::copy(value, value + kCount, at);
}
inline void add_release(int* at, int value) {
  *at += value;
  machine().may_switch();
}
template <int kCount>
void add_in_memory(float* at, const float (&value)[kCount]) {
  expect_aligned(at, kCount);
  for (int n = 0; n < kCount; ++n) at[n] += value[n];
}
inline void let_others_run() { machine().let_others_run(); }

}  // namespace evenkeel::gpu
