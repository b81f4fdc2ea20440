// The work of a consumer warpgroup of Hopper's backward pass at head size 128, step by step. Included by
// hopper_backward_kernel.cuh alone.
#pragma once

#include "attention/cuda/hopper_backward_steps.cuh"

namespace evenkeel::hopper::backward {

// One consumer warpgroup: 64 keys of the tile, 64 queries a step, all features.
//
// Products of a step, in the order in which the tensor cores get them: S, dP, dV, dQ, dK.
template <class Pairs, Consistent kConsistent, Form kForm>
struct WideConsumer : ConsumerSteps<WideConsumer<Pairs, kConsistent, kForm>, Pairs, 128, kConsistent, kForm> {
  using Steps = ConsumerSteps<WideConsumer, Pairs, 128, kConsistent, kForm>;
  using Steps::consumer, Steps::kFp16, Steps::kKeyBox, Steps::kNext16Rows, Steps::kRowBox, Steps::kRows,
      Steps::kScoresShared, Steps::lane, Steps::p, Steps::release, Steps::sm, Steps::thread, Steps::warp;
  using typename Steps::Gradient;
  using typename Steps::ScoreOperand;
  using typename Steps::Scores;
  static constexpr int kGroups = kRows / 16;

  // Steps of all items before this one. Every ring advances once a step (registers are short).
  uint32_t count = 0;
  // This lane's part of a stmatrix into dS: row lane % 8 of matrix lane / 8; (query, 16-byte chunk of 8 keys).
  const uint32_t store_offset;

  EK_DEVICE WideConsumer(SharedMemory<128>& shared, const Backward& problem, int which)
      : Steps(shared, problem, which),
        store_offset(swizzled(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2)) {}

  EK_DEVICE static uint32_t stage_of(uint32_t n) { return warp_uniform(n % kStages); }
  EK_DEVICE static uint32_t parity_of(uint32_t n) { return n / kStages % 2; }

  // All row tiles that see this key tile. No product is on its way where the loop begins again, and no branch leads around one:
  // the compiler would wait for every product.
  EK_DEVICE void walk_rows(const volatile Item& item, int steps, Gradient& dk, Gradient& dv) {
    this->await_keys(item);
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
      const bool edge = typename Steps::Edges(p, item, tile).cross();
      products_wait<1>();
      settle(scores);
      if (kForm == Form::capped || (kForm == Form::banded && p.shaped))
        this->shape_scores(item, step, tile, scores);
      if (edge) this->mask(typename Steps::Edges(p, item, tile), scores);
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
      this->pass_on_dq(item, step, tile, stage_of(count), parity_of(count), dq);
      products_wait<0>();
      release(&sm.q_empty[stage]);
      ++count;
      tile = tile + 1 == item.row_tiles ? item.first_row_tile : tile + 1;
    }
    release(&sm.k_empty);
  }

  // ------------------------------------------------------------------------------------------------------ load
  EK_DEVICE void await_rows(const volatile Item& item, int tile) {
    const uint32_t stage = stage_of(count), parity = parity_of(count);
    Steps::await_rows(item, tile, stage, parity);
  }

  // ----------------------------------------------------------------------------------------------------- score
  EK_DEVICE void begin_scores(uint32_t stage, Scores& scores) {
    begin_product<128, kKeyBox, kRowBox, kFp16>(scores, this->keys_of(sm.k), this->rows_of(sm.q, stage));
  }
  EK_DEVICE void begin_dprobs(uint32_t stage, Scores& dprobs) {
    barrier_wait(&sm.grad_output_full[stage], parity_of(count));
    begin_product<128, kKeyBox, kRowBox, kFp16>(dprobs, this->keys_of(sm.v),
                                                this->rows_of(sm.grad_output, stage));
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
      Steps::find_dscores(i, scores, dprobs, delta, dscores);
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
  EK_DEVICE void add_to_dv(uint32_t stage, const ScoreOperand& probs, Gradient& dv) {
    this->add_product(probs, this->rows_of(sm.grad_output, stage, kRowBox), dv);
  }
  EK_DEVICE void add_to_dk(uint32_t stage, const ScoreOperand& dscores, Gradient& dk) {
    this->add_product(dscores, this->rows_of(sm.q, stage, kRowBox), dk);
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
};

}  // namespace evenkeel::hopper::backward
