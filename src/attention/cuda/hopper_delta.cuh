// zero_sum's delta on Hopper: sum_j P_ij dP_ij / sum_j P_ij, by a pass over the keys of its own. Both sums
// are over the probabilities that this pass computes, so that P (dP - delta) adds up to zero whatever the
// forward pass rounded.
//
// A block stays on its multiprocessor and takes every so many-th tile of 256 query rows of one head, 64 rows a warpgroup.
// One thread of a fifth warpgroup drives the copy engine, and is a query tile ahead where there is room.
#pragma once

#include "attention/cuda/hopper.cuh"

namespace evenkeel::hopper::delta {

struct DeltaArguments : ScoreForms {
  const float* lse;  // (B, H, T)
  float* delta;      // (B, H, T)
  float* log_sum;    // (B, H, T) or null
  int H, heads_per_group;
  HeadList list;
  int tiles_per_head, heads, section_heads;  // tiles_per_head: set where the size of tiles is known
};

inline DeltaArguments arguments_of(const AttentionProblem& problem, const HeadGroup& group, const float* lse,
                                   float* delta, float* log_sum) {
  DeltaArguments a{};
  static_cast<ScoreForms&>(a) = score_forms(problem);
  a.lse = lse;
  a.delta = delta;
  a.log_sum = log_sum;
  a.H = static_cast<int>(problem.H);
  a.heads_per_group = static_cast<int>(problem.H / problem.G);
  a.list = group.list;
  a.heads = static_cast<int>(problem.B) * group.list.count;
  a.section_heads = heads_in_cache(problem, a.heads);
  return a;
}

template <int kHeadSize>
struct Tiles {
  static constexpr int kBoxes = kHeadSize / kBoxFeatures;
  static constexpr int kWarpgroups = 4, kRows = kWarpgroups * kWarpgroupRows, kKeys = 64;
  static constexpr int kQueryStages = kHeadSize == 64 ? 2 : 1, kStages = kHeadSize == 64 ? 6 : 3;
  static constexpr int kWorkers = kWarpgroups * kWarpgroup, kThreads = kWorkers + kWarpgroup;
  // The pool is what the block got at its start: 5 x 96.
  static constexpr int kWorkRegisters = 112, kCopyRegisters = 32;
  static constexpr int kQueryBox = kRows * kRowBytes, kKeyBox = kKeys * kRowBytes;

  struct Shared {
    uint8_t q[kQueryStages][kBoxes][kQueryBox], grad[kQueryStages][kBoxes][kQueryBox];
    uint8_t k[kStages][kBoxes][kKeyBox], v[kStages][kBoxes][kKeyBox];
    uint64_t query_full[kQueryStages], query_empty[kQueryStages], full[kStages], empty[kStages];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
};

// A query tile: whose rows, and the key tiles that some of them see.
template <int kHeadSize, bool kForms>
struct QueryTile {
  int row, b, h;
  Band band;
  int first_tile, end_tile;

