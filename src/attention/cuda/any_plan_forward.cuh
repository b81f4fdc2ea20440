// The forward pass of the any-plan kernels: a block owns rows of one head, each warp 16 of them, and walks
// over tiles of 64 keys with an online softmax. As row_tile_forward.cpp.
#pragma once

#include "attention/cuda/any_plan_problem.cuh"

namespace evenkeel::any_plan {

// s = Pb before its own site, from S. shift_of(n, e) is m of the row of value e of fragment n.
template <Variant kVariant, int kCount, class ShiftOf>
__device__ __forceinline__ void exponentials(float (&s)[kCount][4], bool power_shift,
                                             const SiteRounding& shifted, const StreamKey& shifted_key,
                                             const Elements& elements, ShiftOf shift_of) {
  if (power_shift) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = exp_scaled(s[n][e], shift_of(n, e));
    return;
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = __fsub_rn(s[n][e], shift_of(n, e));
  if (kVariant == Variant::any && shifted.kind > RoundKind::bf16) {
    // A masked -inf stays one, also in a format that has none.
    uint32_t masked = 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) masked |= static_cast<uint32_t>(s[n][e] == kNone) << (n * 4 + e);
    round_fragments<kMostKind<kVariant>>(s, shifted, shifted_key, elements);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = masked >> (n * 4 + e) & 1 ? kNone : s[n][e];
  } else {
    round_fragments<RoundKind::bf16>(s, shifted, shifted_key, elements);
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = exp_low(s[n][e]);
}

// Not inlined, as round_any_4: few problems have a soft cap.
static __device__ __noinline__ float4 softcap_4(float4 s, float cap) {
  s.x = __fmul_rn(cap, tanhf(__fdiv_rn(s.x, cap)));
  s.y = __fmul_rn(cap, tanhf(__fdiv_rn(s.y, cap)));
  s.z = __fmul_rn(cap, tanhf(__fdiv_rn(s.z, cap)));
  s.w = __fmul_rn(cap, tanhf(__fdiv_rn(s.w, cap)));
  return s;
}

// S of a block of fragments from q . k: scaled, soft-capped, rounded. Not yet masked.
template <Variant kVariant, int kCount>
__device__ __forceinline__ void finish_scores(float (&s)[kCount][4], const Problem& p,
                                              const SiteRounding& scores, const StreamKey& key,
                                              const Elements& elements) {
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = __fmul_rn(s[n][e], p.scale);
  if (kVariant == Variant::any && p.softcap > 0) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float4 y = softcap_4({s[n][0], s[n][1], s[n][2], s[n][3]}, p.softcap);
      s[n][0] = y.x, s[n][1] = y.y, s[n][2] = y.z, s[n][3] = y.w;
    }
  }
  round_fragments<kMostKind<kVariant>>(s, scores, key, elements);
}

// Values of two rows over what divides each. Not inlined: a division is a dozen instructions, and these are the last.
static __device__ __noinline__ float4 divide_4(float4 x, float first, float second) {
  return {__fdiv_rn(x.x, first), __fdiv_rn(x.y, first), __fdiv_rn(x.z, second), __fdiv_rn(x.w, second)};
}

// What centred keys took off every score of a row: L is of the scores as they were.
static __device__ __noinline__ float score_of_mean_key(const Problem& p, const DevicePlan& plan, int b, int h,
                                                       int row) {
  const Operand& x = p.q;
  const __nv_bfloat16* from = x.data + b * x.stride[0] + h * x.stride[1] +
                              ((x.offsets ? x.offsets[b] : 0) + int64_t{row}) * x.stride[2];
  const float* mean = p.mean_key + (static_cast<int64_t>(b) * p.G + h / (p.H / p.G)) * p.D;
  double dot = 0;
  for (int d = 0; d < p.D; ++d) {
    double value = 0;
    for (int part = 0; part < plan.parts_q; ++part)
      value += static_cast<double>(__bfloat162float(from[part * x.part_stride + d * x.stride[3]]));
    dot = fma(value, static_cast<double>(mean[d]), dot);
  }
  return static_cast<float>(p.scale * dot);
}

