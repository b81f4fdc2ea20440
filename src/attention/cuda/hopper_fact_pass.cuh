// Facts of rows on Hopper, by a pass behind the other two: what each row of dS adds up to, and its ties. The emulator of the
// tests runs it, too.
//
// The kernels that train stay as they are. This one finds S, P, dP and dS of some sequences again, by the same products in
// the same order of features and the same arithmetic behind them. So each dS has the bits that dQ and dK received; only the
// order in which a row's are added up is its own.
//
// A block is one warpgroup and owns 64 rows of a head. Their Q and dO stay in shared memory, and key tiles of 64 go by, two
// of them on their way. Ties need the row's largest score first: the keys go by a second time. Nothing is shared between
// blocks, and every sum has one order.
#pragma once

#include "attention/cuda/hopper.cuh"
#include "attention/cuda/row_facts.cuh"
#include "base/sizes.h"

namespace evenkeel::hopper::facts {

struct FactArguments : ScoreForms {
  const float* lse;                 // (B, H, T)
  const float *row_max, *row_sum;   // (B, H, T), where heads are consistent
  const float* exact_delta;         // (B, H, T): delta as used, for row_fact to take as it is
  const float* grad_lse = nullptr;  // the same: it is in that delta
  float* residual;                  // (B, H, T)
  int32_t* ties;                    // (B, H, T) or null
  int H, heads_per_group;
  HeadList list;    // the heads of this launch,
  HeadRules rules;  // and theirs; keel stands beside them, since it is in delta, too
  float keel;
  int tiles, heads;  // query tiles of a head; heads of all sequences
};

template <int kHeadSize>
struct Block : WarpgroupThread {
  static constexpr int kTile = kWarpgroupRows;  // rows, and keys
  static constexpr int kThreads = kWarpgroup, kStages = 2, kBoxes = kHeadSize / kBoxFeatures;
  static constexpr int kBox = kTile * kRowBytes;
  static constexpr int kScores = kTile / 2;  // a thread's
  using Tile = uint8_t[kBoxes][kBox];
  using Scores = float[kScores];
  struct alignas(1024) Shared {
    Tile q, grad_output, k[kStages], v[kStages];
    uint64_t rows_full, full[kStages];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);

  Shared& shared;
  const CUtensorMap &q_map, &k_map, &v_map, &grad_map;
  const FactArguments& a;
  const int tile, b, h;
  const Band band;
  const int key_tiles;  // that some of the rows see
  const int steps;      // those, once or twice
  int limit[2];         // keys that the thread's two rows see
  RowFact fact[2];
  float threshold[2];                         // scores from here on tie
  float sum[2] = {0, 0}, weight[2] = {0, 0};  // this thread's part of the rows' dS and P
  int tied[2] = {0, 0};

  EK_DEVICE Block(const CUtensorMap& q_map_, const CUtensorMap& k_map_, const CUtensorMap& v_map_,
                  const CUtensorMap& grad_map_, const FactArguments& a_, int index)
      : WarpgroupThread(0),
        shared(*reinterpret_cast<Shared*>(dynamic_shared())),
        q_map(q_map_),
        k_map(k_map_),
        v_map(v_map_),
        grad_map(grad_map_),
        a(a_),
        tile(a.tiles - 1 - index / a.heads),  // those with most keys first
        b(index % a.heads / a.list.count),
        h(a.list.head_at(index % a.heads % a.list.count)),
        band(a, b),
        key_tiles(band.end_key_tile(tile * kTile, kTile, kTile)),
        steps(a.ties ? 2 * key_tiles : key_tiles) {}

  EK_DEVICE static void run(const CUtensorMap& q_map, const CUtensorMap& k_map, const CUtensorMap& v_map,
                            const CUtensorMap& grad_map, const FactArguments& a) {
    Block(q_map, k_map, v_map, grad_map, a, static_cast<int>(blockIdx.x)).run();
  }
  EK_DEVICE void run() {
    start_rows();
    if (key_tiles > 0) {
      start_loads();
      float most[2] = {-kInfinity, -kInfinity};
      for (int step = 0; step < steps - key_tiles; ++step) find_largest(step, most);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        threshold[r] = __fsub_rn(quad_max(most[r]) * a.score_unit, a.rules.tie_tolerance);
      for (int step = steps - key_tiles; step < steps; ++step) add_tile(step);
    }
    write();
  }

