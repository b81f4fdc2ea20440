// The backward kernel of Hopper for head sizes above 128: dQ, dK and dV with five products a tile, for a causal or full mask.
// It takes the arguments of the Ampere class, whose kernels find the rows' facts for it (ampere_passes.h). The emulator of
// the tests runs it, too.
//
// A block owns 64 keys of one kv head, and the queries that see them stream by. Scores are held transposed, [key][query], so
// that P^T and dS^T are operands from registers as they come. dK and dV of 64 keys take 256 registers of a warpgroup's
// threads. So one warpgroup owns dV and finds P; the other one owns dK and finds dS from the first one's P, which comes
// through shared memory in FP32. Both need dS for dQ, which they share by features, 64 at a time. Parts of dQ from
// different key tiles are added in device memory in FP32, from registers, in one order: the last key tile first. A block
// starts with the first query tile that sees its keys, and block n + 1 is taken up before block n, so that the turn has
// usually come when a part is ready.
#pragma once

#include "attention/cuda/ampere_passes.h"
#include "attention/cuda/hopper.cuh"
#include "attention/cuda/hopper_backward_scores.cuh"

namespace evenkeel::hopper::backward::large {

using ampere::Problem;

inline constexpr int kKeys = 64, kRows = 64;  // of a tile
static_assert(ampere::BackwardTiles<256, false>::kKeys == kKeys &&
              ampere::BackwardTiles<256, false>::kRows == kRows);

// The work of one block at a time: a key tile of a kv head, and the row tiles of its group's heads that see it.
// It lies in shared memory: registers are short.
struct Item {
  int b, g, key_tile;             // key_tile < 0: there is no more work
  int first_row_tile, row_tiles;  // of each head: [first, row_tiles)
  int steps;                      // row tiles of all heads
  Band band;

  EK_DEVICE void take(const Problem& p) {
    const int index = atomicAdd(p.next_item, 1);
    key_tile = -1;
    if (index >= p.B * p.G * p.key_tiles) return;
    // Last key tile first: a block only ever waits for items taken before its own.
    key_tile = p.key_tiles - 1 - index % p.key_tiles;
    b = index / p.key_tiles / p.G;
    g = index / p.key_tiles % p.G;
    band = Band(p, b);
    first_row_tile = band.first_row_tile(key_tile * kKeys, kRows);
    row_tiles = band.end_row_tile(key_tile * kKeys, kKeys, kRows);
    steps = max(0, row_tiles - first_row_tile) * (p.H / p.G);
  }
  EK_DEVICE int last_key_tile(int row_tile) const {
    return band.end_key_tile(row_tile * kRows, kRows, kKeys) - 1;
  }
};

// kHeadSize: of queries and keys. kValueSize: of values and outputs.
template <int kHeadSize_, int kValueSize_>
struct Tiles {
  static constexpr int kHeadSize = kHeadSize_, kValueSize = kValueSize_;
  static constexpr int kHeadBoxes = kHeadSize / kBoxFeatures, kValueBoxes = kValueSize / kBoxFeatures;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr uint32_t kBox = kRows * kRowBytes;
  using HeadTile = uint8_t[kHeadBoxes][kRows][kRowBytes];
  using ValueTile = uint8_t[kValueBoxes][kRows][kRowBytes];

  struct alignas(1024) Shared {
    HeadTile k;
    ValueTile v;
    HeadTile q[kStages];
    ValueTile grad_output[kStages];
    uint8_t dscores[kStages][kKeys][kRowBytes];  // dS^T: [key][query]
    float probs[kRows / 8][kWarpgroup][4];       // P^T as the threads hold it
    float shift[kStages][kRows], inverse[kStages][kRows], delta[kStages][kRows];
    uint64_t k_full, k_empty, v_full, v_empty, probs_full, probs_empty;
    uint64_t q_full[kStages], q_empty[kStages], grad_output_full[kStages], grad_output_empty[kStages];
    uint64_t dscores_full[kStages], dscores_empty[kStages];
    uint64_t turn, dq_done;  // of the part of dQ at hand: it may be added; it is
    uint64_t item_full[kStages], item_empty[kStages];
    Item item[kStages];
    bool consistent[kStages];  // are these rows' heads?
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= 227 * 1024);
};

// What a launch hands to its blocks.
struct Maps {
  CUtensorMap q, k, v, grad_output;
  Maps(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad)
      : q(query_map(problem, in.q, kRows)),
        k(key_map(problem, in.k, kKeys)),
        v(value_map(problem, in.v, kKeys)),
        grad_output(output_map(problem, grad, kRows)) {}
};

// The thread that loads everything.
template <class T, bool kConsistent>
struct Loader {
  typename T::Shared& sm;
  const Problem& p;
  const Maps& maps;
  Ring<kStages> rows, queue;
  uint32_t parity = 0;  // of k and v