// A warp of a block that owns rows of one head: its 16 rows, and the keys that they see.
struct WarpRows {
  const Problem& p;
  const int head, block_row, b, h;
  const DevicePlan& plan;
  const int warp, lane, group, quad, warp_row;
  const int (&row)[2];  // this thread's, of the fragments
  const Sight sight;
  const RowsSight warp_sight;
  const uint64_t pitch;
  int begin = 0, end = 0;  // tiles of keys that some row of the block sees

  EK_DEVICE WarpRows(const Problem& problem, int head_, int block_row_, const DevicePlan& plan_,
                     const int (&row_)[2], int block_rows, int tile_keys)
      : p(problem),
        head(head_),
        block_row(block_row_),
        b(head / p.H),
        h(head % p.H),
        plan(plan_),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        group(lane / 4),
        quad(lane % 4),
        warp_row(block_row + warp * kWarpRows),
        row(row_),
        sight(p, b),
        warp_sight(sight, warp_row, kWarpRows),
        pitch(row_pitch(p)) {
    if (const int bottom = min(block_row + block_rows, sight.rows) - 1; bottom >= block_row) {
      begin = sight.first(block_row) / tile_keys;
      end = (max(sight.last(bottom), 0) + tile_keys - 1) / tile_keys;
    }
  }
};

template <int kD, Variant kVariant>
struct ForwardShape {
  static constexpr bool kAny = kVariant == Variant::any, kQuick = kVariant == Variant::quick;
  // Registers decide: three blocks of 4 warps have 168 a thread. (Two of 8 warps, 128, spill and are slower.)
  static constexpr int kWarps = 4, kBlocks = kAny ? 1 : kQuick || kD == 64 ? 3 : 2;
  static constexpr int kRows = kWarps * kWarpRows, kThreads = kWarps * 32;
  static constexpr int kStages = kAny ? 1 : 2;
  static constexpr bool kKeepQ = !kAny && kD == 64;  // in registers
  static constexpr int kTileBytes = kTileKeys * kTileRowBytes<kD>;

  static size_t shared_bytes(const Problem& p) {
    const size_t q = kRows * kTileRowBytes<kD>;
    return kAny ? q * p.most_q + size_t{kTileBytes} * (p.most_k + p.most_v)
                : q + size_t{kStages} * 2 * kTileBytes;
  }
};

// The work of one warp, step by step: 16 rows of a block's kRows, with the block's other warps at every tile.
// kTies: counts may be asked for, of some sequences.
template <int kD, Variant kVariant, bool kTies>
struct ForwardRows : WarpRows {
  using Shape = ForwardShape<kD, kVariant>;
  static constexpr bool kAny = Shape::kAny, kQuick = Shape::kQuick;
  static constexpr int kFragments = kTileKeys / 8;
  using Loader = TileLoader<kD, Shape::kThreads, kAny>;
  using Scores = float[kFragments][4];  // of the warp's rows and a tile's keys

  const int q_parts, k_parts, v_parts, probs_parts;
  const uint32_t q_tile, k_tile, v_tile;
  // What the loops ask of the plan.
  const SiteRounding scores, shifted, probs, row_sum, pv;
  const bool sums_rounded, power_shift, shadow, shift_counts_ties, one_tile, max_first;
  const float tie_tolerance;
  const bool tells_ties;

  const int key_tiles;  // that are rounded after
  const Loader key_loader, value_loader;
  const StreamKey scores_key, shifted_key, probs_key, sum_key, pv_key;

  uint32_t q[Shape::kKeepQ ? kD / 16 : 1][4];
  RowShift shift[2];
  float unit[2] = {0.5f, 0.5f}, lift[2] = {0, 0};  // lift: dither's part of the shift
  // Ties with the row's final maximum, counted while it is still rising. The least of them is known as long as
  // there is one a tile: a new maximum then leaves all, or none. Where some of several may drop out, one more
  // pass over the keys settles the doubt.
  int tied[2] = {0, 0};
  float least_tied[2] = {0, 0}, tie_max[2], threshold[2];
  bool doubt = false;
  float o[kD / 8][4] = {}, wide_o[kQuick ? 1 : kD / 8][4] = {};
  float sum[2] = {0, 0}, wide_sum[2] = {0, 0};

