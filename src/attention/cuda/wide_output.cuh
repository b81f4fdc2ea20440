// O as delta reads it: its value in the tensors' format, and one byte more. And the random numbers of a row. For all fast
// kernels. Internal to src/attention.
#pragma once

#include "attention/cuda/device_random.cuh"
#include "gpu/cuda/device_function.cuh"

namespace evenkeel {

// O for delta: its BF16 value and one byte more, 16 significand bits in all (19 with FP16). The byte counts steps of 1 / 254
// of an ulp (half an ulp either way, rounded up or down, fits; with 256 steps it would not, and where O lies halfway between
// two numbers, as with two ties, cutting it off is a bias). It is rounded stochastically: rounded to nearest, what is
// smaller than its unit would always be lost (rows with four ties and a tail: a bias of 1e-6, z = -16; so: none).
inline constexpr uint32_t kResidueSteps = 254;
EK_DEVICE float with_residue(uint32_t bf16_bits, int residue) {
  // 2^16 / 254 units of the last place, to 2^-6 of one.
  constexpr int kStep = ((1 << 24) + static_cast<int>(kResidueSteps) / 2) / static_cast<int>(kResidueSteps);
  return __uint_as_float((bf16_bits << 16) + static_cast<uint32_t>((residue * kStep + 128) >> 8));
}

// The residues of a pair, in the lower two bytes (the others hold anything): floor(kResidueSteps (exact - rounded) + noise), in units of the BF16 ulp
// and with a noise in [0, 1) for each, here in 2^-16. It is byte 2 of that sum, modulo 2^32.
EK_DEVICE uint32_t residues(float low, float high, uint32_t packed, uint32_t low_noise, uint32_t high_noise) {
  const uint32_t first = __float_as_uint(low) * kResidueSteps - packed * (kResidueSteps << 16) + low_noise;
  const uint32_t second = (__float_as_uint(high) - (packed & 0xffff0000u)) * kResidueSteps + high_noise;
  return __byte_perm(first, second, 0x0062);
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

// random_unit of numerics/random.h, on the device.
EK_DEVICE float row_random_unit(const RandomKey& key, uint64_t element) {
  const uint32_t bits = philox_bits<1>(static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32),
                                       key.step, key.tensor, element);
  return (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f;
}

}  // namespace evenkeel
