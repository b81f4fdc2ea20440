// dQ on Hopper for head sizes above 128: three products a tile, and nothing is added in memory.
//
// A block owns 128 rows of one head, 64 for each of two warpgroups, and the keys that they see stream by. Q and dO of these rows
// stay in shared memory, dQ in registers. A warpgroup asks for the scores S of the next key tile, for dS K of this one and for
// dP of the next one, in this order: P of the next tile is found while the other two products run, and dS alone is found while
// none of its own does. Then the other warpgroup's do.
//
// Per tile of 128 rows x 64 keys, with 256 features: tensor cores 3,072 clocks (2 x 3 x 2 x 64 x 64 x 256 FLOP at 4,096 a
// clock), exponentials 512. Shared memory 384 KB (3,070 clocks at 128 bytes a clock): of each warpgroup S 64, dP 64, dS K 32; K
// and V arriving 64. Registers of a thread: dQ 128, S 32, dP 32, dS packed 16.
#pragma once

#include "attention/cuda/hopper_backward_large_pass.cuh"

namespace evenkeel::hopper::backward::large {

// The work of one block at a time: 128 rows of a head, and the key tiles that some of them see: from the first one of the
// sequence on, or the first in a window, up to `tiles`.
struct RowItem {
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  int b, h, row;  // the first
  int tiles;      // where they end; 0: there is no more work
  Band band;

  EVENKEEL_HOST_DEVICE static int row_tiles(const Pass& p) { return (p.sequences.T + kRows - 1) / kRows; }
  // Where the key tiles that a warpgroup's rows see end; 0: there are none.
  EK_DEVICE int tiles_of(int warpgroup, int tile_keys) const {
    return band.end_key_tile(row + warpgroup * kWarpgroupRows, kWarpgroupRows, tile_keys);
  }
  template <Instance kInstance>
  EK_DEVICE int first_tile(int of_row, int tile_keys) const {
    return kInstance == Instance::forms ? band.first_key_tile(of_row, tile_keys) : 0;
  }
  // Rows that see no key have no item: dQ of theirs is zero already (clear_unseen_row).
  EK_DEVICE void take(const Pass& p, int tile_keys) {
    const int heads = p.B * p.H, tiles_of_head = row_tiles(p);
    do {
      tiles = 0;
      const int index = atomicAdd(p.next_item + 1, 1);
      if (index >= heads * tiles_of_head) return;
      const TilePlace place(index, tiles_of_head, heads, p.section_heads);
      row = place.tile * kRows;
      b = place.head / p.H;
      h = place.head % p.H;
      band = Band(p, b);
      tiles = band.end_key_tile(row, kRows, tile_keys);
    } while (tiles == 0);
  }
};

// kHeadSize: of queries and keys. kValueSize: of values and outputs.
template <int kHeadSize_, int kValueSize_>
struct RowTiles {
  static constexpr int kHeadSize = kHeadSize_, kValueSize = kValueSize_;
  // With 192 features, 80 instead of 64 need a twelfth less of shared memory's time.
  static constexpr int kKeys = kHeadSize == 256 ? 64 : 80;
  static constexpr int kRows = kWarpgroupRows;  // of a warpgroup, and of a box
  static constexpr int kHeadBoxes = kHeadSize / kBoxFeatures, kValueBoxes = kValueSize / kBoxFeatures;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  // The pool is what the block got at its start: 3 x 168 = 2 x 240 + 24 = 2 x 232 + 40.
  static constexpr int kWorkRegisters = kHeadSize == 256 ? 240 : 232,
                       kLoadRegisters = kHeadSize == 256 ? 24 : 40;
  static constexpr uint32_t kRowBox = kWarpgroupRows * kRowBytes, kKeyBox = kKeys * kRowBytes;
  // A tile of V is needed for one product, and later than K's: with 256 features and 64 keys there is room for one.
  static constexpr int kKeyStages = 2, kValueStages = kHeadSize == 256 ? 1 : 2;

