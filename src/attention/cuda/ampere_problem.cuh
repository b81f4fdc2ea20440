// What the kernels of the Ampere class share: arguments, formats of 16 bits, which rows see which keys, tiles in shared
// memory. They use mma.sync, ldmatrix and cp.async alone (sm_80 and all that came after), and nothing of the device but
// gpu/cuda/instructions.cuh: the emulator of the tests runs them on a CPU. Internal to src/attention.
#pragma once

#include <limits>

#include "attention/cuda/sequences.cuh"
#include "attention/cuda/wide_output.cuh"
#include "gpu/cuda/mma.cuh"
#include "gpu/cuda/warp.cuh"

namespace evenkeel::ampere {

using namespace gpu;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr int kWarpThreads = 32;

// --- Formats: pairs of numbers as the products read them.

struct Bf16Pairs {
  EK_DEVICE static uint32_t pack(float low, float high) { return pack_bf16(low, high); }
  EK_DEVICE static float low(uint32_t packed) { return low_bf16(packed); }
  EK_DEVICE static float high(uint32_t packed) { return high_bf16(packed); }
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
  EK_DEVICE static uint32_t pack(float low, float high) { return pack_fp16(low, high); }
  EK_DEVICE static float low(uint32_t packed) { return low_fp16(packed); }
  EK_DEVICE static float high(uint32_t packed) { return high_fp16(packed); }
  EK_DEVICE static void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_add_fp16(c, a, b0, b1);
  }
  // The exponent field of a number's ulp 2^(exponent - 25); subnormal numbers have the first one's.
  EK_DEVICE static int exponent(uint32_t bits) { return max(static_cast<int>(bits >> 10 & 31), 1); }
  EK_DEVICE static uint32_t residue(float exact, uint32_t bits, uint32_t noise) {
    if ((bits & 0x7c00) == 0x7c00) return 0;
    const float steps = (exact - low_fp16(bits)) *
                        __uint_as_float(static_cast<uint32_t>(127 + 25 - exponent(bits)) << 23) *
                        static_cast<float>(kResidueSteps);
    return static_cast<uint32_t>(static_cast<int>(floorf(steps + static_cast<float>(noise) * 0x1p-16f))) &
           0xff;
  }
  EK_DEVICE static uint32_t residues(float low, float high, uint32_t packed, uint32_t low_noise,
                                     uint32_t high_noise) {
    return residue(low, packed & 0xffff, low_noise) | residue(high, packed >> 16, high_noise) << 8;
  }
  EK_DEVICE static float with_residue(uint32_t bits, int residue) {
    const float ulp = __uint_as_float(static_cast<uint32_t>(127 - 25 + exponent(bits)) << 23);
    return fmaf(static_cast<float>(residue), ulp / static_cast<float>(kResidueSteps), low_fp16(bits));
  }
};

// --- Arguments

// What a head's plan says, resolved. One for all heads, or a table.
struct HeadRules {
  float keel, beta, cap, tie_tolerance;
  float slack;  // how far a row's largest score may pass its shift, in powers of two, before it is moved
  bool dither;
  bool paper_capped;
  bool consistent;   // shifts by powers of two, sums of rounded probabilities
  bool wide;         // O for delta has a residue
  bool exact_delta;  // zero_sum
  uint64_t seed;
};

// (batch, head, row) strides in elements; features lie side by side.
struct Strided {
  uint16_t* data;
  int64_t stride[3];
  EK_DEVICE uint16_t* at(int batch, int head, int row) const {
    return data + batch * stride[0] + head * stride[1] + row * stride[2];
  }
};

// A whole problem and its tensors: what every kernel of both passes is given.
struct Problem {
  int B, H, G, D;
  Sequences sequences;
  float scale;
  float softcap;     // 0: off
  float score_unit;  // of the scores that softmax sees: a, or with a soft cap its c (they are then tanh)
  float score_log2;  // the same in powers of two
  const float *slopes, *sinks;  // (H) or null
  int left, right;              // a row at key position p sees keys p - left ... p + right
  const uint8_t* visible;       // or null
  int64_t visible_stride[4];
  HeadRules rules;
  const HeadRules* table;  // (H), or null: all heads have `rules`
  uint32_t step, layer;
  const uint32_t* device_step;

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
  float* dq_sum;                   // sums of accumulators, as the threads hold them
  int *turn, *next_item;

