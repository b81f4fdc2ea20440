// random_bits of numerics/random.h on the device. Internal to src/attention.
#pragma once

#include "gpu/cuda/instructions.cuh"
#include "numerics/random.h"

namespace evenkeel {

// kUnroll: how many of philox's rounds the compiler writes out. All of them are faster; one keeps a kernel small.
template <int kUnroll>
EK_DEVICE uint32_t philox_bits(uint32_t seed_low, uint32_t seed_high, uint32_t step, uint32_t tensor,
                               uint64_t element) {
  const uint64_t counter = element / kRandomGroup * kRandomLanes + element % kRandomLanes;
  uint32_t x0 = static_cast<uint32_t>(counter), x1 = static_cast<uint32_t>(counter >> 32), x2 = tensor,
           x3 = step;
#pragma unroll kUnroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * x0, product1 = uint64_t{kPhiloxMultiplier1} * x2;
    x0 = static_cast<uint32_t>(product1 >> 32) ^ x1 ^ seed_low;
    x1 = static_cast<uint32_t>(product1);
    x2 = static_cast<uint32_t>(product0 >> 32) ^ x3 ^ seed_high;
    x3 = static_cast<uint32_t>(product0);
    seed_low += kPhiloxWeyl0;
    seed_high += kPhiloxWeyl1;
  }
  const uint32_t word = static_cast<uint32_t>(element % kRandomGroup / kRandomLanes);
  return word == 0 ? x0 : word == 1 ? x1 : word == 2 ? x2 : x3;
}

}  // namespace evenkeel
