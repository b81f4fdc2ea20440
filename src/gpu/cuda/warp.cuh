// Sums and maxima over a warp or a quad (four lanes, which share a row of a product's fragment), whole in every lane.
#pragma once

#include "gpu/cuda/device_function.cuh"

namespace evenkeel::gpu {

using Bf16 = __nv_bfloat16;
inline constexpr int kWarp = 32;           // threads
inline constexpr int kWarpgroup = 128;     // threads, of Hopper's products
inline constexpr int kWarpgroupRows = 64;  // of the accumulator of such a product

// A number that all lanes have, which the compiler then knows to be the same in all of them.
EK_DEVICE uint32_t warp_uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

EK_DEVICE float to_float(float x) { return x; }
EK_DEVICE float to_float(Bf16 x) { return __bfloat162float(x); }

EK_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}
EK_DEVICE float warp_max(float x) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

template <class T>
EK_DEVICE T quad_sum(T x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
EK_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// A 4 x 4 transposition of words between the four lanes of a quad: words of four 8-column blocks of an accumulator's row
// become four consecutive words of one block.
EK_DEVICE void quad_transpose(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = __shfl_xor_sync(~0u, upper ? x[i] : x[i + 2], 2);
    (upper ? x[i] : x[i + 2]) = received;
  }
}

}  // namespace evenkeel::gpu
