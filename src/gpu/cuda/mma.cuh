// Products of a warp (mma.sync) as functions, and loads of its operands (ldmatrix): sm_80 and up. And the layout of the
// tiles they read from shared memory: rows of kD bf16, whose pieces of 16 bytes are permuted within each row so that
// the 8 rows of an ldmatrix never meet in a bank.
#pragma once

#include "gpu/cuda/device_function.cuh"

namespace evenkeel::gpu {

// Four matrices of 8 x 8 bf16; lane l gives the address of row l % 8 of matrix l / 8.
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

// Four matrices of 8 x 8 bf16 to shared memory, a row's 16 bytes by the lane that gives its address. sm_90.
EK_DEVICE void store_matrices(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// c (16 x 8, FP32) += a (16 x 16) b (16 x 8). Lane l holds, with g = l / 4 and t = l % 4, of c: (g, 2t), (g,
// 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
EK_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Byte offset of piece `piece` (of 16 bytes) of row `row` in a tile.
template <int kD>
EK_DEVICE uint32_t tile_offset(int row, int piece) {
  return static_cast<uint32_t>(row * (kD * 2) + ((piece ^ (row & 7)) << 4));
}
template <int kD>
inline constexpr int kTileRowBytes = kD * 2;

// Rows [row, row + 16), columns [16 k, 16 k + 16) of a tile as the left operand.
template <int kD>
EK_DEVICE void load_left(uint32_t (&a)[4], uint32_t tile, int row, int k, int lane) {
  load_matrices(a, tile + tile_offset<kD>(row + (lane & 15), 2 * k + (lane >> 4)));
}
// Rows [row, row + 16) of a tile as columns of the right operand, its columns [16 k, 16 k + 16) as rows:
// b[0], b[1] for the first 8 rows, b[2], b[3] for the others.
template <int kD>
EK_DEVICE void load_right_rows(uint32_t (&b)[4], uint32_t tile, int row, int k, int lane) {
  load_matrices(b, tile + tile_offset<kD>(row + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
}
// Rows [row, row + 16) of a tile as rows of the right operand, columns [16 n, 16 n + 16) as columns.
template <int kD>
EK_DEVICE void load_right_columns(uint32_t (&b)[4], uint32_t tile, int row, int n, int lane) {
  load_matrices_transposed(b, tile + tile_offset<kD>(row + (lane & 15), 2 * n + (lane >> 4)));
}

// The upper halves of two floats: exact for bf16 numbers, truncation for others.
EK_DEVICE uint32_t pack_upper(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
inline constexpr uint32_t kBf16Ones = 0x3f803f80u;

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

// What is left of x beyond its upper half; nothing of an Inf or NaN.
EK_DEVICE float beyond_upper(float x) {
  const uint32_t upper = __float_as_uint(x) & 0xffff0000u;
  return (upper & 0x7f800000u) == 0x7f800000u ? 0.0f : __fsub_rn(x, __uint_as_float(upper));
}

}  // namespace evenkeel::gpu
