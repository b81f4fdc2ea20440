// Formats of 16 bits: pairs of numbers as the products read them. For all fast kernels. Internal to src/attention.
#pragma once

#include "attention/cuda/wide_output.cuh"
#include "gpu/cuda/device_function.cuh"

namespace evenkeel {

struct Bf16Pairs {
  static constexpr uint32_t kOnes = 0x3f803f80;
  EK_DEVICE static uint32_t pack(float low, float high) { return gpu::pack_bf16(low, high); }
  EK_DEVICE static float low(uint32_t packed) { return gpu::low_bf16(packed); }
  EK_DEVICE static float high(uint32_t packed) { return gpu::high_bf16(packed); }
  EK_DEVICE static void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    gpu::multiply_add(c, a, b0, b1);
  }
  EK_DEVICE static uint32_t residues(float low, float high, uint32_t packed, uint32_t low_noise,
                                     uint32_t high_noise) {
    return evenkeel::residues(low, high, packed, low_noise, high_noise);
  }
  EK_DEVICE static float with_residue(uint32_t bits, int residue) {
    return evenkeel::with_residue(bits, residue);
  }
};

struct Fp16Pairs {
  static constexpr uint32_t kOnes = 0x3c003c00;
  EK_DEVICE static uint32_t pack(float low, float high) { return gpu::pack_fp16(low, high); }
  EK_DEVICE static float low(uint32_t packed) { return gpu::low_fp16(packed); }
  EK_DEVICE static float high(uint32_t packed) { return gpu::high_fp16(packed); }
  EK_DEVICE static void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    gpu::multiply_add_fp16(c, a, b0, b1);
  }
  // The exponent field of a number's ulp 2^(exponent - 25); subnormal numbers have the first one's.
  EK_DEVICE static int exponent(uint32_t bits) { return max(static_cast<int>(bits >> 10 & 31), 1); }
  EK_DEVICE static uint32_t residue(float exact, uint32_t bits, uint32_t noise) {
    if ((bits & 0x7c00) == 0x7c00) return 0;
    const float steps = (exact - gpu::low_fp16(bits)) *
                        __uint_as_float(static_cast<uint32_t>(127 + 25 - exponent(bits)) << 23) *
                        static_cast<float>(kResidueSteps);
    return static_cast<uint32_t>(static_cast<int>(floorf(steps + static_cast<float>(noise) * 0x1p-16f))) &
           0xff;
  }
  EK_DEVICE static uint32_t residues(float low, float high, uint32_t packed, uint32_t low_noise,
                                     uint32_t high_noise) {
    return residue(low, packed & 0xffff, low_noise) | residue(high, packed >> 16, high_noise) << 8;
  }
  EK_DEVICE static float with_residue(uint32_t bits, int residue) {
    const float ulp = __uint_as_float(static_cast<uint32_t>(127 - 25 + exponent(bits)) << 23);
    return fmaf(static_cast<float>(residue), ulp / static_cast<float>(kResidueSteps), gpu::low_fp16(bits));
  }
};

}  // namespace evenkeel
