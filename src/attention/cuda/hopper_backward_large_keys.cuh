// dK and dV on Hopper for head sizes above 128: four products a tile.
//
// A block owns 64 keys of one kv head, and the queries that see them stream by. Scores are held transposed, [key][query], so
// that P^T and dS^T are operands from registers as they come. dK and dV of 64 keys take 256 registers of a warpgroup's
// threads. So one warpgroup owns dV and finds P; the other one owns dK and finds dS from the first one's P, which comes
// through shared memory in FP32.
//
// Per step of 64 keys x 64 rows, with 256 features: tensor cores 2,048 clocks (4 x 2 x 64 x 64 x 256 FLOP at 4,096 a clock),
// shared memory 288 KB (2,304 clocks at 128 bytes a clock): S 64, dP 64, dV 32, dK 32, P written and read 32, Q and dO
// arriving 64. Registers of a thread: dV or dK 128, scores 32, the same packed 16.
#pragma once

#include "attention/cuda/hopper_backward_large_pass.cuh"

namespace evenkeel::hopper::backward::large {

// The work of one block at a time: a key tile of a kv head, and the row tiles of its group's heads that see it.
// It lies in shared memory: registers are short.
struct KeyItem {
  int b, g, key_tile;             // key_tile < 0: there is no more work
  int first_row_tile, row_tiles;  // of each head: [first, row_tiles)
  int steps;                      // row tiles of all heads
  Band band;

  EK_DEVICE void take(const Pass& p, int tile_rows) {
    constexpr int kKeys = kWarpgroupRows;  // of a tile
    static_assert(ampere::BackwardTiles<256, false>::kKeys == kKeys);
    const int index = atomicAdd(p.next_item, 1), heads = p.B * p.G;
    key_tile = -1;
    if (index >= heads * p.key_tiles) return;
    const TilePlace place(index, p.key_tiles, heads, p.section_heads);
    key_tile = p.key_tiles - 1 - place.tile;  // with a causal mask most rows see the first
    b = place.head / p.G;
    g = place.head % p.G;
    band = Band(p, b);
    first_row_tile = band.first_row_tile(key_tile * kKeys, tile_rows);
    row_tiles = band.end_row_tile(key_tile * kKeys, kKeys, tile_rows);
    steps = max(0, row_tiles - first_row_tile) * (p.H / p.G);
  }
};

// kHeadSize: of queries and keys. kValueSize: of values and outputs. kAhead: the scores of the next row tile are asked for
// before the product with this one's, and a row tile stays longer: where there is room for three. With values of 128 it was
// slower (docs/kernels.md). The bits are the same.
template <int kHeadSize_, int kValueSize_>
struct KeyTiles {
  static constexpr int kHeadSize = kHeadSize_, kValueSize = kValueSize_;
  static constexpr int kHeadBoxes = kHeadSize / kBoxFeatures, kValueBoxes = kValueSize / kBoxFeatures;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kKeys = kWarpgroupRows, kRows = 64;  // of a tile
  static constexpr bool kAhead = kHeadSize < 256 && kValueSize != 128;
  static constexpr int kRowStages = kAhead ? 3 : 2;
  static constexpr uint32_t kKeyBox = kKeys * kRowBytes, kRowBox = kRows * kRowBytes;

  struct alignas(1024) Shared {
    uint8_t k[kHeadBoxes][kKeys][kRowBytes], v[kValueBoxes][kKeys][kRowBytes];
    uint8_t q[kRowStages][kHeadBoxes][kRows][kRowBytes];
    uint8_t grad_output[kRowStages][kValueBoxes][kRows][kRowBytes];
    float probs[kRows / 8][kWarpgroup][4];  // P^T as the threads hold it
    float shift[kRowStages][kRows], inverse[kRowStages][kRows], delta[kRowStages][kRows];
    uint64_t k_full, k_empty, v_full, v_empty, probs_full, probs_empty;
    uint64_t q_full[kRowStages], q_empty[kRowStages], grad_output_full[kRowStages],
        grad_output_empty[kRowStages];
    uint64_t item_full[kItems], item_empty[kItems];
    KeyItem item[kItems];
    bool consistent[kRowStages];  // are these rows' heads?
    int head[kRowStages];         // Instance::forms: whose rows these are
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= 227 * 1024);
};

// The thread that loads everything.
template <class T, Instance kInstance>
struct KeyLoader {
  static constexpr bool kConsistent = kInstance != Instance::plain, kForms = kInstance == Instance::forms;
  static constexpr int kKeys = T::kKeys, kRows = T::kRows;

