// A warp's rows and keys in the Ampere class's forward kernels: their softmax, and O as it adds up key tile by key tile.
#pragma once

#include "attention/cuda/ampere_problem.cuh"

namespace evenkeel::ampere {

// The softmax of the rows that a quad of lanes holds. What only some stabilisers need is spread over the quad: lane t
// keeps it for row t % kCount.
template <int kCount>
struct Rows {
  float shift[kCount];  // in force, in powers of two; -inf: no key yet
  float sum[kCount];    // l: this thread's part of it
  float unit;           // dither: added to the shift; paper_capped: the row's own random
                        // number; exact: its residue
  float max;            // paper_capped: the largest score so far, scaled; exact: the score
                        // that set the shift
  int ties;             // paper_capped

  EK_DEVICE void start() {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      shift[r] = -kInfinity;
      sum[r] = 0;
    }
  }
  // `row`: the number of row lane % kCount among all of the problem.
  EK_DEVICE void draw(const Problem& p, const HeadRules& rules, int64_t row) {
    max = -kInfinity;
    unit = rules.dither || rules.paper_capped ? row_random_unit(p.random(rules), static_cast<uint64_t>(row))
                                              : 0.0f;
    ties = 0;
  }

  // Of a number for each row, that of row lane % kCount; and of one that is spread over the quad, that of row r.
  EK_DEVICE static float own(const float (&of_row)[kCount]) {
    const int row = static_cast<int>(threadIdx.x) % kCount;
    float number = of_row[0];
#pragma unroll
    for (int r = 1; r < kCount; ++r)
      if (row == r) number = of_row[r];
    return number;
  }
  EK_DEVICE static float of(int r, float spread) {
    return __shfl_sync(~0u, spread, static_cast<int>(threadIdx.x) % kWarpThreads / 4 * 4 + r);
  }

  // The shifts with a tile whose rows' largest scores (as the products left them; -inf: none) are `most`, of which `tied`
  // tie: in `most`'s place.
  EK_DEVICE void move(const Problem& p, const HeadRules& rules, float (&most)[kCount],
                      const int (&tied)[kCount]) {
    if (!rules.dither && !rules.paper_capped) {
#pragma unroll
      for (int r = 0; r < kCount; ++r)
        most[r] = rules.consistent ? ceilf(most[r] * p.score_log2) : most[r] * p.score_log2;
      return;
    }
    const int row = static_cast<int>(threadIdx.x) % kCount;
    const float tile_max = own(most);
    int tile_ties = tied[0];
#pragma unroll
    for (int r = 1; r < kCount; ++r)
      if (row == r) tile_ties = tied[r];
    const float moved = rules.dither ? fmaf(tile_max, p.score_log2, unit)
                                     : paper_shift(rules, tile_max * p.score_unit, tile_ties);
#pragma unroll
    for (int r = 0; r < kCount; ++r) most[r] = of(r, moved);
  }
  EK_DEVICE float paper_shift(const HeadRules& rules, float tile_max, int tile_ties) {
    if (tile_max == -kInfinity) return -kInfinity;
    const float before = max;
    max = fmaxf(before, tile_max);
    ties = (max - before <= rules.tie_tolerance ? ties : 0) + tile_ties;
    float m = max;
    if (ties > 1) {
      const float least = kLn2 * (0.25f + 0.75f * unit);
      const float most = fmaxf(least, rules.cap * (0.5f + 0.5f * unit));
      m += fminf(fmaxf(max > 0 ? (rules.beta - 1) * max : -max, least), most);
    }
    return m * kLog2E;
  }
  // paper_capped: the largest score of row r so far.
  EK_DEVICE float largest(int r) const { return of(r, max); }

