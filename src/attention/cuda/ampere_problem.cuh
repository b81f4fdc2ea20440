// What the kernels of the Ampere class share: arguments, tiles in shared memory. They use mma.sync, ldmatrix and cp.async alone (sm_80 and all that came after), and nothing of the device but
// gpu/cuda/instructions.cuh: the emulator of the tests runs them on a CPU. Internal to src/attention.
#pragma once

#include "attention/cuda/head_rules.cuh"
#include "attention/cuda/pairs.cuh"
#include "attention/cuda/score_forms.cuh"
#include "gpu/cuda/mma.cuh"
#include "gpu/cuda/warp.cuh"

namespace evenkeel::ampere {

using namespace gpu;

inline constexpr int kWarpThreads = 32;

// Heads of more than 128 features have one size of tiles, 256, and a size of their own for values. Products over features
// and over values go through them a chunk at a time, and leave out the chunks behind the head's end.
template <int kHead>
inline constexpr bool kChunked = kHead > 128;
template <int kHead>
inline constexpr int kChunk = kChunked<kHead> ? 64 : kHead;
enum class Side { keys, values };  // whose features: q's and k's, or those of v and o
// f(a chunk's first step of 16 features) over the chunks of a head of `size` features.
template <int kHead, class F>
EK_DEVICE void each_chunk(int size, F f) {
  if constexpr (kChunked<kHead>) {
#pragma unroll 1
    for (int feature = 0; feature < size; feature += kChunk<kHead>) f(feature / 16);
  } else {
    f(0);
  }
}

// Of a block, on multiprocessors with 100 KB (sm_86, 89, 120).
inline constexpr size_t kSmallSharedBytes = 99 << 10;

inline constexpr int kMostKernels = 2;  // after the rows' facts, with a counter of items each

// What an instance of the kernels takes. A branch that is never taken still costs: it parts products from what could run
// beside them, and rules that are read at run time take registers.
enum class Instance {
  plain,       // a band of keys, sinks, sequences, GQA; none, wide_output, zero_sum; any keel
  consistent,  // the same with every head consistent
  all,  // everything else: soft caps, slopes, masks of their own, dither, paper_capped, plans that differ in kind
  exact,  // of the forward pass: the same, with exact shifts where the problem asks for them
};

template <class T, int kBlocks, int kColumns>
EK_DEVICE void clear(T (&numbers)[kBlocks][kColumns][4]) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i)
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) numbers[i][n][e] = 0;
}

// sum += left times 16 kPairs columns. load(right, n) fetches 16 of them, and each serves all blocks of 16 rows.
template <class Pairs, int kPairs, int kBlocks, int kColumns, class Load>
EK_DEVICE void multiply_step(float (&sum)[kBlocks][kColumns][4], const uint32_t (&left)[kBlocks][4],
                             Load load) {
  static_assert(2 * kPairs == kColumns);
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    uint32_t right[4];
    load(right, n);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      Pairs::multiply_add(sum[i][2 * n], left[i], right[0], right[1]);
      Pairs::multiply_add(sum[i][2 * n + 1], left[i], right[2], right[3]);
    }
  }
}

// --- Arguments

// (batch, head, row) strides in elements; features lie side by side.
struct Strided {
  uint16_t* data;
  int64_t stride[3];
  EK_DEVICE uint16_t* at(int batch, int head, int row) const {
    return data + batch * stride[0] + head * stride[1] + row * stride[2];
  }
};

// A part of a row's softmax: sum and O are those under the shift and its residue. shift -inf: no key.
struct alignas(16) RowPart {
  float shift, residue, sum, unused;
};

// A whole problem and its tensors: what every kernel of both passes is given.
struct Problem : ScoreForms {
  int B, H, G, D;
  HeadRules rules;
  const HeadRules* table;  // (H), or null: all heads have `rules`
  uint32_t step, layer;
  const uint32_t* device_step;

  // Of the forward pass: a byte for each warp of each query tile, whether it has far rows. The first launch writes it; the second
  // one has `exact` shifts and reads it. Null: no head takes a second launch.
  uint8_t* far_rows;
  bool exact;
  // Of few rows (ampere_decode.cuh): tiles of a group's rows, splits of the keys and key tiles of each; the splits' parts.
  int row_tiles_of_group, splits, split_tiles;
  RowPart* parts;       // (B, H, T, splits)
  float* part_outputs;  // (B, H, T, splits, Dv)

  Strided q, k, v, o, grad_output, dq, dk, dv;
  float* lse;                // (B, H, T)
  int8_t* residue;           // (B, H, T, D) or null: no head is wide
  float *row_max, *row_sum;  // (B, H, T) or null: no head is consistent

  // Of the backward pass alone.
  int row_tiles, key_tiles, padded_rows;
  float *shift, *inverse, *delta;  // (B, H, padded rows): L log2(e) or M; 1 / l; delta as used
  float* exact_delta;              // (B, H, T) or null
  const float* grad_lse;           // (B, H, T) or null
  float* dsinks;                   // (H) or null
  float* delta_out;                // (B, H, T) or null
  float* dq_sum;                   // sums of accumulators, as the threads hold them; or null, with turn
  int *turn, *next_item;           // (B, H, row tiles): parts of dQ added so far; (kMostKernels)

