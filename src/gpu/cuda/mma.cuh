// Tiles in shared memory that products of a warp read (mma.sync, ldmatrix: instructions.cuh): rows of kD numbers of 16 bits.
// The pieces of 16 bytes are permuted within each row so that the 8 rows of an ldmatrix never meet in a bank.
#pragma once

#include "gpu/cuda/device_function.cuh"

namespace evenkeel::gpu {

// Byte offset of piece `piece` (of 16 bytes) of row `row` in a tile. Two rows of 32 numbers share the banks' 128 bytes.
template <int kD>
EK_DEVICE uint32_t tile_offset(int row, int piece) {
  static_assert(kD == 32 || kD % 64 == 0);
  const int permuted = kD == 32 ? piece ^ ((row >> 1) & 3) : piece ^ (row & 7);
  return static_cast<uint32_t>(row * (kD * 2) + (permuted << 4));
}
template <int kD>
inline constexpr int kTileRowBytes = kD * 2;

// Rows [row, row + 16), columns [16 k, 16 k + 16) of a tile as the left operand.
template <int kD>
EK_DEVICE void load_left(uint32_t (&a)[4], uint32_t tile, int row, int k, int lane) {
  load_matrices(a, tile + tile_offset<kD>(row + (lane & 15), 2 * k + (lane >> 4)));
}
// Rows [row, row + 16) of a tile as columns of the right operand, its columns [16 k, 16 k + 16) as rows.
// The first 8 rows are in b[0] and b[1], the others in b[2] and b[3].
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

// What is left of x beyond its upper half; nothing of an Inf or NaN.
EK_DEVICE float beyond_upper(float x) {
  const uint32_t upper = __float_as_uint(x) & 0xffff0000u;
  return (upper & 0x7f800000u) == 0x7f800000u ? 0.0f : __fsub_rn(x, __uint_as_float(upper));
}

}  // namespace evenkeel::gpu
