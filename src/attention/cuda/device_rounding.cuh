// Rounding, random numbers and the exponential on the device: the same bits as numerics/rounding.h,
// numerics/random.h and attention_kernels.cpp. Every operation is written as one that the compiler may not
// fuse.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "attention/cuda/device_random.cuh"
#include "gpu/cuda/instructions.cuh"
#include "gpu/cuda/mma.cuh"
#include "numerics/rounding.h"

namespace evenkeel::any_plan {

using namespace gpu;

// How a site is rounded: decided once a block, not once an element. Loops are compiled for the kinds up to one of them.
enum class RoundKind : uint8_t {
  identity,
  bf16,
  nearest,  // nearest even in a handful of instructions: NearestRounding
  any,
  tapered,  // and any mode
};

struct DeviceRounding {
  RoundKind kind;
  uint8_t mode;  // RoundingMode
  int8_t scale_exponent;
  uint8_t significand_bits;
  int16_t min_exponent, max_exponent;
  uint32_t largest;       // the largest number's significand, its leading one at bit 23
  float limit, overflow;  // what directed modes stop at, what others give beyond it

  static DeviceRounding of(const Rounding& r) {
    DeviceRounding d{};
    d.kind = is_identity(r)         ? RoundKind::identity
             : r == Rounding{kBf16} ? RoundKind::bf16
             : r.format.tapered     ? RoundKind::tapered
             : is_quick_nearest(r)  ? RoundKind::nearest
                                    : RoundKind::any;
    d.mode = static_cast<uint8_t>(r.mode);
    d.scale_exponent = static_cast<int8_t>(r.scale_exponent);
    d.significand_bits = static_cast<uint8_t>(r.format.significand_bits);
    d.min_exponent = static_cast<int16_t>(evenkeel::min_exponent(r.format));
    d.max_exponent = static_cast<int16_t>(evenkeel::max_exponent(r.format));
    d.largest = evenkeel::split(max_finite(r.format)).significand;
    d.limit = std::ldexp(max_finite(r.format), -r.scale_exponent);
    d.overflow = saturates(r)            ? d.limit
                 : r.format.has_infinity ? std::numeric_limits<float>::infinity()
                                         : std::numeric_limits<float>::quiet_NaN();
    return d;
  }

