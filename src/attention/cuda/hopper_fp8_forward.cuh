// Hopper's forward pass in FP8: O = softmax(a Q K^T) V with both products of E4M3 tiles (hopper_fp8_tile.h). It uses nothing
// of the device but src/gpu/cuda, and the tests run it on the CPU (tests/cuda_emulator). Internal to src/attention.
//
// A block stays on its multiprocessor and takes items (64 query rows for each of its warpgroups) from a counter, the
// longest first. One thread of the last warpgroup drives the copy engine, and three of its warps round the items' rows of q,
// a tile each. Each of the other warpgroups works on its 64 rows alone, one pair of key tiles (128 keys) after another, the last first: scores, softmax, P V. P V of each pair goes to O in FP32,
// away from the 13 bits of the tensor cores' sums; v has one scale a head.
// The warpgroups take turns at the tensor cores. A turn is P V of one pair and the scores of the next. Without turns products
// of several warpgroups get into each other's way: a tenth slower.
#pragma once

#include <limits>

#include "attention/cuda/hopper_fp8_queries.cuh"
#include "attention/cuda/hopper_fp8_tile.h"
#include "attention/cuda/sequences.cuh"
#include "attention/cuda/warpgroup.cuh"
#include "gpu/cuda/barriers.cuh"
#include "gpu/cuda/copy_engine.cuh"
#include "gpu/cuda/warp.cuh"
#include "gpu/cuda/wgmma_e4m3.cuh"

namespace evenkeel::hopper_fp8 {

using namespace gpu;

struct ForwardArguments {
  Sequences sequences;
  const uint16_t* q;     // BF16, (B, H, T, D)
  int64_t q_stride[3];   // batch, head, row
  const uint8_t *k, *v;  // pairs of tiles: (B, G, key_pairs)
  uint16_t* o;           // as q
  int64_t o_stride[3];
  float* lse;  // (B, H, T)
  int H, heads_per_group, D, key_pairs;
  bool causal;
  float scale_log2;  // a log2(e)
  // Items of all heads, in the order of hopper::TilePlace.
  int items_per_head, heads, section_heads;
  uint32_t* next_item;  // counter of those beyond the blocks' first, zero at the start
};

// The query rows of one item, as the copying thread hands them to the others.
struct alignas(16) Item {
  int row, rows, keys,
      pairs;  // first row; the sequence's rows and keys; pairs of key tiles, < 0: no more work
  int head, h, first_row,
      query_batch;  // b H + h; h; place of the sequence on the tensors' row and batch axis
};

// Keys that row i sees: [0, limit).
EK_DEVICE int key_limit(bool causal, int row, int rows, int keys) {
  return max(0, causal ? min(keys, row + 1 + keys - rows) : keys);
}

// The same for every stabiliser of the family: a row's shift is its largest score. One that lags behind it, so that no
// exponential waits for a maximum, was slower (docs/kernels.md).
template <int kHead>
struct Forward {
  static constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  // The least factor of scores: 0 times a masked one would be a NaN.
  static constexpr float kLeastFactor = std::numeric_limits<float>::min();
  static constexpr int kWarpgroups = 3;
  static constexpr int kRows = kWarpgroups * kTileRows, kWorkers = kWarpgroups * kWarpgroup;
  static constexpr int kThreads = kWorkers + kWarpgroup, kBlocksAtOnce = 1;
  // The pool is what the block got at its start: 4 x 128 = 3 x 160 + 32.
  static constexpr int kWorkRegisters = 160, kCopyRegisters = 32;
  static constexpr int kQueryStages = 2, kItems = 2 * kQueryStages, kStages = kHead == 64 ? 6 : 4;
  static constexpr int kKeyLine = line_bytes(false, kHead), kValueLine = line_bytes(true, kHead);
  static constexpr int kScores = kPairRows / 2, kWords = kScores / 4;  // a thread's
  // P V comes in pieces of 64 features, and the first is added to O while the next one's product runs.
  static constexpr int kPieces = kHead / 64, kOutputs = 64 / 2;
  static constexpr int kTileScores = kTileRows / 2, kTileWords = kTileScores / 4;
  static constexpr int kNextBarrier = 1;  // the first of the named barriers by which warpgroups take turns

  static constexpr int kRounders = kWarpgroup / kWarp - 1;  // warps that round q
  static_assert(kRounders == kWarpgroups, "a tile of an item for each of them");

