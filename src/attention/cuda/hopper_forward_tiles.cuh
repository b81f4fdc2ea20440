// Hopper's forward pass: its arguments, its tiles in shared memory, and the thread that loads them. Included by
// hopper_forward_kernel.cuh alone.
#pragma once

#include "attention/cuda/hopper.cuh"
#include "numerics/random.h"

namespace evenkeel::hopper::forward {

inline constexpr float kMinusInfinity = -kInfinity;

// How a row's shift follows its scores.
enum class Shift {
  plain,         // the largest score, which it may lag behind (and dither's part of log 2)
  consistent,    // rounded up to a whole number of log 2; the sum is of the rounded probabilities
  paper_capped,  // row_shift.h: ties are counted
  exact,         // plain, and the score that set it has a probability of exactly one in far rows, too (Rows)
};

struct ForwardArguments : ScoreForms {
  uint16_t* o;          // (B, H, T, Dv)
  int64_t o_stride[3];  // batch, head, row
  float* lse;           // (B, H, T)
  Saved saved;          // what the heads of this launch leave
  int H, heads_per_group, Dv;
  HeadRules rules;  // of the heads of this launch
  RandomKey random;
  const uint32_t* device_step;
  float below_all;  // -1, for hold: the assembler must not know
  HeadList list;
  float *largest_score, *largest_row_mean;  // (H), raised, or null
  // Query tiles of all heads of the list and all sequences, in the order of TilePlace.
  int tiles_per_head, heads, section_heads;
  uint32_t* next_tile;  // counter of those beyond the blocks' first, zero at the start; null: there are none
  // Are there far rows? Zero at the start; the launch with plain shifts notes it, and one with exact shifts, behind it, ends at
  // once where there are none. Null: nobody asks.
  uint32_t* far_rows;
};

// The words of the workspace that a group's launches use, its own; zeros before the first.
struct LaunchWords {
  uint32_t next_tile[2];  // of the first and the second launch
  uint32_t far_rows;
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

// kHeadSize: of queries and keys. kValueSize: of values and outputs.
template <int kHeadSize, int kValueSize>
struct Tiles {
  static_assert(kValueSize == kHeadSize || (kHeadSize == 192 && kValueSize == 128));
  // Head size 64: the exponentials need as many cycles as the products, and four warpgroups with small tiles
  // hide each other's waits. Above: O takes more registers, and two warpgroups with large tiles keep them.
  static constexpr int kWarpgroups = kHeadSize == 64 ? 4 : 2;
  static constexpr int kRows = kWarpgroups * kWarpgroupRows;
  // Above 128 there is room for one query tile: each warpgroup has its part to itself, and O leaves through it.
  static constexpr bool kLarge = kHeadSize > 128;
  static constexpr int kQueryStages = kLarge ? 1 : 2, kQueryParts = kLarge ? kWarpgroups : 1, kItems = 4;
  // As many keys as registers (192: 96 for O, 84 for scores and P) and shared memory allow; but with 256, 80 would fit and
  // are slower than 64.
  static constexpr int kKeys = kHeadSize == 64 ? 64 : kValueSize == 128 ? 128 : kValueSize == 192 ? 112 : 64;
  static constexpr int kHalf = kKeys / 2, kStages = kHeadSize == 64 ? 6 : 2;
  static constexpr bool kHalves = kHalf >= 64;  // a tile of which only the first half is seen is cut
  static constexpr int kWorkers = kWarpgroups * kWarpgroup;  // threads
  static constexpr int kThreads = kWorkers + kWarpgroup;
  // The pool is what the block got at its start: 5 x 96 = 4 x 112 + 32, 3 x 168 = 2 x 232 + 40.
  static constexpr int kWorkRegisters = kHeadSize == 64 ? 112 : 232,
                       kCopyRegisters = kHeadSize == 64 ? 32 : 40;
  static constexpr int kHeadBoxes = kHeadSize / kBoxFeatures, kValueBoxes = kValueSize / kBoxFeatures;
  static constexpr int kPartRows = kRows / kQueryParts;
  static constexpr int kQueryBox = kPartRows * kRowBytes, kKeyBox = kKeys * kRowBytes,
                       kOutBox = kWarpgroupRows * kRowBytes;

