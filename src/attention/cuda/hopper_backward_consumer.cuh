// The work of a consumer warpgroup of Hopper's backward pass, step by step. Included by hopper_backward.cu alone.
#pragma once

#include "attention/cuda/hopper_backward_problem.cuh"

namespace evenkeel::hopper::backward {

// Zeroes rows [first, kRows) of a tile: what lies behind the end of a sequence may be anything, and 0 * NaN is NaN.
template <int kBoxes, int kRows>
EK_DEVICE void zero_rows(uint8_t (&tile)[kBoxes][kRows][kRowBytes], int first, int thread) {
  for (int box = 0; box < kBoxes; ++box)
    for (int n = first * kRowBytes / 16 + thread; n < kRows * kRowBytes / 16; n += kConsumerThreads)
      reinterpret_cast<uint4*>(tile[box])[n] = uint4{0, 0, 0, 0};
}

// An accumulator, scaled and rounded, to rows of device memory: 16 bytes a thread. `to` is (row 0 of the accumulator,
// feature 0); `rows` of its 64 rows hold values, rows up to `all_rows` get zeros, features up to `features` exist.
template <int n>
EK_DEVICE void write_rows(const float (&d)[n], float scale, __nv_bfloat16* to, int64_t stride, int rows,
                          int all_rows, int features) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * r;
#pragma unroll
    for (int j = 0; j < n / 4; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack_bf16(d[4 * (j + i) + 2 * r] * scale, d[4 * (j + i) + 2 * r + 1] * scale);
      quad_transpose(words);
      const int feature = 8 * (j + lane % 4);
      if (row < all_rows && feature < features)
        *reinterpret_cast<uint4*>(to + row * stride + feature) =
            row < rows ? uint4{words[0], words[1], words[2], words[3]} : uint4{0, 0, 0, 0};
    }
  }
}