  EK_DEVICE Loader(typename T::Shared& shared, const Problem& problem, const Maps& of)
      : sm(shared), p(problem), maps(of) {}

  template <int kBoxes>
  EK_DEVICE static void load(uint8_t (&tile)[kBoxes][kRows][kRowBytes], const CUtensorMap& map,
                             uint64_t* full, int row, int head, int batch) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      load_box(tile[box], map, full, box * kBoxFeatures, row, head, batch);
  }
  EK_DEVICE void load_keys(const Item& item) {
    const int key = item.band.s.first_key + item.key_tile * kKeys;
    barrier_wait(&sm.k_empty, parity ^ 1);
    barrier_expect_bytes(&sm.k_full, sizeof(sm.k));
    load(sm.k, maps.k, &sm.k_full, key, item.g, item.band.s.key_batch);
    barrier_wait(&sm.v_empty, parity ^ 1);
    barrier_expect_bytes(&sm.v_full, sizeof(sm.v));
    load(sm.v, maps.v, &sm.v_full, key, item.g, item.band.s.key_batch);
    parity ^= 1;
  }
  EK_DEVICE void load_rows(const Item& item, int h, int tile) {
    constexpr uint32_t kFactBytes = kRows * sizeof(float);
    const int row = item.band.s.first_row + tile * kRows, stage = rows.stage;
    const int64_t fact = static_cast<int64_t>(item.b * p.H + h) * p.padded_rows + tile * kRows;
    uint64_t *const q_full = &sm.q_full[stage], *const grad_full = &sm.grad_output_full[stage];
    barrier_wait(&sm.q_empty[stage], rows.parity ^ 1);
    if (kConsistent) sm.consistent[stage] = p.rules_of(h).consistent;
    barrier_expect_bytes(q_full, sizeof(sm.q[0]) + kFactBytes * (kConsistent ? 2 : 1));
    load(sm.q[stage], maps.q, q_full, row, h, item.band.s.query_batch);
    load_bytes(sm.shift[stage], p.shift + fact, kFactBytes, q_full);
    if (kConsistent) load_bytes(sm.inverse[stage], p.inverse + fact, kFactBytes, q_full);
    barrier_wait(&sm.grad_output_empty[stage], rows.parity ^ 1);
    barrier_expect_bytes(grad_full, sizeof(sm.grad_output[0]) + kFactBytes);
    load(sm.grad_output[stage], maps.grad_output, grad_full, row, h, item.band.s.query_batch);
    load_bytes(sm.delta[stage], p.delta + fact, kFactBytes, grad_full);
    rows.next();
  }
  EK_DEVICE void run() {
    const int group = p.H / p.G;
    while (true) {
      // Not before the consumers are at their last tile: who takes an item early and starts it late makes others wait.
      barrier_wait(&sm.q_empty[rows.stage], rows.parity ^ 1);
      barrier_wait(&sm.item_empty[queue.stage], queue.parity ^ 1);
      Item& item = sm.item[queue.stage];
      item.take(p);
      barrier_arrive(&sm.item_full[queue.stage]);
      queue.next();
      if (item.key_tile < 0) return;
      if (item.steps == 0) continue;
      load_keys(item);
      for (int h = item.g * group; h < (item.g + 1) * group; ++h)
        for (int tile = item.first_row_tile; tile < item.row_tiles; ++tile) load_rows(item, h, tile);
    }
  }
};

// Waits for the turns of the block's parts of dQ and passes them on: one thread. Its release covers what the others have
// added, since it has waited for dq_done.
template <class T>
EK_DEVICE void keep_turns(typename T::Shared& sm, const Problem& p) {
  const int group = p.H / p.G;
  Ring<kStages> queue;
  uint32_t parity = 0;
  for (;; queue.next()) {
    barrier_wait(&sm.item_full[queue.stage], queue.parity);
    const Item& item = sm.item[queue.stage];
    if (item.key_tile < 0) return;
    for (int h = item.g * group; h < (item.g + 1) * group; ++h)
      for (int tile = item.first_row_tile; tile < item.row_tiles; ++tile, parity ^= 1) {
        int* const turn = p.turn + static_cast<int64_t>(item.b * p.H + h) * p.row_tiles + tile;
        const int before = item.last_key_tile(tile) - item.key_tile;
        while (load_acquire(turn) < before) let_others_run();
        barrier_arrive(&sm.turn);
        barrier_wait(&sm.dq_done, parity);
        if (item.key_tile > 0) add_release(turn, 1);
      }
    barrier_arrive(&sm.item_empty[queue.stage]);
  }
}