  struct Shared {
    uint8_t q[kQueryStages][kQueryParts][kHeadBoxes][kQueryBox];
    uint8_t k[kStages][kHeadBoxes][kKeyBox], v[kStages][kValueBoxes][kKeyBox];
    uint8_t o[kLarge ? 1 : kWarpgroups][kLarge ? 1 : kValueBoxes][kLarge ? 16 : kOutBox];
    uint8_t ones[kHeadSize == 64 ? 16 * kRowBytes : 16];  // for Worker::kOnes
    // An item outlives its Q: a warpgroup that writes O may be up to kQueryStages query tiles behind.
    Item items[kItems];
    uint64_t q_full[kQueryStages][kQueryParts], q_empty[kQueryStages][kQueryParts];
    uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= 227 * 1024);
};

// The thread that loads everything.
template <bool kForms, class T>
struct Copier {
  typename T::Shared& shared;
  const CUtensorMap &q_map, &k_map, &v_map;
  const ForwardArguments& a;
  Ring<T::kQueryStages> q;
  Ring<T::kStages> k, v;
  int count = 0;  // of query tiles
  // V of a tile is asked for after K of the next: the order in which they are used.
  int pending_key = -1, pending_head = 0, pending_batch = 0;

  EK_DEVICE Copier(typename T::Shared& shared_, const CUtensorMap& q_, const CUtensorMap& k_,
                   const CUtensorMap& v_, const ForwardArguments& a_)
      : shared(shared_), q_map(q_), k_map(k_), v_map(v_), a(a_) {}

  EK_DEVICE void load_keys(int key, int head, int batch) {
    barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
    uint64_t* const full = &shared.k_full[k.stage];
    barrier_expect_bytes(full, sizeof(shared.k[0]));
#pragma unroll
    for (int box = 0; box < T::kHeadBoxes; ++box)
      load_box(shared.k[k.stage][box], k_map, full, box * kBoxFeatures, key, head, batch);
    k.next();
    load_pending();
    pending_key = key, pending_head = head, pending_batch = batch;
  }
  EK_DEVICE void load_pending() {
    if (pending_key < 0) return;
    barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
    uint64_t* const full = &shared.v_full[v.stage];
    barrier_expect_bytes(full, sizeof(shared.v[0]));
#pragma unroll
    for (int box = 0; box < T::kValueBoxes; ++box)
      load_box(shared.v[v.stage][box], v_map, full, box * kBoxFeatures, pending_key, pending_head,
               pending_batch);
    v.next();
    pending_key = -1;
  }
  // And hands the item over.
  EK_DEVICE void load_query(const Item& item) {
    // Without keys of its own it would keep those who wait for V waiting, and then the place of its Q is never free.
    if (item.tiles <= 0) load_pending();
#pragma unroll
    for (int part = 0; part < T::kQueryParts; ++part) {
      uint64_t* const full = &shared.q_full[q.stage][part];
      barrier_wait(&shared.q_empty[q.stage][part], q.parity ^ 1);
      if (part == 0) shared.items[count++ % T::kItems] = item;
      if (item.tiles <= 0) {
        barrier_arrive(full);
        continue;
      }
      barrier_expect_bytes(full, sizeof(shared.q[0][0]));
#pragma unroll
      for (int box = 0; box < T::kHeadBoxes; ++box)
        load_box(shared.q[q.stage][part][box], q_map, full, box * kBoxFeatures,
                 item.first_row + item.row + part * T::kPartRows, item.h, item.query_batch);
    }
    q.next();
  }

  EK_DEVICE void run() {
    const int total = a.tiles_per_head * a.heads;
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
      // Where Q has one place, it is free only after the tile before is done. Until then keys fill theirs, and the last V
      // of the tile before must be on its way.
      const int before_query = T::kQueryStages == 1 ? min(item.tiles, T::kStages) : 0;
      if (before_query == 0) load_query(item);
      for (int tile = item.tiles - 1; tile >= 0; --tile) {
        load_keys(s.first_key + (item.first_tile + tile) * T::kKeys, h / a.heads_per_group, s.key_batch);
        if (item.tiles - tile == before_query) load_query(item);
      }
    }
    load_pending();
    Item last{};
    last.tiles = -1;
    load_query(last);
  }
};

}  // namespace evenkeel::hopper::forward