// Key tile 0: the sum of all other key tiles' parts, when they are all there, and this one; scaled, rounded, written.
template <int D>
EK_DEVICE void finish_dq(const Backward& p, const volatile Item& item, int head, int tile, int consumer,
                         float (&dq)[32]) {
  constexpr int kRows = kTileRows<D>;
  const int thread = threadIdx.x % kWarpgroup;
  const int64_t part = (static_cast<int64_t>(item.b * p.H + head) * p.row_tiles + tile) * 2 + consumer;
  const int last_row = min((tile + 1) * kRows, item.rows) - 1, last_key = (item.keys - 1) / kTileKeys;
  const int before = p.causal ? min(last_key, (last_row + item.offset) / kTileKeys) : last_key;
  if (before > 0) {
    while (load_acquire(p.turn + part) < before) {
    }
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
  const int row = tile * kRows + (D == 64 ? consumer * 64 : 0), feature = D == 64 ? 0 : consumer * 64;
  const int exist = min(64, item.rows - row);
  const int all = p.sequences.query_offsets ? exist : min(64, p.sequences.T - row);
  write_rows(dq, p.scale,
             p.dq + item.query_batch * p.dq_stride[0] + head * p.dq_stride[1] +
                 (item.first_row + row) * p.dq_stride[2] + feature,
             p.dq_stride[2], exist, all, p.D - feature);
}

// One consumer warpgroup: 64 keys of the tile.
//
// Arrays of products are handed from step to step and are not members: a product's accumulator is an input to the
// compiler even where it is overwritten, and a member would keep its registers from one tile to the next.
template <int D, bool kConsistent>
struct Consumer {
  static constexpr int kRows = kTileRows<D>;
  static constexpr int kScores = kRows / 2;  // a thread's, of 64 keys x kRows queries
  static constexpr bool kEarlyDv =
      D > 64;  // with 64 scores a thread there are no registers for P's copy beside dP
  static constexpr uint32_t kRowBox = kRows * kRowBytes, kKeyBox = kTileKeys * kRowBytes;
  static constexpr uint32_t kNext16Features = 32, kNext16Rows = 16 * kRowBytes;
  // Named barriers. From kDqDone on, one a warpgroup: it has finished its dQ, the other one may overwrite dS.
  static constexpr int kScoresShared = 1, kRowsCleared = 2, kDqDone = 3;
  using Scores = float[kScores];               // 64 keys x kRows queries
  using ScoreOperand = uint32_t[kScores / 2];  // the same in BF16: [16 queries][4]
  using Gradient = float[D / 2];               // 64 keys x D

  SharedMemory<D>& sm;
  const Backward& p;
  const int consumer;
  const int thread, warp, lane, group;
  Ring<kStages> rows, queue, parts;
  uint32_t item_parity = 0;
  // This lane's part of a stmatrix into dS^T: row lane % 8 of matrix lane / 8; (key, 16-byte chunk of 8 queries).
  const int store_key;
  const uint32_t store_chunk;
  const uint64_t k_rows, v_rows;
  // dQ of this warpgroup: 64 of 128 queries and all features, or all 64 queries and 64 of 128 features.
  const uint64_t dq_keys;

  EK_DEVICE Consumer(SharedMemory<D>& shared, const Backward& problem, int which)
      : sm(shared),
        p(problem),
        consumer(which),
        thread(threadIdx.x % kWarpgroup),
        warp(thread / 32),
        lane(thread % 32),
        group(p.H / p.G),
        store_key(consumer * 64 + warp * 16 + lane / 8 % 2 * 8 + lane % 8),
        store_chunk(static_cast<uint32_t>((lane / 16) ^ (store_key & 7)) << 4),
        k_rows(operand(sm.k[0][consumer * 64])),
        v_rows(operand(sm.v[0][consumer * 64])),
        dq_keys(operand(sm.k[D == 64 ? 0 : consumer])) {}

  EK_DEVICE void run() {
    named_arrive(kDqDone + consumer, kConsumerThreads);
    Gradient dk, dv;
    while (true) {
      barrier_wait(&sm.item_full[queue.stage], queue.parity);
      const volatile Item& item = sm.item[queue.stage];  // volatile: read again where needed, not kept
      if (item.key_tile < 0) return;
      const int steps = item.steps;
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;
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
      mask(item, tile, scores);
      ScoreOperand probs, dscores;
      exponentiate(stage, scores);
      if constexpr (kEarlyDv) {
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i) pack_probs(i, scores, probs);
        add_to_dv(stage, probs, dv);
        products_wait<1>();
      } else {
        products_wait<0>();
      }
      settle(dprobs);
      if (last && lane == 0) barrier_arrive(&sm.v_empty);
      find_dscores(stage, scores, dprobs, probs, dscores);
      if constexpr (!kEarlyDv) add_to_dv(stage, probs, dv);
      share_dscores(dscores);
      add_to_dk(stage, dscores, dk);
      store_fence();
      named_sync(kScoresShared, kConsumerThreads);  // the other warpgroup's keys of dS are there
      float dq[32];                                 // 64 queries x 64 features
      begin_dq(dq);
      products_wait<1>();  // dV and dK have read Q and dO
      release_rows(stage);
      const int head = item.g * group + (group == 1 ? 0 : step / (item.row_tiles - item.first_row_tile));
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
      if (item.key_tile > 0)
        hand_over_dq(dq);
      else
        finish_dq<D>(p, item, head, done_tile, consumer, dq);
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
    const uint64_t q = operand(sm.q[rows.stage][0]);
    products_begin();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      Wgmma<kRows>::template ss<false, false>(scores,
                                              advance(k_rows, i / 4 * kKeyBox + i % 4 * kNext16Features),
                                              advance(q, i / 4 * kRowBox + i % 4 * kNext16Features), i > 0);
    products_commit();
  }
  EK_DEVICE void begin_dprobs(int stage, Scores& dprobs) {
    barrier_wait(&sm.grad_output_full[stage], rows.parity);
    const uint64_t grad_output = operand(sm.grad_output[stage][0]);
    products_begin();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      Wgmma<kRows>::template ss<false, false>(
          dprobs, advance(v_rows, i / 4 * kKeyBox + i % 4 * kNext16Features),
          advance(grad_output, i / 4 * kRowBox + i % 4 * kNext16Features), i > 0);
    products_commit();
  }
  // Where the tile crosses the diagonal or the keys' end (rows behind the end have P = 0 by their shift).
  EK_DEVICE void mask(const volatile Item& item, int tile, Scores& scores) {
    const int diagonal = p.causal ? item.key_tile * kTileKeys - item.offset - tile * kRows : -kTileKeys;
    const int keys = item.keys - item.key_tile * kTileKeys;
    if (diagonal > -kTileKeys + 1 || keys < kTileKeys) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = consumer * 64 + warp * 16 + lane / 4 + 8 * r;
        // Queries from this one on see the key.
        const int first_query = key < keys ? key + diagonal - 2 * (lane % 4) : kRows;
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (8 * j + c < first_query) scores[4 * j + 2 * r + c] = -INFINITY;
      }
    }
  }
  // S^T to P^T.
  EK_DEVICE void exponentiate(int stage, Scores& scores) {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const float4 shift = *reinterpret_cast<const float4*>(&sm.shift[stage][16 * i + lane % 4 * 4]);
      const float shifts[4] = {shift.x, shift.y, shift.z, shift.w};
#pragma unroll
      for (int e = 0; e < 8; ++e)
        scores[8 * i + e] = exp2_approx(fmaf(scores[8 * i + e], p.scale_log2, -shifts[e / 4 * 2 + e % 2]));
      if (kConsistent) {  // the forward's rounded probabilities, over their sum
        const float4 inverse = *reinterpret_cast<const float4*>(&sm.inverse[stage][16 * i + lane % 4 * 4]);
        const float inverses[4] = {inverse.x, inverse.y, inverse.z, inverse.w};
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          const uint32_t rounded = pack_bf16(scores[8 * i + e], scores[8 * i + e + 1]);
          scores[8 * i + e] = low_bf16(rounded) * inverses[e / 4 * 2];
          scores[8 * i + e + 1] = high_bf16(rounded) * inverses[e / 4 * 2 + 1];
        }
      }
    }
  }
  EK_DEVICE void pack_probs(int i, const Scores& scores, ScoreOperand& probs) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) probs[4 * i + e / 2] = pack_bf16(scores[8 * i + e], scores[8 * i + e + 1]);
  }
  // dS^T = P^T (dP^T - delta).
  EK_DEVICE void find_dscores(int stage, const Scores& scores, const Scores& dprobs, ScoreOperand& probs,
                              ScoreOperand& dscores) {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const float4 delta = *reinterpret_cast<const float4*>(&sm.delta[stage][16 * i + lane % 4 * 4]);
      const float deltas[4] = {delta.x, delta.y, delta.z, delta.w};
      if constexpr (!kEarlyDv) pack_probs(i, scores, probs);
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        float ds[2];
#pragma unroll
        for (int c = 0; c < 2; ++c)
          ds[c] = scores[8 * i + e + c] * (dprobs[8 * i + e + c] - deltas[e / 4 * 2 + c]);
        dscores[4 * i + e / 2] = pack_bf16(ds[0], ds[1]);
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
  EK_DEVICE void add_to_dv(int stage, const ScoreOperand& probs, Gradient& dv) {
    const uint64_t grad_rows = operand(sm.grad_output[stage][0], kRowBox);
    products_begin();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      Wgmma<D>::template rs<true>(dv, probs[4 * i], probs[4 * i + 1], probs[4 * i + 2], probs[4 * i + 3],
                                  advance(grad_rows, i * kNext16Rows), true);
    products_commit();
  }
  EK_DEVICE void add_to_dk(int stage, const ScoreOperand& dscores, Gradient& dk) {
    const uint64_t q_rows = operand(sm.q[stage][0], kRowBox);
    products_begin();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      Wgmma<D>::template rs<true>(dk, dscores[4 * i], dscores[4 * i + 1], dscores[4 * i + 2],
                                  dscores[4 * i + 3], advance(q_rows, i * kNext16Rows), true);
    products_commit();
  }
  EK_DEVICE void begin_dq(float (&dq)[32]) {
    const uint64_t dq_scores = operand(sm.dscores[D == 64 ? consumer : 0]);
    products_begin();
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i)
      Wgmma<64>::ss<true, true>(dq, advance(dq_scores, i * kNext16Rows), advance(dq_keys, i * kNext16Rows),
                                i > 0);
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
    write_rows(dk, p.scale, p.dk + batch * p.dk_stride[0] + head * p.dk_stride[1] + row * p.dk_stride[2],
               p.dk_stride[2], exist, all, p.D);
    write_rows(dv, 1.0f, p.dv + batch * p.dv_stride[0] + head * p.dv_stride[1] + row * p.dv_stride[2],
               p.dv_stride[2], exist, all, p.D);
  }
};

}  // namespace evenkeel::hopper::backward
