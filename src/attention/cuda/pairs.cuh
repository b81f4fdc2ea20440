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
  // In the lowest byte; the others hold anything. `noise`: less 1/2, and so that nothing lies halfway between two numbers.
  EK_DEVICE static uint32_t residue(float exact, float rounded, float noise) {
    // kResidueSteps / ulp, of a number's exponent field or that of the first normal number.
    constexpr uint32_t kLeast = 127 - 14;
    constexpr float kStepsAtLeast = static_cast<float>(kResidueSteps) * 0x1p24f;
    const uint32_t field = __float_as_uint(fmaxf(fabsf(rounded), 0x1p-14f)) & 0x7f800000u;
    const float scale = __uint_as_float(__float_as_uint(kStepsAtLeast) + (kLeast << 23) - field);
    constexpr float kToInteger = 0x1.8p23f;  // nearest integer, in the lowest bits of the sum
    return __float_as_uint(fmaf(exact - rounded, scale, noise) + kToInteger);
  }
  EK_DEVICE static uint32_t residues(float low, float high, uint32_t packed, uint32_t low_noise,
                                     uint32_t high_noise) {
    constexpr float kHalf = 0.5f - 0x1p-17f;
    // 128 with the noise behind its point, less 128.
    const auto part = [](uint32_t noise) {
      return __uint_as_float(0x43000000u | (noise & 0xffffu)) - 128.0f;
    };
    return __byte_perm(residue(low, gpu::low_fp16(packed), part(low_noise) - kHalf),
                       residue(high, gpu::high_fp16(packed), part(high_noise) - kHalf), 0x0040);
  }
  EK_DEVICE static float with_residue(uint32_t bits, int residue) {
    const float ulp = __uint_as_float(static_cast<uint32_t>(127 - 25 + exponent(bits)) << 23);
    constexpr float kStep = 1 / static_cast<float>(kResidueSteps);  // an ulp is a power of two: rounded once
    return fmaf(static_cast<float>(residue), ulp * kStep, gpu::low_fp16(bits));
  }
};

}  // namespace evenkeel