  EK_DEVICE QueryTile(const DeltaArguments& a, int index) {
    using T = Tiles<kHeadSize>;
    const TilePlace place(index, a.tiles_per_head, a.heads, a.section_heads);
    row = place.tile * T::kRows;
    b = place.head / a.list.count;
    h = a.list.head_at(place.head - b * a.list.count);
    band = Band(a, b);
    first_tile = kForms ? band.first_key_tile(row, T::kKeys) : 0;
    end_tile = band.end_key_tile(row, T::kRows, T::kKeys);
  }
  EK_DEVICE bool sees_keys() const { return first_tile < end_tile; }
};

// Loads everything: one thread.
template <int kHeadSize, bool kForms>
EK_DEVICE void load_tiles(typename Tiles<kHeadSize>::Shared& shared, const CUtensorMap& q_map,
                          const CUtensorMap& k_map, const CUtensorMap& v_map, const CUtensorMap& grad_map,
                          const DeltaArguments& a) {
  using T = Tiles<kHeadSize>;
  Ring<T::kQueryStages> queries;
  Ring<T::kStages> ring;
  for (int index = blockIdx.x; index < a.tiles_per_head * a.heads; index += gridDim.x) {
    const QueryTile<kHeadSize, kForms> tile(a, index);
    if (!tile.sees_keys()) continue;
    const Sequence& s = tile.band.s;
    uint64_t* const query_full = &shared.query_full[queries.stage];
    barrier_wait(&shared.query_empty[queries.stage], queries.parity ^ 1);
    barrier_expect_bytes(query_full, 2 * T::kBoxes * T::kQueryBox);
#pragma unroll
    for (int box = 0; box < T::kBoxes; ++box) {
      load_box(shared.q[queries.stage][box], q_map, query_full, box * kBoxFeatures, s.first_row + tile.row,
               tile.h, s.query_batch);
      load_box(shared.grad[queries.stage][box], grad_map, query_full, box * kBoxFeatures,
               s.first_row + tile.row, tile.h, s.query_batch);
    }
    queries.next();
    for (int j = tile.first_tile; j < tile.end_tile; ++j, ring.next()) {
      const int key = s.first_key + j * T::kKeys, kv_head = tile.h / a.heads_per_group;
      uint64_t* const full = &shared.full[ring.stage];
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      barrier_expect_bytes(full, 2 * T::kBoxes * T::kKeyBox);
#pragma unroll
      for (int box = 0; box < T::kBoxes; ++box) {
        load_box(shared.k[ring.stage][box], k_map, full, box * kBoxFeatures, key, kv_head, s.key_batch);
        load_box(shared.v[ring.stage][box], v_map, full, box * kBoxFeatures, key, kv_head, s.key_batch);
      }
    }
  }
}

// Of a thread's two rows and their keys from `key` on: soft caps (the scores are then tanh) and slopes.
template <int n>
EK_DEVICE void shape_scores(const DeltaArguments& a, const Band& band, int h, int row, int key,
                            float (&scores)[n]) {
  if (a.softcap > 0) {
    const float factor = a.scale / a.softcap;
#pragma unroll
    for (int i = 0; i < n; ++i) scores[i] = tanh_of(scores[i] * factor);
  }
  if (!a.slopes) return;
  const float slope = slope_of(a, h);
  const int distance = row + band.offset - key;
#pragma unroll
  for (int i = 0; i < n; ++i)
    scores[i] =
        fmaf(-slope, fabsf(static_cast<float>(distance + i / 2 % 2 * 8 - (i / 4 * 8 + i % 2))), scores[i]);
}
// What a mask of its own hides.
template <int n>
EK_DEVICE void hide(const DeltaArguments& a, const Band& band, int b, int h, int row, int key,
                    float (&probs)[n]) {
  const Visible visible(a, b, h);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int own = row + i / 2 % 2 * 8, other = key + i / 4 * 8 + i % 2;
    if (own < band.s.rows && other < band.s.keys && !visible(own, other)) probs[i] = 0;
  }
}

// One warpgroup: 64 rows of each query tile. kForms: with windows, soft caps, slopes, masks and sinks.
template <class Pairs, int kHeadSize, bool kForms>
struct DeltaWorker : WarpgroupThread {
  using T = Tiles<kHeadSize>;
  using Shared = typename T::Shared;
  static constexpr bool kFp16 = std::is_same_v<Pairs, Fp16Pairs>;
  // Two operands from shared memory take all that it can give. Queries of 64 features fit the registers, without forms.
  static constexpr bool kHeldQueries = kHeadSize == 64 && !kForms;
  static constexpr int kScores = T::kKeys / 2;  // a thread's
  using Scores = float[kScores];

  Shared& shared;
  const DeltaArguments& a;
  Ring<T::kQueryStages> queries;
  Ring<T::kStages> ring;
  uint32_t query[kHeldQueries ? kHeadSize / 16 : 1][4];
  int row, from[2], limit[2];  // a thread's first row; keys that its rows see
  float shift[2], sum[2], weighted[2];

  EK_DEVICE DeltaWorker(Shared& shared_, const DeltaArguments& a_, int group_)
      : WarpgroupThread(group_), shared(shared_), a(a_) {}

  EK_DEVICE void run() {
    for (int index = blockIdx.x; index < a.tiles_per_head * a.heads; index += gridDim.x) {
      const QueryTile<kHeadSize, kForms> tile(a, index);
      const int first_row = tile.row + group * kWarpgroupRows;
      start(tile, first_row);
      if (tile.sees_keys()) {
        await_queries();
        walk_keys(tile, first_row);
        release(&shared.query_empty[queries.stage]);
        queries.next();
      }
      write(tile);
    }
  }