  struct alignas(1024) Tile {
    uint8_t image[image_bytes(kHead)];
  };
  struct Shared {
    Tile q[kQueryStages][kWarpgroups], k[kStages][kPairTiles], v[kStages][kPairTiles];
    typename QueryTile<kHead>::Waiting q_waiting[kRounders];
    alignas(16) float k_scale[kStages][kPairTiles][kScaleBytes / sizeof(float)];
    float q_scale[kQueryStages][kWarpgroups];
    // An item outlives its q: a warpgroup that writes O may be behind.
    Item items[kItems];
    uint64_t q_asked[kQueryStages], q_full[kQueryStages], q_empty[kQueryStages];
    uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= 227 * 1024);

  EK_DEVICE static void run(const ForwardArguments& a) {
    auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    if (threadIdx.x == 0) {
      constexpr int kWarps = kWorkers / 32;
      for (int i = 0; i < kQueryStages; ++i) {
        barrier_init(&shared.q_asked[i], 1), barrier_init(&shared.q_full[i], kRounders);
        barrier_init(&shared.q_empty[i], kWarps);
      }
      for (int i = 0; i < kStages; ++i) {
        barrier_init(&shared.k_full[i], 1), barrier_init(&shared.k_empty[i], kWarps);
        barrier_init(&shared.v_full[i], 1), barrier_init(&shared.v_empty[i], kWarps);
      }
      barrier_init_fence();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x / kWarpgroup), 0);
    if (group == kWarpgroups) {
      give_registers<kCopyRegisters>();
      const int warp = static_cast<int>(warp_uniform(threadIdx.x / kWarp)) - kWorkers / kWarp;
      if (warp < kRounders)
        round_queries(shared, a, warp);
      else if (threadIdx.x % kWarp == 0)
        Loader{shared, a}.run();
    } else {
      take_registers<kWorkRegisters>();
      Worker(shared, a, group).run();
    }
  }

  // --- A warp that rounds tile `tile` of each item. The loader asks for it when the place of an earlier one is free.
  EK_DEVICE static void round_queries(Shared& shared, const ForwardArguments& a, int tile) {
    for (int count = 0;; ++count) {
      const int stage = count % kQueryStages;
      barrier_wait(&shared.q_asked[stage], count / kQueryStages & 1);
      const Item& item = shared.items[count % kItems];
      const int pairs = item.pairs, row = item.row + tile * kTileRows;
      if (pairs > 0 && row < item.rows) {
        const uint16_t* const first = a.q + item.query_batch * a.q_stride[0] + item.h * a.q_stride[1] +
                                      (static_cast<int64_t>(item.first_row) + row) * a.q_stride[2];
        QueryTile<kHead>::round(first, a.q_stride[2], item.rows - row, a.D, shared.q_waiting[tile],
                                shared.q[stage][tile].image, &shared.q_scale[stage][tile]);
      }
      store_fence();  // threads wrote what the tensor cores read
      __syncwarp();
      if (threadIdx.x % kWarp == 0) barrier_arrive(&shared.q_full[stage]);
      if (pairs < 0) return;
    }
  }

  // --- The thread that loads tiles of k and v.
  struct Loader {
    Shared& shared;
    const ForwardArguments& a;
    Ring<kStages> k{}, v{};
    int count = 0;     // of items
    int pending = -1;  // V of a pair is asked for after K of the next: the order of their use