  EK_DEVICE ForwardRows(const Problem& problem, int head_, int block_row_, const DevicePlan& plan_,
                        const int (&row_)[2], uint32_t shared)
      : WarpRows(problem, head_, block_row_, plan_, row_, Shape::kRows, kTileKeys),
        q_parts(kAny ? plan.parts_q : 1),
        k_parts(kAny ? plan.parts_k : 1),
        v_parts(kAny ? plan.parts_v : 1),
        probs_parts(kAny ? plan.parts_probs : 1),
        q_tile(shared),
        k_tile(q_tile + Shape::kRows * kTileRowBytes<kD> * (kAny ? p.most_q : 1)),
        v_tile(k_tile + Shape::kTileBytes * (kAny ? p.most_k : Shape::kStages)),
        scores(plan.at(Site::scores)),
        shifted(plan.at(Site::shifted)),
        probs(plan.at(Site::probs)),
        row_sum(plan.at(Site::row_sum)),
        pv(plan.at(Site::pv)),
        sums_rounded(!kQuick && plan.sums_rounded),
        power_shift(!kQuick && plan.shift.rule == ShiftRule::power_of_two),
        shadow(!kQuick && plan.shadow),
        shift_counts_ties(!kQuick && counts_ties(plan.shift.rule)),
        one_tile(!kQuick && p.one_tile),
        max_first(!kQuick && (plan.max_first || p.one_tile)),
        tie_tolerance(plan.shift.tie_tolerance),
        tells_ties(kTies && p.ties && b < p.fact_sequences),
        key_tiles(p.one_tile ? 1 : (p.N + kTileKeys - 1) / kTileKeys),
        key_loader(p.k, p.D, b, h, sight.keys, k_parts),
        value_loader(p.v, p.D, b, h, sight.keys, v_parts),
        scores_key(stream_key(p, plan, Site::scores)),
        shifted_key(stream_key(p, plan, Site::shifted)),
        probs_key(stream_key(p, plan, Site::probs)),
        sum_key(stream_key(p, plan, Site::row_sum)),
        pv_key(stream_key(p, plan, Site::pv)) {}

  EK_DEVICE void run() {
    load_queries();
    if (max_first) find_shift_first();
    start_ties();
    if (begin < end && Shape::kStages > 1) {
      load_keys(begin, 0);
      load_values(begin, 0);
      commit_copies();
    }
    for (int tile = begin; tile < end; ++tile) {
      const int stage = Shape::kStages > 1 ? (tile - begin) & 1 : 0, key = tile * kTileKeys;
      load_tile(tile, stage);
      if (!warp_sight.any(key, kTileKeys)) continue;
      Scores s;
      score_tile(s, key, stage);
      const float tile_max[2] = {quad_max(largest(s, 0)), quad_max(largest(s, 1))};
      // A tile without a score near the largest changes nothing.
      if (tells_ties && __any_sync(0xffffffffu, tile_max[0] >= threshold[0] || tile_max[1] >= threshold[1]))
        count_ties(s, key, tile_max);
      if (!max_first) move_shift(s, tile_max);
      accumulate(s, key, stage);
      if (!one_tile) round_sums(tile);
    }
    if (one_tile && begin < end) round_sums(0);
    if (tells_ties) finish_ties();
    finish_row_values();
    finish_output();
  }