  // What NearestRounding needs: FP32 has the smallest normal number among its own, and above the largest number there is
  // room for 2^23 gaps.
  static bool is_quick_nearest(const Rounding& r) {
    const int bits = r.format.significand_bits;
    return r.mode == RoundingMode::nearest_even && bits < 23 &&
           evenkeel::min_exponent(r.format) - r.scale_exponent >= -126 &&
           evenkeel::max_exponent(r.format) - r.scale_exponent + 1 + 23 - bits <= 127;
  }
};

// The stream of one site, layer and step.
struct StreamKey {
  uint32_t seed_low, seed_high, step, tensor;
};

__device__ inline uint32_t device_random_bits(const StreamKey& key, uint64_t element) {
  return philox_bits<kPhiloxRounds>(key.seed_low, key.seed_high, key.step, key.tensor, element);
}

__device__ inline float device_random_unit(const StreamKey& key, uint64_t element) {
  return __fmul_rn(__fadd_rn(static_cast<float>(device_random_bits(key, element) >> 9), 0.5f), 0x1p-23f);
}

__device__ __forceinline__ float power_of_two_normal(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// Exponent of the gap between neighbours, as gap_exponent of numerics/format.h.
__device__ __forceinline__ int device_gap(RoundKind kind, int significand_bits, int min_exponent,
                                          int leading) {
  if (kind != RoundKind::tapered) return max(leading, min_exponent) - significand_bits;
  const int exponent = max(leading, kTaperedLeast), size = exponent < 0 ? -exponent : exponent;
  return exponent - (size <= 3 ? 3 : size <= 7 ? 2 : size <= 15 || exponent > 0 ? 1 : 0);
}
static_assert(kTapers[2].largest_exponent == 3 && kTapers[3].largest_exponent == 7);

// A rounding of RoundKind::nearest, taken apart once for many values. FP32 has 23 bits behind the leading one: the sum of a
// magnitude and 2^23 gaps has none below a gap, so that FP32's rounding of the sum is the format's.
struct NearestRounding {
  uint32_t least;  // the exponent of the smallest normal number, in an exponent's place
  uint32_t steps;  // from a number's exponent to that of 2^23 gaps, likewise
  float limit, overflow;

  __device__ __forceinline__ explicit NearestRounding(const DeviceRounding& r)
      : least(static_cast<uint32_t>(r.min_exponent - r.scale_exponent + 127) << 23),
        steps(static_cast<uint32_t>(23 - r.significand_bits) << 23),
        limit(r.limit),
        overflow(r.overflow) {}

  __device__ __forceinline__ float operator()(float x) const {
    const uint32_t bits = __float_as_uint(x);
    const float size = fminf(fabsf(x), 2 * limit);  // which is beyond the limit and stays so
    const float gaps = __uint_as_float(max(__float_as_uint(size) & 0x7f800000u, least) + steps);
    float rounded = __fsub_rn(__fadd_rn(size, gaps), gaps);
    rounded = rounded > limit ? overflow : rounded;
    return __uint_as_float(x != x ? bits | 0x00400000u : __float_as_uint(rounded) | (bits & 0x80000000u));
  }
};

// round_to of numerics/rounding.cpp on 32 bits.
__device__ inline float round_any(const DeviceRounding& r, float x, uint32_t random) {
  if (r.kind == RoundKind::nearest) return NearestRounding(r)(x);
  const uint32_t bits = __float_as_uint(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  if (magnitude > 0x7f800000u) return __uint_as_float(bits | 0x00400000u);
  if (magnitude == 0x7f800000u) return __uint_as_float(__float_as_uint(r.overflow) | sign);
  if (magnitude == 0) return x;
  const uint32_t biased = magnitude >> 23;
  const uint32_t significand = biased == 0 ? magnitude : (magnitude & 0x7fffffu) | 0x800000u;
  const int exponent = (biased == 0 ? -149 : static_cast<int>(biased) - 150) + r.scale_exponent;
  const int leading = 31 - __clz(static_cast<int>(significand)) + exponent;
  const int gap = device_gap(r.kind, r.significand_bits, r.min_exponent, leading);
  const int shift = min(gap - exponent, 62);
  const auto mode = static_cast<RoundingMode>(r.mode);
  uint32_t kept = significand;
  if (shift > 0) {
    kept = shift < 32 ? significand >> shift : 0u;
    const uint32_t discarded = shift < 32 ? significand & ((1u << shift) - 1u) : significand;
    bool up = false;
    if (discarded != 0) {
      // 24 bits are less than half of 2^shift from a shift of 26 on.
      const uint32_t half = 1u << (min(shift, 26) - 1);
      if (mode == RoundingMode::nearest_even)
        up = discarded > half || (discarded == half && (kept & 1u));
      else if (mode == RoundingMode::nearest_away)
        up = discarded >= half;
      else if (mode == RoundingMode::up)
        up = sign == 0;
      else if (mode == RoundingMode::down)
        up = sign != 0;
      else if (mode == RoundingMode::stochastic)
        up = random < (shift == 32 ? discarded
                       : shift < 32
                           ? discarded << (32 - shift)
                           : (shift < 64 ? static_cast<uint32_t>(uint64_t{discarded} >> (shift - 32)) : 0u));
    }
    kept += up;
  }
  if (kept == 0) return __uint_as_float(sign);
  const int step = shift > 0 ? gap : exponent;
  const int top = 31 - __clz(static_cast<int>(kept));  // 0..24
  const uint32_t normal = top > 23 ? kept >> 1 : kept << (23 - top);
  if (top + step > r.max_exponent || (top + step == r.max_exponent && normal > r.largest)) {
    const bool stops = mode == RoundingMode::toward_zero || (mode == RoundingMode::up && sign) ||
                       (mode == RoundingMode::down && !sign);
    return __uint_as_float(__float_as_uint(stops ? r.limit : r.overflow) | sign);
  }
  // kept 2^(step - scale): two factors in the normal range, so that only the last product can round.
  const int power = step - r.scale_exponent, first = power >> 1;
  const float value = __fmul_rn(__fmul_rn(static_cast<float>(kept), power_of_two_normal(first)),
                                power_of_two_normal(power - first));
  return __uint_as_float(__float_as_uint(value) | sign);
}

// The four values of a fragment, elements first, first + column, first + row, first + row + column of their
// stream. Not inlined: it is long, and the common formats never come here.
static __device__ __noinline__ float4 round_any_4(float4 x, const DeviceRounding* rounding, StreamKey key,
                                                  uint64_t first, uint64_t column, uint64_t row) {
  const DeviceRounding r = *rounding;
  const bool random = r.mode == static_cast<uint8_t>(RoundingMode::stochastic);
  x.x = round_any(r, x.x, random ? device_random_bits(key, first) : 0);
  x.y = round_any(r, x.y, random ? device_random_bits(key, first + column) : 0);
  x.z = round_any(r, x.z, random ? device_random_bits(key, first + row) : 0);
  x.w = round_any(r, x.w, random ? device_random_bits(key, first + row + column) : 0);
  return x;
}
static __device__ __noinline__ float round_any_1(float x, const DeviceRounding* rounding, StreamKey key,
                                                 uint64_t element) {
  const DeviceRounding r = *rounding;
  return round_any(
      r, x, r.mode == static_cast<uint8_t>(RoundingMode::stochastic) ? device_random_bits(key, element) : 0);
}

__device__ __forceinline__ void round_bf16(float& x, float& y) {
  const uint32_t packed = pack_bf16(x, y);
  x = low_bf16(packed);
  y = high_bf16(packed);
}

// Where the fragments of a block lie in a site's stream of random numbers: element (i, j) of the block is
// first + i * row + j * column.
struct Elements {
  uint64_t first, row, column;
};

// A site of a plan, its kind read once: loops must not wait for the table.
struct SiteRounding {
  RoundKind kind;
  const DeviceRounding* rounding;
};

// Rounds fragments x[n], 16 x 8 each, side by side. Of the kinds up to kMost: bf16, nearest or any.
template <RoundKind kMost, int kCount>
__device__ __forceinline__ void round_fragments(float (&x)[kCount][4], const SiteRounding& site,
                                                const StreamKey& key, const Elements& elements) {
  if (site.kind == RoundKind::identity) return;
  if (kMost == RoundKind::bf16 || site.kind == RoundKind::bf16) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      round_bf16(x[n][0], x[n][1]);
      round_bf16(x[n][2], x[n][3]);
    }
    return;
  }
  if constexpr (kMost == RoundKind::nearest) {
    const NearestRounding round(*site.rounding);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = round(x[n][e]);
  }
  if constexpr (kMost == RoundKind::any) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float4 y = round_any_4({x[n][0], x[n][1], x[n][2], x[n][3]}, site.rounding, key,
                                   elements.first + static_cast<uint64_t>(n) * 8 * elements.column,
                                   elements.column, 8 * elements.row);
      x[n][0] = y.x;
      x[n][1] = y.y;
      x[n][2] = y.z;
      x[n][3] = y.w;
    }
  }
}