// One of the two working warpgroups. kValues: the one that owns dV and finds P. Otherwise: the one that owns dK and finds dS.
//
// Arrays of products are handed from step to step and are not members, as in the kernel for smaller heads.
template <class Pairs, class T, bool kConsistent, bool kValues>
struct Consumer {
  static constexpr bool kFp16 = std::is_same_v<Pairs, Fp16Pairs>;
  static constexpr uint32_t kNext16Rows = 16 * kRowBytes;
  static constexpr int kWhich = kValues ? 0 : 1;
  static constexpr int kRowsCleared = 1;  // named barrier
  static constexpr int kOwnSize = kValues ? T::kValueSize : T::kHeadSize;
  using Scores = float[kRows / 2];           // 64 keys x 64 queries, a thread's
  using ScoreOperand = uint32_t[kRows / 4];  // the same in 16 bits: [16 queries][4]
  using Gradient = float[kOwnSize / 2];      // 64 keys x all features

  typename T::Shared& sm;
  const Problem& p;
  const int thread, warp, lane, group;
  Ring<kStages> rows, queue, shared_scores, read_scores;  // dS as written, and as read
  uint32_t item_parity = 0, probs_parity = 0, turn_parity = 0;

  EK_DEVICE Consumer(typename T::Shared& shared, const Problem& problem)
      : sm(shared),
        p(problem),
        thread(threadIdx.x % kWarpgroup),
        warp(thread / 32),
        lane(thread % 32),
        group(p.H / p.G) {}

  EK_DEVICE void arrive(uint64_t* barrier) const {  // of all lanes' accesses so far
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }

  EK_DEVICE void run() {
    Gradient gradient;
    while (true) {
      barrier_wait(&sm.item_full[queue.stage], queue.parity);
      const Item& item = sm.item[queue.stage];
      if (item.key_tile < 0) return;
      const int steps = item.steps;
#pragma unroll
      for (int i = 0; i < kOwnSize / 2; ++i) gradient[i] = 0;
      if (steps > 0) walk_rows(item, steps, gradient);
      settle(gradient);
      write_gradient(item, gradient);
    }
  }

  // All row tiles that see this key tile. dQ of a tile comes a step later, behind the products of the next: nobody waits for
  // the other warpgroup's dS.
  EK_DEVICE void walk_rows(const Item& item, int steps, Gradient& gradient) {
    await_keys(item);
    Scores scores;  // S^T, then P^T; or dP^T
    int tile = item.first_row_tile, last_tile = tile;
    await_rows(item, tile);
    begin_scores(scores);
    products_wait<0>();
    settle(scores);
    for (int step = 0; step < steps; ++step) {
      const int stage = rows.stage, done_tile = tile;
      ScoreOperand left;  // P^T or dS^T
      if constexpr (kValues) {
        find_probs(item, tile, stage, scores, left);
        arrive(&sm.q_empty[stage]);
        barrier_wait(&sm.grad_output_full[stage], rows.parity);
      } else {
        find_dscores(stage, scores, left);
        arrive(&sm.grad_output_empty[stage]);
        share_dscores(left);
      }
      add_to_gradient(stage, left, gradient);
      rows.next();
      if (step + 1 < steps) {
        tile = tile + 1 == item.row_tiles ? item.first_row_tile : tile + 1;
        await_rows(item, tile);
      }
      // After the last tile the product is of whatever lies there, and nobody reads it: a branch around a product would make
      // the compiler wait for every product.
      begin_scores(scores);
      products_wait<1>();
      arrive(kValues ? &sm.grad_output_empty[stage] : &sm.q_empty[stage]);
      if (step > 0) add_to_dq(item, head_of(item, step - 1), last_tile);
      products_wait<0>();
      settle(scores);
      last_tile = done_tile;
    }
    add_to_dq(item, head_of(item, steps - 1), last_tile);
    arrive(&sm.k_empty);
    arrive(&sm.v_empty);
  }

