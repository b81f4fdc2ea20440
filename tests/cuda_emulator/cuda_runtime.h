// The words of CUDA C++ that kernels use, on the CPU: what <cuda_runtime.h> is to nvcc. Included by
// gpu/cuda/instructions.cuh beside it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator.h"

#define __device__
#define __host__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

// Where the thread that runs stands.
#define threadIdx (::evenkeel::cuda_emulator::machine().thread_index)
#define blockIdx (::evenkeel::cuda_emulator::machine().block_index)
#define gridDim (::evenkeel::cuda_emulator::machine().grid)

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __logf(float x) { return std::log(x); }
inline int min(int a, int b) { return std::min(a, b); }
inline int max(int a, int b) { return std::max(a, b); }
inline int __vimax3_s32(int a, int b, int c) { return std::max({a, b, c}); }
inline uint32_t __vimax3_u16x2(uint32_t a, uint32_t b, uint32_t c) {
  return std::max({a & 0xffff0000u, b & 0xffff0000u, c & 0xffff0000u}) |
         std::max({a & 0xffffu, b & 0xffffu, c & 0xffffu});
}
inline int __vimin3_s32(int a, int b, int c) { return std::min({a, b, c}); }

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int n = 0; n < 4; ++n)
    result |= static_cast<uint32_t>(bytes >> (selector >> (4 * n) & 7) * 8 & 0xff) << (8 * n);
  return result;
}

inline void __syncthreads() { evenkeel::cuda_emulator::machine().block_barrier(); }
inline void __syncwarp() { evenkeel::cuda_emulator::machine().warp_barrier(); }
inline void __threadfence() {}
template <class T>
T __ldcg(const T* at) {
  return *at;
}

template <class T>
T __shfl_xor_sync(uint32_t lanes, T value, int mask) {
  return evenkeel::cuda_emulator::machine().shuffle(lanes, value, [mask](int lane) { return lane ^ mask; });
}
template <class T>
T __shfl_sync(uint32_t lanes, T value, int from) {
  return evenkeel::cuda_emulator::machine().shuffle(lanes, value, [from](int) { return from & 31; });
}
inline uint32_t __ballot_sync(uint32_t lanes, bool value) {
  return evenkeel::cuda_emulator::machine().vote(lanes, value);
}
inline bool __any_sync(uint32_t lanes, bool value) {
  return evenkeel::cuda_emulator::machine().vote(lanes, value) != 0;
}

// One thread of the CPU runs all threads of all blocks.
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}
template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  *at = std::max(*at, value);
  return before;
}
template <class T>
T atomicMin(T* at, T value) {
  const T before = *at;
  *at = std::min(*at, value);
  return before;
}