  // exact: what rounding took from a far shift is the score that set it less the shift, exactly. That score's probability is one,
  // and BF16 must not round it. A fused multiply-add alone leaves 2^residue, and BF16 rounds that while the sum l does not: O of
  // a row that sees one key is then not that key's V, and its row of dS does not add up to zero. Nearer than kFar the residue is
  // left out, so that near rows have the bits of plain shifts.
  // After a shift moved from `before` to `after`, set by `score` (all of row lane % kCount): returns how far the residue fell.
  EK_DEVICE float move_residue(const Problem& p, float score, float before, float after) {
    if (before == after) return 0;
    const float was = unit;
    unit = is_far(after) ? fmaf(score, p.score_log2, -after) : 0.0f;
    max = score;
    return was - unit;
  }
  EK_DEVICE float residue(int r) const { return of(r, unit); }
  // The score that is subtracted in place of row r's shift; 0: none is, the shift has no residue.
  EK_DEVICE float subtracted(int r) const { return of(r, unit != 0 ? max : 0.0f); }
};

// 16 kBlocks rows of a warp, and kKeys keys at a time. O is unnormalised, under the rows' shifts.
template <class Pairs, int kHead, int kBlocks, int kKeys, Instance kInstance>
struct WarpTile {
  static constexpr bool kAll = kInstance == Instance::all || kInstance == Instance::exact;
  static constexpr int kRowCount = 2 * kBlocks;  // a thread's rows
  static constexpr int kChunks = kHead / kChunk<kHead>;

  const Problem& p;
  const int lane;
  const HeadRules rules;
  float s[kBlocks][kKeys / 8][4];
  float o[kChunks][kBlocks][kChunk<kHead> / 8][4] = {};
  float used[kRowCount];  // the shift of `s`
  Rows<kRowCount> state;

  EK_DEVICE WarpTile(const Problem& problem, int h)
      : p(problem), lane(static_cast<int>(threadIdx.x) % kWarpThreads), rules(problem.rules_of(h)) {}

