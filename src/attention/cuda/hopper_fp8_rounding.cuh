// BF16 to E4M3 with a scale that is a power of two, eight numbers of a row (an octet) at a time: what the quantiser of k and v
// and the forward kernel, which rounds q itself, share. Internal to src/attention.
#pragma once

#include "attention/cuda/hopper_fp8_tile.h"
#include "gpu/cuda/warp.cuh"
#include "gpu/cuda/wgmma_e4m3.cuh"
#include "numerics/format.h"

namespace evenkeel::hopper_fp8 {

using namespace gpu;

// A power of two by which a tile's numbers, or a head's, are E4M3 numbers. `largest` has the bits of their largest finite
// magnitude in BF16.
static_assert(scale_target(kE4m3) == 1.75f * 256);
struct TileScale {
  float scale, inverse;
  EK_DEVICE explicit TileScale(uint32_t largest) {
    // ScaleRule::e8m0_up: 2^8 times the scale is largest's own power of two, or the next one if largest is above 1.75 of it
    // (the target is 1.75 2^8). Both are in reach: from 2^-127, a subnormal number, which zeros get too, up to 2^120.
    constexpr uint32_t kSignificands = 128, kTop = kSignificands * 3 / 4;
    const uint32_t above = (largest + kSignificands - 1 - kTop) / kSignificands;
    const uint32_t exponent = above > 8 ? above - 8 : 0;
    scale = __uint_as_float(exponent ? exponent << 23 : 1u << 22);
    inverse = __uint_as_float((254 - exponent) << 23);
  }
};

EK_DEVICE float number(const uint4& octet, int i) {
  const uint32_t words[4] = {octet.x, octet.y, octet.z, octet.w};
  return i % 2 ? high_bf16(words[i / 2]) : low_bf16(words[i / 2]);
}
// Four neighbours of an octet in E4M3. What is infinite becomes the largest number, as anything too large.
EK_DEVICE uint32_t four(const uint4& octet, int i, const TileScale& by) {
  return pack_e4m3(number(octet, i) * by.inverse, number(octet, i + 1) * by.inverse,
                   number(octet, i + 2) * by.inverse, number(octet, i + 3) * by.inverse);
}
// An octet of row `row` of a tile of q or k, from feature `feature`, to its place in the tile.
template <int kHead>
EK_DEVICE void write_octet(uint8_t* tile, int row, int feature, const uint4& octet, const TileScale& by) {
  *reinterpret_cast<uint2*>(tile + tile_offset(row, feature, line_bytes(false, kHead))) =
      uint2{four(octet, 0, by), four(octet, 4, by)};
}

EK_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
EK_DEVICE uint32_t warp_largest(uint32_t most) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) most = larger(most, __shfl_xor_sync(~0u, most, lane));
  return most;
}
// The bits of the largest finite magnitude. each(body) calls body(octet) for all octets of a thread; of_all(most) is the largest
// among threads, which all call it, once or twice.
template <class Each, class OfAll>
EK_DEVICE uint32_t largest_finite(Each each, OfAll of_all) {
  constexpr uint32_t kInfinity = 0x7f80u, kMagnitudes = 0x7fff7fffu;
  uint32_t pair = 0;  // magnitudes of BF16 numbers are in the order of integers, two in a word
  each([&](const uint4& octet) {
    pair = __vimax3_u16x2(pair, octet.x & kMagnitudes, octet.y & kMagnitudes);
    pair = __vimax3_u16x2(pair, octet.z & kMagnitudes, octet.w & kMagnitudes);
  });
  const uint32_t most = of_all(larger(pair & 0xffffu, pair >> 16));
  if (most < kInfinity) return most;
  uint32_t finite = 0;
  each([&](const uint4& octet) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t magnitude = __float_as_uint(number(octet, i)) >> 16 & 0x7fffu;
      if (magnitude < kInfinity) finite = larger(finite, magnitude);
    }
  });
  return of_all(finite);
}

}  // namespace evenkeel::hopper_fp8
