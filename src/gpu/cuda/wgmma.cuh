// Products of a warpgroup (wgmma) as functions. sm_90a.
//
// An operand in shared memory is a box (copy_engine.cuh), read either way: features summed over ("K-major"), or rows
// summed over ("transposed", MN-major). A head size of 128 is two boxes.
#pragma once

#include "gpu/cuda/copy_engine.cuh"
#include "gpu/cuda/device_function.cuh"
#include "gpu/cuda/warp.cuh"
#include "gpu/cuda/wgmma_names.h"

namespace evenkeel::gpu {

template <int kRegisters>
EK_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
EK_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptor of an operand in shared memory with the 128-byte swizzle. K-major: `group_bytes` from one group of 8
// rows to the next (1024 in a box). Transposed: 1024 from 8 summed rows to the next, and `box_bytes` from one box
// of 64 features to the next.
EK_DEVICE uint64_t operand(const void* at, uint32_t box_bytes = 16, uint32_t group_bytes = 8 * kRowBytes) {
  return (static_cast<uint64_t>(shared_address(at) & 0x3FFFF) >> 4) |
         (static_cast<uint64_t>(box_bytes >> 4) << 16) | (static_cast<uint64_t>(group_bytes >> 4) << 32) |
         (uint64_t{1} << 62);
}
// An operand further on, in bytes: 32 for the next 16 features of a K-major box, 16 * kRowBytes for the next 16
// summed rows of a transposed one.
EK_DEVICE uint64_t advance(uint64_t operand,
                           uint32_t bytes) {  // the address never carries into the upper word
  return (operand & 0xffffffff00000000ull) | (static_cast<uint32_t>(operand) + (bytes >> 4));
}

EK_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
EK_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
EK_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses of an accumulator across the wait it stands behind.
template <int n>
EK_DEVICE void settle(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Nothing that follows starts before x is known: a branch that is never taken, x being nowhere below
// `below_all`. The assembler moves a wait for products up to the last branch before it, whatever stands
// between.
EK_DEVICE void hold(float x, float below_all) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, %1;\n@p trap;\n}" ::"f"(x), "f"(below_all) : "memory");
}

// d (+)= A B over 16 summed terms of BF16, or of FP16; A is 64 x 16, B 16 x N. `sum` false: d is overwritten. Accumulator:
// thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 + {0, 8} and columns 8 j + 2 (t % 4) + {0, 1}:
//   d[4 j + 2 r + c] is (row + 8 r, column + c).
// Form `ss`: both operands in shared memory. Form `rs`: A in registers, where an accumulator packed to pairs is in the right order.
template <int N, bool kFp16 = false>
struct Wgmma;

// clang-format off
#define EK_TEXT(n, type, names, left, right, add, transposed) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type \
  " {" names "}, " left ", " right ", p, 1, 1, " transposed ";\n}\n"
// What follows the accumulator's names are the operands' numbers.
#define EK_SS(n, type, names, floats, left, right, add, transposed) \
  asm volatile(EK_TEXT(n, type, names, left, right, add, transposed) : floats \
               : "l"(a), "l"(b), "r"(static_cast<int>(sum)), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 1 : 0))
#define EK_RS(n, type, names, floats, left, right, add, transposed) \
  asm volatile(EK_TEXT(n, type, names, left, right, add, transposed) : floats \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(sum)), "n"(kTransposeB ? 1 : 0))
// clang-format on

template <bool kFp16>
struct Wgmma<64, kFp16> {
  template <bool kTransposeA, bool kTransposeB>
  EK_DEVICE static void ss(float (&d)[32], uint64_t a, uint64_t b, bool sum) {
    if constexpr (kFp16)
      EK_SS("64", "f16", EK_NAMES_32, EK_FLOATS_32, "%32", "%33", "%34", "%35, %36");
    else
      EK_SS("64", "bf16", EK_NAMES_32, EK_FLOATS_32, "%32", "%33", "%34", "%35, %36");
  }
  template <bool kTransposeB>
  EK_DEVICE static void rs(float (&d)[32], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                           const uint32_t& a3, uint64_t b, bool sum) {
    if constexpr (kFp16)
      EK_RS("64", "f16", EK_NAMES_32, EK_FLOATS_32, "{%32, %33, %34, %35}", "%36", "%37", "%38");
    else
      EK_RS("64", "bf16", EK_NAMES_32, EK_FLOATS_32, "{%32, %33, %34, %35}", "%36", "%37", "%38");
  }
};

