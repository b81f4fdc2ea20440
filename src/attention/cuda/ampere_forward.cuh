// The forward pass of the Ampere class: O = softmax(a Q K^T) V, tile by tile, never in memory. A block owns 128 query rows of
// one head, a warp 32 of them: each matrix of K and V that it loads then serves two products. K and V tiles go through a
// ring of three slots in the order in which they are used (K, V, K, V, ...). Each is on its way for two steps, with one
// barrier a step. Key tiles run from the last to the first, and a warp leaves out those that none of its rows sees. Exponentials come
// behind V's barrier, with the products that use them: the compiler lets both run at once.
#pragma once

#include "attention/cuda/ampere_problem.cuh"

namespace evenkeel::ampere {

// The softmax of the rows that a quad of lanes holds. What only some stabilisers need is spread over the quad: lane t
// keeps it for row t % kCount.
template <int kCount>
struct Rows {
  float shift[kCount];  // in force, in powers of two; -inf: no key yet
  float sum[kCount];    // l: this thread's part of it
  float unit;  // dither: added to the shift; paper_capped: the row's own random number; exact: its residue
  float max;   // paper_capped: the largest score so far, scaled; exact: the score that set the shift
  int ties;    // paper_capped

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

// Registers of a thread: O takes kBlocks kHead / 2, scores kBlocks kKeys / 2, Q where it is kept kBlocks kHead / 4. kSmall: for
// less shared memory.
template <int kHead, bool kSmall>
struct ForwardTiles {
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = 2;            // of 16 rows, a warp's
  static constexpr int kKeys = 64;             // of a tile
  static constexpr bool kKeepQ = kHead == 64;  // in registers
  static constexpr int kRows = 128;
  static constexpr int kBlocksAtOnce = 2;  // on a multiprocessor, by registers
};
// O alone takes 128 registers with 16 rows a warp.
template <bool kSmall>
struct ForwardTiles<256, kSmall> {
  static constexpr int kWarps = kSmall ? 4 : 8;
  static constexpr int kBlocks = 1;
  static constexpr int kKeys = kSmall ? 32 : 64;
  static constexpr bool kKeepQ = false;
  static constexpr int kRows = kSmall ? 64 : 128;
  static constexpr int kBlocksAtOnce = kSmall ? 2 : 1;
};

template <class Pairs, int kHead, bool kSmall, Instance kInstance, class Tiles = ForwardTiles<kHead, kSmall>>
struct Forward {
  static constexpr bool kAll = kInstance == Instance::all;
  static constexpr int kWarps = Tiles::kWarps, kThreads = kWarps * kWarpThreads, kBlocks = Tiles::kBlocks,
                       kRows = Tiles::kRows, kKeys = Tiles::kKeys, kBlocksAtOnce = Tiles::kBlocksAtOnce;
  static constexpr int kRowCount = 2 * kBlocks;  // a thread's rows
  static constexpr bool kKeepQ = Tiles::kKeepQ;
  static constexpr int kSteps = kHead / 16;  // of the product over features
  static constexpr int kChunks = kHead / kChunk<kHead>;
  static constexpr int kSlots = 3;
  static constexpr uint32_t kQueryBytes = kRows * kHead * 2, kSlotBytes = kKeys * kHead * 2;
  static constexpr size_t kSharedBytes = kQueryBytes + kSlots * kSlotBytes;
  static_assert(!kSmall || kSharedBytes <= kSmallSharedBytes);
  static_assert(kRows == kWarps * kBlocks * 16);

  const Problem& p;
  const int thread, warp, lane;
  int b, h, row;  // row: the block's first
  Band band;
  const HeadRules rules;
  int first_tile, end_tile;               // of keys
  uint32_t q, slots;                      // addresses
  int slot = 0;                           // of the tile in use
  const uint16_t *next_key, *next_value;  // this thread's first pieces of the tiles to be loaded next
  bool has_queries = false;               // in `kept`

  uint32_t kept[kKeepQ ? kSteps : 1][kBlocks][4];
  float s[kBlocks][kKeys / 8][4];
  float o[kChunks][kBlocks][kChunk<kHead> / 8][4] = {};
  float used[kRowCount];  // the shift of `s`
  Rows<kRowCount> state;

