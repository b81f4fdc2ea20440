// Words of CUDA that the any-plan kernels use besides those of tests/cuda_emulator, for the CPU. Included before their headers.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "gpu/cuda/instructions.cuh"

#define __global__
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
// Kernels that a test calls have their shared memory from it.
#define __shared__
#define __align__(bytes)
struct BlockSize {
  unsigned x;
};
inline BlockSize blockDim{64};
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __clz(int x) { return std::countl_zero(static_cast<uint32_t>(x)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
inline uint32_t max(uint32_t a, uint32_t b) { return std::max(a, b); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  return {static_cast<uint16_t>(evenkeel::gpu::bf16_bits(x))};
}
inline uint32_t atomicMax(uint32_t* at, uint32_t value) {
  const uint32_t before = *at;
  *at = std::max(before, value);
  return before;
}
inline int __syncthreads_or(int value) {
  static int any;  // blocks run one after the other
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= value;
  __syncthreads();
  return any;
}

namespace evenkeel::gpu {

inline int greater_equal(float a, float b) { return a >= b ? -1 : 0; }
inline uint32_t greater_equal_bf16(uint32_t a, uint32_t b) {
  const uint32_t low = bf16_value(a & 0xffff) >= bf16_value(b & 0xffff) ? 0x3f80u : 0u,
                 high = bf16_value(a >> 16) >= bf16_value(b >> 16) ? 0x3f800000u : 0u;
  return high | low;
}
inline uint32_t pack_twice_upward(float x) {
  const uint32_t bits =
      std::bit_cast<uint32_t>(round_to({.format = kBf16, .mode = RoundingMode::up}, x)) >> 16;
  return bits << 16 | bits;
}
inline uint32_t square_bf16(uint32_t packed) {
  const float low = bf16_value(packed & 0xffff), high = bf16_value(packed >> 16);
  return pack_bf16(low * low, high * high);
}

}  // namespace evenkeel::gpu
