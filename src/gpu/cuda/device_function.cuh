// What device code of every kind uses: inlined functions, addresses in shared memory, pairs of BF16, powers of 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define EK_DEVICE __device__ __forceinline__

namespace evenkeel::gpu {

inline constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

EK_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

EK_DEVICE float exp2_approx(float x) {  // 2 ulp; below 2^-126: 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats to BF16, nearest even; `low` in the lower half.
EK_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
EK_DEVICE float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
EK_DEVICE float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

}  // namespace evenkeel::gpu
