// What the kernels of Hopper's backward pass know of a problem: arguments, which tiles see each other, shared memory.
// Included by hopper_backward.cu alone.
#pragma once

#include "attention/cuda/hopper.cuh"

namespace evenkeel::hopper::backward {

inline constexpr int kTileKeys = 128;
inline constexpr int kConsumers = 2;  // warpgroups, 64 keys each
inline constexpr int kConsumerThreads = kConsumers * kWarpgroup, kConsumerWarps = kConsumerThreads / 32;
inline constexpr int kStages = 2;  // of Q, dO, and parts of dQ

template <int D>
inline constexpr int kTileRows = D == 64 ? 128 : 64;  // by registers: 240 a thread

// Facts of a row that the main kernel reads, in the order its threads want them: a group of 16 rows is stored so that
// the four that a thread of the accumulator holds are 16 bytes.
EK_DEVICE int row_slot(int row) {
  const int r = row & 15;
  return (row & ~15) + ((r & 7) >> 1) * 4 + (r >> 3) * 2 + (r & 1);
}

struct RowFacts {
  float* shift;    // (B, H, padded T): L log2(e), or for consistent M; +inf where P is 0 throughout
  float* inverse;  // (B, H, padded T): consistent: 1 / l
  float* delta;    // (B, H, padded T)
};

struct Backward {
  int B, H, G, D;
  int padded_rows;  // T up to whole tiles
  int row_tiles, key_tiles;
  float scale, scale_log2;  // a, a log2(e)
  bool causal;
  Sequences sequences;
  RowFacts facts;
  float* dq_sum;  // (B, H, row tiles, 2, 8, 128, 4): accumulators as the threads hold them
  int* turn;      // (B, H, row tiles, 2): parts added so far
  int* next_item;
  const __nv_bfloat16 *grad_output, *o;
  const int8_t* residue;
  const float *lse, *row_max, *row_sum, *exact_delta;
  float keel;
  float* delta_out;  // (B, H, T) or null
  __nv_bfloat16 *dq, *dk, *dv;
  int64_t grad_output_stride[3], o_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];  // batch, head, row
};

// What rows and keys of a sequence have to do with each other: key <= row + offset under a causal mask.
struct Span {
  Sequence s;
  int offset;
  bool causal;
  int key_tiles, row_tiles;  // that exist in this sequence

  // Last key tile that some row of the tile sees; -1: none.
  EK_DEVICE int last_key_tile(int row_tile, int rows) const {
    if (!causal) return key_tiles - 1;
    const int last_row = min((row_tile + 1) * rows, s.rows) - 1;
    return last_row + offset < 0 ? -1 : min(key_tiles - 1, (last_row + offset) / kTileKeys);
  }
  EK_DEVICE int first_row_tile(int key_tile, int rows) const {
    return causal ? max(0, key_tile * kTileKeys - offset) / rows : 0;
  }
};
EK_DEVICE Span span_of(const Backward& p, int b, int rows) {
  Span span;
  span.s = sequence(p.sequences, b);
  span.offset = span.s.keys - span.s.rows;
  span.causal = p.causal;
  span.key_tiles = (span.s.keys + kTileKeys - 1) / kTileKeys;
  span.row_tiles = (span.s.rows + rows - 1) / rows;
  return span;
}

// The work of one block at a time: a key tile of a kv head, and the row tiles of its group's heads that see it.
// It lies in shared memory: registers are short.
struct Item {
  int b, g, key_tile;                                            // key_tile < 0: there is no more work
  int first_row_tile, row_tiles;                                 // of each head: [first, row_tiles)
  int steps;                                                     // row tiles of all heads
  int rows, keys, first_row, first_key, query_batch, key_batch;  // Sequence
  int offset;                                                    // key <= row + offset, if causal

  EK_DEVICE static Item at(const Backward& p, int index, int tile_rows) {
    Item item{};
    item.key_tile = -1;
    if (index >= p.B * p.G * p.key_tiles) return item;
    // Last key tile first: a block only ever waits for items taken before its own.
    item.key_tile = p.key_tiles - 1 - index % p.key_tiles;
    item.b = index / p.key_tiles / p.G;
    item.g = index / p.key_tiles % p.G;
    const Span span = span_of(p, item.b, tile_rows);
    if (item.key_tile < span.key_tiles) {
      item.first_row_tile = span.first_row_tile(item.key_tile, tile_rows);
      item.row_tiles = span.row_tiles;
    }
    item.steps = max(0, item.row_tiles - item.first_row_tile) * (p.H / p.G);
    item.rows = span.s.rows;
    item.keys = span.s.keys;
    item.first_row = span.s.first_row;
    item.first_key = span.s.first_key;
    item.query_batch = span.s.query_batch;
    item.key_batch = span.s.key_batch;
    item.offset = span.offset;
    return item;
  }
};

template <int D>
struct alignas(1024) SharedMemory {
  static constexpr int kRows = kTileRows<D>, kBoxes = D / kBoxFeatures;
  using KeyTile = uint8_t[kBoxes][kTileKeys][kRowBytes];
  using RowTile = uint8_t[kBoxes][kRows][kRowBytes];
  KeyTile k, v;
  RowTile q[kStages], grad_output[kStages];
  uint8_t dscores[kRows / 64][kTileKeys][kRowBytes];  // dS^T: boxes of 64 queries, [key][query]
  float dq[kStages][kConsumers][8][kWarpgroup][4];    // accumulators as the threads hold them
  float shift[kStages][kRows], inverse[kStages][kRows], delta[kStages][kRows];
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t q_full[kStages], q_empty[kStages], grad_output_full[kStages], grad_output_empty[kStages];
  uint64_t dq_full[kStages][kConsumers], dq_empty[kStages][kConsumers];
  uint64_t item_full[kStages], item_empty[kStages];
  Item item[kStages];
};

}  // namespace evenkeel::hopper::backward
