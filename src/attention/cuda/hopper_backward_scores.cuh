// What a consumer warpgroup of Hopper's backward pass does with scores: masks, forms, exponentials. Both head sizes'. Included
// by the files of the consumers alone.
#pragma once

#include "attention/cuda/hopper_backward_problem.cuh"

namespace evenkeel::hopper::backward {

// Zeroes rows [first, kRows) of a tile: what lies behind the end of a sequence may be anything, and 0 * NaN is NaN.
template <int kThreads = kConsumerThreads, int kBoxes, int kRows>
EK_DEVICE void zero_rows(uint8_t (&tile)[kBoxes][kRows][kRowBytes], int first, int thread) {
  for (int box = 0; box < kBoxes; ++box)
    for (int n = first * kRowBytes / 16 + thread; n < kRows * kRowBytes / 16; n += kThreads)
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

// Adds the i-th four numbers of a sum that lies as the threads hold it.
EK_DEVICE void add_four(float (&dq)[32], int i, float4 four) {
  dq[4 * i] += four.x;
  dq[4 * i + 1] += four.y;
  dq[4 * i + 2] += four.z;
  dq[4 * i + 3] += four.w;
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

// A consumer warpgroup's place in the block, and its scores: 64 keys of the tile x kRows queries, transposed.
template <class Pairs, int D, Consistent kConsistent, Form kForm>
struct ScoreWork {
  static constexpr bool kFp16 = std::is_same_v<Pairs, Fp16Pairs>;
  static constexpr int kRows = kTileRows<D>;
  static constexpr int kScores = kRows / 2;  // a thread's
  static constexpr uint32_t kRowBox = kRows * kRowBytes, kKeyBox = kTileKeys * kRowBytes;
  static constexpr uint32_t kNext16Rows = 16 * kRowBytes;
  using Scores = float[kScores];               // 64 keys x kRows queries
  using ScoreOperand = uint32_t[kScores / 2];  // the same in 16 bits: [16 queries][4]
  using Gradient = float[D / 2];               // 64 keys x D

  SharedMemory<D>& sm;
  const Backward& p;
  const int consumer;
  const int thread, warp, lane, group;

  EK_DEVICE ScoreWork(SharedMemory<D>& shared, const Backward& problem, int which)
      : sm(shared),
        p(problem),
        consumer(which),
        thread(threadIdx.x % kWarpgroup),
        warp(thread / 32),
        lane(thread % 32),
        group(p.H / p.G) {}

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
    const Edges edges(p, item, tile);
    if (edges.cross()) mask(edges, scores);
  }
  struct Edges {
    int begin, end;  // of the queries that see the tile's first key, from the row tile's first
    int keys;        // from the tile's first one on
    EK_DEVICE Edges(const Backward& p, const volatile Item& item, int tile) {
      const int at = item.key_tile * kTileKeys - item.offset - tile * kRows;
      begin = at - p.right;
      end = at + p.left;
      keys = item.keys - item.key_tile * kTileKeys;
    }
    EK_DEVICE bool cross() const {
      return begin > -kTileKeys + 1 || keys < kTileKeys || (kForm != Form::plain && end < kRows - 1);
    }
  };
  EK_DEVICE void mask(const Edges& edges, Scores& scores) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = consumer * 64 + warp * 16 + lane / 4 + 8 * r;
      // Queries from this one on see the key, and up to that one.
      const int first_query = key < edges.keys ? key + edges.begin - 2 * (lane % 4) : kRows;
      const int last_query = key + edges.end - 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * j + c < first_query || (kForm != Form::plain && 8 * j + c > last_query))
            scores[4 * j + 2 * r + c] = -INFINITY;
    }
  }
  // Of the four queries that a thread has of a group of 16.
  EK_DEVICE float4 four_facts(const float (&facts)[kRows], int i) const {
    return *reinterpret_cast<const float4*>(&facts[16 * i + lane % 4 * 4]);
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
    exponentiate(i, four_facts(sm.shift[stage], i), scores);
  }
  EK_DEVICE void exponentiate(int i, const float4& shift, Scores& scores) {
    const float shifts[4] = {shift.x, shift.y, shift.z, shift.w};
#pragma unroll
    for (int e = 0; e < 8; ++e)
      scores[8 * i + e] = exp2_approx(fmaf(scores[8 * i + e], p.score_log2, -shifts[e / 4 * 2 + e % 2]));
  }
  // The forward's rounded probabilities, over their sum.
  EK_DEVICE void use_rounded(int i, int stage, Scores& scores) {
    const float4 inverse = four_facts(sm.inverse[stage], i);
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
    for (int e = 0; e < 8; ++e) scores[8 * i + e] = weight_of(scores[8 * i + e], slopes[e]);
  }
  EK_DEVICE void pack_probs(int i, const Scores& scores, ScoreOperand& probs) {
#pragma unroll
    for (int e = 0; e < 8; e += 2)
      probs[4 * i + e / 2] = Pairs::pack(scores[8 * i + e], scores[8 * i + e + 1]);
  }
};

}  // namespace evenkeel::hopper::backward