  typename T::Shared& sm;
  const Pass& p;
  const Maps& maps;
  Ring<T::kRowStages> rows;
  Ring<kItems> queue;
  uint32_t parity = 0;  // of k and v

  EK_DEVICE KeyLoader(typename T::Shared& shared, const Pass& pass, const Maps& of)
      : sm(shared), p(pass), maps(of) {}

  EK_DEVICE void load_keys(const KeyItem& item) {
    const int key = item.band.s.first_key + item.key_tile * kKeys;
    barrier_wait(&sm.k_empty, parity ^ 1);
    barrier_expect_bytes(&sm.k_full, sizeof(sm.k));
    load_boxes(sm.k, maps.k, &sm.k_full, key, item.g, item.band.s.key_batch);
    barrier_wait(&sm.v_empty, parity ^ 1);
    barrier_expect_bytes(&sm.v_full, sizeof(sm.v));
    load_boxes(sm.v, maps.v, &sm.v_full, key, item.g, item.band.s.key_batch);
    parity ^= 1;
  }
  EK_DEVICE void load_rows(const KeyItem& item, int h, int tile) {
    constexpr uint32_t kFactBytes = kRows * sizeof(float);
    const int row = item.band.s.first_row + tile * kRows, stage = rows.stage;
    const int64_t fact = static_cast<int64_t>(item.b * p.H + h) * p.padded_rows + tile * kRows;
    uint64_t *const q_full = &sm.q_full[stage], *const grad_full = &sm.grad_output_full[stage];
    barrier_wait(&sm.q_empty[stage], rows.parity ^ 1);
    if (kConsistent) sm.consistent[stage] = p.rules_of(h).consistent;
    if (kForms) sm.head[stage] = h;
    const bool has_inverse = kForms ? p.inverse != nullptr : kConsistent;
    barrier_expect_bytes(q_full, sizeof(sm.q[0]) + kFactBytes * (has_inverse ? 2 : 1));
    load_boxes(sm.q[stage], maps.q, q_full, row, h, item.band.s.query_batch);
    load_bytes(sm.shift[stage], p.shift + fact, kFactBytes, q_full);
    if (has_inverse) load_bytes(sm.inverse[stage], p.inverse + fact, kFactBytes, q_full);
    barrier_wait(&sm.grad_output_empty[stage], rows.parity ^ 1);
    barrier_expect_bytes(grad_full, sizeof(sm.grad_output[0]) + kFactBytes);
    load_boxes(sm.grad_output[stage], maps.grad_output, grad_full, row, h, item.band.s.query_batch);
    load_bytes(sm.delta[stage], p.delta + fact, kFactBytes, grad_full);
    rows.next();
  }
  EK_DEVICE void run() {
    const int group = p.H / p.G;
    while (true) {
      barrier_wait(&sm.item_empty[queue.stage], queue.parity ^ 1);
      KeyItem& item = sm.item[queue.stage];
      item.take(p, kRows);
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

// One of the two working warpgroups. kValues: the one that owns dV and finds P. Otherwise: the one that owns dK and finds dS.
//
// Arrays of products are handed from step to step and are not members, as in the kernel for smaller heads.
template <class Pairs, class T, Instance kInstance, bool kValues>
struct KeyConsumer : Worker {
  static constexpr bool kConsistent = kInstance != Instance::plain, kForms = kInstance == Instance::forms;
  static constexpr bool kFp16 = std::is_same_v<Pairs, Fp16Pairs>;
  static constexpr int kKeys = T::kKeys, kRows = T::kRows;
  static constexpr int kRowsCleared = 1;  // named barrier
  static constexpr int kOwnSize = kValues ? T::kValueSize : T::kHeadSize;
  using Scores = float[kRows / 2];           // 64 keys x 64 queries, a thread's
  using ScoreOperand = uint32_t[kRows / 4];  // the same in 16 bits: [16 queries][4]
  using Gradient = float[kOwnSize / 2];      // 64 keys x all features

  typename T::Shared& sm;
  const Pass& p;
  Ring<T::kRowStages> rows;
  Ring<kItems> queue;
  uint32_t item_parity = 0, probs_parity = 0;

  EK_DEVICE KeyConsumer(typename T::Shared& shared, const Pass& pass) : sm(shared), p(pass) {}

  EK_DEVICE void run() {
    Gradient gradient;
    while (true) {
      barrier_wait(&sm.item_full[queue.stage], queue.parity);
      const KeyItem& item = sm.item[queue.stage];
      if (item.key_tile < 0) return;
      const int steps = item.steps;
#pragma unroll
      for (int i = 0; i < kOwnSize / 2; ++i) gradient[i] = 0;
      if (steps > 0) walk_rows(item, steps, gradient);
      settle(gradient);
      write_gradient(item, gradient);
    }
  }

  // All row tiles that see this key tile. No branch leads around a product, and none is on its way where the loop begins again:
  // the compiler would wait for every product. So the last step stands behind the loop.
  EK_DEVICE void walk_rows(const KeyItem& item, int steps, Gradient& gradient) {
    barrier_wait(kValues ? &sm.k_full : &sm.v_full, item_parity);
    item_parity ^= 1;
    Scores scores;      // S^T, then P^T; or dP^T, then dS^T
    ScoreOperand left;  // P^T or dS^T
    int tile = item.first_row_tile;
    await_rows(item, tile);
    begin_scores(scores);
    products_wait<0>();
    settle(scores);
    if constexpr (T::kAhead) {
      find(item, tile, scores);
      pack(scores, left);
    }
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      const int stage = rows.stage, next = tile + 1 == item.row_tiles ? item.first_row_tile : tile + 1;
      if constexpr (T::kAhead) {
        rows.next();
        await_rows(item, next);
        begin_scores(scores);
        add_to_gradient(stage, left, gradient);
        products_wait<1>();
        settle(scores);
        find(item, next, scores);
        hold_all(scores);
        products_wait<0>();
        release_second(stage);
        pack(scores, left);
      } else {
        find(item, tile, scores);
        pack(scores, left);
        add_to_gradient(stage, left, gradient);
        rows.next();
        await_rows(item, next);
        begin_scores(scores);
        products_wait<1>();
        release_second(stage);
        products_wait<0>();
        settle(scores);
      }
      tile = next;
    }
    arrive(kValues ? &sm.k_empty : &sm.v_empty);
    if constexpr (!T::kAhead) {
      find(item, tile, scores);
      pack(scores, left);
    }
    add_to_gradient(rows.stage, left, gradient);
    products_wait<0>();
    release_second(rows.stage);
    rows.next();
  }

  // ------------------------------------------------------------------------------------------------------ load
  // Waits for the tile's rows; those behind the end of a sequence become zeros. dO is waited for where it is needed. Keys behind
  // the end may hold anything: what comes of them is not written.
  EK_DEVICE void await_rows(const KeyItem& item, int tile) {
    const int stage = rows.stage;
    if (kValues) barrier_wait(&sm.q_full[stage], rows.parity);
    if (p.sequences.query_lengths && (tile + 1) * kRows > item.band.s.rows) {
      barrier_wait(&sm.q_full[stage], rows.parity);
      barrier_wait(&sm.grad_output_full[stage], rows.parity);
      zero_rows(sm.q[stage], item.band.s.rows - tile * kRows, threadIdx.x - kWarpgroup);
      zero_rows(sm.grad_output[stage], item.band.s.rows - tile * kRows, threadIdx.x - kWarpgroup);
      store_fence();
      named_sync(kRowsCleared, kConsumerThreads);
    }
    if (!kValues) barrier_wait(&sm.grad_output_full[stage], rows.parity);
  }
  // The operand of the second product, which the other warpgroup's first one reads too.
  EK_DEVICE void release_second(int stage) {
    arrive(kValues ? &sm.grad_output_empty[stage] : &sm.q_empty[stage]);
  }

  // ----------------------------------------------------------------------------------------------------- score
  EK_DEVICE void begin_scores(Scores& scores) {
    if constexpr (kValues)
      begin_product<T::kHeadSize, T::kKeyBox, T::kRowBox, kFp16>(scores, operand(sm.k[0]),
                                                                 operand(sm.q[rows.stage][0]));
    else
      begin_product<T::kValueSize, T::kKeyBox, T::kRowBox, kFp16>(scores, operand(sm.v[0]),
                                                                  operand(sm.grad_output[rows.stage][0]));
  }
  // Of the four queries that a thread has of a group of 16.
  EK_DEVICE void four_facts(const float (&facts)[kRows], int i, float (&four)[4]) const {
    const float2 low = *reinterpret_cast<const float2*>(&facts[16 * i + lane % 4 * 2]),
                 high = *reinterpret_cast<const float2*>(&facts[16 * i + lane % 4 * 2 + 8]);
    four[0] = low.x, four[1] = low.y, four[2] = high.x, four[3] = high.y;
  }
  // Soft caps (the scores are then tanh), slopes, and what a mask of its own hides.
  EK_DEVICE void shape(const KeyItem& item, int tile, int stage, Scores& scores) const {
    const int head = *const_cast<const volatile int*>(&sm.head[stage]);
    shape_scores<8>(p, item.band, item.b, head, tile * kRows, item.key_tile * kKeys, scores, [&](int i) {
      return Place{i / 4 * 8 + lane % 4 * 2 + i % 2, warp * 16 + lane / 4 + i / 2 % 2 * 8};
    });
  }
  // Where the tile crosses the band's edges or the keys' end (rows behind the end have P = 0 by their shift).
  EK_DEVICE void mask(const KeyItem& item, int tile, Scores& scores) const {
    // The first query that sees the tile's first key, from the row tile's first; and the last one.
    const int begin = item.key_tile * kKeys - item.band.offset - tile * kRows - p.right;
    const int end = begin + p.right + p.left;
    const int keys = item.band.s.keys - item.key_tile * kKeys;
    if (begin <= -kKeys + 1 && keys >= kKeys && (!kForms || end >= kRows - 1)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = warp * 16 + lane / 4 + 8 * r;
      const int first_query = key < keys ? key + begin - 2 * (lane % 4) : kRows;
      const int last_query = key + end - 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * j + c < first_query || (kForms && 8 * j + c > last_query))
            scores[4 * j + 2 * r + c] = -INFINITY;
    }
  }
  // What the first product left to what the second one takes, in FP32; the first one's rows are given back.
  EK_DEVICE void find(const KeyItem& item, int tile, Scores& scores) {
    const int stage = rows.stage;
    if constexpr (kValues) {
      find_probs(item, tile, stage, scores);
      arrive(&sm.q_empty[stage]);
      barrier_wait(&sm.grad_output_full[stage], rows.parity);
    } else {
      find_dscores(stage, scores);
      arrive(&sm.grad_output_empty[stage]);
      barrier_wait(&sm.q_full[stage], rows.parity);
    }
  }
  EK_DEVICE static void pack(const Scores& scores, ScoreOperand& left) {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) left[i] = Pairs::pack(scores[2 * i], scores[2 * i + 1]);
  }
  EK_DEVICE void hold_all(const Scores& scores) const { large::hold_all(scores, p.below_all); }
  // S^T to P^T, which the other warpgroup takes in FP32.
  EK_DEVICE void find_probs(const KeyItem& item, int tile, int stage, Scores& scores) {
    if constexpr (kForms)
      if (p.shaped) shape(item, tile, stage, scores);
    mask(item, tile, scores);
    if (kForms && p.softcap > 0) return weigh(stage, scores);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      float shift[4];
      four_facts(sm.shift[stage], i, shift);
#pragma unroll
      for (int e = 0; e < 8; ++e) exponentiate(scores[8 * i + e], shift[e / 4 * 2 + e % 2]);
    }
    if constexpr (kConsistent) {
      if (is_consistent(stage)) {
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i) use_rounded(i, stage, scores);
      }
    }
    await_place();
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j)
      share(j, scores[4 * j], scores[4 * j + 1], scores[4 * j + 2], scores[4 * j + 3]);
    arrive(&sm.probs_full);
  }
  // The same with a soft cap: tanh to P^T. The other warpgroup takes what dP - delta is multiplied by.
  EK_DEVICE void weigh(int stage, Scores& scores) {
    const bool rounded = is_consistent(stage);
    await_place();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      float shift[4], weights[8];  // first the slopes of tanh
      four_facts(sm.shift[stage], i, shift);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        weights[e] = 1 - scores[8 * i + e] * scores[8 * i + e];
        exponentiate(scores[8 * i + e], shift[e / 4 * 2 + e % 2]);
      }
      if (rounded) use_rounded(i, stage, scores);
