// What the kernels of Hopper's backward pass know of a problem: arguments, which tiles see each other, shared memory.
// Included by
// hopper_backward_kernel.cuh and its host code.
#pragma once

#include "attention/cuda/hopper.cuh"

namespace evenkeel::hopper::backward {

inline constexpr int kTileKeys = 128;
inline constexpr int kConsumers = 2;  // warpgroups, 64 keys each
inline constexpr int kConsumerThreads = kConsumers * kWarpgroup, kConsumerWarps = kConsumerThreads / 32;
inline constexpr int kStages = 2;  // of Q, dO, and parts of dQ

template <int D>
inline constexpr int kTileRows = D == 64 ? 128 : 64;  // by registers: 240 a thread

// Facts of a row that the main kernel reads, in the order its threads want them. A thread of the accumulator holds four of
// a group of 16 rows. The group is stored so that these four are 16 bytes.
EK_DEVICE int row_slot(int row) {
  const int r = row & 15;
  return (row & ~15) + ((r & 7) >> 1) * 4 + (r >> 3) * 2 + (r & 1);
}

struct RowFacts {
  float* shift;    // (B, H, padded T): L log2(e), or for consistent M; +inf where P is 0 throughout
  float* inverse;  // (B, H, padded T): consistent: 1 / l
  float* delta;    // (B, H, padded T)
};

// Whose probabilities the kernel finds as the forward pass rounded them.
enum class Consistent { no_head, every_head, by_head };
inline constexpr int kMostLaunches = 64;  // counters of items

// What a kernel computes besides a causal or full mask.
enum class Form {
  plain,   // nothing
  banded,  // windows, masks, slopes
  capped,  // those, and a soft cap
};

struct Backward : ScoreForms {
  int B, H, G, D;
  int padded_rows;  // T up to whole tiles
  int row_tiles, key_tiles;
  HeadRules rules;
  const HeadRules* table;  // (H), or null: all heads have `rules`
  RowFacts facts;
  float* dq_sum;   // (B, H, row tiles, 2, 8, 128, 4): accumulators as the threads hold them
  int* turn;       // (B, H, row tiles, 2): parts added so far, in the first of the two
  int* next_item;  // of this launch's items
  HeadList list;   // kv heads of this launch
  const uint16_t *grad_output, *o;
  const int8_t* residue;
  const float *lse, *row_max, *row_sum, *exact_delta;
  const float* log_sum;   // (B, H, T) or null: log2 of zero_sum's sum P, by which P is divided
  const float* grad_lse;  // (B, H, T) or null
  float* dsinks;          // (H) or null
  float* delta_out;       // (B, H, T) or null
  uint16_t *dq, *dk, *dv;
  int64_t grad_output_stride[3], o_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];  // batch, head, row

  EK_DEVICE const HeadRules& rules_of(int h) const { return table ? table[h] : rules; }
};

// The work of one block at a time: a key tile of a kv head, and the row tiles of its group's heads that see it.
// It lies in shared memory: registers are short.
struct Item {
  int b, g, key_tile;                                            // key_tile < 0: there is no more work
  int first_row_tile, row_tiles;                                 // of each head: [first, row_tiles)
  int steps;                                                     // row tiles of all heads
  int rows, keys, first_row, first_key, query_batch, key_batch;  // Sequence
  int offset;                                                    // a row stands at key row + offset

  EK_DEVICE static Item at(const Backward& p, int index, int tile_rows) {
    Item item{};
    item.key_tile = -1;
    if (index >= p.B * p.list.count * p.key_tiles) return item;
    // Last key tile first: a block only ever waits for items taken before its own.
    item.key_tile = p.key_tiles - 1 - index % p.key_tiles;
    item.b = index / p.key_tiles / p.list.count;
    item.g = p.list.head_at(index / p.key_tiles % p.list.count);
    const Band band(p, item.b);
    if (item.key_tile * kTileKeys < band.s.keys) {
      item.first_row_tile = band.first_row_tile(item.key_tile * kTileKeys, tile_rows);
      item.row_tiles = band.end_row_tile(item.key_tile * kTileKeys, kTileKeys, tile_rows);
    }
    item.steps = max(0, item.row_tiles - item.first_row_tile) * (p.H / p.G);
    item.rows = band.s.rows;
    item.keys = band.s.keys;
    item.first_row = band.s.first_row;
    item.first_key = band.s.first_key;
    item.query_batch = band.s.query_batch;
    item.key_batch = band.s.key_batch;
    item.offset = band.offset;
    return item;
  }
};

template <int D>
struct alignas(1024) SharedMemory {
  static constexpr int kRows = kTileRows<D>, kBoxes = D / kBoxFeatures;
  using KeyTile = uint8_t[kBoxes][kTileKeys][kRowBytes];
  using RowTile = uint8_t[kBoxes][kRows][kRowBytes];
  // Head size 64: dS^T, boxes of 64 queries, [key][query]. 128: dS, two stages, a box for each warpgroup's keys, [query][key].
  using Dscores = std::conditional_t<D == 64, uint8_t[kRows / 64][kTileKeys][kRowBytes],
                                     uint8_t[kStages][kConsumers][kRows][kRowBytes]>;
  KeyTile k, v;
  RowTile q[kStages], grad_output[kStages];
  Dscores dscores;
  float dq[kStages][kConsumers][8][kWarpgroup][4];  // accumulators as the threads hold them
  float shift[kStages][kRows], inverse[kStages][kRows], delta[kStages][kRows];
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t q_full[kStages], q_empty[kStages], grad_output_full[kStages], grad_output_empty[kStages];
  uint64_t dq_full[kStages], dq_empty[kStages];
  uint64_t item_full[kStages], item_empty[kStages];
  Item item[kStages];
  bool consistent[kStages];  // Consistent::by_head: are these rows' heads?
};

// Barriers of a stage that the kernels of head sizes 64 and 128 have: loads arrive at full ones, the consumers' warps at empty ones.
template <class Shared>
EK_DEVICE void init_row_barriers(Shared& sm, int stage) {
  barrier_init(&sm.q_full[stage], 1);
  barrier_init(&sm.grad_output_full[stage], 1);
  barrier_init(&sm.item_full[stage], 1);
  barrier_init(&sm.q_empty[stage], kConsumerWarps);
  barrier_init(&sm.grad_output_empty[stage], kConsumerWarps);
}

}  // namespace evenkeel::hopper::backward
