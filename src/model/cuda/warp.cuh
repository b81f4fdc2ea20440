// What the model's kernels share: their types, and sums over a warp, whole in every lane.
#pragma once

#include <cuda_bf16.h>

namespace evenkeel::device {

using Bf16 = __nv_bfloat16;
inline constexpr int kWarp = 32;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Bf16 x) { return __bfloat162float(x); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

}  // namespace evenkeel::device