  EK_DEVICE bool consistent() const { return kAll ? rules.consistent : kInstance == Instance::consistent; }
  EK_DEVICE bool exact() const { return kInstance == Instance::exact && p.exact; }
  EK_DEVICE int size(Side side) const { return p.template size<kHead>(side); }
  // This thread's row r, of the warp's.
  EK_DEVICE int row_in_warp(int r) const { return r / 2 * 16 + r % 2 * 8 + lane / 4; }
  // Eight features of O, of a block of 16 rows.
  EK_DEVICE float (&block(int i, int n))[4] {
    constexpr int kInChunk = kChunk<kHead> / 8;
    return o[n / kInChunk][i][n % kInChunk];
  }
  // f(which of the thread's rows, block of eight features, this thread's pair of them)
  template <class F>
  EK_DEVICE void each_pair(F f) {
#pragma unroll
    for (int r = 0; r < kRowCount; ++r)
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n) f(r, n, block(r / 2, n)[r % 2 * 2], block(r / 2, n)[r % 2 * 2 + 1]);
  }

  // S = Q K^T, soft-capped. load_left(left, step): 16 features of the rows.
  template <class LoadLeft>
  EK_DEVICE void find_scores(const Piece<kHead>& keys, LoadLeft load_left) {
    clear(s);
    each_chunk<kHead>(size(Side::keys), [&](int first_step) {
#pragma unroll
      for (int n = 0; n < kChunk<kHead> / 16; ++n) {
        const int step = first_step + n;
        uint32_t left[kBlocks][4];
        load_left(left, step);
        multiply_step<Pairs, kKeys / 16>(
            s, left, [&](uint32_t(&right)[4], int m) { load_matrices(right, keys.at(m, step)); });
      }
    });
    if (kAll && p.softcap > 0) {
      const float factor = p.scale / p.softcap;
      each_score(s, lane, [&](float& x, int, int) { x = tanh_of(x * factor); });
    }
  }

  // Keys [key, key + kKeys): what slopes take from their scores, and -inf where a row does not see them. `whole`: the band
  // has all of them. The thread's row r is row_of(r) of head_of(r), counted from the sequence's first.
  template <class HeadOf, class RowOf>
  EK_DEVICE void mask(const Band& band, int b, int key, bool whole, HeadOf head_of, RowOf row_of) {
    if (kAll && p.slopes) {
      float slope[kRowCount];
#pragma unroll
      for (int r = 0; r < kRowCount; ++r) slope[r] = slope_of(p, head_of(r));
      each_score(s, lane, [&](float& x, int r, int column) {
        x = fmaf(-slope[r], fabsf(static_cast<float>(row_of(r) + band.offset - key - column)), x);
      });
    }
    if (!whole) {
      int first[kRowCount], end[kRowCount];
#pragma unroll
      for (int r = 0; r < kRowCount; ++r) {
        first[r] = band.first_key(row_of(r)) - key;
        end[r] = band.end_key(row_of(r)) - key;
      }
      each_score(s, lane, [&](float& x, int r, int column) {
        if (column < first[r] || column >= end[r]) x = -kInfinity;
      });
    }
    if (kAll && p.visible) {
      each_score(s, lane, [&](float& x, int r, int column) {
        if (row_of(r) < band.s.rows && key + column < band.s.keys &&
            !Visible(p, b, head_of(r))(row_of(r), key + column))
          x = -kInfinity;
      });
    }
  }

  // Moves the rows' shifts, and O with them, if the scores ask for it.
  EK_DEVICE void move_shifts() {
    float most[kRowCount];
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) most[r] = -kInfinity;
    each_score(s, lane, [&](float& x, int r, int) { most[r] = fmaxf(most[r], x); });
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) most[r] = quad_max(most[r]);
    int ties[kRowCount] = {};
    float score = 0;  // that may set the shift of row lane % kRowCount
    if constexpr (kAll) {
      if (exact()) score = state.own(most);
      if (rules.paper_capped) count_ties(most, ties);
      state.move(p, rules, most, ties);
    } else {
#pragma unroll
      for (int r = 0; r < kRowCount; ++r)
        most[r] = consistent() ? ceilf(most[r] * p.score_log2) : most[r] * p.score_log2;
    }
    bool moves = false;
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) moves |= most[r] > state.shift[r] + rules.slack;
    if (__any_sync(~0u, moves)) scale_by(most, score);
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) used[r] = state.shift[r] == -kInfinity ? 0.0f : state.shift[r];
    if (exact()) subtract_scores();
  }
  // New shifts for the rows whose shift lags too far behind `most`.
  EK_DEVICE void scale_by(const float (&most)[kRowCount], float score) {
    float factor[kRowCount];
    const float before = state.own(state.shift);
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      factor[r] = state.shift[r];
      if (most[r] > state.shift[r] + rules.slack) state.shift[r] = most[r];
      factor[r] -= state.shift[r] == -kInfinity ? 0.0f : state.shift[r];
    }
    if (exact()) {
      const float fallen = state.move_residue(p, score, before, state.own(state.shift));
#pragma unroll
      for (int r = 0; r < kRowCount; ++r) factor[r] += state.of(r, fallen);
    }
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      factor[r] = exp2_approx(factor[r]);
      state.sum[r] *= factor[r];
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
#pragma unroll
        for (int n = 0; n < kChunk<kHead> / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[c][i][n][e] *= factor[2 * i + e / 2];
  }
  // exact: scores less the one that set their row's shift, where that has a residue. It is exact for those near it, and gives that
  // one an exponent of zero.
  EK_DEVICE void subtract_scores() {
    float taken[kRowCount];
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      taken[r] = state.subtracted(r);
      if (taken[r] != 0) used[r] = 0;
    }
    each_score(s, lane, [&](float& x, int r, int) { x -= taken[r]; });
  }
  EK_DEVICE void count_ties(const float (&most)[kRowCount], int (&ties)[kRowCount]) {
    float threshold[kRowCount];
#pragma unroll
    for (int r = 0; r < kRowCount; ++r)
      threshold[r] = fmaxf(state.largest(r), most[r] * p.score_unit) - rules.tie_tolerance;
    each_score(s, lane, [&](float& x, int r, int) { ties[r] += x * p.score_unit >= threshold[r]; });
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) ties[r] = quad_sum(ties[r]);
  }

  // O += P V, with P rounded. l sums P, or the rounded P where they are
  // consistent. values: a tile; `first`: its row of these keys' first.
  EK_DEVICE void add_values(uint32_t tile, int first) {
    const auto values = Piece<kHead>::across(tile, first, lane);
    const auto multiply = [&](int chunk, const uint32_t(&left)[kBlocks][4], int step) {
      multiply_step<Pairs, kChunk<kHead> / 16>(o[chunk], left, [&](uint32_t(&right)[4], int n) {
        load_matrices_transposed(right, values.at(step, chunk * (kChunk<kHead> / 16) + n));
      });
    };
    if constexpr (kChunked<kHead>) {  // one branch a chunk, and long products
                                      // behind it
      uint32_t left[kKeys / 16][kBlocks][4];
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) find_probs(left[step], step);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        if (chunk * kChunk<kHead> < size(Side::values)) {
#pragma unroll
          for (int step = 0; step < kKeys / 16; ++step) multiply(chunk, left[step], step);
        }
    } else {
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        uint32_t left[kBlocks][4];
        find_probs(left, step);
        multiply(0, left, step);
      }
    }
  }
  // P of 16 keys, packed.
  EK_DEVICE void find_probs(uint32_t (&left)[kBlocks][4], int step) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[i][n][e];
          x = exp2_approx(fmaf(x, p.score_log2, -used[2 * i + e / 2]));
          if (!consistent()) state.sum[2 * i + e / 2] += x;
        }
      pack_left<Pairs>(left[i], s[i][2 * step], s[i][2 * step + 1]);
      if (consistent()) {
#pragma unroll
        for (int n = 0; n < 4; ++n)
          state.sum[2 * i + n % 2] += Pairs::low(left[i][n]) + Pairs::high(left[i][n]);
      }
    }
  }
};