  struct alignas(1024) Shared {
    uint8_t q[kConsumers][kHeadBoxes][kWarpgroupRows][kRowBytes];
    uint8_t grad_output[kConsumers][kValueBoxes][kWarpgroupRows][kRowBytes];
    uint8_t k[kKeyStages][kHeadBoxes][kKeys][kRowBytes];
    uint8_t v[kValueStages][kValueBoxes][kKeys][kRowBytes];
    uint64_t q_full[kConsumers], grad_output_full[kConsumers], rows_empty[kConsumers];
    uint64_t k_full[kKeyStages], k_empty[kKeyStages], v_full[kValueStages], v_empty[kValueStages];
    uint64_t item_full[kItems], item_empty[kItems];
    RowItem item[kItems];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= 227 * 1024);
};

// The thread that takes items and loads keys and values, and the one that loads their rows: neither waits for what keeps the
// other one waiting.
template <class T, Instance kInstance>
struct RowLoader {
  typename T::Shared& sm;
  const Pass& p;
  const Maps& maps;

  EK_DEVICE void load_keys() const {
    Ring<kItems> queue;
    Ring<T::kKeyStages> k;
    Ring<T::kValueStages> v;
    for (;; queue.next()) {
      barrier_wait(&sm.item_empty[queue.stage], queue.parity ^ 1);
      RowItem& item = sm.item[queue.stage];
      item.take(p, T::kKeys);
      barrier_arrive(&sm.item_full[queue.stage]);
      if (item.tiles == 0) return;
      const int g = item.h / (p.H / p.G), batch = item.band.s.key_batch, tiles = item.tiles;
      for (int tile = item.template first_tile<kInstance>(item.row, T::kKeys); tile < tiles;
           ++tile, k.next(), v.next()) {
        const int key = item.band.s.first_key + tile * T::kKeys;
        barrier_wait(&sm.k_empty[k.stage], k.parity ^ 1);
        barrier_expect_bytes(&sm.k_full[k.stage], sizeof(sm.k[0]));
        load_boxes(sm.k[k.stage], maps.k, &sm.k_full[k.stage], key, g, batch);
        barrier_wait(&sm.v_empty[v.stage], v.parity ^ 1);
        barrier_expect_bytes(&sm.v_full[v.stage], sizeof(sm.v[0]));
        load_boxes(sm.v[v.stage], maps.v, &sm.v_full[v.stage], key, g, batch);
      }
    }
  }
  EK_DEVICE void load_rows() const {
    Ring<kItems> queue;
    for (uint32_t parity = 0;; parity ^= 1, queue.next()) {
      barrier_wait(&sm.item_full[queue.stage], queue.parity);
      const RowItem& item = sm.item[queue.stage];
      if (item.tiles == 0) return;
#pragma unroll
      for (int part = 0; part < kConsumers; ++part) {
        const int row = item.band.s.first_row + item.row + part * kWarpgroupRows,
                  batch = item.band.s.query_batch;
        barrier_wait(&sm.rows_empty[part], parity ^ 1);
        barrier_expect_bytes(&sm.q_full[part], sizeof(sm.q[0]));
        load_boxes(sm.q[part], maps.q, &sm.q_full[part], row, item.h, batch);
        barrier_expect_bytes(&sm.grad_output_full[part], sizeof(sm.grad_output[0]));
        load_boxes(sm.grad_output[part], maps.grad_output, &sm.grad_output_full[part], row, item.h, batch);
      }
      barrier_arrive(&sm.item_empty[queue.stage]);
    }
  }
};

// The working warpgroup kWhich: 64 rows. Arrays of products are handed from step to step and are not members. Registers are
// short: every ring's place follows from two counters.
template <class Pairs, class T, Instance kInstance, int kWhich>
struct RowConsumer : Worker {
  static constexpr bool kConsistent = kInstance != Instance::plain, kForms = kInstance == Instance::forms;
  static constexpr bool kFp16 = std::is_same_v<Pairs, Fp16Pairs>;
  static constexpr int kNextBarrier = 1, kClearedBarrier = kNextBarrier + kConsumers;  // named barriers
  static constexpr int kScores = T::kKeys / 2;                                         // a thread's
  using Scores =
      float[kScores];  // 64 rows x kKeys keys: of a thread's two rows, r, 4 j + 2 r + c is key 8 j + c
  using ScoreOperand = uint32_t[kScores / 2];  // the same in 16 bits: [16 keys][4]
  using Gradient = float[T::kHeadSize / 2];    // 64 rows x all features
  struct Facts {                               // of the two rows
    float shift[2], delta[2], inverse[2];
    bool consistent;
  };

  typename T::Shared& sm;
  const Pass& p;
  uint32_t items = 0, keys = 0;  // before the item at hand, and tiles of keys before the one at hand

  EK_DEVICE RowConsumer(typename T::Shared& shared, const Pass& pass) : sm(shared), p(pass) {}

