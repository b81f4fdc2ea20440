// Hopper's forward pass in FP8: O = softmax(a Q K^T) V with both products of E4M3 tiles (hopper_fp8_tile.h). It uses nothing
// of the device but src/gpu/cuda, and the tests run it on the CPU (tests/cuda_emulator). Internal to src/attention.
//
// A block stays on its multiprocessor and takes items (64 query rows for each of its warpgroups) from a counter, the
// longest first. One thread of the last warpgroup drives the copy engine. Each of the others works on its 64 rows alone,
// two tiles of 64 keys after another two, the last first: scores, softmax, P V. P V goes to O in FP32: times V's scale,
// which each tile has of its own, and away from the 13 bits of the tensor cores' sums. The warpgroups get out of step by
// themselves, so that one has the tensor cores while others have exponentials. Three that each do one thing at a time
// are faster than two that overlap their own work and take the registers for it.
#pragma once

#include <limits>

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
  const uint8_t *q, *k, *v;  // tiles: (B, H, row_tiles), (B, G, key_tiles) twice
  uint16_t* o;               // BF16, (B, H, T, D)
  int64_t o_stride[3];       // batch, head, row
  float* lse;                // (B, H, T)
  int H, heads_per_group, D, row_tiles, key_tiles;
  bool causal;
  float scale_log2;  // a log2(e)
  // Items of all heads, in the order of hopper::TilePlace.
  int items_per_head, heads, section_heads;
  uint32_t* next_item;  // counter of those beyond the blocks' first, zero at the start
};

// The query rows of one item, as the copying thread hands them to the others.
struct alignas(16) Item {
  int row, rows, keys, tiles;  // first row; the sequence's rows and keys; key tiles, < 0: no more work
  int head, h, first_row,
      query_batch;  // b H + h; h; place of the sequence on the tensors' row and batch axis
};

// Keys that row i sees: [0, limit).
EK_DEVICE int key_limit(bool causal, int row, int rows, int keys) {
  return max(0, causal ? min(keys, row + 1 + keys - rows) : keys);
}

template <int kHead, bool kConsistent>
struct Forward {
  static constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  // The least factor of scores: 0 times a masked one would be a NaN.
  static constexpr float kLeastFactor = std::numeric_limits<float>::min();
  static constexpr int kWarpgroups = 3;
  static constexpr int kRows = kWarpgroups * kTileRows, kWorkers = kWarpgroups * kWarpgroup;
  static constexpr int kThreads = kWorkers + kWarpgroup, kBlocksAtOnce = 1;
  // The pool is what the block got at its start: 4 x 128 = 3 x 160 + 32.
  static constexpr int kWorkRegisters = 160, kCopyRegisters = 32;
  static constexpr int kQueryStages = 2, kItems = 2 * kQueryStages, kStages = kHead == 64 ? 10 : 8;
  static constexpr int kKeyLine = line_bytes(false, kHead), kValueLine = line_bytes(true, kHead);
  static constexpr int kScores = kTileRows / 2, kOutputs = kHead / 2, kWords = kScores / 4;  // a thread's
  // P V is added up in pieces of 64 features, so that one is added to O while the tensor cores have the next.
  static constexpr int kPieces = kHead / 64, kPiece = kOutputs / kPieces;

  struct alignas(1024) Tile {
    uint8_t image[image_bytes(kHead)];
    float scale[kScaleBytes / sizeof(float)];
  };
  struct Shared {
    Tile q[kQueryStages][kWarpgroups], k[kStages], v[kStages];
    // An item outlives its q: a warpgroup that writes O may be behind.
    Item items[kItems];
    uint64_t q_full[kQueryStages], q_empty[kQueryStages];
    uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= 227 * 1024);

  EK_DEVICE static void run(const ForwardArguments& a) {
    auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    if (threadIdx.x == 0) {
      constexpr int kWarps = kWorkers / 32;
      for (int i = 0; i < kQueryStages; ++i)
        barrier_init(&shared.q_full[i], 1), barrier_init(&shared.q_empty[i], kWarps);
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
      if (threadIdx.x == kWorkers) Loader{shared, a}.run();
    } else {
      take_registers<kWorkRegisters>();
      Worker(shared, a, group).run();
    }
  }

  // --- The thread that loads tiles.
  struct Loader {
    Shared& shared;
    const ForwardArguments& a;
    Ring<kQueryStages> q{};
    Ring<kStages> k{}, v{};
    int count = 0;                     // of items
    const uint8_t* pending = nullptr;  // V of a tile is asked for after K of the next: the order of their use

