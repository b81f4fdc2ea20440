// Hopper's forward pass: its arguments, its tiles in shared memory, and the thread that loads them. Included by
// hopper_forward_kernel.cuh alone.
#pragma once

#include "attention/cuda/hopper.cuh"
#include "numerics/random.h"

namespace evenkeel::hopper::forward {

inline constexpr float kMinusInfinity = -kInfinity;

// How a row's shift follows its scores.
enum class Shift {
  plain,         // the largest score (and dither's part of log 2)
  consistent,    // rounded up to a whole number of log 2; the sum is of the rounded probabilities
  paper_capped,  // row_shift.h: ties are counted
};

struct ForwardArguments : ScoreForms {
  uint16_t* o;          // (B, H, T, D)
  int64_t o_stride[3];  // batch, head, row
  float* lse;           // (B, H, T)
  Saved saved;          // what the heads of this launch leave
  int H, heads_per_group, D;
  HeadRules rules;  // of the heads of this launch
  RandomKey random;
  const uint32_t* device_step;
  float below_all;  // -1, for hold: the assembler must not know
  HeadList list;
  float *largest_score, *largest_row_mean;  // (H), raised, or null
  // Query tiles of all heads of the list and all sequences, in the order of TilePlace.
  int tiles_per_head, heads, section_heads;
  uint32_t* next_tile;  // counter of those beyond the blocks' first, zero at the start; null: there are none
};

// One query tile, as the copying thread hands it to the others.
struct alignas(16) Item {
  int row, rows, keys, tiles;  // first row; the sequence's rows and keys; key tiles, < 0: no more work
  int head, h, first_row,
      query_batch;  // b H + h; h; place of the sequence on the tensors' row and batch axis
  int first_tile;   // of keys; 0 without a window
};

// Keys that row i sees: those before key_limit, from first_key on. Negative: none.
EK_DEVICE int key_limit(int right, int row, int rows, int keys) {
  return min(keys, row + keys - rows + right + 1);
}
EK_DEVICE int first_key(int left, int row, int rows, int keys) { return max(0, row + keys - rows - left); }

template <int kHeadSize>
struct Tiles {
  // Head size 64: the exponentials need as many cycles as the products, and four warpgroups with small tiles
  // hide each other's waits. Head size 128: O takes twice the registers, and two warpgroups with large tiles
  // keep them.
  static constexpr int kWarpgroups = kHeadSize == 64 ? 4 : 2;
  static constexpr int kKeys = kHeadSize == 64 ? 64 : 128;
  static constexpr int kBoxes = kHeadSize / kBoxFeatures;
  static constexpr int kRows = kWarpgroups * kWarpgroupRows, kHalf = kKeys / 2;
  static constexpr bool kHalves = kHalf >= 64;  // a tile of which only the first half is seen is cut
  static constexpr int kQueryStages = 2, kItems = 2 * kQueryStages, kStages = kHeadSize == 64 ? 6 : 2;
  static constexpr int kWorkers = kWarpgroups * kWarpgroup;  // threads
  static constexpr int kThreads = kWorkers + kWarpgroup;
  // The pool is what the block got at its start: 5 x 96 = 4 x 112 + 32, 3 x 168 = 2 x 232 + 40.
  static constexpr int kWorkRegisters = kHeadSize == 64 ? 112 : 232,
                       kCopyRegisters = kHeadSize == 64 ? 32 : 40;
  static constexpr int kQueryBox = kRows * kRowBytes, kKeyBox = kKeys * kRowBytes,
                       kOutBox = kWarpgroupRows * kRowBytes;