  EK_DEVICE const RowItem& item() const { return sm.item[items % kItems]; }
  EK_DEVICE int first_row() const { return item().row + kWhich * kWarpgroupRows; }
  EK_DEVICE uint32_t k_stage() const { return keys % T::kKeyStages; }
  EK_DEVICE uint32_t v_stage() const { return keys % T::kValueStages; }
  EK_DEVICE void wait_k() const { barrier_wait(&sm.k_full[k_stage()], keys / T::kKeyStages % 2); }
  EK_DEVICE void wait_v() const { barrier_wait(&sm.v_full[v_stage()], keys / T::kValueStages % 2); }

  // The warpgroups take turns at the tensor cores: 3 to 10 % faster (docs/kernels.md).
  EK_DEVICE void wait_turn() const { named_sync(kNextBarrier + kWhich, kConsumerThreads); }
  EK_DEVICE void pass_turn() const { named_arrive(kNextBarrier + 1 - kWhich, kConsumerThreads); }

  EK_DEVICE void run() {
    if (kWhich == 1) pass_turn();
    Gradient dq;
    while (true) {
      barrier_wait(&sm.item_full[items % kItems], items / kItems % 2);
      if (item().tiles == 0) return;
      const int begin = item().template first_tile<kInstance>(item().row, T::kKeys),
                tiles = item().tiles_of(kWhich, T::kKeys);
      const int first =
          kForms && tiles > 0 ? item().template first_tile<kInstance>(first_row(), T::kKeys) : begin;
#pragma unroll
      for (int i = 0; i < T::kHeadSize / 2; ++i) dq[i] = 0;
      barrier_wait(&sm.q_full[kWhich], items % 2);
      if (kForms) skip_keys(first - begin);
      if (tiles > 0)
        walk_keys(first, tiles, dq);
      else
        leave_rows();
      settle(dq);
      skip_keys(item().tiles - (kForms ? max(begin, tiles) : tiles));
      write_gradient(tiles > 0, dq);
      ++items;
    }
  }
  EK_DEVICE void leave_rows() {
    barrier_wait(&sm.grad_output_full[kWhich], items % 2);
    arrive(&sm.rows_empty[kWhich]);
  }
  // Tiles that only the other warpgroup's rows see. Passed on when they are there: who is far ahead would arrive twice.
  EK_DEVICE void skip_keys(int tiles) {
    for (; tiles > 0; --tiles, ++keys) {
      wait_turn();
      pass_turn();
      wait_k();
      arrive(&sm.k_empty[k_stage()]);
      wait_v();
      arrive(&sm.v_empty[v_stage()]);
    }
  }

  // The key tiles [first, end). No branch leads around a product, and none is on its way where the loop begins again: the compiler
  // would wait for every product.
  EK_DEVICE void walk_keys(int first, int end, Gradient& dq) {
    const Facts facts = find_facts();
    Scores scores, dprobs;  // S, then P; dP
    ScoreOperand dscores;
    await_keys(first);
    wait_turn();
    begin_scores(scores);
    barrier_wait(&sm.grad_output_full[kWhich], items % 2);
    await_values(first);
    begin_dprobs(dprobs);
    pass_turn();
    products_wait<1>();
    settle(scores);
    find_probs(facts, first * T::kKeys, scores);
    products_wait<0>();
    settle(dprobs);
    find_dscores(facts, scores, dprobs, dscores);
#pragma unroll 1
    for (int tile = first + 1; tile < end; ++tile) {
      const uint32_t stage = k_stage();
      ++keys;
      await_keys(tile);
      wait_turn();
      begin_scores(scores);
      add_to_dq(stage, dscores, dq);
      await_values(tile);
      begin_dprobs(dprobs);
      pass_turn();
      products_wait<2>();
      settle(scores);
      find_probs(facts, tile * T::kKeys, scores);
      hold_all(scores, p.below_all);
      products_wait<1>();
      arrive(&sm.k_empty[stage]);
      products_wait<0>();
      settle(dprobs);
      find_dscores(facts, scores, dprobs, dscores);
    }
    arrive(&sm.rows_empty[kWhich]);
    add_to_dq(k_stage(), dscores, dq);
    products_wait<0>();
    arrive(&sm.k_empty[k_stage()]);
    ++keys;
  }

