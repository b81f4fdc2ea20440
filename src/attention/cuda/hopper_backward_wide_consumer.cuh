// The work of a consumer warpgroup of Hopper's backward pass at head size 128, step by step. Included by
// hopper_backward_kernel.cuh alone.
#pragma once

#include "attention/cuda/hopper_backward_scores.cuh"

namespace evenkeel::hopper::backward {

// One consumer warpgroup: 64 keys of the tile, 64 queries a step, all features.
//
// Products of a step, in the order in which the tensor cores get them: S, dP, dV, dQ, dK.
//
// Operands of products are found from numbers that the compiler knows to be the same in all threads of a warp (warp_uniform).
// It then keeps their descriptors in uniform registers. Else four moves stand before every product, and the tensor cores wait.
template <class Pairs, Consistent kConsistent, Form kForm>
struct WideConsumer : ScoreWork<Pairs, 128, kConsistent, kForm> {
  using Work = ScoreWork<Pairs, 128, kConsistent, kForm>;
  using typename Work::Gradient;
  using typename Work::ScoreOperand;
  using typename Work::Scores;
  using Work::consumer, Work::group, Work::kFp16, Work::kKeyBox, Work::kNext16Rows, Work::kRowBox,
      Work::kRows, Work::lane, Work::p, Work::sm, Work::thread, Work::warp;
  static constexpr int kGroups = kRows / 16;
  static constexpr int kRowsCleared = 1, kScoresShared = 2;  // named barriers

  Ring<kStages> queue;
  uint32_t item_parity = 0;
  // Steps of all items before this one. Every ring advances once a step (registers are short).
  uint32_t count = 0;
  // This lane's part of a stmatrix into dS: row lane % 8 of matrix lane / 8; (query, 16-byte chunk of 8 keys).
  const uint32_t store_offset;

  EK_DEVICE WideConsumer(SharedMemory<128>& shared, const Backward& problem, int which)
      : Work(shared, problem, which),
        store_offset(swizzled(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2)) {}

  EK_DEVICE static uint32_t stage_of(uint32_t n) { return warp_uniform(n % kStages); }
  EK_DEVICE static uint32_t parity_of(uint32_t n) { return n / kStages % 2; }

  EK_DEVICE void run() {
    Gradient dk, dv;
    while (true) {
      barrier_wait(&sm.item_full[queue.stage], queue.parity);
      const volatile Item& item = sm.item[queue.stage];  // volatile: read again where needed, not kept
      if (item.key_tile < 0) return;
      const int steps = item.steps;
#pragma unroll
      for (int i = 0; i < 64; ++i) dk[i] = dv[i] = 0;
      if (steps > 0) walk_rows(item, steps, dk, dv);
      settle(dk);
      settle(dv);
      write_gradients(item, dk, dv);
    }
  }

  // All row tiles that see this key tile. No product is on its way where the loop begins again, and no branch leads around one:
  // the compiler would wait for every product.
  EK_DEVICE void walk_rows(const volatile Item& item, int steps, Gradient& dk, Gradient& dv) {
    await_keys(item);
    int tile = item.first_row_tile;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const uint32_t stage = stage_of(count);
      await_rows(item, tile);
      Scores scores, dprobs;  // S^T, then P^T; dP^T
      begin_scores(stage, scores);
      begin_dprobs(stage, dprobs);
      float4 shifts[kGroups];  // read before the products are waited for
#pragma unroll
      for (int i = 0; i < kGroups; ++i) shifts[i] = this->four_facts(sm.shift[stage], i);
      const bool edge = typename Work::Edges(p, item, tile).cross();
      products_wait<1>();
      settle(scores);
      if (kForm == Form::capped || (kForm == Form::banded && p.shaped))
        this->shape_scores(item, step, tile, scores);
      if (edge) this->mask(typename Work::Edges(p, item, tile), scores);
      ScoreOperand probs, dscores;
      find_probs(stage, shifts, scores, probs);
      products_wait<0>();
      settle(dprobs);
      if (step + 1 == steps) release(&sm.v_empty);
      find_dscores(stage, scores, dprobs, dscores);
      share_dscores(dscores);
      add_to_dv(stage, probs, dv);
      named_sync(kScoresShared, kConsumerThreads);  // the other warpgroup's keys of dS are there
      float dq[32];                                 // 64 queries x 64 features
      begin_dq(dq);
      add_to_dk(stage, dscores, dk);
      products_wait<1>();  // dV and dQ are there
      settle(dq);
      release(&sm.grad_output_empty[stage]);
      pass_on_dq(item, step, tile, dq);
      products_wait<0>();
      release(&sm.q_empty[stage]);
      ++count;
      tile = tile + 1 == item.row_tiles ? item.first_row_tile : tile + 1;
    }
    release(&sm.k_empty);
  }
  EK_DEVICE void release(uint64_t* empty) {
    if (lane == 0) barrier_arrive(empty);
  }