  // ------------------------------------------------------------------------------------------------------ load
  // Waits for the tile's keys and values; those behind the end of a sequence become zeros.
  EK_DEVICE void await_keys(const Item& item) {
    barrier_wait(&sm.k_full, item_parity);
    barrier_wait(&sm.v_full, item_parity);
    item_parity ^= 1;
    const int keys = item.band.s.keys - item.key_tile * kKeys;  // from the tile's first one on
    if (p.sequences.key_lengths && keys < kKeys) {
      zero_rows(sm.k, keys, threadIdx.x - kWarpgroup);
      zero_rows(sm.v, keys, threadIdx.x - kWarpgroup);
      store_fence();
      named_sync(kRowsCleared, kConsumerThreads);
    }
  }
  // The same of the tile's rows. dO is waited for where it is needed.
  EK_DEVICE void await_rows(const Item& item, int tile) {
    const int stage = rows.stage;
    barrier_wait(&sm.q_full[stage], rows.parity);
    if (p.sequences.query_lengths && (tile + 1) * kRows > item.band.s.rows) {
      barrier_wait(&sm.grad_output_full[stage], rows.parity);
      zero_rows(sm.q[stage], item.band.s.rows - tile * kRows, threadIdx.x - kWarpgroup);
      zero_rows(sm.grad_output[stage], item.band.s.rows - tile * kRows, threadIdx.x - kWarpgroup);
      store_fence();
      named_sync(kRowsCleared, kConsumerThreads);
    }
    if (!kValues) barrier_wait(&sm.grad_output_full[stage], rows.parity);
  }