  EK_DEVICE static int tiles_per_head(const Problem& p) { return (p.sequences.T + kRows - 1) / kRows; }

  // Blocks of one head follow each other, the longest rows first.
  EK_DEVICE explicit Forward(const Problem& problem)
      : p(problem),
        thread(static_cast<int>(threadIdx.x)),
        warp(thread / kWarpThreads),
        lane(thread % kWarpThreads),
        b(static_cast<int>(blockIdx.x) / tiles_per_head(p) / p.H),
        h(static_cast<int>(blockIdx.x) / tiles_per_head(p) % p.H),
        row((tiles_per_head(p) - 1 - static_cast<int>(blockIdx.x) % tiles_per_head(p)) * kRows),
        band(p, b),
        rules(p.rules_of(h)),
        first_tile(band.first_key_tile(row, kKeys)),
        end_tile(band.end_key_tile(row, kRows, kKeys)),
        q(shared_address(dynamic_shared())),
        slots(q + kQueryBytes) {}

  EK_DEVICE bool consistent() const { return kAll ? rules.consistent : kInstance == Instance::consistent; }

  EK_DEVICE bool exact() const { return kAll && p.exact; }

  EK_DEVICE static void run(const Problem& p) {
    if (kAll && p.exact && !has_far_rows(p)) return;
    Forward(p).run();
  }
  // The first launch noted a byte for each warp of this block.
  EK_DEVICE static bool has_far_rows(const Problem& p) {
    using Warps = std::conditional_t<kWarps == 4, uint32_t, uint64_t>;
    static_assert(sizeof(Warps) == kWarps);
    return reinterpret_cast<const Warps*>(p.far_rows)[blockIdx.x] != 0;
  }

  EK_DEVICE void run() {
    state.start();
    if constexpr (kAll)
      state.draw(p, rules, static_cast<int64_t>(b * p.H + h) * p.sequences.T + row_of(lane % kRowCount));
    if (first_tile < end_tile) {
      const Sequence& sequence = band.s;
      load_tile<kHead, kRows, kThreads>(
          q, own_piece<kHead>(p.q.at(sequence.query_batch, h, sequence.first_row + row), p.q.stride[2]),
          p.q.stride[2], sequence.rows - row, p.D);
      const int g = h / (p.H / p.G), key = sequence.first_key + (end_tile - 1) * kKeys;
      next_key = own_piece<kHead>(p.k.at(sequence.key_batch, g, key), p.k.stride[2]);
      next_value = own_piece<kHead>(p.v.at(sequence.key_batch, g, key), p.v.stride[2]);
      load_keys(next_key, p.k.stride[2], end_tile - 1, 0, Side::keys);
      load_keys(next_value, p.v.stride[2], end_tile - 1, 1, Side::values);
      for (int tile = end_tile - 1; tile >= first_tile; --tile) walk(tile);
    }
    write();
  }

  // The row of the block's tile that this thread's row r is, counted from the sequence's first.
  EK_DEVICE int row_of(int r) const { return warp_row() + row_in_warp(r); }
  EK_DEVICE int warp_row() const { return row + warp * kBlocks * 16; }
  EK_DEVICE uint32_t slot_at(int n) const { return slots + n * kSlotBytes; }
  EK_DEVICE int size(Side side) const { return p.template size<kHead>(side); }

  EK_DEVICE void load_keys(const uint16_t*& from, int64_t stride, int tile, int to, Side side) {
    if (tile >= first_tile) {
      load_tile<kHead, kKeys, kThreads>(slot_at(to), from, stride, band.s.keys - tile * kKeys, size(side));
      from -= kKeys * stride;
    }
    commit_copies();
  }

  // One key tile. What arrives next but one takes the slot that was used last.
  EK_DEVICE void walk(int tile) {
    const bool seen = band.some_seen(warp_row(), kBlocks * 16, tile * kKeys, kKeys);
    next_slot(next_key, p.k.stride[2], tile, Side::keys);
    if (seen) {
      find_scores();
      mask(tile);
      move_shifts();
    }
    slot = slot == kSlots - 1 ? 0 : slot + 1;
    next_slot(next_value, p.v.stride[2], tile, Side::values);
    if (seen) add_values();
    slot = slot == kSlots - 1 ? 0 : slot + 1;
  }
  EK_DEVICE void next_slot(const uint16_t*& from, int64_t stride, int tile, Side side) {
    wait_for_copies<1>();
    __syncthreads();
    load_keys(from, stride, tile - 1, slot == 0 ? kSlots - 1 : slot - 1, side);
  }