  // --- Load
  EK_DEVICE void load_keys(int tile, int stage) {
    key_loader.template load<kTileKeys>(k_tile + stage * Shape::kTileBytes, tile * kTileKeys);
  }
  EK_DEVICE void load_values(int tile, int stage) {
    value_loader.template load<kTileKeys>(v_tile + stage * Shape::kTileBytes, tile * kTileKeys);
  }
  EK_DEVICE void load_queries() {
    Loader(p.q, p.D, b, h, sight.rows, q_parts).template load<Shape::kRows>(q_tile, block_row);
    if (draws_number(plan.shift.rule))
      for (int i = 0; i < 2; ++i) {
        unit[i] = device_random_unit(stream_key(p, plan, 63u), static_cast<uint64_t>(head) * p.T + row[i]);
        if (plan.shift.rule == ShiftRule::dither) lift[i] = __fmul_rn(unit[i], static_cast<float>(kLog2));
      }
    commit_copies();
    if (Shape::kKeepQ || max_first) {
      wait_for_copies();
      __syncthreads();
    }
    if constexpr (Shape::kKeepQ) {
#pragma unroll
      for (int k = 0; k < kD / 16; ++k) load_left<kD>(q[k], q_tile, warp * kWarpRows, k, lane);
    }
  }
  // This tile's keys and values, and with two stages the next one's on their way.
  EK_DEVICE void load_tile(int tile, int stage) {
    if constexpr (Shape::kStages > 1) {
      wait_for_copies();
      __syncthreads();  // the tile is here, and nobody reads the one before it any more
      if (tile + 1 < end) {
        load_keys(tile + 1, stage ^ 1);
        load_values(tile + 1, stage ^ 1);
        commit_copies();
      }
    } else {
      __syncthreads();
      load_keys(tile, 0);
      load_values(tile, 0);
      commit_copies();
      wait_for_copies();
      __syncthreads();
    }
  }
  // body(key) for every tile, with K alone in shared memory: the passes before and after the main one.
  template <class Body>
  EK_DEVICE void for_each_key_tile(Body body) {
    for (int tile = begin; tile < end; ++tile) {
      __syncthreads();
      load_keys(tile, 0);
      commit_copies();
      wait_for_copies();
      __syncthreads();
      if (warp_sight.any(tile * kTileKeys, kTileKeys)) body(tile * kTileKeys);
    }
  }

  // --- Score and mask
  EK_DEVICE Elements elements_at(int key) const {
    return Elements{(static_cast<uint64_t>(head) * p.N + key + 2 * quad) * pitch + row[0], 1, pitch};
  }
  // S of this warp's rows and the tile that begins at `key`, -inf where masked.
  EK_DEVICE void score_tile(Scores& s, int key, int stage) {
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = 0;
    if constexpr (Shape::kKeepQ)
      multiply_rows<kD>(s, q, k_tile + stage * Shape::kTileBytes, 0, lane);
    else
      multiply_rows<kD, kFragments, kAny>(s, q_tile, Shape::kRows, warp * kWarpRows, q_parts,
                                          k_tile + stage * Shape::kTileBytes, kTileKeys, 0, k_parts, lane);
    finish_scores<kVariant>(s, p, scores, scores_key, elements_at(key));
    if (!warp_sight.whole(key, kTileKeys)) mask(s, key);
    if (kAny && p.visible) hide(s, key);
  }
  EK_DEVICE void mask(Scores& s, int key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = sight.first(row[i]) - key - 2 * quad, last = sight.last(row[i]) - key - 2 * quad;
#pragma unroll
      for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * n + e < first || 8 * n + e >= last) s[n][2 * i + e] = kNone;
    }
  }
  // What p.visible does not show.
  EK_DEVICE void hide(Scores& s, int key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row[i] >= sight.rows) continue;
      const uint8_t* const shown = &visible_at(p, b, h, row[i], key + 2 * quad);
