// Hopper's forward pass: the shift and the sum of a row, its random numbers, the residues of O. Included by
// hopper_forward.cu alone.
#pragma once

#include "attention/cuda/hopper_forward_tiles.cuh"
#include "gpu/cuda/warp.cuh"

namespace evenkeel::hopper::forward {

// random_unit of numerics/random.h, on the device.
EK_DEVICE float device_random_unit(const RandomKey& key, uint64_t element) {
  const uint64_t counter = element / kRandomGroup * kRandomLanes + element % kRandomLanes;
  uint32_t x0 = static_cast<uint32_t>(counter), x1 = static_cast<uint32_t>(counter >> 32), x2 = key.tensor,
           x3 = key.step;
  uint32_t key0 = static_cast<uint32_t>(key.seed), key1 = static_cast<uint32_t>(key.seed >> 32);
#pragma unroll 1
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * x0, product1 = uint64_t{kPhiloxMultiplier1} * x2;
    x0 = static_cast<uint32_t>(product1 >> 32) ^ x1 ^ key0;
    x1 = static_cast<uint32_t>(product1);
    x2 = static_cast<uint32_t>(product0 >> 32) ^ x3 ^ key1;
    x3 = static_cast<uint32_t>(product0);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  const int word = static_cast<int>(element % kRandomGroup / kRandomLanes);
  const uint32_t bits = word == 0 ? x0 : word == 1 ? x1 : word == 2 ? x2 : x3;
  return (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f;
}

// 16 random bits for a row: a hash of its number (J. K. Salmon's generator would take ten times as long; here only the
// mean matters).
EK_DEVICE uint32_t row_noise(const RandomKey& key, uint32_t row) {
  uint32_t x =
      row * 0x9E3779B1u + key.step * 0x85EBCA77u + key.tensor * 0xC2B2AE3Du + static_cast<uint32_t>(key.seed);
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return (x ^ x >> 16) >> 16;
}

// The residues of a pair (hopper.cuh), in the lower two bytes: floor(kResidueSteps (exact - rounded) + noise), in units of
// the BF16 ulp and with a noise in [0, 1) for each, here in 2^-16. It is byte 2 of that sum, modulo 2^32.
EK_DEVICE uint32_t residues(float low, float high, uint32_t packed, uint32_t low_noise, uint32_t high_noise) {
  const uint32_t first = __float_as_uint(low) * kResidueSteps - packed * (kResidueSteps << 16) + low_noise;
  const uint32_t second = (__float_as_uint(high) - (packed & 0xffff0000u)) * kResidueSteps + high_noise;
  return __byte_perm(first, second, 0x0062);
}

// The state of the two rows a thread holds (with three others) of its warpgroup's 64.
template <Shift kShift>
struct Rows {
  float shift[2];  // in force, in powers of two; -inf: no key yet
  float sum[2];    // l: this thread's part of it
  float unit[2];   // dither: added to the shift; paper_capped: the row's own random number
  float max[2];    // paper_capped: the largest score so far, scaled
  int ties[2];     // paper_capped

  EK_DEVICE void start(const ForwardArguments& a, int head, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shift[r] = max[r] = kMinusInfinity;
      sum[r] = 0;
      unit[r] = 0;
      ties[r] = 0;
      if (kShift == Shift::paper_capped || (kShift == Shift::plain && a.dither)) {
        RandomKey key = a.random;
        if (a.device_step) key.step = *a.device_step;
        unit[r] = device_random_unit(key, static_cast<uint64_t>(head) * a.sequences.T + row + 8 * r);
      }
    }
  }

  // The shift with a tile whose largest score (unscaled; -inf: none) is tile_max, of which `tile_ties` tie.
  EK_DEVICE float moved(const ForwardArguments& a, int r, float tile_max, int tile_ties) {
    if constexpr (kShift == Shift::plain) {
      return fmaf(tile_max, a.scale_log2, unit[r]);
    } else if constexpr (kShift == Shift::consistent) {
      return ceilf(tile_max * a.scale_log2);
    } else {
      const float before = max[r], scaled = tile_max * a.scale;
      if (scaled == kMinusInfinity) return kMinusInfinity;
      max[r] = fmaxf(before, scaled);
      ties[r] = (max[r] - before <= a.tie_tolerance ? ties[r] : 0) + tile_ties;
      float m = max[r];
      if (ties[r] > 1) {
        const float least = kLn2 * (0.25f + 0.75f * unit[r]);
        const float most = fmaxf(least, a.cap * (0.5f + 0.5f * unit[r]));
        m += fminf(fmaxf(max[r] > 0 ? (a.beta - 1) * max[r] : -max[r], least), most);
      }
      return m * kLog2E;
    }
  }
};

}  // namespace evenkeel::hopper::forward