  EK_DEVICE void find_scores() {
    clear(s);
    if (kKeepQ && !has_queries) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_queries(kept[kKeepQ ? step : 0], step);
      has_queries = true;
    }
    const auto keys = Piece<kHead>::along(slot_at(slot), 0, lane);
    each_chunk<kHead>(size(Side::keys), [&](int first_step) {
#pragma unroll
      for (int n = 0; n < kChunk<kHead> / 16; ++n) {
        const int step = first_step + n;
        uint32_t left[kBlocks][4];
        if constexpr (!kKeepQ) load_queries(left, step);
        multiply_step<Pairs, kKeys / 16>(
            s, kKeepQ ? kept[kKeepQ ? step : 0] : left,
            [&](uint32_t(&right)[4], int m) { load_matrices(right, keys.at(m, step)); });
      }
    });
    if (kAll && p.softcap > 0) {
      const float factor = p.scale / p.softcap;
      each_score(s, lane, [&](float& x, int, int) { x = tanh_of(x * factor); });
    }
  }
  EK_DEVICE void load_queries(uint32_t (&left)[kBlocks][4], int step) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      load_matrices(left[i], Piece<kHead>::across(q, warp * kBlocks * 16, lane).at(i, step));
  }

  EK_DEVICE void mask(int tile) {
    const int key = tile * kKeys;
    if (kAll && p.slopes) {
      const float slope = slope_of(p, h);
      each_score(s, lane, [&](float& x, int r, int column) {
        x = fmaf(-slope, fabsf(static_cast<float>(row_of(r) + band.offset - key - column)), x);
      });
    }
    if (!band.all_seen(warp_row(), kBlocks * 16, key, kKeys)) {
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
      const Visible visible(p, b, h);
      each_score(s, lane, [&](float& x, int r, int column) {
        if (row_of(r) < band.s.rows && key + column < band.s.keys && !visible(row_of(r), key + column))
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

  // O += P V, with P rounded. l sums P, or the rounded P where they are consistent.
  EK_DEVICE void add_values() {
    const auto values = Piece<kHead>::across(slot_at(slot), 0, lane);
    const auto multiply = [&](int chunk, const uint32_t(&left)[kBlocks][4], int step) {
      multiply_step<Pairs, kChunk<kHead> / 16>(o[chunk], left, [&](uint32_t(&right)[4], int n) {
        load_matrices_transposed(right, values.at(step, chunk * (kChunk<kHead> / 16) + n));
      });
    };
    if constexpr (kChunked<kHead>) {  // one branch a chunk, and long products behind it
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

  // O / l, L and what the backward pass needs. Rows behind a sequence's end: zeros in a padded tensor, none in a packed one.
  EK_DEVICE void write() {
    const int T = p.sequences.T;
    const float sink = sink_log2(p, h);
    if (p.far_rows && !exact()) note_far_rows();
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      const int i = row_of(r);
      float of_keys = quad_sum(state.sum[r]);
      const float residue = exact() ? state.residue(r) : 0.0f;
      // A sink that leaves the keys nothing makes the sum infinite: O = 0, and so is P.
      const float sum = of_keys == 0 ? 0.0f : of_keys + exp2_approx(sink - state.shift[r] - residue);
      const float factor = sum == 0 ? 0.0f : 1.0f / sum;  // no key in sight: O = 0
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n) {
        float(&numbers)[4] = block(r / 2, n);
        numbers[r % 2 * 2] *= factor, numbers[r % 2 * 2 + 1] *= factor;
      }
      if (lane % 4 != 0 || i >= T) continue;
      // A residue is at most half an ulp of its shift. Beyond 64, where 2^residue would soon leave FP32, what is cut off is
      // less than that of L.
      if (residue != 0) of_keys *= exp2_approx(fminf(fmaxf(residue, -64.0f), 64.0f));
      const bool exists = i < band.s.rows, sees = exists && sum != 0;
      const int64_t at = static_cast<int64_t>(b * p.H + h) * T + i;
      p.lse[at] = exists ? log_sum(state.shift[r], of_keys, sink) : -kInfinity;
      if (p.row_max) {
        p.row_max[at] = sees ? state.shift[r] : -kInfinity;
        p.row_sum[at] = sees ? sum : 0.0f;
      }
    }
    write_output();
    if (p.residue) write_residue();
  }

  EK_DEVICE void note_far_rows() const {
    bool far = false;
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) far |= row_of(r) < band.s.rows && is_far(state.shift[r]);
    const bool some = __any_sync(~0u, far) && (!kAll || has_second_launch(p.rules_of(h)));
    if (lane == 0) p.far_rows[static_cast<int64_t>(blockIdx.x) * kWarps + warp] = some;
  }

  // The warp's part of the query tile, which it needs no more, takes its rows before they go to memory as whole pieces.
  static constexpr int kWarpRows = kBlocks * 16, kPieces = kHead / 8,  // pieces of eight features
      kRowsAtOnce = kWarpThreads / kPieces;
  EK_DEVICE uint8_t* staged(int i, int piece) const {
    return dynamic_shared() + tile_offset<kHead>(warp * kWarpRows + i, piece);
  }
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
  EK_DEVICE void write_output() {
    __syncwarp();
    each_pair([&](int r, int n, float low, float high) {
      *reinterpret_cast<uint32_t*>(staged(row_in_warp(r), n) + lane % 4 * 4) = Pairs::pack(low, high);
    });
    __syncwarp();
    const Sequence& sequence = band.s;
    const int written = p.sequences.query_offsets ? sequence.rows : p.sequences.T;
    const int feature = lane % kPieces * 8;
    uint16_t* to =
        p.o.at(sequence.query_batch, h, sequence.first_row + warp_row() + lane / kPieces) + feature;
#pragma unroll
    for (int n = 0; n < kWarpRows; n += kRowsAtOnce) {
      const int i = n + lane / kPieces, own = warp_row() + i;
      if (own < written && feature < size(Side::values))
        *reinterpret_cast<uint4*>(to) = own < sequence.rows
                                            ? *reinterpret_cast<const uint4*>(staged(i, lane % kPieces))
                                            : uint4{0, 0, 0, 0};
      to += kRowsAtOnce * p.o.stride[2];
    }
  }
  // What O lost: a byte for each number.
  EK_DEVICE void write_residue() {
    const HeadRules& of_head = p.rules_of(h);  // read again: registers are short before
    const bool wide = of_head.wide;
    const RandomKey key = p.random(of_head);
    const int64_t first = static_cast<int64_t>(b * p.H + h) * p.sequences.T + warp_row();
    // Every feature's noise is uniform; those of a row lie sixteen steps apart, so that errors of features whose
    // gradients have one sign do not add up.
    uint32_t noise[kRowCount];
#pragma unroll
    for (int r = 0; r < kRowCount; ++r)
      noise[r] = row_noise(key, static_cast<uint32_t>(first + row_in_warp(r))) + lane % 4 * 0x1000u;
    __syncwarp();
    if (wide)
      each_pair([&](int r, int n, float low, float high) {
        const uint32_t start = noise[r] + n % 2 * 0x8000u;
        *reinterpret_cast<uint16_t*>(staged(row_in_warp(r), n / 2) + n % 2 * 8 + lane % 4 * 2) =
            static_cast<uint16_t>(Pairs::residues(low, high, Pairs::pack(low, high), start & 0xffffu,
                                                  (start + 0x4000u) & 0xffffu));
      });
    __syncwarp();
    const int feature = lane % kPieces * 8;
    int8_t* to = p.residue + (first + lane / kPieces) * size(Side::values) + feature;
#pragma unroll
    for (int n = 0; n < kWarpRows; n += kRowsAtOnce) {
      const int i = n + lane / kPieces, own = warp_row() + i;
      if (own < p.sequences.T && feature < size(Side::values))
        *reinterpret_cast<uint2*>(to) =
            wide && own < band.s.rows
                ? *reinterpret_cast<const uint2*>(staged(i, feature / 16) + feature % 16)
                : uint2{0, 0};
      to += kRowsAtOnce * size(Side::values);
    }
  }
};

}  // namespace evenkeel::ampere