  // ------------------------------------------------------------------------------------------------------ load
  EK_DEVICE int row(int r) const { return tile * kTile + lane_row + 8 * r; }
  EK_DEVICE int64_t place(int r) const {
    return (static_cast<int64_t>(b) * a.H + h) * a.sequences.T + row(r);
  }
  EK_DEVICE void start_rows() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      limit[r] = row(r) < band.s.rows ? max(0, band.end_key(row(r))) : 0;
      if (limit[r] > 0) fact[r] = row_fact(a, a.rules, place(r), 0);
    }
  }
  EK_DEVICE void start_loads() {
    if (thread == 0) {
      barrier_init(&shared.rows_full, 1);
      for (int stage = 0; stage < kStages; ++stage) barrier_init(&shared.full[stage], 1);
      barrier_init_fence();
    }
    __syncthreads();
    if (thread == 0) {
      const int first = band.s.first_row + tile * kTile;
      barrier_expect_bytes(&shared.rows_full, 2 * sizeof(Tile));
      load_tile(shared.q, q_map, &shared.rows_full, first, h, band.s.query_batch);
      load_tile(shared.grad_output, grad_map, &shared.rows_full, first, h, band.s.query_batch);
      for (int step = 0; step < kStages; ++step) load_keys(step);
    }
    barrier_wait(&shared.rows_full, 0);
  }
  EK_DEVICE static void load_tile(Tile& to, const CUtensorMap& map, uint64_t* full, int row, int head,
                                  int batch) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) load_box(to[box], map, full, box * kBoxFeatures, row, head, batch);
  }
  // One thread. The values come where gradients are found.
  EK_DEVICE void load_keys(int step) {
    if (step >= steps) return;
    const int stage = step % kStages, key = band.s.first_key + step % key_tiles * kTile;
    const bool values = step >= steps - key_tiles;
    uint64_t* const full = &shared.full[stage];
    barrier_expect_bytes(full, (values ? 2 : 1) * sizeof(Tile));
    load_tile(shared.k[stage], k_map, full, key, h / a.heads_per_group, band.s.key_batch);
    if (values) load_tile(shared.v[stage], v_map, full, key, h / a.heads_per_group, band.s.key_batch);
  }
  EK_DEVICE void await_keys(int step) {
    barrier_wait(&shared.full[step % kStages], static_cast<uint32_t>(step / kStages % 2));
  }
  // All products have read the tile: the next one may come in its place.
  EK_DEVICE void release_keys(int step) {
    __syncthreads();
    if (thread == 0) load_keys(step + kStages);
  }

  // ----------------------------------------------------------------------------------------------------- score
  EK_DEVICE static void begin(const Tile& rows, const Tile& keys, Scores& product) {
    begin_product<kHeadSize, kBox, kBox, false>(product, operand(rows[0]), operand(keys[0]));
  }
  // Keys that a row does not see, and those behind the last one, where anything may stand.
  EK_DEVICE void mask(int step, Scores& scores, float instead) const {
    const int key = step % key_tiles * kTile;
    if (key + kTile <= band.end_key(tile * kTile)) return;  // all rows see all of them
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      if (key + lane_column + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) scores[i] = instead;
  }
  EK_DEVICE void find_largest(int step, float (&most)[2]) {
    Scores scores;
    await_keys(step);
    begin(shared.q, shared.k[step % kStages], scores);
    products_wait<0>();
    settle(scores);
    release_keys(step);
    mask(step, scores, -kInfinity);
#pragma unroll
    for (int i = 0; i < kScores; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], scores[i]);
  }
  EK_DEVICE void add_tile(int step) {
    Scores scores, dprobs;
    await_keys(step);
    begin(shared.q, shared.k[step % kStages], scores);
    begin(shared.grad_output, shared.v[step % kStages], dprobs);
    products_wait<0>();
    settle(scores);
    settle(dprobs);
    release_keys(step);
    mask(step, scores, -kInfinity);
    mask(step, dprobs, 0);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      tied[r] += scores[i] * a.score_unit >= threshold[r];
      scores[i] = exp2_approx(fmaf(scores[i], a.score_log2, -fact[r].shift));
    }
    if (a.rules.consistent) use_rounded(scores);
    add_up(scores, dprobs);
  }
  // The forward's rounded probabilities, over their sum.
  EK_DEVICE void use_rounded(Scores& probs) const {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const uint32_t rounded = Bf16Pairs::pack(probs[i], probs[i + 1]);
      probs[i] = Bf16Pairs::low(rounded) * fact[i / 2 % 2].inverse;
      probs[i + 1] = Bf16Pairs::high(rounded) * fact[i / 2 % 2].inverse;
    }
  }
  // A tile's dS add up by themselves first: sums of many small numbers stay short.
  EK_DEVICE void add_up(const Scores& probs, const Scores& dprobs) {
    float of_dscores[2] = {0, 0}, of_probs[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i / 2 % 2;
      const uint32_t dscores = Bf16Pairs::pack(probs[i] * (dprobs[i] - fact[r].delta),
                                               probs[i + 1] * (dprobs[i + 1] - fact[r].delta));
      of_dscores[r] += Bf16Pairs::low(dscores) + Bf16Pairs::high(dscores);
      of_probs[r] += probs[i] + probs[i + 1];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += of_dscores[r], weight[r] += of_probs[r];
  }

  // ---------------------------------------------------------------------------------------------------- finish
  EK_DEVICE void write() const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float of_dscores = quad_sum(sum[r]), of_probs = quad_sum(weight[r]);
      const int ties = quad_sum(tied[r]);
      if (lane_column != 0 || row(r) >= a.sequences.T) continue;
      const bool seen = fact[r].shift < kInfinity;
      // keel leaves 2 z L sum P in the row on purpose.
      a.residual[place(r)] = seen ? of_dscores - 2 * a.keel * a.lse[place(r)] * of_probs : 0.0f;
      if (a.ties) a.ties[place(r)] = seen ? ties : 0;
    }
  }
};