  // ------------------------------------------------------------------------------------------------------ load
  // Rows behind the end of a sequence have P = 0 by their shift, and nobody writes what comes of them.
  EK_DEVICE Facts find_facts() const {
    Facts facts;
    const int64_t head = static_cast<int64_t>(item().b * p.H + item().h) * p.padded_rows;
    const int row = first_row() + warp * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      facts.shift[r] = p.shift[head + row + 8 * r];
      facts.delta[r] = p.delta[head + row + 8 * r];
      facts.inverse[r] = (kForms ? p.inverse != nullptr : kConsistent) ? p.inverse[head + row + 8 * r] : 0.0f;
    }
    facts.consistent = kConsistent && p.rules_of(item().h).consistent;
    return facts;
  }
  // Waits for a tile. What lies behind the end of a sequence may be anything, and 0 * NaN is NaN. Each warpgroup clears it for
  // itself: doing it twice does no harm.
  EK_DEVICE void await_keys(int tile) const {
    wait_k();
    clear_keys(tile, sm.k[k_stage()]);
  }
  EK_DEVICE void await_values(int tile) const {
    wait_v();
    clear_keys(tile, sm.v[v_stage()]);
  }
  template <int kBoxes>
  EK_DEVICE void clear_keys(int tile, uint8_t (&keys_or_values)[kBoxes][T::kKeys][kRowBytes]) const {
    if (!p.sequences.key_lengths) return;
    const int exist = item().band.s.keys - tile * T::kKeys;
    if (exist >= T::kKeys) return;
    zero_rows<kWarpgroup>(keys_or_values, exist, thread);
    store_fence();
    named_sync(kClearedBarrier + kWhich, kWarpgroup);
  }

  // ----------------------------------------------------------------------------------------------------- score
  // An operand further on. The compiler knows it to be uniform, and finds it anew for each product: descriptors that it keeps
  // from tile to tile are spilled.
  EK_DEVICE static uint64_t stage_of(uint64_t operand, uint32_t bytes) {
    return (operand & 0xffffffff00000000ull) | warp_uniform(static_cast<uint32_t>(operand) + (bytes >> 4));
  }
  EK_DEVICE void begin_scores(Scores& scores) const {
    begin_product<T::kHeadSize, T::kRowBox, T::kKeyBox, kFp16>(
        scores, stage_of(operand(sm.q[kWhich][0]), 0),
        stage_of(operand(sm.k[0][0]), keys % T::kKeyStages * sizeof(sm.k[0])));
  }
  EK_DEVICE void begin_dprobs(Scores& dprobs) const {
    begin_product<T::kValueSize, T::kRowBox, T::kKeyBox, kFp16>(
        dprobs, stage_of(operand(sm.grad_output[kWhich][0]), 0),
        stage_of(operand(sm.v[0][0]), keys % T::kValueStages * sizeof(sm.v[0])));
  }
  // dQ += dS K.
  EK_DEVICE void add_to_dq(uint32_t stage, const ScoreOperand& dscores, Gradient& dq) const {
    add_product<T::kHeadSize, kFp16>(dscores,
                                     stage_of(operand(sm.k[0][0], T::kKeyBox), stage * sizeof(sm.k[0])), dq);
  }
  // Soft caps (the scores are then tanh), slopes, and what a mask of its own hides.
  EK_DEVICE void shape(int key, Scores& scores) const {
    const RowItem& item = this->item();
    shape_scores<1>(p, item.band, item.b, item.h, first_row(), key, scores, [&](int i) {
      return Place{warp * 16 + lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
    });
  }
  // Where some row does not see all of the tile that begins with `key`.
  EK_DEVICE void mask(int key, Scores& scores) const {
    const Band& band = item().band;
    const int row = first_row();
    const bool from_first = !kForms || key >= band.first_key(row + kWarpgroupRows - 1);
    if (from_first && key + T::kKeys <= band.end_key(row)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = row + warp * 16 + lane / 4 + 8 * r;
      const int end = band.end_key(own) - key - lane % 4 * 2,
                first = kForms ? band.first_key(own) - key - lane % 4 * 2 : 0;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * j + c >= end || (kForms && 8 * j + c < first)) scores[4 * j + 2 * r + c] = -INFINITY;
    }
  }
  // S to P, of the tile that begins with `key`. With a soft cap to what dP - delta is multiplied by.
  EK_DEVICE void find_probs(const Facts& facts, int key, Scores& scores) const {
    if constexpr (kForms)
      if (p.shaped) shape(key, scores);
    mask(key, scores);
    if (kForms && p.softcap > 0) return weigh(facts, scores);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = exponentiated(facts, i, scores[i]);
    if (kConsistent && facts.consistent) {
#pragma unroll
      for (int i = 0; i < kScores; i += 2) use_rounded(facts, i, scores);
    }
  }
  EK_DEVICE void weigh(const Facts& facts, Scores& scores) const {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      float slopes[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        slopes[c] = 1 - scores[i + c] * scores[i + c];
        scores[i + c] = exponentiated(facts, i, scores[i + c]);
      }
      if (facts.consistent) use_rounded(facts, i, scores);
#pragma unroll
      for (int c = 0; c < 2; ++c) scores[i + c] = weight_of(scores[i + c], slopes[c]);
    }
  }
  EK_DEVICE float exponentiated(const Facts& facts, int i, float score) const {
    return exp2_approx(fmaf(score, p.score_log2, -facts.shift[i / 2 % 2]));
  }
  // The forward's rounded probabilities, over their sum.
  EK_DEVICE static void use_rounded(const Facts& facts, int i, Scores& scores) {
    const uint32_t rounded = Pairs::pack(scores[i], scores[i + 1]);
    scores[i] = Pairs::low(rounded) * facts.inverse[i / 2 % 2];
    scores[i + 1] = Pairs::high(rounded) * facts.inverse[i / 2 % 2];
  }
  // dS = P (dP - delta), packed. V's tile is given back.
  EK_DEVICE void find_dscores(const Facts& facts, const Scores& probs, const Scores& dprobs,
                              ScoreOperand& dscores) {
    arrive(&sm.v_empty[v_stage()]);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const float delta = facts.delta[i / 2 % 2];
      dscores[i / 2] = Pairs::pack(probs[i] * (dprobs[i] - delta), probs[i + 1] * (dprobs[i + 1] - delta));
    }
  }

  // ---------------------------------------------------------------------------------------------------- finish
  // Gives the item back before dQ is written.
  EK_DEVICE void write_gradient(bool sees_keys, const Gradient& dq) {
    const Sequence& s = item().band.s;
    const int row = first_row(), exist = min(kWarpgroupRows, s.rows - row);
    const int all = p.sequences.query_offsets ? exist : min(kWarpgroupRows, p.sequences.T - row);
    uint16_t* const to = p.dq.at(s.query_batch, item().h, s.first_row + row);
    arrive(&sm.item_empty[items % kItems]);
    if (sees_keys) write_rows<Pairs>(dq, p.scale, to, p.dq.stride[2], exist, all, p.D);
  }
};