template <bool kFp16>
struct Wgmma<80, kFp16> {
  template <bool kTransposeA, bool kTransposeB>
  EK_DEVICE static void ss(float (&d)[40], uint64_t a, uint64_t b, bool sum) {
    if constexpr (kFp16)
      EK_SS("80", "f16", EK_NAMES_40, EK_FLOATS_40, "%40", "%41", "%42", "%43, %44");
    else
      EK_SS("80", "bf16", EK_NAMES_40, EK_FLOATS_40, "%40", "%41", "%42", "%43, %44");
  }
};

template <bool kFp16>
struct Wgmma<128, kFp16> {
  template <bool kTransposeA, bool kTransposeB>
  EK_DEVICE static void ss(float (&d)[64], uint64_t a, uint64_t b, bool sum) {
    if constexpr (kFp16)
      EK_SS("128", "f16", EK_NAMES_64, EK_FLOATS_64, "%64", "%65", "%66", "%67, %68");
    else
      EK_SS("128", "bf16", EK_NAMES_64, EK_FLOATS_64, "%64", "%65", "%66", "%67, %68");
  }
  template <bool kTransposeB>
  EK_DEVICE static void rs(float (&d)[64], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                           const uint32_t& a3, uint64_t b, bool sum) {
    if constexpr (kFp16)
      EK_RS("128", "f16", EK_NAMES_64, EK_FLOATS_64, "{%64, %65, %66, %67}", "%68", "%69", "%70");
    else
      EK_RS("128", "bf16", EK_NAMES_64, EK_FLOATS_64, "{%64, %65, %66, %67}", "%68", "%69", "%70");
  }
};

template <bool kFp16>
struct Wgmma<72, kFp16> {
  template <bool kTransposeB>
  EK_DEVICE static void rs(float (&d)[36], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                           const uint32_t& a3, uint64_t b, bool sum) {
    if constexpr (kFp16)
      EK_RS("72", "f16", EK_NAMES_36, EK_FLOATS_36, "{%36, %37, %38, %39}", "%40", "%41", "%42");
    else
      EK_RS("72", "bf16", EK_NAMES_36, EK_FLOATS_36, "{%36, %37, %38, %39}", "%40", "%41", "%42");
  }
};

template <bool kFp16>
struct Wgmma<112, kFp16> {
  template <bool kTransposeA, bool kTransposeB>
  EK_DEVICE static void ss(float (&d)[56], uint64_t a, uint64_t b, bool sum) {
    if constexpr (kFp16)
      EK_SS("112", "f16", EK_NAMES_56, EK_FLOATS_56, "%56", "%57", "%58", "%59, %60");
    else
      EK_SS("112", "bf16", EK_NAMES_56, EK_FLOATS_56, "%56", "%57", "%58", "%59, %60");
  }
};

template <bool kFp16>
struct Wgmma<192, kFp16> {
  template <bool kTransposeB>
  EK_DEVICE static void rs(float (&d)[96], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                           const uint32_t& a3, uint64_t b, bool sum) {
    if constexpr (kFp16)
      EK_RS("192", "f16", EK_NAMES_96, EK_FLOATS_96, "{%96, %97, %98, %99}", "%100", "%101", "%102");
    else
      EK_RS("192", "bf16", EK_NAMES_96, EK_FLOATS_96, "{%96, %97, %98, %99}", "%100", "%101", "%102");
  }
};

template <bool kFp16>
struct Wgmma<256, kFp16> {
  template <bool kTransposeB>
  EK_DEVICE static void rs(float (&d)[128], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                           const uint32_t& a3, uint64_t b, bool sum) {
    if constexpr (kFp16)
      EK_RS("256", "f16", EK_NAMES_128, EK_FLOATS_128, "{%128, %129, %130, %131}", "%132", "%133", "%134");
    else
      EK_RS("256", "bf16", EK_NAMES_128, EK_FLOATS_128, "{%128, %129, %130, %131}", "%132", "%133", "%134");
  }
};

#undef EK_RS
#undef EK_SS
#undef EK_TEXT

}  // namespace evenkeel::gpu
