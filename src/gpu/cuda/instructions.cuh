// Every instruction of sm_80 that CUDA C++ has no word for, as a function: all that kernels of mma.sync and cp.async ask of
// the machine. The folder tests/cuda_emulator has a file of the same name with the same functions for the CPU. A kernel that
// uses no other assembler runs there unchanged.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define EK_DEVICE __device__ __forceinline__

namespace evenkeel::gpu {

// --- Shared memory

// The block's dynamic shared memory.
EK_DEVICE uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t memory[];
  return memory;
}
EK_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

EK_DEVICE void store_shared(uint32_t address, uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(address), "h"(value));
}

// --- Numbers

EK_DEVICE float max_or_nan(float x, float y) {  // where one operand is NaN the result is
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}
EK_DEVICE float exp2_approx(float x) {  // 2 ulp; below 2^-126: 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
EK_DEVICE float reciprocal_approx(float x) {  // 1 ulp; of subnormal numbers: infinite
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats to BF16 or FP16, nearest even; `low` in the lower half.
EK_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
EK_DEVICE uint32_t pack_fp16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
EK_DEVICE float low_fp16(uint32_t packed) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(packed)));
  return x;
}
EK_DEVICE float high_fp16(uint32_t packed) { return low_fp16(packed >> 16); }

// -1 where a >= b, else 0.
EK_DEVICE int greater_equal(float a, float b) {
  int result;
  asm("set.ge.s32.f32 %0, %1, %2;\n" : "=r"(result) : "f"(a), "f"(b));
  return result;
}
// Of two bf16 numbers each: 1 where a >= b, else 0, in bf16.
EK_DEVICE uint32_t greater_equal_bf16(uint32_t a, uint32_t b) {
  const __nv_bfloat162 result =
      __hge2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&result);
}
// The least bf16 number that is not below x, twice.
EK_DEVICE uint32_t pack_twice_upward(float x) {
  const __nv_bfloat162 result = __bfloat162bfloat162(__float2bfloat16_ru(x));
  return *reinterpret_cast<const uint32_t*>(&result);
}
// Two bf16 numbers squared.
EK_DEVICE uint32_t square_bf16(uint32_t packed) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %1, %2;\n" : "=r"(result) : "r"(packed), "r"(0u));
  return result;
}

// --- Products of a warp (mma.sync) and loads of their operands (ldmatrix)

// Four matrices of 8 x 8 numbers of 16 bits; lane l gives the address of row l % 8 of matrix l / 8.
EK_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
EK_DEVICE void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// c (16 x 8, FP32) += a (16 x 16) b (16 x 8). Lane l holds, with g = l / 4 and t = l % 4, of c: (g, 2t), (g,
// 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). Operands of BF16 or FP16.
EK_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
EK_DEVICE void multiply_add_fp16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- Asynchronous copies into shared memory (cp.async). A thread's copies since its last commit are a group.

// 16 bytes, or zeros where not `present`; 4 bytes. `target`: an address in shared memory.
EK_DEVICE void copy_16_async(uint32_t target, const void* source, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target), "l"(source),
               "r"(present ? 16 : 0));
}
EK_DEVICE void copy_4_async(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(target), "l"(source));
}
EK_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;\n"); }
// All groups but the newest kPending have arrived.
template <int kPending = 0>
EK_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// --- Blocks that wait for each other, in device memory

EK_DEVICE int load_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// The same without an order: other accesses may be earlier or later.
EK_DEVICE int load_relaxed(const int* at) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}
EK_DEVICE void store_relaxed(uint32_t* at, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value));
}
// Numbers side by side that the memory adds with one instruction: four from compute capability 9.0 on. (Code that is made for
// 8.0 runs there, too, with one.)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr int kAddedAtOnce = 4;
#else
inline constexpr int kAddedAtOnce = 1;
#endif
// From the memory that all blocks share, past the multiprocessor's own cache.
EK_DEVICE void load_past_cache(float (&value)[1], const float* at) {
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value[0]) : "l"(at) : "memory");
}
EK_DEVICE void load_past_cache(float (&value)[4], const float* at) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "l"(at)
               : "memory");
}
EK_DEVICE void store(float* at, const float (&value)[1]) { *at = value[0]; }
EK_DEVICE void store(float* at, const float (&value)[4]) {
  *reinterpret_cast<float4*>(at) = {value[0], value[1], value[2], value[3]};
}
EK_DEVICE void add_release(int* at, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// *at += value, by the memory itself.
EK_DEVICE void add_in_memory(float* at, const float (&value)[1]) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(at), "f"(value[0]) : "memory");
}
EK_DEVICE void add_in_memory(float* at, const float (&value)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(value[0]),
               "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
}
// In a loop that waits for another block; on a GPU they run anyway.
EK_DEVICE void let_others_run() {}

}  // namespace evenkeel::gpu
