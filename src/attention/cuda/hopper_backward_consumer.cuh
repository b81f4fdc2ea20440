// The work of a consumer warpgroup of Hopper's backward pass, step by step. Included by
// hopper_backward_kernel.cuh alone.
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
// feature 0). `rows` of its 64 rows hold values, and rows up to `all_rows` get zeros. Features up to `features` exist.
template <class Pairs, int n>
EK_DEVICE void write_rows(const float (&d)[n], float scale, uint16_t* to, int64_t stride, int rows,
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
        words[i] = Pairs::pack(d[4 * (j + i) + 2 * r] * scale, d[4 * (j + i) + 2 * r + 1] * scale);
      quad_transpose(words);
      const int feature = 8 * (j + lane % 4);
      if (row < all_rows && feature < features)
        *reinterpret_cast<uint4*>(to + row * stride + feature) =
            row < rows ? uint4{words[0], words[1], words[2], words[3]} : uint4{0, 0, 0, 0};
    }
  }
}

// The first and last key tile that a row tile sees. dQ is finished in the first.
template <int D, Form kForm>
EK_DEVICE int first_key_tile(const Backward& p, int offset, int row_tile) {
  return kForm == Form::plain ? 0 : max(0, row_tile * kTileRows<D> + offset - p.left) / kTileKeys;
}
template <int D>
EK_DEVICE int last_key_tile(const Backward& p, const volatile Item& item, int row_tile) {
  const int last_row = min((row_tile + 1) * kTileRows<D>, item.rows) - 1;
  return (min(item.keys, last_row + item.offset + p.right + 1) - 1) / kTileKeys;
}

// The first of its row tile's key tiles: the sum of all others' parts, when they are all there, and this one; scaled,
// rounded, written.
template <class Pairs, int D>
EK_DEVICE void finish_dq(const Backward& p, const volatile Item& item, int head, int tile, int consumer,
                         float (&dq)[32]) {
  constexpr int kRows = kTileRows<D>;
  const int thread = threadIdx.x % kWarpgroup;
  const int64_t part = (static_cast<int64_t>(item.b * p.H + head) * p.row_tiles + tile) * 2 + consumer;
  const int before = last_key_tile<D>(p, item, tile) - item.key_tile;
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
  write_rows<Pairs>(dq, p.scale,
                    p.dq + item.query_batch * p.dq_stride[0] + head * p.dq_stride[1] +
                        (item.first_row + row) * p.dq_stride[2] + feature,
                    p.dq_stride[2], exist, all, p.D - feature);
}