    EK_DEVICE static void load(Tile& to, const uint8_t* from, uint64_t* full) {
      load_bytes(&to, from, tile_bytes(kHead), full);
    }
    EK_DEVICE void load_pending() {
      if (!pending) return;
      barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
      barrier_expect_bytes(&shared.v_full[v.stage], tile_bytes(kHead));
      load(shared.v[v.stage], pending, &shared.v_full[v.stage]);
      v.next();
      pending = nullptr;
    }
    EK_DEVICE Item item_at(int index) const {
      const hopper::TilePlace place(index, a.items_per_head, a.heads, a.section_heads);
      const int b = place.head / a.H;
      const Sequence s = sequence(a.sequences, b);
      Item item{place.tile * kRows,   s.rows,      s.keys,       0, place.head,
                place.head - b * a.H, s.first_row, s.query_batch};
      if (item.row < s.rows) {
        const int limit = key_limit(a.causal, min(item.row + kRows, s.rows) - 1, s.rows, s.keys);
        item.tiles = (limit + kTileRows - 1) / kTileRows;
      }
      return item;
    }
    EK_DEVICE void load_queries(const Item& item) {
      uint64_t* const full = &shared.q_full[q.stage];
      if (item.tiles == 0) return barrier_arrive(full);
      const int tiles = min(kWarpgroups, (item.rows - item.row + kTileRows - 1) / kTileRows);
      const uint8_t* const from =
          a.q + (static_cast<int64_t>(item.head) * a.row_tiles + item.row / kTileRows) * tile_bytes(kHead);
      barrier_expect_bytes(full, tiles * tile_bytes(kHead));
      for (int n = 0; n < tiles; ++n) load(shared.q[q.stage][n], from + n * tile_bytes(kHead), full);
    }
    EK_DEVICE void run() {
      const int total = a.items_per_head * a.heads;
      for (int index = blockIdx.x; index < total; index = gridDim.x + atomicAdd(a.next_item, 1u)) {
        const Item item = item_at(index);
        // No K comes with it, and the item after it may wait for rows that wait for this V.
        if (item.tiles == 0) load_pending();
        barrier_wait(&shared.q_empty[q.stage], q.parity ^ 1);
        shared.items[count++ % kItems] = item;
        load_queries(item);
        q.next();
        const int64_t kv_head = item.head / a.heads_per_group;  // H is a multiple of heads_per_group
        for (int j = item.tiles - 1; j >= 0; --j) {
          const int64_t at = (kv_head * a.key_tiles + j) * static_cast<int64_t>(tile_bytes(kHead));
          barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
          barrier_expect_bytes(&shared.k_full[k.stage], tile_bytes(kHead));
          load(shared.k[k.stage], a.k + at, &shared.k_full[k.stage]);
          k.next();
          load_pending();
          pending = a.v + at;
        }
      }
      load_pending();
      barrier_wait(&shared.q_empty[q.stage], q.parity ^ 1);
      shared.items[count % kItems].tiles = -1;
      barrier_arrive(&shared.q_full[q.stage]);
    }
  };

  // --- A warpgroup and its 64 rows.
  struct Worker : hopper::WarpgroupThread {
    Shared& shared;
    const ForwardArguments& a;

    int count = 0;  // of items so far
    Ring<kStages> k, v;
    int row;                // of the item at hand, this warpgroup's first
    int j;                  // the last of the key tiles at hand
    float factor[2];        // scores of each tile times this are in powers of two
    float s[2][kScores];    // of two tiles, 64 rows x 64 keys each
    uint32_t p[2][kWords];  // probabilities times 2^8, E4M3: value_slot has the order
    float part[2][kPiece];  // P V of one tile and 64 features, without V's scale
    float o[kOutputs];
    float shift[2];  // in force, in powers of two, less 8; -inf: no key yet
    float sum
        [4];  // l: consistent: of rounded probabilities, whole, twice a row; else this thread's part of it in 0 and 2

    EK_DEVICE Worker(Shared& shared_, const ForwardArguments& a_, int group_)
        : WarpgroupThread(group_), shared(shared_), a(a_) {}

    EK_DEVICE const Item& item() const { return shared.items[count % kItems]; }
    EK_DEVICE const Tile& query() const { return shared.q[count % kQueryStages][group]; }

    // A key tile that none of the rows sees.
    EK_DEVICE void skip_tile() {
      barrier_wait(&shared.k_full[k.stage], k.parity);
      release(&shared.k_empty[k.stage]);
      k.next();
      barrier_wait(&shared.v_full[v.stage], v.parity);
      release_values();
    }

