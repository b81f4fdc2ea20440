// Scales that a block of values shares, on the device: the same bits as numerics/round_block.h.
#pragma once

#include "attention/cuda/device_rounding.cuh"
#include "numerics/shared_scale.h"

namespace evenkeel::any_plan {

// scale_target of numerics/format.h: a rounding with a shared scale has no other.
inline constexpr float kTaperedTarget = scale_target(kHif8);
inline constexpr int kTaperedTargetExponent = scale_target_exponent(kHif8);
__device__ __forceinline__ float target_of(const DeviceRounding& r) {
  return r.kind == RoundKind::tapered ? kTaperedTarget : r.limit;
}
__device__ __forceinline__ int target_exponent_of(const DeviceRounding& r) {
  return r.kind == RoundKind::tapered ? kTaperedTargetExponent : r.max_exponent;
}

// is_down_column of numerics/shared_scale.h, which is a host function.
__device__ __forceinline__ bool runs_down_column(ScaleGroup group) {
  return group == ScaleGroup::column_block || group == ScaleGroup::column;
}

// Magnitude bits of finite values; NaN and Inf do not count.
__device__ __forceinline__ uint32_t counted_bits(float x) {
  const uint32_t magnitude = __float_as_uint(x) & 0x7fffffffu;
  return magnitude < 0x7f800000u ? magnitude : 0u;
}

__device__ __forceinline__ float clamped_power(int exponent) {
  exponent = min(max(exponent, -127), 127);
  return exponent >= -126 ? power_of_two_normal(exponent) : __uint_as_float(1u << (exponent + 149));
}

// REQUIRES: x > 0.
__device__ __forceinline__ int exponent_of(float x) {
  const uint32_t bits = __float_as_uint(x), biased = bits >> 23;
  return biased != 0 ? static_cast<int>(biased) - 127 : 31 - __clz(static_cast<int>(bits)) - 149;
}

inline constexpr float kE4m3Largest = max_finite(kE4m3);
__device__ inline float round_e4m3_scale(float x) {
  DeviceRounding e4m3{};
  e4m3.kind = RoundKind::nearest;
  e4m3.mode = static_cast<uint8_t>(RoundingMode::nearest_even);
  e4m3.significand_bits = 3;
  e4m3.min_exponent = -6;
  e4m3.max_exponent = 8;
  e4m3.largest = 0xe00000u;
  e4m3.limit = e4m3.overflow = kE4m3Largest;
  return round_any(e4m3, x, 0);
}
static_assert(min_exponent(kE4m3) == -6 && max_exponent(kE4m3) == 8 &&
              split(max_finite(kE4m3)).significand == 0xe00000u);

__device__ inline float device_block_scale(const DeviceRounding& r, const SharedScale& shared, float largest,
                                           float outer) {
  if (largest == 0) return 0;
  const float target = target_of(r), quotient = __fdiv_rn(largest, target);
  const int exponent = exponent_of(largest) - target_exponent_of(r);
  switch (shared.rule) {
    case ScaleRule::fp32:
      return quotient;
    case ScaleRule::e4m3:
      return __fmul_rn(round_e4m3_scale(__fdiv_rn(quotient, outer)), outer);
    case ScaleRule::e8m0:
      return clamped_power(exponent);
    case ScaleRule::e8m0_up:
      return clamped_power(exponent + (ldexp(static_cast<double>(target), exponent) < largest ? 1 : 0));
  }
  return 0;
}

__device__ inline float device_outer_scale(const DeviceRounding& r, float largest) {
  if (largest == 0) return 1;
  const float scale = __fdiv_rn(largest, __fmul_rn(target_of(r), kE4m3Largest));
  return scale == 0 ? __uint_as_float(1u) : scale;
}

// round(x / scale) scale.
template <class Round>
__device__ __forceinline__ float under_scale(float x, float scale, Round round) {
  if (x != x) return x;
  if (scale == 0) return __uint_as_float(__float_as_uint(x) & 0x80000000u);
  return __fmul_rn(round(__fdiv_rn(x, scale)), scale);
}

}  // namespace evenkeel::any_plan
