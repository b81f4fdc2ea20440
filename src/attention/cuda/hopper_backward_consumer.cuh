// The work of a consumer warpgroup of Hopper's backward pass at head size 64, step by step. Included by
// hopper_backward_kernel.cuh alone.
#pragma once

#include "attention/cuda/hopper_backward_scores.cuh"

namespace evenkeel::hopper::backward {

// The first of its row tile's key tiles: the sum of all others' parts, when they are all there, and this one; scaled,
// rounded, written.
template <class Pairs>
EK_DEVICE void finish_dq(const Backward& p, const volatile Item& item, int head, int tile, int consumer,
                         float (&dq)[32]) {
  const int thread = threadIdx.x % kWarpgroup;
  const int64_t part = (static_cast<int64_t>(item.b * p.H + head) * p.row_tiles + tile) * 2 + consumer;
  const int before = last_key_tile<64>(p, item, tile) - item.key_tile;
  if (before > 0) {
    while (load_acquire(p.turn + part) < before) let_others_run();
    const float4* const sum = reinterpret_cast<const float4*>(p.dq_sum) + part * 8 * kWarpgroup + thread;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 four = __ldcg(sum + i * kWarpgroup);
      dq[4 * i] += four.x;
      dq[4 * i + 1] += four.y;
      dq[4 * i + 2] += four.z;
      dq[4 * i + 3] += four.w;
    }
  }
  const int row = tile * kTileRows<64> + consumer * 64;
  const int exist = min(64, item.rows - row);
  const int all = p.sequences.query_offsets ? exist : min(64, p.sequences.T - row);
  write_rows<Pairs>(dq, p.scale,
                    p.dq + item.query_batch * p.dq_stride[0] + head * p.dq_stride[1] +
                        (item.first_row + row) * p.dq_stride[2],
                    p.dq_stride[2], exist, all, p.D);
}

// One consumer warpgroup: 64 keys of the tile.
//
// Arrays of products are handed from step to step and are not members. The compiler takes a product's accumulator for an
// input even where it is overwritten, so a member would keep its registers from one tile to the next.
template <class Pairs, Consistent kConsistent, Form kForm>
struct Consumer : ScoreWork<Pairs, 64, kConsistent, kForm> {
  using Work = ScoreWork<Pairs, 64, kConsistent, kForm>;
  using typename Work::Gradient;
  using typename Work::ScoreOperand;
  using typename Work::Scores;
  using Work::consumer, Work::group, Work::kFp16, Work::kKeyBox, Work::kNext16Rows, Work::kRowBox,
      Work::kRows, Work::lane, Work::p, Work::sm, Work::thread, Work::warp;
  // Named barriers. From kDqDone on, one a warpgroup: it has finished its dQ, the other one may overwrite dS.
  static constexpr int kScoresShared = 1, kRowsCleared = 2, kDqDone = 3;

  Ring<kStages> rows, queue, parts;
  uint32_t item_parity = 0;
  // This lane's part of a stmatrix into dS^T: row lane % 8 of matrix lane / 8; (key, 16-byte chunk of 8 queries).
  const int store_key;
  const uint32_t store_chunk;
  const uint64_t k_rows, v_rows;
  // dQ of this warpgroup: 64 of 128 queries and all features.
  const uint64_t dq_keys;

  EK_DEVICE Consumer(SharedMemory<64>& shared, const Backward& problem, int which)
      : Work(shared, problem, which),
        store_key(consumer * 64 + warp * 16 + lane / 8 % 2 * 8 + lane % 8),
        store_chunk(static_cast<uint32_t>((lane / 16) ^ (store_key & 7)) << 4),
        k_rows(operand(sm.k[0][consumer * 64])),
        v_rows(operand(sm.v[0][consumer * 64])),
        dq_keys(operand(sm.k[0])) {}

  EK_DEVICE void run() {
    named_arrive(kDqDone + consumer, kConsumerThreads);
    Gradient dk, dv;
    while (true) {
      barrier_wait(&sm.item_full[queue.stage], queue.parity);
      const volatile Item& item = sm.item[queue.stage];  // volatile: read again where needed, not kept
      if (item.key_tile < 0) return;
      const int steps = item.steps;
#pragma unroll
      for (int i = 0; i < 32; ++i) dk[i] = dv[i] = 0;
      if (steps > 0) walk_rows(item, steps, dk, dv);
      settle(dk);
      settle(dv);
      write_gradients(item, dk, dv);
    }
  }