#pragma unroll
      for (int e = 0; e < 8; ++e) weights[e] = weight_of(scores[8 * i + e], weights[e]);
      share(2 * i, weights[0], weights[1], weights[2], weights[3]);
      share(2 * i + 1, weights[4], weights[5], weights[6], weights[7]);
    }
    arrive(&sm.probs_full);
  }
  EK_DEVICE bool is_consistent(int stage) const {
    return kConsistent && *const_cast<const volatile bool*>(&sm.consistent[stage]);
  }
  EK_DEVICE void exponentiate(float& score, float shift) const {
    score = exp2_approx(fmaf(score, p.score_log2, -shift));
  }
  // The forward's rounded probabilities, over their sum, of 16 rows.
  EK_DEVICE void use_rounded(int i, int stage, Scores& scores) const {
    float inverse[4];
    four_facts(sm.inverse[stage], i, inverse);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const uint32_t rounded = Pairs::pack(scores[8 * i + e], scores[8 * i + e + 1]);
      scores[8 * i + e] = Pairs::low(rounded) * inverse[e / 4 * 2];
      scores[8 * i + e + 1] = Pairs::high(rounded) * inverse[e / 4 * 2 + 1];
    }
  }
  // The place where the other warpgroup finds P.
  EK_DEVICE void await_place() {
    barrier_wait(&sm.probs_empty, probs_parity ^ 1);
    probs_parity ^= 1;
  }
  EK_DEVICE void share(int j, float x, float y, float z, float w) const {
    *reinterpret_cast<float4*>(sm.probs[j][thread]) = float4{x, y, z, w};
  }
  // dP^T to dS^T = P^T (dP^T - delta).
  EK_DEVICE void find_dscores(int stage, Scores& dprobs) {
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
        dprobs[4 * j] = probs.x * (dprobs[4 * j] - delta[half * 2]);
        dprobs[4 * j + 1] = probs.y * (dprobs[4 * j + 1] - delta[half * 2 + 1]);
        dprobs[4 * j + 2] = probs.z * (dprobs[4 * j + 2] - delta[half * 2]);
        dprobs[4 * j + 3] = probs.w * (dprobs[4 * j + 3] - delta[half * 2 + 1]);
      }
    }
    arrive(&sm.probs_empty);
  }

  // ------------------------------------------------------------------------------------------------ accumulate
  // dV += P^T dO, or dK += dS^T Q.
  EK_DEVICE void add_to_gradient(int stage, const ScoreOperand& left, Gradient& gradient) {
    add_product<kOwnSize, kFp16>(
        left, kValues ? operand(sm.grad_output[stage][0], T::kRowBox) : operand(sm.q[stage][0], T::kRowBox),
        gradient);
  }

  // ---------------------------------------------------------------------------------------------------- finish
  // Gives the item back before dK or dV is written.
  EK_DEVICE void write_gradient(const KeyItem& item, const Gradient& gradient) {
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

template <class Pairs, class T_, Instance kInstance>
struct KeyBlock {
  using T = T_;
  static int items(const Pass& p) { return p.B * p.G * p.key_tiles; }

  EK_DEVICE static void run(const Maps& maps, const Pass& p) {
    auto& sm = *reinterpret_cast<typename T::Shared*>(dynamic_shared());
    constexpr int kWarps = kWarpgroup / 32;  // of a warpgroup
    if (threadIdx.x == 0) {
      for (uint64_t* full : {&sm.k_full, &sm.v_full}) barrier_init(full, 1);
      for (uint64_t* one : {&sm.k_empty, &sm.v_empty, &sm.probs_full, &sm.probs_empty})
        barrier_init(one, kWarps);
      for (int i = 0; i < T::kRowStages; ++i) {
        barrier_init(&sm.q_full[i], 1), barrier_init(&sm.q_empty[i], kConsumerWarps);
        barrier_init(&sm.grad_output_full[i], 1), barrier_init(&sm.grad_output_empty[i], kConsumerWarps);
      }
      for (int i = 0; i < kItems; ++i)
        barrier_init(&sm.item_full[i], 1), barrier_init(&sm.item_empty[i], kConsumerWarps);
      barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      give_registers<40>();
      if (threadIdx.x == 0) KeyLoader<T, kInstance>(sm, p, maps).run();
    } else {
      take_registers<232>();
      if (warpgroup == 1)
        KeyConsumer<Pairs, T, kInstance, true>(sm, p).run();
      else
        KeyConsumer<Pairs, T, kInstance, false>(sm, p).run();
    }
  }
};

}  // namespace evenkeel::hopper::backward::large
