// The work of a consumer warpgroup of Hopper's backward pass at head size 64, step by step. Included by
// hopper_backward_kernel.cuh alone.
#pragma once

#include "attention/cuda/hopper_backward_steps.cuh"

namespace evenkeel::hopper::backward {

// One consumer warpgroup: 64 keys of the tile.
//
// Arrays of products are handed from step to step and are not members. The compiler takes a product's accumulator for an
// input even where it is overwritten, so a member would keep its registers from one tile to the next.
template <class Pairs, Consistent kConsistent, Form kForm>
struct Consumer : ConsumerSteps<Consumer<Pairs, kConsistent, kForm>, Pairs, 64, kConsistent, kForm> {
  using Steps = ConsumerSteps<Consumer, Pairs, 64, kConsistent, kForm>;
  using Steps::consumer, Steps::kDqDone, Steps::kFp16, Steps::kKeyBox, Steps::kNext16Rows, Steps::kRowBox,
      Steps::kRows, Steps::kScoresShared, Steps::lane, Steps::p, Steps::sm, Steps::thread, Steps::warp;
  using typename Steps::Gradient;
  using typename Steps::ScoreOperand;
  using typename Steps::Scores;

  Ring<kStages> rows;
  // This lane's part of a stmatrix into dS^T: row lane % 8 of matrix lane / 8; (key, 16-byte chunk of 8 queries).
  const int store_key;
  const uint32_t store_chunk;

  EK_DEVICE Consumer(SharedMemory<64>& shared, const Backward& problem, int which)
      : Steps(shared, problem, which),
        store_key(consumer * 64 + warp * 16 + lane / 8 % 2 * 8 + lane % 8),
        store_chunk(static_cast<uint32_t>((lane / 16) ^ (store_key & 7)) << 4) {}

  EK_DEVICE void run() {
    named_arrive(kDqDone + consumer, kConsumerThreads);
    Steps::run();
  }

  // All row tiles that see this key tile.
  EK_DEVICE void walk_rows(const volatile Item& item, int steps, Gradient& dk, Gradient& dv) {
    this->await_keys(item);
    Scores scores;  // S^T, then P^T
    int tile = item.first_row_tile;
    await_rows(item, tile);
    begin_scores(scores);
    products_wait<0>();
    settle(scores);
    for (int step = 0; step < steps; ++step) {
      const int stage = rows.stage, done_tile = tile;
      const uint32_t parity = rows.parity;
      const bool last = step + 1 == steps;
      Scores dprobs;  // dP^T
      begin_dprobs(stage, dprobs);
      if (kForm == Form::capped || (kForm == Form::banded && p.shaped))
        this->shape_scores(item, step, tile, scores);
      this->mask(item, tile, scores);
      ScoreOperand probs, dscores;
      if constexpr (kForm != Form::capped) this->exponentiate(stage, scores);
      products_wait<0>();
      settle(dprobs);
      if (last) this->release(&sm.v_empty);
      find_dscores(stage, scores, dprobs, probs, dscores);
      add_to_dv(stage, probs, dv);
      share_dscores(dscores);
      add_to_dk(stage, dscores, dk);
      store_fence();
      named_sync(kScoresShared, kConsumerThreads);  // the other warpgroup's keys of dS are there
      float dq[32];                                 // 64 queries x 64 features
      begin_dq(dq);
      products_wait<1>();  // dV and dK have read Q and dO
      release_rows(stage);
      if (!last) {
        tile = tile + 1 == item.row_tiles ? item.first_row_tile : tile + 1;
        await_rows(item, tile);
      }
      // The next tile's scores begin before dQ is looked at. After the last tile they are of whatever lies there, or is just
      // arriving, and nobody reads them: a branch around a product would make the compiler wait for every product.
      begin_scores(scores);
      products_wait<1>();
      settle(dq);
      named_arrive(kDqDone + consumer, kConsumerThreads);
      this->pass_on_dq(item, step, done_tile, stage, parity, dq);
      products_wait<0>();
      settle(scores);
    }
    this->release(&sm.k_empty);
  }

  // ------------------------------------------------------------------------------------------------------ load
  EK_DEVICE void await_rows(const volatile Item& item, int tile) {
    Steps::await_rows(item, tile, rows.stage, rows.parity);
  }
  EK_DEVICE void release_rows(int stage) {
    if (lane == 0) {
      barrier_arrive(&sm.q_empty[stage]);
      barrier_arrive(&sm.grad_output_empty[stage]);
    }
    rows.next();
  }

  // ----------------------------------------------------------------------------------------------------- score
  EK_DEVICE void begin_scores(Scores& scores) {
    begin_product<64, kKeyBox, kRowBox, kFp16>(scores, this->keys_of(sm.k),
                                               this->rows_of(sm.q, warp_uniform(rows.stage)));
  }
  EK_DEVICE void begin_dprobs(int stage, Scores& dprobs) {
    barrier_wait(&sm.grad_output_full[stage], rows.parity);
    begin_product<64, kKeyBox, kRowBox, kFp16>(dprobs, this->keys_of(sm.v),
                                               this->rows_of(sm.grad_output, warp_uniform(stage)));
  }
  // dS^T = P^T (dP^T - delta).
  EK_DEVICE void find_dscores(int stage, Scores& scores, const Scores& dprobs, ScoreOperand& probs,
                              ScoreOperand& dscores) {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const float4 delta = this->four_facts(sm.delta[stage], i);
      if constexpr (kForm == Form::capped)
        this->weigh(i, stage, scores, probs);
      else
        this->pack_probs(i, scores, probs);
      Steps::find_dscores(i, scores, dprobs, delta, dscores);
    }
  }
  // dS^T into shared memory, for both warpgroups' dQ.
  EK_DEVICE void share_dscores(const ScoreOperand& dscores) {
    named_sync(kDqDone + (1 - consumer), kConsumerThreads);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      store_matrices(sm.dscores[i / 4][store_key] + ((i % 4 * 32) ^ store_chunk), dscores[4 * i],
                     dscores[4 * i + 1], dscores[4 * i + 2], dscores[4 * i + 3]);
  }

  // ------------------------------------------------------------------------------------------------ accumulate
  EK_DEVICE void add_to_dv(int stage, const ScoreOperand& probs, Gradient& dv) {
    this->add_product(probs, this->rows_of(sm.grad_output, warp_uniform(stage), kRowBox), dv);
  }
  EK_DEVICE void add_to_dk(int stage, const ScoreOperand& dscores, Gradient& dk) {
    this->add_product(dscores, this->rows_of(sm.q, warp_uniform(stage), kRowBox), dk);
  }
  // 64 of 128 queries, and all features.
  EK_DEVICE void begin_dq(float (&dq)[32]) {
    const uint64_t dscores = advance(operand(sm.dscores[0]), warp_uniform(consumer) * sizeof(sm.dscores[0])),
                   keys = operand(sm.k[0]);
    products_begin();
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i)
      Wgmma<64, kFp16>::template ss<true, true>(dq, advance(dscores, i * kNext16Rows),
                                                advance(keys, i * kNext16Rows), i > 0);
    products_commit();
  }
};

}  // namespace evenkeel::hopper::backward