#pragma unroll
      for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (key + 8 * n + 2 * quad + e < sight.keys && shown[(8 * n + e) * p.visible_stride[3]] == 0)
            s[n][2 * i + e] = kNone;
    }
  }

  // --- Ties
  EK_DEVICE static float largest(const Scores& s, int i) {
    float best = kNone;
#pragma unroll
    for (int n = 0; n < kFragments; ++n) best = fmaxf(best, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
    return best;
  }
  EK_DEVICE static int count_at_least(const Scores& s, int i, float least) {
    int count = 0;
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
      count -= greater_equal(s[n][2 * i], least) + greater_equal(s[n][2 * i + 1], least);
    return count;
  }
  // Of BF16 scores, none of them masked: both rows' counts at once, two comparisons an instruction, and tensor cores add
  // up. A third of the time.
  EK_DEVICE static void count_bf16_at_least(const Scores& s, const float (&least)[2], int (&count)[2]) {
    uint32_t limit[2];
    for (int i = 0; i < 2; ++i) limit[i] = pack_twice_upward(least[i]);
    float sums[4] = {};
#pragma unroll
    for (int n = 0; n < kFragments; n += 2) {
      uint32_t reached[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        reached[e] = greater_equal_bf16(pack_upper(s[n + e / 2][e % 2 * 2], s[n + e / 2][e % 2 * 2 + 1]),
                                        limit[e % 2]);
      multiply_add(sums, reached, kBf16Ones, kBf16Ones);
    }
    for (int i = 0; i < 2; ++i) count[i] = static_cast<int>(sums[2 * i]);
  }
  EK_DEVICE void start_ties() {
    for (int i = 0; i < 2; ++i) {
      tie_max[i] = shift[i].max;
      threshold[i] = __fsub_rn(tie_max[i], tie_tolerance);
    }
  }
  EK_DEVICE void count_ties(const Scores& s, int key, const float (&tile_max)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (tile_max[i] <= tie_max[i]) continue;
      threshold[i] = __fsub_rn(tile_max[i], tie_tolerance);
      if (tied[i] > 0 && least_tied[i] < threshold[i]) {
        doubt |= tied[i] > 1 && tie_max[i] >= threshold[i];
        tied[i] = 0;
      }
      tie_max[i] = tile_max[i];
    }
    int count[2];
    if (scores.kind == RoundKind::bf16 && warp_sight.whole(key, kTileKeys) && !p.visible) {
      count_bf16_at_least(s, threshold, count);
    } else {
      for (int i = 0; i < 2; ++i) count[i] = quad_sum(count_at_least(s, i, threshold[i]));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!(tile_max[i] >= threshold[i]) || tile_max[i] == kNone) continue;
      least_tied[i] = count[i] > 1 ? kNone : tied[i] == 0 ? tile_max[i] : fminf(least_tied[i], tile_max[i]);
      tied[i] += count[i];
    }
  }
  EK_DEVICE void finish_ties() {
    if (__syncthreads_or(doubt)) {
      tied[0] = tied[1] = 0;
      for_each_key_tile([&](int key) {
        Scores s;
        score_tile(s, key, 0);
        for (int i = 0; i < 2; ++i)
          if (tie_max[i] != kNone) tied[i] += quad_sum(count_at_least(s, i, threshold[i]));
      });
    }
    for (int i = 0; i < 2; ++i)
      if (quad == 0 && row[i] < p.T)
        p.ties[static_cast<int64_t>(head) * p.T + row[i]] = row[i] < sight.rows ? tied[i] : 0;
  }

  // --- Shift
  // The row's maximum by a pass of its own.
  EK_DEVICE void find_shift_first() {
    float top[2] = {kNone, kNone};
    int count[2] = {0, 0};
    // One piece of code finds maxima and, where the rule asks for them, ties: it is long.
#pragma unroll 1
    for (int counts = 0; counts <= shift_counts_ties; ++counts) {
      for_each_key_tile([&](int key) {
        Scores s;
        score_tile(s, key, 0);
        for (int i = 0; i < 2; ++i)
          if (counts)
            count[i] += count_at_least(s, i, shift[i].tie_threshold(plan.shift, top[i]));
          else
            top[i] = fmaxf(top[i], largest(s, i));
      });
      for (int i = 0; i < 2; ++i) top[i] = quad_max(top[i]);
    }
    if (shift_counts_ties)
      for (int i = 0; i < 2; ++i) count[i] = quad_sum(count[i]);
    for (int i = 0; i < 2; ++i) shift[i].add_tile(plan.shift, top[i], count[i], unit[i]);
    __syncthreads();
  }
  // The shift with this tile, and what was summed under the old shift, under the new one.
  EK_DEVICE void move_shift(const Scores& s, const float (&tile_max)[2]) {
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float before = shift[i].m;
      if constexpr (kQuick) {
        shift[i].max = fmaxf(shift[i].max, tile_max[i]);
        shift[i].m = __fadd_rn(shift[i].max, lift[i]);
      } else {
        int count = 0;
        if (shift_counts_ties)
          count = quad_sum(count_at_least(s, i, shift[i].tie_threshold(plan.shift, tile_max[i])));
        shift[i].add_tile(plan.shift, tile_max[i], count, unit[i]);
      }
      const float now = shift[i].m == kNone ? 0.0f : shift[i].m;
      factor[i] = before == kNone ? kNone : __fsub_rn(before, now);
      factor[i] =
          power_shift ? ldexpf(1.0f, static_cast<int>(fmaxf(-300.0f, factor[i]))) : exp_low(factor[i]);
    }
    if (!__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = __fmul_rn(sum[i], factor[i]);
      if constexpr (!kQuick) wide_sum[i] = __fmul_rn(wide_sum[i], factor[i]);
    }