  int Dv;  // features of v, o and their gradients; D where the tiles are not chunked

  EK_DEVICE const HeadRules& rules_of(int h) const { return table ? table[h] : rules; }
  EK_DEVICE RandomKey random(const HeadRules& rules_of_head) const {
    return {rules_of_head.seed, device_step ? *device_step : step, layer * 64 + 63};
  }
  template <int kHead>
  EK_DEVICE int size(Side side) const {
    return kChunked<kHead> && side == Side::values ? Dv : D;
  }
};

// f(score, which of the lane's rows, column) over the accumulators of 16 kBlocks x 8 kColumns scores. Row `which` is
// row 8 which + lane / 4.
template <int kBlocks, int kColumns, class F>
EK_DEVICE void each_score(float (&scores)[kBlocks][kColumns][4], int lane, F f) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i)
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(scores[i][n][e], 2 * i + e / 2, 8 * n + lane % 4 * 2 + e % 2);
}

// --- Tiles

// A thread's first piece of 16 bytes in a tensor whose first row of a tile is at `from`.
template <int kHead>
EK_DEVICE const uint16_t* own_piece(const uint16_t* from, int64_t stride) {
  constexpr int kPieces = kHead / 8;
  const int thread = static_cast<int>(threadIdx.x);
  return from + thread / kPieces * stride + thread % kPieces * 8;
}
// A thread's share of the copy of a tile's rows [0, kRows): one piece of every kStep-th row, the first at `from` (own_piece).
// Zeros where a row is not below `exist` or the head ends.
template <int kHead, int kRows, int kThreads>
EK_DEVICE void load_tile(uint32_t tile, const uint16_t* from, int64_t stride, int exist, int D) {
  constexpr int kPieces = kHead / 8, kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kRows % kStep == 0);
  static_assert(kStep % 8 == 0 || (8 % kStep == 0 && kPieces >= 8));
  const int thread = static_cast<int>(threadIdx.x), row = thread / kPieces, piece = thread % kPieces;
  const uint32_t to = tile + tile_offset<kHead>(row, piece);
  const int present = piece * 8 < D ? exist - row : 0;
#pragma unroll
  for (int n = 0; n < kRows; n += kStep) {
    // Every eighth row's pieces are permuted alike.
    copy_16_async((to + static_cast<uint32_t>(n * kTileRowBytes<kHead>)) ^ static_cast<uint32_t>(n % 8 << 4),
                  from, n < present);
    from += kStep * stride;
  }
}

// A lane's address of 16 x 16 numbers in a tile, for ldmatrix. Rows and columns further on cost one instruction and no
// register: the permutation of pieces is an exclusive or, and leaves the bits above a row alone (tiles begin at multiples of
// a row).
template <int kHead>
struct Piece {
  uint32_t address;
  // Rows [row, row + 16) as rows of the left operand, or as rows of the right one, read transposed.
  EK_DEVICE static Piece across(uint32_t tile, int row, int lane) {
    return {tile + tile_offset<kHead>(row + (lane & 15), lane >> 4)};
  }
  // Rows [row, row + 16) as columns of the right operand.
  EK_DEVICE static Piece along(uint32_t tile, int row, int lane) {
    return {tile + tile_offset<kHead>(row + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)};
  }
  // 16 n rows and 16 k columns further on. REQUIRES: the first column is a multiple of 16 of which k has no bit.
  EK_DEVICE uint32_t at(int n, int k) const {
    return (address ^ static_cast<uint32_t>(k << 5)) + static_cast<uint32_t>(n * 16 * kTileRowBytes<kHead>);
  }
};

// A product's left operand out of an accumulator: the 16 columns of blocks 2 n and 2 n + 1.
template <class Pairs>
EK_DEVICE void pack_left(uint32_t (&a)[4], const float (&even)[4], const float (&odd)[4]) {
  a[0] = Pairs::pack(even[0], even[1]);
  a[1] = Pairs::pack(even[2], even[3]);
  a[2] = Pairs::pack(odd[0], odd[1]);
  a[3] = Pairs::pack(odd[2], odd[3]);
}

// Four blocks of an accumulator's row `r` (of the two that a thread has), scaled and rounded, to 32 features of device
// memory: 16 bytes a thread. All lanes take part; those not `present` write nothing, those not `exists` write zeros.
template <class Pairs>
EK_DEVICE void write_blocks(const float (*block)[4], int r, float scale, uint16_t* to, bool present,
                            bool exists) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = Pairs::pack(block[i][2 * r] * scale, block[i][2 * r + 1] * scale);
  quad_transpose(words);
  if (present)
    *reinterpret_cast<uint4*>(to) =
        exists ? uint4{words[0], words[1], words[2], words[3]} : uint4{0, 0, 0, 0};
}

}  // namespace evenkeel::ampere