template <RoundKind kMost>
__device__ __forceinline__ float round_one(float x, const SiteRounding& site, const StreamKey& key,
                                           uint64_t element) {
  if (site.kind == RoundKind::identity) return x;
  if (kMost == RoundKind::bf16 || site.kind == RoundKind::bf16) return low_bf16(pack_bf16(x, 0.0f));
  if constexpr (kMost == RoundKind::nearest)
    return NearestRounding(*site.rounding)(x);
  else
    return round_any_1(x, site.rounding, key, element);
}

// One step of a rounding's format at x, as evenkeel::ulp.
__device__ inline float device_ulp(RoundKind kind, int significand_bits, int min_exponent, float x) {
  const uint32_t magnitude = __float_as_uint(x) & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  const int biased = static_cast<int>(magnitude >> 23);
  const int leading = magnitude == 0 ? -149
                      : biased != 0  ? biased - 127
                                     : 31 - __clz(static_cast<int>(magnitude)) - 149;
  const int gap = device_gap(kind, significand_bits, min_exponent, leading);
  return gap >= -126 ? power_of_two_normal(gap) : __uint_as_float(1u << (gap + 149));
}

// --- The exponential of attention_kernels.cpp, operation by operation.
inline constexpr float kLog2High = 0x1.62e43p-1f, kLog2Low = -0x1.05c61p-29f;