  // ----------------------------------------------------------------------------------------------------- score
  EK_DEVICE void begin_scores(Scores& scores) {
    if constexpr (kValues)
      begin_product<T::kHeadSize, T::kBox, T::kBox, kFp16>(scores, operand(sm.k[0]),
                                                           operand(sm.q[rows.stage][0]));
    else
      begin_product<T::kValueSize, T::kBox, T::kBox, kFp16>(scores, operand(sm.v[0]),
                                                            operand(sm.grad_output[rows.stage][0]));
  }
  EK_DEVICE int head_of(const Item& item, int step) const {
    return item.g * group + (group == 1 ? 0 : step / (item.row_tiles - item.first_row_tile));
  }
  // Of the four queries that a thread has of a group of 16.
  EK_DEVICE void four_facts(const float (&facts)[kRows], int i, float (&four)[4]) const {
    const float2 low = *reinterpret_cast<const float2*>(&facts[16 * i + lane % 4 * 2]),
                 high = *reinterpret_cast<const float2*>(&facts[16 * i + lane % 4 * 2 + 8]);
    four[0] = low.x, four[1] = low.y, four[2] = high.x, four[3] = high.y;
  }
  // Where the tile crosses the diagonal or the keys' end (rows behind the end have P = 0 by their shift).
  EK_DEVICE void mask(const Item& item, int tile, Scores& scores) const {
    // The first query that sees the tile's first key, from the row tile's first.
    const int begin = item.key_tile * kKeys - item.band.offset - tile * kRows - p.right;
    const int keys = item.band.s.keys - item.key_tile * kKeys;
    if (begin <= -kKeys + 1 && keys >= kKeys) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = warp * 16 + lane / 4 + 8 * r;
      const int first_query = key < keys ? key + begin - 2 * (lane % 4) : kRows;
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * j + c < first_query) scores[4 * j + 2 * r + c] = -INFINITY;
    }
  }
  // S^T to P^T, in FP32 for the other warpgroup and packed for dV.
  EK_DEVICE void find_probs(const Item& item, int tile, int stage, Scores& scores, ScoreOperand& probs) {
    mask(item, tile, scores);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      float shift[4];
      four_facts(sm.shift[stage], i, shift);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        scores[8 * i + e] = exp2_approx(fmaf(scores[8 * i + e], p.score_log2, -shift[e / 4 * 2 + e % 2]));
    }
    if (kConsistent && *const_cast<const volatile bool*>(&sm.consistent[stage])) use_rounded(stage, scores);
    barrier_wait(&sm.probs_empty, probs_parity ^ 1);
    probs_parity ^= 1;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j)
      *reinterpret_cast<float4*>(sm.probs[j][thread]) =
          float4{scores[4 * j], scores[4 * j + 1], scores[4 * j + 2], scores[4 * j + 3]};
    arrive(&sm.probs_full);
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) probs[i] = Pairs::pack(scores[2 * i], scores[2 * i + 1]);
  }
  // The forward's rounded probabilities, over their sum.
  EK_DEVICE void use_rounded(int stage, Scores& scores) const {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      float inverse[4];
      four_facts(sm.inverse[stage], i, inverse);
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const uint32_t rounded = Pairs::pack(scores[8 * i + e], scores[8 * i + e + 1]);
        scores[8 * i + e] = Pairs::low(rounded) * inverse[e / 4 * 2];
        scores[8 * i + e + 1] = Pairs::high(rounded) * inverse[e / 4 * 2 + 1];
      }
    }
  }
  // dS^T = P^T (dP^T - delta).
  EK_DEVICE void find_dscores(int stage, const Scores& dprobs, ScoreOperand& dscores) {
    barrier_wait(&sm.probs_full, probs_parity);
    probs_parity ^= 1;
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      float delta[4];
      four_facts(sm.delta[stage], i, delta);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = 2 * i + half;
        const float4 probs = *reinterpret_cast<const float4*>(sm.probs[j][thread]);
        dscores[2 * j] = Pairs::pack(probs.x * (dprobs[4 * j] - delta[half * 2]),
                                     probs.y * (dprobs[4 * j + 1] - delta[half * 2 + 1]));
        dscores[2 * j + 1] = Pairs::pack(probs.z * (dprobs[4 * j + 2] - delta[half * 2]),
                                         probs.w * (dprobs[4 * j + 3] - delta[half * 2 + 1]));
      }
    }
    arrive(&sm.probs_empty);
  }
  // dS^T into shared memory, for both warpgroups' dQ.
  EK_DEVICE void share_dscores(const ScoreOperand& dscores) {
    const int stage = shared_scores.stage;
    // This lane's part of a stmatrix: row lane % 8 of matrix lane / 8; (key, 16-byte chunk of 8 queries).
    const int key = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t chunk = static_cast<uint32_t>((lane / 16) ^ (key & 7)) << 4;
    barrier_wait(&sm.dscores_empty[stage], shared_scores.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      store_matrices(sm.dscores[stage][key] + ((i * 32) ^ chunk), dscores[4 * i], dscores[4 * i + 1],
                     dscores[4 * i + 2], dscores[4 * i + 3]);
    store_fence();
    arrive(&sm.dscores_full[stage]);
    shared_scores.next();
  }

  // ------------------------------------------------------------------------------------------------ accumulate
  // dV += P^T dO, or dK += dS^T Q.
  EK_DEVICE void add_to_gradient(int stage, const ScoreOperand& left, Gradient& gradient) {
    const uint64_t query_rows =
        kValues ? operand(sm.grad_output[stage][0], T::kBox) : operand(sm.q[stage][0], T::kBox);
    products_begin();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      Wgmma<kOwnSize, kFp16>::template rs<true>(gradient, left[4 * i], left[4 * i + 1], left[4 * i + 2],
                                                left[4 * i + 3], advance(query_rows, i * kNext16Rows), true);
    products_commit();
  }
  // This warpgroup's features of dQ of one row tile: every second 64.
  EK_DEVICE void add_to_dq(const Item& item, int head, int tile) {
    const int stage = read_scores.stage;
    const int64_t tile_at = static_cast<int64_t>(item.b * p.H + head) * p.row_tiles + tile;
    barrier_wait(&sm.dscores_full[stage], read_scores.parity);
    read_scores.next();
#pragma unroll
    for (int box = kWhich; box < T::kHeadBoxes; box += kConsumers) {
      float dq[32];  // 64 queries x 64 features
      products_begin();
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i)
        Wgmma<64, kFp16>::template ss<true, true>(dq, advance(operand(sm.dscores[stage]), i * kNext16Rows),
                                                  advance(operand(sm.k[box]), i * kNext16Rows), i > 0);
      products_commit();
      if (box == kWhich) barrier_wait(&sm.turn, turn_parity);
      products_wait<0>();
      settle(dq);
      if (box + kConsumers >= T::kHeadBoxes) arrive(&sm.dscores_empty[stage]);
      float* const sum = p.dq_sum + ((tile_at * T::kHeadBoxes + box) * 8 * kWarpgroup + thread) * 4;
      if (item.key_tile == 0)
        finish_dq(item, head, tile, box, sum, dq);
      else
        add_part(item.last_key_tile(tile) == item.key_tile, sum, dq);
    }
    turn_parity ^= 1;
    arrive(&sm.dq_done);
  }
  EK_DEVICE static void add_part(bool is_first, float* sum, const float (&dq)[32]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 part{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
      if (is_first)
        *reinterpret_cast<float4*>(sum + i * kWarpgroup * 4) = part;
      else
        add_four_in_memory(sum + i * kWarpgroup * 4, part);
    }
  }
  // The first of its row tile's key tiles comes last: the sum of all others' parts and this one; scaled, rounded, written.
  EK_DEVICE void finish_dq(const Item& item, int head, int tile, int box, const float* sum, float (&dq)[32]) {
    if (item.last_key_tile(tile) > 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        add_four(dq, i, __ldcg(reinterpret_cast<const float4*>(sum) + i * kWarpgroup));
    }
    const int row = tile * kRows, feature = box * kBoxFeatures;
    const int exist = min(kRows, item.band.s.rows - row);
    const int all = p.sequences.query_offsets ? exist : min(kRows, p.sequences.T - row);
    write_rows<Pairs>(dq, p.scale,
                      p.dq.at(item.band.s.query_batch, head, item.band.s.first_row + row) + feature,
                      p.dq.stride[2], exist, all, p.D - feature);
  }

  // ---------------------------------------------------------------------------------------------------- finish
  // Gives the item back before dK or dV is written.
  EK_DEVICE void write_gradient(const Item& item, const Gradient& gradient) {
    const int key = item.key_tile * kKeys, exist = min(kKeys, item.band.s.keys - key);
    const int all = p.sequences.key_offsets ? exist : min(kKeys, p.sequences.N - key);
    const ampere::Strided& target = kValues ? p.dv : p.dk;
    uint16_t* const to = target.at(item.band.s.key_batch, item.g, item.band.s.first_key + key);
    arrive(&sm.item_empty[queue.stage]);
    queue.next();
    write_rows<Pairs>(gradient, kValues ? 1.0f : p.scale, to, target.stride[2], exist, all,
                      kValues ? p.Dv : p.D);
  }
};