  EK_DEVICE const HeadRules& rules_of(int h) const { return table ? table[h] : rules; }
  EK_DEVICE RandomKey random(const HeadRules& rules_of_head) const {
    return {rules_of_head.seed, device_step ? *device_step : step, layer * 64 + 63};
  }
};

// What a head's sink is to its softmax, in powers of two; -inf: it has none.
EK_DEVICE float sink_log2(const Problem& p, int h) { return p.sinks ? p.sinks[h] * kLog2E : -kInfinity; }
// How much a score, as the products leave it, falls for each key of distance.
EK_DEVICE float slope_of(const Problem& p, int h) { return p.slopes ? p.slopes[h] / p.scale : 0.0f; }

// --- Which rows see which keys: a band, cut off at the sequence's ends.

struct Span {
  Sequence s;
  int offset, left, right;

  Span() = default;
  EK_DEVICE Span(const Problem& p, int b)
      : s(sequence(p.sequences, b)), offset(s.keys - s.rows), left(p.left), right(p.right) {}
  // Row i sees keys [first_key, end_key) at most; none where first_key >= end_key.
  EK_DEVICE int first_key(int row) const { return max(0, row + offset - left); }
  EK_DEVICE int end_key(int row) const { return min(s.keys, row + offset + right + 1); }
  // Key tiles [first, end) that some row of a row tile sees. Every one of them has that tile among its row tiles.
  EK_DEVICE int first_key_tile(int row, int tile_keys) const { return first_key(row) / tile_keys; }
  EK_DEVICE int end_key_tile(int row, int tile_rows, int tile_keys) const {
    if (row >= s.rows) return 0;
    const int end = end_key(min(row + tile_rows, s.rows) - 1);
    return end <= first_key(row) ? 0 : (end + tile_keys - 1) / tile_keys;
  }
  // Row tiles [first, end) that see some key of the tile that begins with `key`.
  EK_DEVICE int first_row_tile(int key, int tile_rows) const {
    return max(0, key - right - offset) / tile_rows;
  }
  EK_DEVICE int end_row_tile(int key, int tile_keys, int tile_rows) const {
    if (key >= s.keys) return 0;
    const int last_row = min(s.rows - 1, min(key + tile_keys, s.keys) - 1 + left - offset);
    return last_row < 0 ? 0 : last_row / tile_rows + 1;
  }
  // Do all rows of [row, row + rows) see all keys of [key, key + keys)? Does one see one?
  EK_DEVICE bool all_seen(int row, int rows, int key, int keys) const {
    return key >= row + rows - 1 + offset - left && key + keys - 1 <= row + offset + right &&
           key + keys <= s.keys;
  }
  EK_DEVICE bool some_seen(int row, int rows, int key, int keys) const {
    return row < s.rows && key < end_key(min(row + rows, s.rows) - 1) && key + keys > first_key(row);
  }
};

// --- Scores

// tanh(x): 1 - 2 / (1 + e^2x), with the absolute accuracy of a number near 1. A soft-capped score needs no more.
EK_DEVICE float tanh_of(float x) {
  return fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(x * (2 * kLog2E))), 1.0f);
}

// The mask of one head, element by element.
struct Visible {
  const uint8_t* data;  // of the head, or null: every key in the band is visible
  int64_t row_stride, key_stride;
  EK_DEVICE Visible(const Problem& p, int b, int h)
      : data(p.visible ? p.visible + b * p.visible_stride[0] + h * p.visible_stride[1] : nullptr),
        row_stride(p.visible_stride[2]),
        key_stride(p.visible_stride[3]) {}
  // REQUIRES: row and key exist.
  EK_DEVICE bool operator()(int row, int key) const { return data[row * row_stride + key * key_stride] != 0; }
};

// --- Tiles

// Rows [0, kRows) of a tile from device memory, row n at from + n stride; zeros where n >= exist or the head ends.
template <int kHead, int kRows, int kThreads>
EK_DEVICE void load_tile(uint32_t tile, const uint16_t* from, int64_t stride, int exist, int D) {
  constexpr int kPieces = kHead / 8;
  const int thread = static_cast<int>(threadIdx.x);
  static_assert(kRows * kPieces % kThreads == 0);
#pragma unroll
  for (int n = 0; n < kRows * kPieces / kThreads; ++n) {
    const int row = (thread + n * kThreads) / kPieces, piece = (thread + n * kThreads) % kPieces;
    const bool present = row < exist && piece * 8 < D;
    copy_16_async(tile + tile_offset<kHead>(row, piece), present ? from + row * stride + piece * 8 : from,
                  present);
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