  // ------------------------------------------------------------------------------------------------------ load
  // Waits for the tile's keys and values; those behind the end of a sequence become zeros.
  EK_DEVICE void await_keys(const volatile Item& item) {
    barrier_wait(&sm.k_full, item_parity);
    barrier_wait(&sm.v_full, item_parity);
    item_parity ^= 1;
    const int keys = item.keys - item.key_tile * kTileKeys;  // from the tile's first one on
    if (p.sequences.key_lengths && keys < kTileKeys) {
      zero_rows(sm.k, keys, threadIdx.x - kWarpgroup);
      zero_rows(sm.v, keys, threadIdx.x - kWarpgroup);
      store_fence();
      named_sync(kRowsCleared, kConsumerThreads);
    }
  }
  // The same of the tile's rows.
  EK_DEVICE void await_rows(const volatile Item& item, int tile) {
    const uint32_t stage = stage_of(count), parity = parity_of(count);
    barrier_wait(&sm.q_full[stage], parity);
    if (p.sequences.query_lengths && (tile + 1) * kRows > item.rows) {
      barrier_wait(&sm.grad_output_full[stage], parity);
      zero_rows(sm.q[stage], item.rows - tile * kRows, threadIdx.x - kWarpgroup);
      zero_rows(sm.grad_output[stage], item.rows - tile * kRows, threadIdx.x - kWarpgroup);
      store_fence();
      named_sync(kRowsCleared, kConsumerThreads);
    }
  }