  EK_DEVICE void start(const QueryTile<kHeadSize, kForms>& tile, int first_row) {
    row = first_row + lane_row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + 8 * r;
      from[r] = kForms ? tile.band.first_key(i) : 0;
      limit[r] = i < tile.band.s.rows ? max(0, tile.band.end_key(i)) : 0;
      shift[r] = limit[r] > 0 ? a.lse[static_cast<size_t>(tile.b * a.H + tile.h) * a.sequences.T + i] * kLog2E
                              : 0.0f;
      sum[r] = weighted[r] = 0;
    }
  }
  EK_DEVICE void await_queries() {
    barrier_wait(&shared.query_full[queries.stage], queries.parity);
    if constexpr (kHeldQueries) {
#pragma unroll
      for (int step = 0; step < kHeadSize / 16; ++step)
        load_left<kBoxFeatures>(query[step], shared_address(shared.q[queries.stage][0]),
                                group * kWarpgroupRows + thread / 32 * 16, step, thread % 32);
    }
  }
  // Lanes leave a wait one by one: a tile is passed on when the last one has, or that one waits for a later load for ever.
  EK_DEVICE void skip_keys(int tiles) {
    for (; tiles > 0; --tiles) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      __syncwarp();
      release_keys();
    }
  }
  EK_DEVICE void release_keys() {
    release(&shared.empty[ring.stage]);
    ring.next();
  }
  // Key tiles that the warpgroup's own rows see; the others are left out.
  EK_DEVICE void walk_keys(const QueryTile<kHeadSize, kForms>& tile, int first_row) {
    const Band& band = tile.band;
    const int own_end = band.end_key_tile(first_row, kWarpgroupRows, T::kKeys);  // 0: they see none
    const int end = max(tile.first_tile, own_end);
    const int begin = kForms && own_end > 0 ? band.first_key_tile(first_row, T::kKeys) : tile.first_tile;
    // Key tiles that all of its rows see whole.
    const int clear = max(0, band.end_key(first_row)) / T::kKeys;
    const int clear_from =
        kForms ? (band.first_key(first_row + kWarpgroupRows - 1) + T::kKeys - 1) / T::kKeys : 0;
    skip_keys(begin - tile.first_tile);
    for (int j = begin; j < end; ++j) add_tile(tile, j, j >= clear || j < clear_from);
    skip_keys(tile.end_tile - end);
  }
  EK_DEVICE void add_tile(const QueryTile<kHeadSize, kForms>& tile, int j, bool masked) {
    Scores scores, dprobs;
    const int first_key = j * T::kKeys + lane_column;
    barrier_wait(&shared.full[ring.stage], ring.parity);
    begin_scores(scores);
    begin_product<kHeadSize, T::kQueryBox, T::kKeyBox, kFp16>(
        dprobs, operand(shared.grad[queries.stage][0] + group * kWarpgroupRows * kRowBytes),
        operand(shared.v[ring.stage][0]));
    products_wait<1>();
    settle(scores);
    if constexpr (kForms) shape_scores(a, tile.band, tile.h, row, first_key, scores);
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      scores[i] = exp2_approx(fmaf(scores[i], a.score_log2, -shift[i / 2 % 2]));
    settle(scores);
    products_wait<0>();
    settle(dprobs);
    release_keys();
    if (masked) {  // or behind the last key: anything may stand there
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int key = first_key + i / 4 * 8 + i % 2;
        if (key >= limit[i / 2 % 2] || (kForms && key < from[i / 2 % 2])) scores[i] = dprobs[i] = 0;
      }
    }
    if (kForms && a.visible) hide(a, tile.band, tile.b, tile.h, row, first_key, scores);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      sum[i / 2 % 2] += scores[i];
      weighted[i / 2 % 2] = fmaf(scores[i], dprobs[i], weighted[i / 2 % 2]);
    }
  }
  EK_DEVICE void begin_scores(Scores& scores) {
    const uint64_t keys = operand(shared.k[ring.stage][0]);
    if constexpr (kHeldQueries) {
      products_begin();
#pragma unroll
      for (int step = 0; step < kHeadSize / 16; ++step)
        Wgmma<T::kKeys, kFp16>::template rs<false>(scores, query[step][0], query[step][1], query[step][2],
                                                   query[step][3], advance(keys, step * 32), step > 0);
      products_commit();
    } else {
      begin_product<kHeadSize, T::kQueryBox, T::kKeyBox, kFp16>(
          scores, operand(shared.q[queries.stage][0] + group * kWarpgroupRows * kRowBytes), keys);
    }
  }
  EK_DEVICE void write(const QueryTile<kHeadSize, kForms>& tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float of_row = quad_sum(sum[r]);
      const float weighted_row = quad_sum(weighted[r]);
      if (kForms && limit[r] > 0) of_row += exp2_approx(sink_log2(a, tile.h) - shift[r]);
      const int i = row + 8 * r;
      if (lane_column == 0 && i < a.sequences.T) {
        const bool seen = limit[r] > 0 && of_row > 0;
        const size_t at = static_cast<size_t>(tile.b * a.H + tile.h) * a.sequences.T + i;
        a.delta[at] = seen ? weighted_row / of_row : 0.0f;
        if (a.log_sum) a.log_sum[at] = seen ? log2f(of_row) : 0.0f;
      }
    }
  }
};

template <class Pairs, int kHeadSize, bool kForms>
__global__ void __launch_bounds__(Tiles<kHeadSize>::kThreads, 1)
    delta_rows(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap grad_map,
               const __grid_constant__ DeltaArguments a) {
  using T = Tiles<kHeadSize>;
  auto& shared = *reinterpret_cast<typename T::Shared*>(dynamic_shared());
  if (threadIdx.x == 0) {
    constexpr int kWarps = T::kWorkers / kWarp;
    for (int i = 0; i < T::kQueryStages; ++i)
      barrier_init(&shared.query_full[i], 1), barrier_init(&shared.query_empty[i], kWarps);
    for (int i = 0; i < T::kStages; ++i)
      barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], kWarps);
    barrier_init_fence();
    prefetch_map(q_map), prefetch_map(k_map), prefetch_map(v_map), prefetch_map(grad_map);
  }
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (group == T::kWarpgroups) {
    give_registers<T::kCopyRegisters>();
    if (threadIdx.x == T::kWorkers) load_tiles<kHeadSize, kForms>(shared, q_map, k_map, v_map, grad_map, a);
  } else {
    take_registers<T::kWorkRegisters>();
    DeltaWorker<Pairs, kHeadSize, kForms>(shared, a, group).run();
  }
}

}  // namespace evenkeel::hopper::delta
