// What device code of every kind uses: instructions, and the two numbers of a pair of BF16.
#pragma once

#include "gpu/cuda/instructions.cuh"

namespace evenkeel::gpu {

inline constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

EK_DEVICE float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
EK_DEVICE float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

}  // namespace evenkeel::gpu