template <class Pairs, class T_, Instance kInstance>
struct RowBlock {
  using T = T_;
  static int items(const Pass& p) { return p.B * p.H * RowItem::row_tiles(p); }

  EK_DEVICE static void run(const Maps& maps, const Pass& p) {
    auto& sm = *reinterpret_cast<typename T::Shared*>(dynamic_shared());
    constexpr int kWarps = kWarpgroup / 32;  // of a warpgroup
    if (threadIdx.x == 0) {
      for (int i = 0; i < kConsumers; ++i) {
        barrier_init(&sm.q_full[i], 1), barrier_init(&sm.grad_output_full[i], 1);
        barrier_init(&sm.rows_empty[i], kWarps);
      }
      for (int i = 0; i < T::kKeyStages; ++i)
        barrier_init(&sm.k_full[i], 1), barrier_init(&sm.k_empty[i], kConsumerWarps);
      for (int i = 0; i < T::kValueStages; ++i)
        barrier_init(&sm.v_full[i], 1), barrier_init(&sm.v_empty[i], kConsumerWarps);
      for (int i = 0; i < kItems; ++i)
        barrier_init(&sm.item_full[i], 1), barrier_init(&sm.item_empty[i], kConsumerWarps + 1);
      barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      give_registers<T::kLoadRegisters>();
      const RowLoader<T, kInstance> loader{sm, p, maps};
      if (threadIdx.x == 0)
        loader.load_keys();
      else if (threadIdx.x == 32)
        loader.load_rows();
    } else {
      take_registers<T::kWorkRegisters>();
      if (warpgroup == 1)
        RowConsumer<Pairs, T, kInstance, 0>(sm, p).run();
      else
        RowConsumer<Pairs, T, kInstance, 1>(sm, p).run();
    }
  }
};

}  // namespace evenkeel::hopper::backward::large