#pragma unroll
    for (int n = 0; n < kD / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        o[n][e] = __fmul_rn(o[n][e], factor[e / 2]);
        if constexpr (!kQuick) wide_o[n][e] = __fmul_rn(wide_o[n][e], factor[e / 2]);
      }
  }

  // --- Accumulate
  // S to probabilities, l and O.
  EK_DEVICE void accumulate(Scores& s, int key, int stage) {
    const float m[2] = {shift[0].m == kNone ? 0.0f : shift[0].m, shift[1].m == kNone ? 0.0f : shift[1].m};
    exponentials<kVariant>(s, power_shift, shifted, shifted_key, elements_at(key),
                           [&](int, int e) { return m[e / 2]; });
    float tile_sum[2] = {0, 0};
    const auto add_up = [&] {
#pragma unroll
      for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) tile_sum[e / 2] = __fadd_rn(tile_sum[e / 2], s[n][e]);
    };
    // l sums the probabilities before their rounding, or those that are used.
    if (!sums_rounded) add_up();
    if (sums_rounded || is_rounded_apart<kVariant>(probs))
      round_operand<kVariant>(s, probs, probs_key, elements_at(key));
    if (sums_rounded) add_up();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tile_sum[i] = quad_sum(tile_sum[i]);
      sum[i] = __fadd_rn(sum[i], tile_sum[i]);
      if constexpr (!kQuick) wide_sum[i] = __fadd_rn(wide_sum[i], tile_sum[i]);
    }
    const uint32_t values = v_tile + stage * Shape::kTileBytes;
    multiply_columns<kD, kFragments, kAny>(o, s, probs_parts, values, kTileKeys, 0, v_parts, lane);
    if constexpr (!kQuick)
      if (shadow)
        multiply_columns<kD, kFragments, kAny>(wide_o, s, probs_parts, values, kTileKeys, 0, v_parts, lane);
  }
  EK_DEVICE void round_sums(int tile) {
    for (int i = 0; i < 2; ++i)
      sum[i] = round_one<kMostKind<kVariant>>(
          sum[i], row_sum, sum_key, (static_cast<uint64_t>(head) * key_tiles + tile) * pitch + row[i]);
    round_fragments<kMostKind<kVariant>>(
        o, pv, pv_key,
        {((static_cast<uint64_t>(head) * key_tiles + tile) * p.D + 2 * quad) * pitch + row[0], 1, pitch});
  }

  // --- Finish
  // L and what the backward pass needs of m and l: lane 0 of a row's four for the first row, lane 1 for the
  // other.
  EK_DEVICE void finish_row_values() {
    const int i = quad & 1, own = row[i];
    const float own_max = i ? shift[1].max : shift[0].max, m = i ? shift[1].m : shift[0].m,
                own_sum = i ? sum[1] : sum[0];
    const float l = sums_rounded ? (i ? wide_sum[1] : wide_sum[0]) : own_sum;
    const bool empty = own >= sight.rows || (own_max == kNone && own_sum == 0);
    // The logarithm in FP64, rounded once: within an ulp of the CPU's logf.
    const double log_sum = log(static_cast<double>(l));
    const float finite_m = m == kNone ? 0.0f : m;
    const float lse = power_shift ? static_cast<float>(fma(static_cast<double>(finite_m), kLog2, log_sum))
                                  : __fadd_rn(finite_m, static_cast<float>(log_sum));
    float given = lse;
    if constexpr (kAny)
      if (plan.centres_keys && !empty) given = __fadd_rn(lse, score_of_mean_key(p, plan, b, h, own));
    if (quad < 2 && own < p.T) {
      const int64_t at = static_cast<int64_t>(head) * p.T + own;
      p.row_values[at] = empty ? float2{0.0f, 1.0f} : sums_rounded ? float2{m, l} : float2{lse, 1.0f};
      p.lse[at] = empty ? kNone : given;
    }
  }
  EK_DEVICE float divisor(int i, float l) const {
    return (shift[i].max == kNone && sum[i] == 0) || row[i] >= sight.rows ? 1.0f : l;
  }
  // O, and what delta uses.
  EK_DEVICE void finish_output() {
    const StreamKey output_key = stream_key(p, plan, Site::output);
    const SiteRounding output = plan.at(Site::output), output_for_delta = plan.at(Site::output_for_delta);
    const bool saves_output = plan.saves_output, wide = plan.wide_output;
    const RowWriter writer(p, p.o, b, h, row, sight.rows, p.T);
    float* const saved =  // of row[0]
        p.o_for_delta ? p.o_for_delta + (static_cast<int64_t>(head) * p.T + row[0]) * p.D : nullptr;
    clear_missing_rows();
    const float by[2] = {divisor(0, sum[0]), divisor(1, sum[1])};
    // wide without a shadow: l was never rounded, so the two are one.
    const float wide_by[2] = {divisor(0, wide && !kQuick ? wide_sum[0] : sum[0]),
                              divisor(1, wide && !kQuick ? wide_sum[1] : sum[1])};
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      const Elements elements{(static_cast<uint64_t>(head) * p.D + 8 * n + 2 * quad) * pitch + row[0], 1,
                              pitch};
      float x[1][4];
      const auto set = [&](const float(&from)[4], const float(&divisors)[2]) {
        const float4 y = divide_4({from[0], from[1], from[2], from[3]}, divisors[0], divisors[1]);
        x[0][0] = y.x, x[0][1] = y.y, x[0][2] = y.z, x[0][3] = y.w;
      };
      set(o[n], by);
      round_fragments<RoundKind::any>(x, output, output_key, elements);
      const int d = 8 * n + 2 * quad;
      writer.write(d, x[0]);
      if (saves_output) {
        if constexpr (kQuick) {
          set(o[n], wide_by);
        } else {
          float source[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) source[e] = shadow ? wide_o[n][e] : o[n][e];
          set(source, wide_by);
        }
        round_fragments<RoundKind::any>(x, output_for_delta, output_key, elements);
      }
      if (saved) {  // for all heads if for one: no part of `saved` is left as it was
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (row[e / 2] < p.T && d + e % 2 < p.D) saved[e / 2 * 8 * p.D + d + e % 2] = x[0][e];
      }
    }
  }
  EK_DEVICE void clear_missing_rows() {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (row[i] >= sight.rows) {
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) {
          o[n][2 * i] = o[n][2 * i + 1] = 0;
          if constexpr (!kQuick) wide_o[n][2 * i] = wide_o[n][2 * i + 1] = 0;
        }
      }
  }
};

template <int kD, Variant kVariant, bool kTies>
__global__ void __launch_bounds__(ForwardShape<kD, kVariant>::kThreads, ForwardShape<kD, kVariant>::kBlocks)
    forward_kernel(const __grid_constant__ Problem p) {
  using Shape = ForwardShape<kD, kVariant>;
  // Rows with the most keys first; the tiles of a head together, so that its keys stay in the cache.
  const int row_tiles = (p.T + Shape::kRows - 1) / Shape::kRows;
  const int head = blockIdx.x / row_tiles,
            block_row = (row_tiles - 1 - blockIdx.x % row_tiles) * Shape::kRows;
  const DevicePlan& plan = plan_of(p, head % p.H);
  if (plan.forward != kVariant) return;
  extern __shared__ __align__(128) uint8_t shared[];
  const int first_row = block_row + threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4;
  const int row[2] = {first_row, first_row + 8};
  ForwardRows<kD, kVariant, kTies>(p, head, block_row, plan, row, shared_address(shared)).run();
}

}  // namespace evenkeel::any_plan