// Bytes of features 8 n + 2 pair and the next one of a row with this noise: what O lost. Every feature's noise is uniform;
// those of a row lie sixteen steps apart, so that errors of features whose gradients have one sign do not add up.
template <class Pairs>
EK_DEVICE uint32_t residues_of(uint32_t noise, int n, int pair, float low, float high) {
  const uint32_t start =
      noise + static_cast<uint32_t>(pair) * 0x1000u + static_cast<uint32_t>(n % 2) * 0x8000u;
  return Pairs::residues(low, high, Pairs::pack(low, high), start & 0xffffu, (start + 0x4000u) & 0xffffu);
}

// The end of a row's softmax, from the sum over its keys.
struct RowEnd {
  float shift, of_keys, sink, residue, sum, factor;

  EK_DEVICE RowEnd(const Problem& p, int h, float of_shift, float of_residue, float sum_over_keys)
      : shift(of_shift), of_keys(sum_over_keys), sink(sink_log2(p, h)), residue(of_residue) {
    // A sink that leaves the keys nothing makes the sum infinite: O = 0, and so is P.
    sum = of_keys == 0 ? 0.0f : of_keys + exp2_approx(sink - shift - residue);
    factor = sum == 0 ? 0.0f : 1.0f / sum;  // no key in sight: O = 0
  }
  // L, and what consistent heads keep, of row `at` of (B, H, T).
  EK_DEVICE void write(const Problem& p, int64_t at, bool exists) const {
    // A residue is at most half an ulp of its shift. Beyond 64, where 2^residue would soon leave FP32, what is cut off is
    // less than that of L.
    const float keys = residue == 0 ? of_keys : of_keys * exp2_approx(fminf(fmaxf(residue, -64.0f), 64.0f));
    p.lse[at] = exists ? log_sum(shift, keys, sink) : -kInfinity;
    if (!p.row_max) return;
    const bool sees = exists && sum != 0;
    p.row_max[at] = sees ? shift : -kInfinity;
    p.row_sum[at] = sees ? sum : 0.0f;
  }
};

}  // namespace evenkeel::ampere