  struct Shared {
    uint8_t q[kQueryStages][kBoxes][kQueryBox];
    uint8_t k[kStages][kBoxes][kKeyBox], v[kStages][kBoxes][kKeyBox];
    uint8_t o[kWarpgroups][kBoxes][kOutBox];
    uint8_t ones[kHeadSize == 64 ? 16 * kRowBytes : 16];  // for Worker::kOnes
    // An item outlives its Q: a warpgroup that writes O may be up to kQueryStages query tiles behind.
    Item items[kItems];
    uint64_t q_full[kQueryStages], q_empty[kQueryStages];
    uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared) + 1024;  // to align it
};

template <bool kForms, class S, class T>
EK_DEVICE void copy_tiles(S& shared, const CUtensorMap& q_map, const CUtensorMap& k_map,
                          const CUtensorMap& v_map, const ForwardArguments& a, T) {
  Ring<T::kQueryStages> q;
  Ring<T::kStages> k, v;
  int count = 0;  // of query tiles
  const int total = a.tiles_per_head * a.heads;
  const auto load = [&](uint8_t(&to)[T::kBoxes][T::kKeyBox], const CUtensorMap& map, uint64_t* full, int key,
                        int head, int batch) {
    barrier_expect_bytes(full, T::kBoxes * T::kKeyBox);
#pragma unroll
    for (int box = 0; box < T::kBoxes; ++box)
      load_box(to[box], map, full, box * kBoxFeatures, key, head, batch);
  };
  // V of a tile is asked for after K of the next: the order in which they are used.
  int pending_key = -1, pending_head = 0, pending_batch = 0;
  const auto load_pending = [&] {
    if (pending_key < 0) return;
    barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
    load(shared.v[v.stage], v_map, &shared.v_full[v.stage], pending_key, pending_head, pending_batch);
    v.next();
    pending_key = -1;
  };
  for (int index = blockIdx.x, following; index < total; index = following) {
    following = a.next_tile ? gridDim.x + atomicAdd(a.next_tile, 1u) : total;
    const TilePlace place(index, a.tiles_per_head, a.heads, a.section_heads);
    const int b = place.head / a.list.count, h = a.list.head_at(place.head - b * a.list.count);
    const Sequence s = sequence(a.sequences, b);
    const int row = place.tile * T::kRows;
    Item item{row, s.rows, s.keys, 0, b * a.H + h, h, s.first_row, s.query_batch, 0};
    if (row < s.rows) {
      const int limit = key_limit(a.right, min(row + T::kRows, s.rows) - 1, s.rows, s.keys);
      if constexpr (kForms) item.first_tile = first_key(a.left, row, s.rows, s.keys) / T::kKeys;
      item.tiles = max(0, (limit + T::kKeys - 1) / T::kKeys - item.first_tile);
    }
    // Without keys of its own it would keep those who wait for V waiting, and then the place of its Q is never free.
    if (item.tiles == 0) load_pending();
    barrier_wait(&shared.q_empty[q.stage], q.parity ^ 1);
    shared.items[count++ % T::kItems] = item;
    if (item.tiles > 0) {
      barrier_expect_bytes(&shared.q_full[q.stage], T::kBoxes * T::kQueryBox);
#pragma unroll
      for (int box = 0; box < T::kBoxes; ++box)
        load_box(shared.q[q.stage][box], q_map, &shared.q_full[q.stage], box * kBoxFeatures,
                 s.first_row + row, h, s.query_batch);
    } else {
      barrier_arrive(&shared.q_full[q.stage]);
    }
    q.next();
    const int kv_head = h / a.heads_per_group;
    for (int j = item.first_tile + item.tiles - 1; j >= item.first_tile; --j) {
      const int key = s.first_key + j * T::kKeys;
      barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
      load(shared.k[k.stage], k_map, &shared.k_full[k.stage], key, kv_head, s.key_batch);
      k.next();
      load_pending();
      pending_key = key, pending_head = kv_head, pending_batch = s.key_batch;
    }
  }
  load_pending();
  barrier_wait(&shared.q_empty[q.stage], q.parity ^ 1);
  shared.items[count % T::kItems].tiles = -1;
  barrier_arrive(&shared.q_full[q.stage]);
}

}  // namespace evenkeel::hopper::forward
