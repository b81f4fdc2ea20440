// Products of a warpgroup with E4M3 operands (wgmma), and conversion to and from E4M3. sm_90a.
//
// FP8 operands are always read with the summed index along the line ("K-major"): a line is 64 or 128 bytes, with the
// swizzle of its own length, 8 lines after 8 lines, aligned to 1024. The chip adds products with 13 bits
// (numerics/tensor_core.h): long sums go to FP32 registers piece by piece.
#pragma once

#include "gpu/cuda/wgmma.cuh"
#include "gpu/cuda/wgmma_names.h"

namespace evenkeel::gpu {

// Descriptor of an operand in shared memory. `advance` by 32 bytes goes to the next 32 summed terms.
template <int kLineBytes>
EK_DEVICE uint64_t operand_e4m3(const void* at) {
  static_assert(kLineBytes == 64 || kLineBytes == 128);
  constexpr uint64_t kSwizzle = kLineBytes == 128 ? 1 : 2;
  return (static_cast<uint64_t>(shared_address(at) & 0x3FFFF) >> 4) | uint64_t{1} << 16 |
         static_cast<uint64_t>(8 * kLineBytes >> 4) << 32 | kSwizzle << 62;
}

// Four floats to E4M3, nearest even, saturating; the first in the lowest byte.
EK_DEVICE uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

// The four numbers of a word in FP16, which has every number of E4M3; the first in the lowest half.
EK_DEVICE void unpack_e4m3(uint32_t packed, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 first, second;\nmov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\ncvt.rn.f16x2.e4m3x2 %1, second;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(packed));
}

// d (+)= A B over 32 summed terms; A is 64 x 32, B 32 x N. `add` false: d is overwritten. The accumulator is that of
// Wgmma. A in registers, with g = t % 32 / 4 and q = t % 4 of thread t: Byte i of a0 is (row 16 (t / 32) + g, term 4 q + i).
// Byte i of a1 is (row + 8, the same term). For a2 and a3: the same rows and term 16 + 4 q + i.
template <int N>
struct WgmmaE4m3;

// clang-format off
#define EK_TEXT(n, names, left, right, add) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" names "}, " \
  left ", " right ", p, 1, 1;\n}\n"
// What follows the accumulator's names are the operands' numbers.
#define EK_SS(n, names, floats, left, right, add_at) \
  asm volatile(EK_TEXT(n, names, left, right, add_at) : floats : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define EK_RS(n, names, floats, left, right, add_at) \
  asm volatile(EK_TEXT(n, names, left, right, add_at) : floats \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(add)))
// clang-format on

template <>
struct WgmmaE4m3<64> {
  // Both operands in shared memory.
  EK_DEVICE static void ss(float (&d)[32], uint64_t a, uint64_t b, bool add) {
    EK_SS("64", EK_NAMES_32, EK_FLOATS_32, "%32", "%33", "%34");
  }
  // A in registers.
  EK_DEVICE static void rs(float (&d)[32], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                           const uint32_t& a3, uint64_t b, bool add) {
    EK_RS("64", EK_NAMES_32, EK_FLOATS_32, "{%32, %33, %34, %35}", "%36", "%37");
  }
};

template <>
struct WgmmaE4m3<128> {
  EK_DEVICE static void ss(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    EK_SS("128", EK_NAMES_64, EK_FLOATS_64, "%64", "%65", "%66");
  }
};

#undef EK_RS
#undef EK_SS
#undef EK_TEXT

}  // namespace evenkeel::gpu