    template <int kTiles>
    EK_DEVICE void compute_scores(int clear) {
      Ring<kStages> next = k;
      const uint64_t queries = operand_e4m3<kKeyLine>(query().image);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        barrier_wait(&shared.k_full[next.stage], next.parity);
        const uint64_t keys = operand_e4m3<kKeyLine>(shared.k[next.stage].image);
        products_begin();
#pragma unroll
        for (int step = 0; step < kHead / 32; ++step)
          WgmmaE4m3<kTileRows>::ss(s[tile], advance(queries, step * 32), advance(keys, step * 32), step > 0);
        products_commit();
        factor[tile] = fmaxf(a.scale_log2 * query().scale[0] * shared.k[next.stage].scale[0], kLeastFactor);
        next.next();
      }
      if constexpr (kTiles == 2) {
        products_wait<1>();
        take_scores(0, clear);
      }
      products_wait<0>();
      take_scores(kTiles - 1, clear);
    }
    EK_DEVICE void take_scores(int tile, int clear) {
      settle(s[tile]);
      release(&shared.k_empty[k.stage]);
      k.next();
      if (j - tile >= clear) mask(tile);
    }
    EK_DEVICE void mask(int tile) {
      int limit[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        limit[r] = key_limit(a.causal, row + lane_row + 8 * r, item().rows, item().keys) -
                   (j - tile) * kTileRows - lane_column;
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[tile][i] = kMinusInfinity;
    }

    // O += P V, a piece of 64 features after the other; O before times decay where a row moves.
    template <int kTiles>
    EK_DEVICE void add_values(bool moves, const float (&decay)[2]) {
      constexpr int kAll = kTiles * kPieces;
      Ring<kStages> next = v;
      float scale[kTiles];
      uint64_t values[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        barrier_wait(&shared.v_full[next.stage], next.parity);
        values[tile] = operand_e4m3<kValueLine>(shared.v[next.stage].image);
        scale[tile] = shared.v[next.stage].scale[0];
        next.next();
      }
      issue_piece(0, p[0], values[0]);
      if constexpr (kAll > 1)
        issue_piece(1, p[1 / kPieces], advance(values[1 / kPieces], 1 % kPieces * 64 * kValueLine));
      if (moves) rescale(decay);
#pragma unroll
      for (int n = 0; n < kAll; ++n) {
        if (n + 1 < kAll)
          products_wait<1>();
        else
          products_wait<0>();
        add_piece(n % 2, n % kPieces, scale[n / kPieces]);
        if (n + 2 < kAll)
          issue_piece(n % 2, p[(n + 2) / kPieces],
                      advance(values[(n + 2) / kPieces], (n + 2) % kPieces * 64 * kValueLine));
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) release_values();
    }
    EK_DEVICE void issue_piece(int buffer, const uint32_t (&words)[kWords], uint64_t values) {
      products_begin();
#pragma unroll
      for (int step = 0; step < kTileRows / 32; ++step)
        WgmmaE4m3<64>::rs(part[buffer], words[4 * step], words[4 * step + 1], words[4 * step + 2],
                          words[4 * step + 3], advance(values, step * 32), step > 0);
      products_commit();
    }
    EK_DEVICE void add_piece(int buffer, int piece, float scale) {
      settle(part[buffer]);
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
        o[piece * kPiece + i] = fmaf(part[buffer][i], scale, o[piece * kPiece + i]);
    }
    EK_DEVICE void release_values() {
      release(&shared.v_empty[v.stage]);
      v.next();
    }

    // s: scores to probabilities times 2^8; moves the rows' shifts, and l with them. decay: what O of the tiles before is
    // to be multiplied by. True: some row of the warp has one that is not 1.
    template <int kTiles>
    EK_DEVICE bool softmax(float (&decay)[2]) {
      float most[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float chain[4] = {s[tile][0], s[tile][1], s[tile][2], s[tile][3]};
#pragma unroll
        for (int i = 4; i < kScores; ++i) chain[i % 4] = fmaxf(chain[i % 4], s[tile][i]);
#pragma unroll
        for (int r = 0; r < 2; ++r)
          most[r] = fmaxf(most[r], fmaxf(chain[2 * r], chain[2 * r + 1]) * factor[tile]);
      }
      bool moves = false;
      float used[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float largest = quad_max(most[r]), before = shift[r];
        // With the 2^8 in the shift the two cannot be rounded apart.
        shift[r] = fmaxf(before, (kConsistent ? ceilf(largest) : largest) - kProbsExponent);
        used[r] = shift[r] == kMinusInfinity ? 0.0f : shift[r];
        decay[r] = exp2_approx(before - used[r]);
        moves |= shift[r] != before;
      }
      moves = __any_sync(~0u, moves);
      if (moves) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] *= decay[i / 2];
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          s[tile][i] = exp2_approx(fmaf(s[tile][i], factor[tile], -used[i / 2 % 2]));
          if (!kConsistent) sum[i / 2 % 2 * 2] += s[tile][i];
        }
        pack(tile);
      }
      return moves;
    }
    // s to p, and consistent's l. (These sums while products are on their way made the whole a sixth slower.)
    EK_DEVICE void pack(int tile) {
#pragma unroll
      for (int n = 0; n < kWords; ++n) {  // word n: row n % 2, keys of blocks 2 (n / 2) and the next
        const int i = n / 2 * 8 + n % 2 * 2;
        p[tile][n] = pack_e4m3(s[tile][i], s[tile][i + 1], s[tile][i + 4], s[tile][i + 5]);
      }
      if (kConsistent) {
#pragma unroll
        for (int n = 0; n < kWords; n += 4)
          add_row_sums_e4m3(sum, p[tile][n], p[tile][n + 1], p[tile][n + 2], p[tile][n + 3]);
      }
    }
    EK_DEVICE void rescale(const float (&decay)[2]) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] *= decay[i / 2 % 2];
    }

    // The key tiles [0, own) of the item at hand, the last first; own > 0.
    EK_DEVICE void attend(int own) {
      shift[0] = shift[1] = kMinusInfinity;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = 0;
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] = 0;
      const int clear =
          key_limit(a.causal, row, item().rows, item().keys) / kTileRows;  // all rows see these whole
      j = own - 1;
      if (own % 2) attend_tiles<1>(clear);
      while (j >= 0) attend_tiles<2>(clear);
    }
    // Key tile j, and the one before it.
    template <int kTiles>
    EK_DEVICE void attend_tiles(int clear) {
      compute_scores<kTiles>(clear);
      if (j < kTiles) release(&shared.q_empty[count % kQueryStages]);
      float decay[2];
      const bool moves = softmax<kTiles>(decay);
      add_values<kTiles>(moves, decay);
      j -= kTiles;
    }

    EK_DEVICE uint16_t* output(const Item& done, int i) const {
      return a.o + done.query_batch * a.o_stride[0] + done.h * a.o_stride[1] +
             (static_cast<int64_t>(done.first_row) + i) * a.o_stride[2];
    }
    // O / l and L. Rows that do not exist are zero in a padded tensor; a packed one does not have them.
    EK_DEVICE void write(const Item& done) {
      const int end = a.sequences.query_offsets ? done.rows : a.sequences.T;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = row + lane_row + 8 * r;
        const bool exists = i < done.rows;
        const float l = kConsistent ? sum[2 * r] : quad_sum(sum[2 * r]);
        const float inverse = exists && l != 0 ? __fdividef(1.0f, l) : 0.0f;
        if (lane_column == 0 && i < a.sequences.T)
          a.lse[static_cast<int64_t>(done.head) * a.sequences.T + i] =
              exists ? fmaf(shift[r], kLn2, __logf(l)) : kMinusInfinity;
          // Of four blocks of 8 features a lane of the quad has two features each; it gets one block whole.
#pragma unroll
        for (int n = 0; n < kHead / 32; ++n) {
          uint32_t word[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const int at = (n * 4 + w) * 4 + 2 * r;
            word[w] = exists ? pack_bf16(o[at] * inverse, o[at + 1] * inverse) : 0u;
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
      for (;; ++count) {
        barrier_wait(&shared.q_full[count % kQueryStages], count / kQueryStages & 1);
        const Item& item = this->item();
        const int tiles = item.tiles;
        if (tiles < 0) return;
        row = item.row + group * kTileRows;
        const int limit = row < item.rows
                              ? key_limit(a.causal, min(row + kTileRows, item.rows) - 1, item.rows, item.keys)
                              : 0;
        const int own = (limit + kTileRows - 1) / kTileRows;
        for (int skipped = own; skipped < tiles; ++skipped) skip_tile();
        if (own > 0) {
          attend(own);
          write(item);
        } else {
          release(&shared.q_empty[count % kQueryStages]);
          write_empty_rows(item);
        }
      }
    }
  };
};

}  // namespace evenkeel::hopper_fp8
