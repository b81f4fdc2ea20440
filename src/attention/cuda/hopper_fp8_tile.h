// A tile of the FP8 kernel: 64 rows of q, k or v of one head in E4M3, and the one scale they share. The bytes are exactly
// as shared memory holds them for the tensor cores. The quantiser writes tiles of k and v to device memory, and a plain copy of
// bytes brings them to shared memory, where the forward kernel writes those of q. `wgmma` reads them there: this file is what all
// agree on. Plain C++, for host and device code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention_call.h"
#include "base/sizes.h"
#include "gpu/device_memory.h"
#include "numerics/shared_scale.h"

namespace evenkeel::hopper_fp8 {

inline constexpr int kTileRows = kScaleTileRows;
// Probabilities are stored times 2^8: the largest is 256 of E4M3's 448, and 2^-17 is the smallest that is not 0.
inline constexpr int kProbsExponent = 8;

// FP8 products sum over bytes that lie beside each other in both operands. So a tile of q or k is 64 rows of kHead
// features, and a tile of v is transposed: kHead rows of 64 keys.
EVENKEEL_HOST_DEVICE constexpr int line_bytes(bool is_value, int head) { return is_value ? kTileRows : head; }
constexpr int lines(bool is_value, int head) { return is_value ? head : kTileRows; }

// Byte offset of byte `byte` of line `line` (the swizzle of 128 or 64 bytes). Pieces of 16 bytes trade places within 128
// bytes, by the number of these 128 bytes modulo the pieces of a line. So 8 lines never meet in a bank.
EVENKEEL_HOST_DEVICE constexpr uint32_t tile_offset(int line, int byte, int line_bytes) {
  const int piece = byte / 16 ^ (line * line_bytes / 128 & (line_bytes / 16 - 1));
  return static_cast<uint32_t>(line * line_bytes + piece * 16 + byte % 16);
}

// Where a key stands in a line of v. A thread holds scores of keys 8 i + 2 t and 8 i + 2 t + 1 (t its number in its quad,
// i = 0..7). Packed in this order to words, they are the left operand's bytes 4 t .. 4 t + 3 of each 16. The keys of v are
// permuted in memory so that the probabilities need not be moved between threads.
EVENKEEL_HOST_DEVICE constexpr int value_slot(int key) {
  const int pair = key / 8 % 2, quad = key % 8 / 2;
  return key / 16 * 16 + quad * 4 + pair * 2 + key % 2;
}

// Tiles of k and v come in pairs, 128 rows: the numbers of both, then the scale of each. The second tile of a last pair may be all zeros.
inline constexpr int kPairTiles = 2, kPairRows = kPairTiles * kTileRows;
EVENKEEL_HOST_DEVICE constexpr size_t image_bytes(int head) { return static_cast<size_t>(kTileRows * head); }
inline constexpr size_t kScaleBytes = 16;  // the least that the copy engine moves
EVENKEEL_HOST_DEVICE constexpr size_t pair_bytes(int head) {
  return kPairTiles * (image_bytes(head) + kScaleBytes);
}
// Of tile `tile`, from the first tile's.
EVENKEEL_HOST_DEVICE constexpr size_t image_offset(uint32_t tile, int head) {
  return tile / kPairTiles * pair_bytes(head) + tile % kPairTiles * image_bytes(head);
}
EVENKEEL_HOST_DEVICE constexpr size_t scale_offset(uint32_t tile, int head) {
  return tile / kPairTiles * pair_bytes(head) + kPairTiles * image_bytes(head) +
         tile % kPairTiles * kScaleBytes;
}

constexpr int kernel_head(int64_t D) { return D <= 64 ? 64 : 128; }

// What the blocks of a kernel share, zeros when it starts.
struct Counters {
  int32_t* all;
  int64_t count;
  // Of one head's v, as far as it was looked at: bits of the largest finite magnitude, and tiles.
  struct Head {
    int32_t *largest, *tiles;
  };
  EVENKEEL_HOST_DEVICE uint32_t* next_item() const { return reinterpret_cast<uint32_t*>(all); }
  EVENKEEL_HOST_DEVICE uint32_t* next_piece() const { return next_item() + 1; }
  EVENKEEL_HOST_DEVICE Head head(int n) const { return {all + 2 + 2 * n, all + 3 + 2 * n}; }
};
inline Counters take_counters(const AttentionProblem& problem, Carver& parts) {
  const int64_t count = 2 + 2 * problem.B * problem.G;
  return {parts.take<int32_t>(count), count};
}

// The forward pass's workspace: counters, and the tiles of k and v.
struct Layout {
  Counters counters;
  uint8_t *k, *v;
  size_t bytes;
};
inline Layout lay_out(const AttentionProblem& problem, void* workspace) {
  Carver parts(workspace);
  const auto pair = static_cast<int64_t>(pair_bytes(kernel_head(problem.D)));
  const int64_t key_pairs = divide_up(problem.N, kPairRows);
  Layout layout{};
  layout.counters = take_counters(problem, parts);
  layout.k = parts.take<uint8_t>(problem.B * problem.G * key_pairs * pair);
  layout.v = parts.take<uint8_t>(problem.B * problem.G * key_pairs * pair);
  layout.bytes = parts.used();
  return layout;
}

// The backward pass's: counters, the rounded q, k and v in BF16, and what the BF16 kernels need.
struct BackwardLayout {
  Counters counters;
  PassInputs rounded;
  void* rest;
  size_t bytes;
};
inline BackwardLayout lay_out_backward(const AttentionProblem& problem, void* workspace, size_t rest_bytes) {
  Carver parts(workspace);
  // As packed as the given tensor is; the rows of a head lie together.
  const auto rounded = [&](int64_t heads, int64_t rows, int64_t packed_rows, bool packed) {
    const int64_t B = packed ? 1 : problem.B, all = packed ? packed_rows : rows;
    return DeviceTensor{parts.take<uint16_t>(B * heads * all * problem.D),
                        {packed ? 0 : heads * all * problem.D, all * problem.D, problem.D, 1}};
  };
  const AttentionMask& mask = problem.mask;
  const bool packed_keys = !mask.key_offsets.empty();
  BackwardLayout layout{};
  layout.counters = take_counters(problem, parts);
  layout.rounded = {rounded(problem.H, problem.T, mask.query_rows, !mask.query_offsets.empty()),
                    rounded(problem.G, problem.N, mask.key_rows, packed_keys),
                    rounded(problem.G, problem.N, mask.key_rows, packed_keys)};
  layout.rest = parts.take_bytes(rest_bytes);
  layout.bytes = parts.used();
  return layout;
}

}  // namespace evenkeel::hopper_fp8