// f.operator()<Block>() with the one for the problem's head size.
template <class F>
void with_block_of(const AttentionProblem& problem, F f) {
  if (problem.D <= 64)
    f.template operator()<Block<64>>();
  else
    f.template operator()<Block<128>>();
}

// What a launch hands to its blocks.
struct BlockMaps {
  CUtensorMap q, k, v, grad_output;
  BlockMaps(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad)
      : q(query_map(problem, in.q, kWarpgroupRows)),
        k(key_map(problem, in.k, kWarpgroupRows)),
        v(key_map(problem, in.v, kWarpgroupRows)),
        grad_output(query_map(problem, grad, kWarpgroupRows)) {}
};

// launch(arguments, blocks) for all heads, in as few groups as their plans allow.
template <class Launch>
void for_fact_groups(const AttentionProblem& problem, const ForwardPass& saved, const FactPass& out,
                     Launch launch) {
  FactArguments a{};
  static_cast<ScoreForms&>(a) = score_forms(problem);
  const Saved kept = saved_layout(problem, saved.saved);
  a.lse = saved.lse;
  a.row_max = kept.row_max;
  a.row_sum = kept.row_sum;
  a.exact_delta = out.delta;
  a.residual = out.residual;
  a.ties = out.ties;
  a.H = static_cast<int>(problem.H);
  a.heads_per_group = static_cast<int>(problem.H / problem.G);
  a.tiles = static_cast<int>(divide_up(problem.T, kWarpgroupRows));
  const auto alike = [](const HeadRules& x, const HeadRules& y) {
    return x.consistent == y.consistent && x.keel == y.keel && x.tie_tolerance == y.tie_tolerance;
  };
  for (const HeadGroup& group : head_groups(problem, alike)) {
    a.list = group.list;
    a.rules = group.rules;
    a.keel = std::exchange(a.rules.keel, 0.0f);
    a.rules.exact_delta = true;  // whatever it was found by
    a.heads = static_cast<int>(problem.fact_sequences) * group.list.count;
    launch(a, a.tiles * a.heads);
  }
}

}  // namespace evenkeel::hopper::facts