    // Pair `pair` of all heads, and the scales of k's. Those of v are one a head, which write() takes from memory.
    EK_DEVICE void load_keys(int pair) {
      uint64_t* const full = &shared.k_full[k.stage];
      const uint8_t* const from = a.k + pair * static_cast<int64_t>(pair_bytes(kHead));
      barrier_expect_bytes(full, pair_bytes(kHead));
      load_bytes(shared.k[k.stage], from, kPairTiles * image_bytes(kHead), full);
      load_bytes(shared.k_scale[k.stage], from + kPairTiles * image_bytes(kHead), kPairTiles * kScaleBytes,
                 full);
    }
    EK_DEVICE void load_values(int pair) {
      uint64_t* const full = &shared.v_full[v.stage];
      barrier_expect_bytes(full, kPairTiles * image_bytes(kHead));
      load_bytes(shared.v[v.stage], a.v + pair * static_cast<int64_t>(pair_bytes(kHead)),
                 kPairTiles * image_bytes(kHead), full);
    }
    EK_DEVICE void load_pending() {
      if (pending < 0) return;
      barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
      load_values(pending);
      v.next();
      pending = -1;
    }
    EK_DEVICE Item item_at(int index) const {
      const hopper::TilePlace place(index, a.items_per_head, a.heads, a.section_heads);
      const int b = place.head / a.H;
      const Sequence s = sequence(a.sequences, b);
      Item item{place.tile * kRows,   s.rows,      s.keys,       0, place.head,
                place.head - b * a.H, s.first_row, s.query_batch};
      if (item.row < s.rows) {
        const int limit = key_limit(a.causal, min(item.row + kRows, s.rows) - 1, s.rows, s.keys);
        item.pairs = (limit + kPairRows - 1) / kPairRows;
      }
      return item;
    }
    // The next item, when the one before the last is no longer needed.
    EK_DEVICE void hand_out(const Item& item) {
      const int stage = count % kQueryStages;
      barrier_wait(&shared.q_empty[stage], ~(count / kQueryStages) & 1);
      shared.items[count % kItems] = item;
      barrier_arrive(&shared.q_asked[stage]);
      ++count;
    }
    EK_DEVICE void run() {
      const int total = a.items_per_head * a.heads;
      for (int index = blockIdx.x; index < total; index = gridDim.x + atomicAdd(a.next_item, 1u)) {
        const Item item = item_at(index);
        // No K comes with it, and the item after it may wait for rows that wait for this V.
        if (item.pairs == 0) load_pending();
        hand_out(item);
        const int first = item.head / a.heads_per_group * a.key_pairs;  // H is a multiple of heads_per_group
#pragma unroll 1
        for (int j = item.pairs - 1; j >= 0; --j) {
          barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
          load_keys(first + j);
          k.next();
          load_pending();
          pending = first + j;
        }
      }
      load_pending();
      Item none{};
      none.pairs = -1;
      hand_out(none);
    }
  };

  // --- A warpgroup and its 64 rows.
  struct Worker : hopper::WarpgroupThread {
    Shared& shared;
    const ForwardArguments& a;

    int count = 0;  // of items so far
    Ring<kStages> k, v;
    int row;                        // of the item at hand, this warpgroup's first
    int j;                          // the pair of key tiles at hand
    float factor[kPairTiles];       // scores of each tile times this are in powers of two
    float s[kScores];               // 64 rows x 128 keys
    uint32_t p[kWords];             // probabilities times 2^8, E4M3: value_slot has the order
    float part[kPieces][kOutputs];  // P V of the pair
    float o[kPieces][kOutputs];
    float shift[2];  // in force, in powers of two, less 8; -inf: no key yet
    float sum[2];    // l, this thread's part

    EK_DEVICE Worker(Shared& shared_, const ForwardArguments& a_, int group_)
        : WarpgroupThread(group_), shared(shared_), a(a_) {}

    EK_DEVICE const Item& item() const { return shared.items[count % kItems]; }

    EK_DEVICE void wait_turn() { named_sync(kNextBarrier + group, 2 * kWarpgroup); }
    EK_DEVICE void pass_turn() {
      named_arrive(kNextBarrier + (group + 1 == kWarpgroups ? 0 : group + 1), 2 * kWarpgroup);
    }

    // A pair of key tiles that none of the rows sees. Every warpgroup has as many turns as the item has pairs, and one more.
    EK_DEVICE void skip_pair() {
      wait_keys();
      wait_turn();
      pass_turn();
      release_keys();
      wait_values();
      __syncwarp();  // lanes leave a wait one by one: the last one would wait for a later load for ever
      release_values();
    }
    EK_DEVICE void wait_keys() { barrier_wait(&shared.k_full[k.stage], k.parity); }
    EK_DEVICE void wait_values() { barrier_wait(&shared.v_full[v.stage], v.parity); }
    EK_DEVICE void release_keys() {
      release(&shared.k_empty[k.stage]);
      k.next();
    }
    EK_DEVICE void release_values() {
      release(&shared.v_empty[v.stage]);
      v.next();
    }