  // All row tiles that see this key tile.
  EK_DEVICE void walk_rows(const volatile Item& item, int steps, Gradient& dk, Gradient& dv) {
    await_keys(item);
    Scores scores;  // S^T, then P^T
    int tile = item.first_row_tile;
    await_rows(item, tile);
    begin_scores(scores);
    products_wait<0>();
    settle(scores);
    for (int step = 0; step < steps; ++step) {
      const int stage = rows.stage, done_tile = tile;
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
      if (last && lane == 0) barrier_arrive(&sm.v_empty);
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
      const int head = this->head_of(item, step);
      if (!last) {
        tile = tile + 1 == item.row_tiles ? item.first_row_tile : tile + 1;
        await_rows(item, tile);
      }
      // The next tile's scores begin before dQ is looked at. After the last tile they are of whatever lies there, and
      // nobody reads them: a branch around a product would make the compiler wait for every product.
      begin_scores(scores);
      products_wait<1>();
      settle(dq);
      named_arrive(kDqDone + consumer, kConsumerThreads);
      if (item.key_tile > first_key_tile<64, kForm>(p, item.offset, done_tile))
        hand_over_dq(dq);
      else
        finish_dq<Pairs>(p, item, head, done_tile, consumer, dq);
      products_wait<0>();
      settle(scores);
    }
    if (lane == 0) barrier_arrive(&sm.k_empty);
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
    const int stage = rows.stage;
    barrier_wait(&sm.q_full[stage], rows.parity);
    if (p.sequences.query_lengths && (tile + 1) * kRows > item.rows) {
      barrier_wait(&sm.grad_output_full[stage], rows.parity);
      zero_rows(sm.q[stage], item.rows - tile * kRows, threadIdx.x - kWarpgroup);
      zero_rows(sm.grad_output[stage], item.rows - tile * kRows, threadIdx.x - kWarpgroup);
      store_fence();
      named_sync(kRowsCleared, kConsumerThreads);
    }
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
    begin_product<64, kKeyBox, kRowBox, kFp16>(scores, k_rows, operand(sm.q[rows.stage][0]));
  }
  EK_DEVICE void begin_dprobs(int stage, Scores& dprobs) {
    barrier_wait(&sm.grad_output_full[stage], rows.parity);
    begin_product<64, kKeyBox, kRowBox, kFp16>(dprobs, v_rows, operand(sm.grad_output[stage][0]));
  }
  // dS^T = P^T (dP^T - delta).
  EK_DEVICE void find_dscores(int stage, Scores& scores, const Scores& dprobs, ScoreOperand& probs,
                              ScoreOperand& dscores) {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const float4 delta = this->four_facts(sm.delta[stage], i);
      const float deltas[4] = {delta.x, delta.y, delta.z, delta.w};
      if constexpr (kForm == Form::capped)
        this->weigh(i, stage, scores, probs);
      else
        this->pack_probs(i, scores, probs);
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
  // dS^T into shared memory, for both warpgroups' dQ.
  EK_DEVICE void share_dscores(const ScoreOperand& dscores) {
    named_sync(kDqDone + (1 - consumer), kConsumerThreads);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      store_matrices(sm.dscores[i / 4][store_key] + ((i % 4 * 32) ^ store_chunk), dscores[4 * i],
                     dscores[4 * i + 1], dscores[4 * i + 2], dscores[4 * i + 3]);
  }

  // ------------------------------------------------------------------------------------------------ accumulate
  // sums += P^T or dS^T (keys x query rows) times the query rows of a tile.
  EK_DEVICE static void add_product(const ScoreOperand& left, uint64_t query_rows, Gradient& sums) {
    products_begin();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      Wgmma<64, kFp16>::template rs<true>(sums, left[4 * i], left[4 * i + 1], left[4 * i + 2],
                                          left[4 * i + 3], advance(query_rows, i * kNext16Rows), true);
    products_commit();
  }
  EK_DEVICE void add_to_dv(int stage, const ScoreOperand& probs, Gradient& dv) {
    add_product(probs, operand(sm.grad_output[stage][0], kRowBox), dv);
  }
  EK_DEVICE void add_to_dk(int stage, const ScoreOperand& dscores, Gradient& dk) {
    add_product(dscores, operand(sm.q[stage][0], kRowBox), dk);
  }
  EK_DEVICE void begin_dq(float (&dq)[32]) {
    const uint64_t dq_scores = operand(sm.dscores[consumer]);
    products_begin();
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i)
      Wgmma<64, kFp16>::template ss<true, true>(dq, advance(dq_scores, i * kNext16Rows),
                                                advance(dq_keys, i * kNext16Rows), i > 0);
    products_commit();
  }
  // To the thread that adds parts up.
  EK_DEVICE void hand_over_dq(const float (&dq)[32]) {
    barrier_wait(&sm.dq_empty[parts.stage][consumer], parts.parity ^ 1);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      *reinterpret_cast<float4*>(sm.dq[parts.stage][consumer][i][thread]) =
          float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    store_fence();
    __syncwarp();
    if (lane == 0) barrier_arrive(&sm.dq_full[parts.stage][consumer]);
    parts.next();
  }

  // ---------------------------------------------------------------------------------------------------- finish
  // Gives the item back before dK and dV are written.
  EK_DEVICE void write_gradients(const volatile Item& item, const Gradient& dk, const Gradient& dv) {
    const int key = item.key_tile * kTileKeys + consumer * 64;
    const int exist = min(64, item.keys - key);
    const int all = p.sequences.key_offsets ? exist : min(64, p.sequences.N - key);
    const int64_t row = item.first_key + key, batch = item.key_batch, head = item.g;
    __syncwarp();
    if (lane == 0) barrier_arrive(&sm.item_empty[queue.stage]);
    queue.next();
    write_rows<Pairs>(dk, p.scale,
                      p.dk + batch * p.dk_stride[0] + head * p.dk_stride[1] + row * p.dk_stride[2],
                      p.dk_stride[2], exist, all, p.D);
    write_rows<Pairs>(dv, 1.0f, p.dv + batch * p.dv_stride[0] + head * p.dv_stride[1] + row * p.dv_stride[2],
                      p.dv_stride[2], exist, all, p.D);
  }
};

}  // namespace evenkeel::hopper::backward