  // ----------------------------------------------------------------------------------------------------- score
  // This warpgroup's 64 keys of a tile; the rows of a stage.
  EK_DEVICE uint64_t keys_of(const typename SharedMemory<128>::KeyTile& tile) const {
    return advance(operand(tile[0][0]), warp_uniform(consumer) * 64 * kRowBytes);
  }
  using RowTiles = typename SharedMemory<128>::RowTile[kStages];
  EK_DEVICE static uint64_t rows_of(const RowTiles& tiles, uint32_t stage, uint32_t box_bytes = 16) {
    return advance(operand(tiles[0][0], box_bytes), stage * sizeof(tiles[0]));
  }
  EK_DEVICE void begin_scores(uint32_t stage, Scores& scores) {
    begin_product<128, kKeyBox, kRowBox, kFp16>(scores, keys_of(sm.k), rows_of(sm.q, stage));
  }
  EK_DEVICE void begin_dprobs(uint32_t stage, Scores& dprobs) {
    barrier_wait(&sm.grad_output_full[stage], parity_of(count));
    begin_product<128, kKeyBox, kRowBox, kFp16>(dprobs, keys_of(sm.v), rows_of(sm.grad_output, stage));
  }
  // S^T to P^T, and the same packed. With a soft cap the scores are then what dP - delta is multiplied by.
  EK_DEVICE void find_probs(int stage, const float4 (&shifts)[kGroups], Scores& scores, ScoreOperand& probs) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if constexpr (kForm == Form::capped) {
        this->weigh(i, stage, scores, probs);
      } else {
        this->exponentiate(i, shifts[i], scores);
        if constexpr (kConsistent == Consistent::every_head) this->use_rounded(i, stage, scores);
        if constexpr (kConsistent != Consistent::by_head) this->pack_probs(i, scores, probs);
      }
    }
    if constexpr (kConsistent == Consistent::by_head && kForm != Form::capped) {
      const bool rounded = this->is_consistent(stage);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        if (rounded) this->use_rounded(i, stage, scores);
        this->pack_probs(i, scores, probs);
      }
    }
  }
  // dS^T = P^T (dP^T - delta).
  EK_DEVICE void find_dscores(int stage, const Scores& scores, const Scores& dprobs, ScoreOperand& dscores) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float4 delta = this->four_facts(sm.delta[stage], i);
      const float deltas[4] = {delta.x, delta.y, delta.z, delta.w};
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        float ds[2];
#pragma unroll
        for (int c = 0; c < 2; ++c)
          ds[c] = scores[8 * i + e + c] * (dprobs[8 * i + e + c] - deltas[e / 4 * 2 + c]);
        dscores[4 * i + e / 2] = Pairs::pack(ds[0], ds[1]);
      }
    }
  }
  // dS into shared memory, for both warpgroups' dQ. The other one is done with the dQ of two steps ago: it was at the barrier of
  // the step before.
  EK_DEVICE void share_dscores(const ScoreOperand& dscores) {
    const uint32_t stage = stage_of(count);
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
      store_matrices_transposed(&sm.dscores[stage][consumer][0][0] + i * kNext16Rows + store_offset,
                                dscores[4 * i], dscores[4 * i + 1], dscores[4 * i + 2], dscores[4 * i + 3]);
    store_fence();
  }

  // ------------------------------------------------------------------------------------------------ accumulate
  // sums += P^T or dS^T (keys x query rows) times the query rows of a tile.
  EK_DEVICE static void add_product(const ScoreOperand& left, uint64_t query_rows, Gradient& sums) {
    products_begin();
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
      Wgmma<128, kFp16>::template rs<true>(sums, left[4 * i], left[4 * i + 1], left[4 * i + 2],
                                           left[4 * i + 3], advance(query_rows, i * kNext16Rows), true);
    products_commit();
  }
  EK_DEVICE void add_to_dv(uint32_t stage, const ScoreOperand& probs, Gradient& dv) {
    add_product(probs, rows_of(sm.grad_output, stage, kRowBox), dv);
  }
  EK_DEVICE void add_to_dk(uint32_t stage, const ScoreOperand& dscores, Gradient& dk) {
    add_product(dscores, rows_of(sm.q, stage, kRowBox), dk);
  }
  // All 64 queries, and 64 of 128 features.
  EK_DEVICE void begin_dq(float (&dq)[32]) {
    const uint64_t dscores = advance(operand(sm.dscores[0][0]), stage_of(count) * sizeof(sm.dscores[0])),
                   keys = advance(operand(sm.k[0][0]), warp_uniform(consumer) * sizeof(sm.k[0]));
    products_begin();
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i)  // a box of dS has 64 keys
      Wgmma<64, kFp16>::template ss<false, true>(dq, advance(dscores, i / 4 * kRowBox + i % 4 * 32),
                                                 advance(keys, i * kNext16Rows), i > 0);
    products_commit();
  }
  // The row tile's first key tile comes last: it finds the sum of all others' parts in shared memory. Other parts go to the
  // thread that adds them up.
  EK_DEVICE void pass_on_dq(const volatile Item& item, int step, int tile, float (&dq)[32]) {
    const uint32_t stage = stage_of(count), parity = parity_of(count);
    auto& part = sm.dq[stage][consumer];
    if (item.key_tile > first_key_tile<128, kForm>(p, item.offset, tile)) {
      barrier_wait(&sm.dq_empty[stage], parity ^ 1);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        *reinterpret_cast<float4*>(part[i][thread]) =
            float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
      store_fence();
      __syncwarp();
      release(&sm.dq_full[stage]);
    } else {
      barrier_wait(&sm.dq_full[stage], parity);
      if (last_key_tile<128>(p, item, tile) > item.key_tile) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float4 four = *reinterpret_cast<const float4*>(part[i][thread]);
          dq[4 * i] += four.x;
          dq[4 * i + 1] += four.y;
          dq[4 * i + 2] += four.z;
          dq[4 * i + 3] += four.w;
        }
      }
      __syncwarp();
      release(&sm.dq_empty[stage]);
      write_dq(item, this->head_of(item, step), tile, dq);
    }
  }
  EK_DEVICE void write_dq(const volatile Item& item, int head, int tile, const float (&dq)[32]) {
    const int row = tile * kRows, feature = consumer * 64;
    const int exist = min(64, item.rows - row);
    const int all = p.sequences.query_offsets ? exist : min(64, p.sequences.T - row);
    write_rows<Pairs>(dq, p.scale,
                      p.dq + item.query_batch * p.dq_stride[0] + head * p.dq_stride[1] +
                          (item.first_row + row) * p.dq_stride[2] + feature,
                      p.dq_stride[2], exist, all, p.D - feature);
  }

  // ---------------------------------------------------------------------------------------------------- finish
  // Gives the item back before dK and dV are written.
  EK_DEVICE void write_gradients(const volatile Item& item, const Gradient& dk, const Gradient& dv) {
    const int key = item.key_tile * kTileKeys + consumer * 64;
    const int exist = min(64, item.keys - key);
    const int all = p.sequences.key_offsets ? exist : min(64, p.sequences.N - key);
    const int64_t row = item.first_key + key, batch = item.key_batch, head = item.g;
    __syncwarp();
    release(&sm.item_empty[queue.stage]);
    queue.next();
    write_rows<Pairs>(dk, p.scale,
                      p.dk + batch * p.dk_stride[0] + head * p.dk_stride[1] + row * p.dk_stride[2],
                      p.dk_stride[2], exist, all, p.D);
    write_rows<Pairs>(dv, 1.0f, p.dv + batch * p.dv_stride[0] + head * p.dv_stride[1] + row * p.dv_stride[2],
                      p.dv_stride[2], exist, all, p.D);
  }
};

}  // namespace evenkeel::hopper::backward