__device__ __forceinline__ float exp_reduced(float r) {
  float p = 1.0f / 5040;
  p = __fmaf_rn(p, r, 1.0f / 720);
  p = __fmaf_rn(p, r, 1.0f / 120);
  p = __fmaf_rn(p, r, 1.0f / 24);
  p = __fmaf_rn(p, r, 1.0f / 6);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.0f);
  return __fmaf_rn(p, r, 1.0f);
}

// exp(x) for x up to 40, -inf included. Beyond 40 it is no exp, and +inf gives NaN: an l that underflowed to 0.
// The factor 2^n is applied in two steps. 2^(n + 64) cannot leave the normal range. 2^-64 rounds once, where the
// result is subnormal. The nearest whole number comes from adding 1.5 * 2^23 and those 64: the sum's low bits
// are n + 64.
__device__ __forceinline__ float exp_low(float x) {
  constexpr float kMagic = 12582912.0f + 64.0f;
  x = gpu::max_or_nan(x, -128.0f);
  const float shifted = __fadd_rn(__fmul_rn(x, kLog2E), kMagic);
  const float n = __fsub_rn(shifted, kMagic);
  float r = __fmaf_rn(n, -kLog2High, x);
  r = __fmaf_rn(n, -kLog2Low, r);
  const float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
  return __fmul_rn(__fmul_rn(exp_reduced(r), power), 0x1p-64f);
}

// exp of anything: 0 below -104, Inf above 88.7.
__device__ __forceinline__ float exp_any(float x) {
  x = x > 128.0f ? 128.0f : gpu::max_or_nan(x, -128.0f);
  const float n = __fsub_rn(__fadd_rn(__fmul_rn(x, kLog2E), 12582912.0f), 12582912.0f);
  float r = __fmaf_rn(n, -kLog2High, x);
  r = __fmaf_rn(n, -kLog2Low, r);
  const int whole = static_cast<int>(n), half = whole >> 1;
  return __fmul_rn(__fmul_rn(exp_reduced(r), power_of_two_normal(half)), power_of_two_normal(whole - half));
}

// exp(x) 2^-power, power a whole number not far below x / log 2.
__device__ __forceinline__ float exp_scaled(float x, float power) {
  const float least = __fmul_rn(__fsub_rn(power, 200.0f), kLog2High);
  x = least > x ? least : x;
  const float n = rintf(__fmul_rn(x, kLog2E));
  float r = __fmaf_rn(n, -kLog2High, x);
  r = __fmaf_rn(n, -kLog2Low, r);
  const float k = fminf(fmaxf(__fsub_rn(n, power), -220.0f), 20.0f);
  // As in exp_low; 100 keeps 2^-220 in the normal range.
  const float scale =
      __uint_as_float((__float_as_uint(__fadd_rn(k, 12582912.0f + 100.0f)) << 23) + 0x3f800000u);
  return __fmul_rn(__fmul_rn(exp_reduced(r), scale), 0x1p-100f);
}

}  // namespace evenkeel::any_plan