    // The scores of pair j, its keys being there.
    EK_DEVICE void issue_scores() {
      const uint64_t queries = operand_e4m3<kKeyLine>(shared.q[count % kQueryStages][group].image);
      const uint64_t keys = operand_e4m3<kKeyLine>(shared.k[k.stage][0].image);
      products_begin();
#pragma unroll
      for (int step = 0; step < kHead / 32; ++step)
        WgmmaE4m3<kPairRows>::ss(s, advance(queries, step * 32), advance(keys, step * 32), step > 0);
      products_commit();
#pragma unroll
      for (int tile = 0; tile < kPairTiles; ++tile)
        factor[tile] = fmaxf(
            a.scale_log2 * shared.q_scale[count % kQueryStages][group] * shared.k_scale[k.stage][tile][0],
            kLeastFactor);
    }
    EK_DEVICE void take_scores(int clear) {
      products_wait<0>();
      settle(s);
      release_keys();
      if (j >= clear) mask();
      if (j == 0) release(&shared.q_empty[count % kQueryStages]);
    }
    EK_DEVICE void mask() {
      int limit[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        limit[r] = key_limit(a.causal, row + lane_row + 8 * r, item().rows, item().keys) - j * kPairRows -
                   lane_column;
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = kMinusInfinity;
    }

    // O = decay O + P V, its values being there.
    EK_DEVICE void add_values(const float (&decay)[2]) {
      products_begin();
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) multiply_values(piece);
      add_piece<0>(decay);
      if constexpr (kPieces > 1) add_piece<1>(decay);
    }
    EK_DEVICE void multiply_values(int piece) {
      constexpr int kSteps = kTileRows / 32, kPieceBytes = 64 * kValueLine;
#pragma unroll
      for (int step = 0; step < kPairRows / 32; ++step) {
        const uint64_t values = operand_e4m3<kValueLine>(shared.v[v.stage][step / kSteps].image);
        WgmmaE4m3<64>::rs(part[piece], p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                          advance(values, piece * kPieceBytes + step % kSteps * 32), step > 0);
      }
      products_commit();
    }
    template <int kPiece>
    EK_DEVICE void add_piece(const float (&decay)[2]) {
      products_wait<kPieces - 1 - kPiece>();
      settle(part[kPiece]);
      if (kPiece == kPieces - 1) release_values();
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[kPiece][i] = fmaf(o[kPiece][i], decay[i / 2 % 2], part[kPiece][i]);
    }

    // The largest of the thread's scores in row r of the two, in powers of two; all are negative unless kPositive.
    template <bool kPositive>
    EK_DEVICE float largest(int r) const {
      float most = kMinusInfinity;
#pragma unroll
      for (int tile = 0; tile < kPairTiles; ++tile) {
        const auto bits = [&](int n) {
          return static_cast<int>(__float_as_uint(s[tile * kTileScores + n / 2 * 4 + 2 * r + n % 2]));
        };
        int extreme = bits(0);
#pragma unroll
        for (int n = 1; n < kTileScores / 2; n += 2) {
          const int last = bits(n + 1 < kTileScores / 2 ? n + 1 : n);
          extreme = kPositive ? __vimax3_s32(extreme, bits(n), last) : __vimin3_s32(extreme, bits(n), last);
        }
        most = fmaxf(most, __uint_as_float(static_cast<uint32_t>(extreme)) * factor[tile]);
      }
      return most;
    }

    // Scores to probabilities times 2^8, p; moves the rows' shifts, and l with them. decay: O's factor.
    EK_DEVICE void softmax(float (&decay)[2]) {
      float most[2] = {largest<true>(0), largest<true>(1)};
      // Bits of floats are in the order of integers, and in the reverse order where all are negative.
      if (most[0] < 0 || most[1] < 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (most[r] < 0) most[r] = largest<false>(r);
      }
      float used[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float highest = quad_max(most[r]), before = shift[r];
        // With the 2^8 in the shift the two cannot be rounded apart.
        shift[r] = fmaxf(before, highest - kProbsExponent);
        used[r] = shift[r] == kMinusInfinity ? 0.0f : shift[r];
        decay[r] = exp2_approx(before - used[r]);
        sum[r] *= decay[r];
      }
      add_probabilities(used);
    }
    // p with these shifts, and l.
    EK_DEVICE void add_probabilities(const float (&used)[2]) {
      float added[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < kWords; ++n) {  // word n: row n % 2, keys of blocks 2 (n / 2) and the next
        const int i = n / 2 * 8 + n % 2 * 2, r = n % 2;
        float e[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          e[c] = exp2_approx(fmaf(s[i + c / 2 * 4 + c % 2], factor[n / kTileWords], -used[r]));
          added[r] += e[c];
        }
        p[n] = pack_e4m3(e[0], e[1], e[2], e[3]);
      }
      sum[0] += added[0], sum[1] += added[1];
    }