// One consumer warpgroup: 64 keys of the tile.
//
// Arrays of products are handed from step to step and are not members. The compiler takes a product's accumulator for an
// input even where it is overwritten, so a member would keep its registers from one tile to the next.
template <class Pairs, int D, Consistent kConsistent, Form kForm>
struct Consumer {
  static constexpr bool kFp16 = std::is_same_v<Pairs, Fp16Pairs>;
  static constexpr int kRows = kTileRows<D>;
  static constexpr int kScores = kRows / 2;  // a thread's, of 64 keys x kRows queries
  static constexpr bool kEarlyDv =
      D > 64;  // with 64 scores a thread there are no registers for P's copy beside dP
  static constexpr uint32_t kRowBox = kRows * kRowBytes, kKeyBox = kTileKeys * kRowBytes;
  static constexpr uint32_t kNext16Rows = 16 * kRowBytes;
  // Named barriers. From kDqDone on, one a warpgroup: it has finished its dQ, the other one may overwrite dS.
  static constexpr int kScoresShared = 1, kRowsCleared = 2, kDqDone = 3;
  using Scores = float[kScores];               // 64 keys x kRows queries
  using ScoreOperand = uint32_t[kScores / 2];  // the same in 16 bits: [16 queries][4]
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
      if (kForm == Form::capped || (kForm == Form::banded && p.shaped))
        shape_scores(item, step, tile, scores);
      mask(item, tile, scores);
      ScoreOperand probs, dscores;
      if constexpr (kForm != Form::capped) exponentiate(stage, scores);
      if constexpr (kEarlyDv) {
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i) {
          if constexpr (kForm == Form::capped)
            weigh(i, stage, scores, probs);
          else
            pack_probs(i, scores, probs);
        }
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
      const int head = head_of(item, step);
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
      if (item.key_tile > first_key_tile<D, kForm>(p, item.offset, done_tile))
        hand_over_dq(dq);
      else
        finish_dq<Pairs, D>(p, item, head, done_tile, consumer, dq);
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
    begin_product<D, kKeyBox, kRowBox, kFp16>(scores, k_rows, operand(sm.q[rows.stage][0]));
  }
  EK_DEVICE void begin_dprobs(int stage, Scores& dprobs) {
    barrier_wait(&sm.grad_output_full[stage], rows.parity);
    begin_product<D, kKeyBox, kRowBox, kFp16>(dprobs, v_rows, operand(sm.grad_output[stage][0]));
  }
  EK_DEVICE int head_of(const volatile Item& item, int step) const {
    return item.g * group + (group == 1 ? 0 : step / (item.row_tiles - item.first_row_tile));
  }
  // f(score, key from the tile's first, query from the tile's first) over a thread's scores.
  template <class F>
  EK_DEVICE void each(Scores& scores, F f) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        f(scores[4 * j + e], consumer * 64 + warp * 16 + lane / 4 + e / 2 * 8, 8 * j + lane % 4 * 2 + e % 2);
  }
  // Soft caps (the scores are then tanh), slopes, and what a mask of its own hides.
  EK_DEVICE void shape_scores(const volatile Item& item, int step, int tile, Scores& scores) {
    if constexpr (kForm == Form::capped) {
      const float factor = p.scale / p.softcap;
      each(scores, [&](float& x, int, int) { x = tanh_of(x * factor); });
    }
    if (p.slopes) {
      const float slope = slope_of(p, head_of(item, step));
      const int distance = tile * kRows + item.offset - item.key_tile * kTileKeys;
      each(scores, [&](float& x, int key, int query) {
        x = fmaf(-slope, fabsf(static_cast<float>(distance + query - key)), x);
      });
    }
    if (p.visible) {
      const Visible visible(p, item.b, head_of(item, step));
      const int row = tile * kRows, first = item.key_tile * kTileKeys, rows = item.rows, keys = item.keys;
      each(scores, [&](float& x, int key, int query) {
        if (first + key < keys && row + query < rows && !visible(row + query, first + key)) x = -INFINITY;
      });
    }
  }
  // Where the tile crosses the band's edges or the keys' end (rows behind the end have P = 0 by their shift).
  EK_DEVICE void mask(const volatile Item& item, int tile, Scores& scores) {
    // The query that stands at the tile's first key, from the row tile's first; queries that see it begin and end with:
    const int at = item.key_tile * kTileKeys - item.offset - tile * kRows;
    const int begin = at - p.right, end = at + p.left;
    const int keys = item.keys - item.key_tile * kTileKeys;
    if (begin > -kTileKeys + 1 || keys < kTileKeys || (kForm != Form::plain && end < kRows - 1)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = consumer * 64 + warp * 16 + lane / 4 + 8 * r;
        // Queries from this one on see the key, and up to that one.
        const int first_query = key < keys ? key + begin - 2 * (lane % 4) : kRows;
        const int last_query = key + end - 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (8 * j + c < first_query || (kForm != Form::plain && 8 * j + c > last_query))
              scores[4 * j + 2 * r + c] = -INFINITY;
      }
    }
  }
  EK_DEVICE bool is_consistent(int stage) const {
    return kConsistent == Consistent::every_head ||
           (kConsistent == Consistent::by_head && *const_cast<const volatile bool*>(&sm.consistent[stage]));
  }
  // S^T to P^T.
  EK_DEVICE void exponentiate(int stage, Scores& scores) {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      exponentiate(i, stage, scores);
      if constexpr (kConsistent == Consistent::every_head) use_rounded(i, stage, scores);
    }
    if constexpr (kConsistent == Consistent::by_head) {
      if (is_consistent(stage)) {
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i) use_rounded(i, stage, scores);
      }
    }
  }
  EK_DEVICE void exponentiate(int i, int stage, Scores& scores) {
    const float4 shift = *reinterpret_cast<const float4*>(&sm.shift[stage][16 * i + lane % 4 * 4]);
    const float shifts[4] = {shift.x, shift.y, shift.z, shift.w};
#pragma unroll
    for (int e = 0; e < 8; ++e)
      scores[8 * i + e] = exp2_approx(fmaf(scores[8 * i + e], p.score_log2, -shifts[e / 4 * 2 + e % 2]));
  }
  // The forward's rounded probabilities, over their sum.
  EK_DEVICE void use_rounded(int i, int stage, Scores& scores) {
    const float4 inverse = *reinterpret_cast<const float4*>(&sm.inverse[stage][16 * i + lane % 4 * 4]);
    const float inverses[4] = {inverse.x, inverse.y, inverse.z, inverse.w};
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const uint32_t rounded = Pairs::pack(scores[8 * i + e], scores[8 * i + e + 1]);
      scores[8 * i + e] = Pairs::low(rounded) * inverses[e / 4 * 2];
      scores[8 * i + e + 1] = Pairs::high(rounded) * inverses[e / 4 * 2 + 1];
    }
  }
  // Form::capped, 16 rows: tanh to P, packed; left is what dP - delta is multiplied by, P (1 - tanh^2).
  EK_DEVICE void weigh(int i, int stage, Scores& scores, ScoreOperand& probs) {
    float slopes[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) slopes[e] = 1 - scores[8 * i + e] * scores[8 * i + e];
    exponentiate(i, stage, scores);
    if (is_consistent(stage)) use_rounded(i, stage, scores);
    pack_probs(i, scores, probs);
#pragma unroll
    for (int e = 0; e < 8; ++e)  // a masked score is -inf: its P is 0, its slope is not a number
      scores[8 * i + e] = scores[8 * i + e] == 0 ? 0.0f : scores[8 * i + e] * slopes[e];
  }
  EK_DEVICE void pack_probs(int i, const Scores& scores, ScoreOperand& probs) {
#pragma unroll
    for (int e = 0; e < 8; e += 2)
      probs[4 * i + e / 2] = Pairs::pack(scores[8 * i + e], scores[8 * i + e + 1]);
  }
  // dS^T = P^T (dP^T - delta).
  EK_DEVICE void find_dscores(int stage, Scores& scores, const Scores& dprobs, ScoreOperand& probs,
                              ScoreOperand& dscores) {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const float4 delta = *reinterpret_cast<const float4*>(&sm.delta[stage][16 * i + lane % 4 * 4]);
      const float deltas[4] = {delta.x, delta.y, delta.z, delta.w};
      if constexpr (!kEarlyDv && kForm == Form::capped)
        weigh(i, stage, scores, probs);
      else if constexpr (!kEarlyDv)
        pack_probs(i, scores, probs);
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
      Wgmma<D, kFp16>::template rs<true>(sums, left[4 * i], left[4 * i + 1], left[4 * i + 2], left[4 * i + 3],
                                         advance(query_rows, i * kNext16Rows), true);
    products_commit();
  }
  EK_DEVICE void add_to_dv(int stage, const ScoreOperand& probs, Gradient& dv) {
    add_product(probs, operand(sm.grad_output[stage][0], kRowBox), dv);
  }
  EK_DEVICE void add_to_dk(int stage, const ScoreOperand& dscores, Gradient& dk) {
    add_product(dscores, operand(sm.q[stage][0], kRowBox), dk);
  }
  EK_DEVICE void begin_dq(float (&dq)[32]) {
    const uint64_t dq_scores = operand(sm.dscores[D == 64 ? consumer : 0]);
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