template <class Pairs_, class T_, bool kConsistent>
struct Block {
  using Pairs = Pairs_;
  using T = T_;

  EK_DEVICE static void run(const Maps& maps, const Problem& p) {
    auto& sm = *reinterpret_cast<typename T::Shared*>(dynamic_shared());
    constexpr int kWarps = kWarpgroup / 32;  // of a warpgroup
    if (threadIdx.x == 0) {
      for (uint64_t* full : {&sm.k_full, &sm.v_full}) barrier_init(full, 1);
      for (uint64_t* empty : {&sm.k_empty, &sm.v_empty}) barrier_init(empty, kConsumerWarps);
      barrier_init(&sm.probs_full, kWarps);
      barrier_init(&sm.probs_empty, kWarps);
      for (int i = 0; i < kStages; ++i) {
        init_row_barriers(sm, i);
        barrier_init(&sm.dscores_full[i], kWarps);
        barrier_init(&sm.dscores_empty[i], kConsumerWarps);
        barrier_init(&sm.item_empty[i], kConsumerWarps + 1);
      }
      barrier_init(&sm.turn, 1);
      barrier_init(&sm.dq_done, kConsumerWarps);
      barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      give_registers<40>();
      if (threadIdx.x == 0)
        Loader<T, kConsistent>(sm, p, maps).run();
      else if (threadIdx.x == 32)
        keep_turns<T>(sm, p);
    } else {
      take_registers<232>();
      if (warpgroup == 1)
        Consumer<Pairs, T, kConsistent, true>(sm, p).run();
      else
        Consumer<Pairs, T, kConsistent, false>(sm, p).run();
    }
  }
};

// f.operator()<Block>() with the one for the problem's head sizes.
template <class Pairs, class F>
void with_block_of(const AttentionProblem& problem, F f) {
  with_large_sizes(problem, [&]<int kHeadSize, int kValueSize>() {
    using T = Tiles<kHeadSize, kValueSize>;
    if (any_head(problem, [](const HeadRules& rules) { return rules.consistent; }))
      f.template operator()<Block<Pairs, T, true>>();
    else
      f.template operator()<Block<Pairs, T, false>>();
  });
}

}  // namespace evenkeel::hopper::backward::large