    // The pairs [0, own) of the item at hand, the last first; own > 0.
    EK_DEVICE void attend(int own) {
      shift[0] = shift[1] = kMinusInfinity;
      sum[0] = sum[1] = 0;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[piece][i] = 0;
      const int clear =
          key_limit(a.causal, row, item().rows, item().keys) / kPairRows;  // all rows see these whole
      wait_keys();
      wait_turn();
      for (j = own - 1; j >= 0; --j) {
        issue_scores();
        pass_turn();
        take_scores(clear);
        float decay[2];
        softmax(decay);
        wait_values();
        if (j > 0) wait_keys();  // of the next pair, which are asked for before these values: not in its turn
        wait_turn();
        add_values(decay);
      }
      pass_turn();
    }

    EK_DEVICE uint16_t* output(const Item& done, int i) const {
      return a.o + done.query_batch * a.o_stride[0] + done.h * a.o_stride[1] +
             (static_cast<int64_t>(done.first_row) + i) * a.o_stride[2];
    }
    // O / l and L. Rows that do not exist are zero in a padded tensor; a packed one does not have them.
    EK_DEVICE void write(const Item& done) {
      const int end = a.sequences.query_offsets ? done.rows : a.sequences.T;
      const int first = done.head / a.heads_per_group * a.key_pairs * kPairTiles;  // of its key tiles
      const float value_scale = *reinterpret_cast<const float*>(a.v + scale_offset(first, kHead));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = row + lane_row + 8 * r;
        const bool exists = i < done.rows;
        const float l = quad_sum(sum[r]);
        const float inverse = exists && l != 0 ? __fdividef(value_scale, l) : 0.0f;
        if (lane_column == 0 && i < a.sequences.T)
          a.lse[static_cast<int64_t>(done.head) * a.sequences.T + i] =
              exists ? fmaf(shift[r], kLn2, __logf(l)) : kMinusInfinity;
          // Of four blocks of 8 features a lane of the quad has two features each; it gets one block whole.
#pragma unroll
        for (int n = 0; n < kHead / 32; ++n) {
          uint32_t word[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const int at = (n % 2 * 4 + w) * 4 + 2 * r;
            word[w] = exists ? pack_bf16(o[n / 2][at] * inverse, o[n / 2][at + 1] * inverse) : 0u;
          }
          quad_transpose(word);
          const int feature = (n * 4 + thread % 4) * 8;
          if (i < end && feature < a.D)
            *reinterpret_cast<uint4*>(output(done, i) + feature) = uint4{word[0], word[1], word[2], word[3]};
        }
      }
    }
    // A warpgroup whose rows see no key, or do not exist.
    EK_DEVICE void write_empty_rows(const Item& empty) {
      const int end = min(row + kTileRows, a.sequences.T);
      const int end_of_output = a.sequences.query_offsets ? min(end, empty.rows) : end;
      for (int i = row + thread / 2; i < end; i += kWarpgroup / 2) {
        if (thread % 2 == 0) a.lse[static_cast<int64_t>(empty.head) * a.sequences.T + i] = kMinusInfinity;
        if (i >= end_of_output) continue;
        for (int feature = thread % 2 * 8; feature < a.D; feature += 16)
          *reinterpret_cast<uint4*>(output(empty, i) + feature) = uint4{0, 0, 0, 0};
      }
    }

    EK_DEVICE void run() {
      if (group == kWarpgroups - 1) pass_turn();  // the first warpgroup has the first turn
      for (;; ++count) {
        barrier_wait(&shared.q_full[count % kQueryStages], count / kQueryStages & 1);
        const Item& item = this->item();
        const int pairs = item.pairs;
        if (pairs < 0) return;
        row = item.row + group * kTileRows;
        const int limit = row < item.rows
                              ? key_limit(a.causal, min(row + kTileRows, item.rows) - 1, item.rows, item.keys)
                              : 0;
        const int own = (limit + kPairRows - 1) / kPairRows;
        for (int skipped = own; skipped < pairs; ++skipped) skip_pair();
        if (own > 0) {
          attend(own);
          write(item);
        } else {
          wait_turn();
          pass_turn();
          release(&shared.q_empty[count % kQueryStages]);
          write_empty_rows(item);
        }
      }
    }
  };
};

}  // namespace evenkeel::hopper_fp8
