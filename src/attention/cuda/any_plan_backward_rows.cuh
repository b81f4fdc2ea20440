// The any-plan kernel that owns rows: delta, dQ and the facts.
#pragma once

#include "attention/cuda/any_plan_backward.cuh"

namespace evenkeel::any_plan {

inline constexpr int kFp32MinExponent = min_exponent(kFp32);

inline __host__ __device__ bool tells_facts_of(const Problem& p) {
  return p.residual || p.residual_floor || p.delta_error;
}

enum class RowTask { gradients, gradients_and_facts, zero_sum_delta };

// dO . O of row i of a tile of dO, features in order. O from `saved`, or where there is none from the output
// tensor.
template <int kD, bool kAny>
__device__ __forceinline__ float dot_with_output(const Problem& p, const float* saved, int64_t start,
                                                 const uint8_t* grad_tile, int i, int grad_parts) {
  float delta = 0;
  if (!kAny && !saved && p.o.wide) {
    uint4 o[kD / 8];
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.o.data) + start);
#pragma unroll
    for (int piece = 0; piece < kD / 8; ++piece) o[piece] = piece * 8 < p.D ? from[piece] : uint4{};
#pragma unroll
    for (int piece = 0; piece < kD / 8; ++piece) {
      const uint4 g = *reinterpret_cast<const uint4*>(grad_tile + tile_offset<kD>(i, piece));
      const uint32_t left[4] = {g.x, g.y, g.z, g.w},
                     right[4] = {o[piece].x, o[piece].y, o[piece].z, o[piece].w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        delta = __fmaf_rn(low_bf16(left[n]), low_bf16(right[n]), delta);
        delta = __fmaf_rn(high_bf16(left[n]), high_bf16(right[n]), delta);
      }
    }
    return delta;
  }
#pragma unroll 8
  for (int d = 0; d < p.D; ++d) {
    float grad = 0;
    for (int part = 0; part < grad_parts; ++part)
      grad += __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(
          grad_tile + part * kOwnedRows * kTileRowBytes<kD> + tile_offset<kD>(i, d / 8) + d % 8 * 2));
    const int64_t at = start + d * p.o.stride[3];
    const float o = saved    ? saved[d]
                    : p.fp32 ? static_cast<const float*>(p.o.data)[at]
                             : __bfloat162float(static_cast<const __nv_bfloat16*>(p.o.data)[at]);
    delta = __fmaf_rn(grad, o, delta);
  }
  return delta;
}

// The work of one warp, step by step: 16 rows of a block's kOwnedRows, with the block's other warps at every load.
template <int kD, Variant kVariant, RowTask kTask>
struct BackwardRows : WarpRows {
  using Shape = BackwardShape<kD, kVariant>;
  static constexpr bool kAny = Shape::kAny;
  static constexpr bool kDeltaOnly = kTask == RowTask::zero_sum_delta,
                        kFacts = kTask == RowTask::gradients_and_facts;  // they may be asked for
  using Loader = TileLoader<kD, Shape::kThreads, kAny>;
  using Scores = float[kStepFragments][4];  // of the warp's rows and a step's keys

  const bool has_facts, tells_facts;
  const int q_parts, k_parts, v_parts, grad_parts;
  const uint8_t* const shared;
  float* const block_delta;  // (kOwnedRows), in shared memory
  const uint32_t q_tile, grad_tile, k_tile, v_tile;
  const BackwardSites<kVariant> sites;
  const int64_t head_rows;
  const Loader key_loader, value_loader;

  RowValues values[2];
  float dq[kDeltaOnly ? 1 : kD / 8][4] = {};
  // The facts' sums, in FP64. Where P and dS are bf16 (but in Variant::any) tensor cores add dS up, and the squares of its
  // powers of two, for the floor: products with a matrix of ones, exact but for their sums in FP32.
  double prob_sum[2] = {0, 0}, gradient_sum[2] = {0, 0}, residual[2] = {0, 0}, floor[2] = {0, 0};
  float quick_prob_sum[2] = {0, 0}, dscore_sums[4] = {}, gap_sums[4] = {};
  // sum P is also what keel's part of the residual needs.
  const bool wants_floor, wants_error, sums_in_fp64;
  const int dscores_parts;
  float delta_sum[2] = {0, 0}, delta_weight[2] = {0, 0};

  EK_DEVICE BackwardRows(const Problem& problem, int head_, int block_row_, const DevicePlan& plan_,
                         const int (&row_)[2], const uint8_t* shared_, float* block_delta_)
      : WarpRows(problem, head_, block_row_, plan_, row_, kOwnedRows, Shape::kLoad),
        has_facts(b < p.fact_sequences),
        tells_facts(kFacts && has_facts && tells_facts_of(p)),
        q_parts(kAny ? plan.parts_q : 1),
        k_parts(kAny ? plan.parts_k : 1),
        v_parts(kAny ? plan.parts_v : 1),
        grad_parts(kAny ? plan.parts_grad : 1),
        shared(shared_),
        block_delta(block_delta_),
        q_tile(shared_address(shared)),
        grad_tile(q_tile + Shape::kOwnedBytes * (kAny ? p.most_q : 1)),
        k_tile(grad_tile + Shape::kOwnedBytes * (kAny ? p.most_grad : 1)),
        v_tile(k_tile + Shape::kLoadBytes * (kAny ? p.most_k : Shape::kStages)),
        sites(plan),
        head_rows(static_cast<int64_t>(head) * p.T),
        key_loader(p.k, p.D, b, h, sight.keys, k_parts),
        value_loader(p.v, p.D, b, h, sight.keys, v_parts),
        wants_floor(p.residual_floor != nullptr),
        wants_error(p.delta_error != nullptr || plan.keel != 0),
        sums_in_fp64(kAny || (kVariant == Variant::full && sites.small_formats())),
        dscores_parts(kAny ? plan.parts_dscores : 1) {}

  EK_DEVICE void run() {
    load_rows();
    if (!kDeltaOnly && threadIdx.x < kOwnedRows) find_delta();
    __syncthreads();
    take_row_values();
    for (int step = begin; step < end; ++step) {
      const int stage = Shape::kStages > 1 ? (step - begin) & 1 : 0;
      await_load(step, stage);
#pragma unroll 1
      for (int start = 0; start < Shape::kLoad; start += kBackwardStep) {
        const int key = step * Shape::kLoad + start;
        if (!warp_sight.any(key, kBackwardStep)) continue;
        take_step(key, stage * Shape::kLoadBytes + start * kTileRowBytes<kD>);
      }
    }
    if constexpr (kDeltaOnly) {
      finish_delta();
    } else {
      if (tells_facts) finish_facts();
      finish_dq();
    }
  }

  // --- Load
  EK_DEVICE void load_step(int step, int stage) {
    key_loader.template load<Shape::kLoad>(k_tile + stage * Shape::kLoadBytes, step * Shape::kLoad);
    value_loader.template load<Shape::kLoad>(v_tile + stage * Shape::kLoadBytes, step * Shape::kLoad);
    commit_copies();
  }
  EK_DEVICE void load_rows() {
    Loader(p.q, p.D, b, h, sight.rows, q_parts).template load<kOwnedRows>(q_tile, block_row);
    Loader(p.grad, p.D, b, h, sight.rows, grad_parts).template load<kOwnedRows>(grad_tile, block_row);
    commit_copies();
    wait_for_copies();
    __syncthreads();
    if (Shape::kStages > 1 && begin < end) load_step(begin, 0);
  }
  // This load's keys and values, and with two stages the next one's on their way.
  EK_DEVICE void await_load(int step, int stage) {
    if constexpr (Shape::kStages > 1) {
      wait_for_copies();
      __syncthreads();
      if (step + 1 < end) load_step(step + 1, stage ^ 1);
    } else {
      __syncthreads();
      load_step(step, 0);
      wait_for_copies();
      __syncthreads();
    }
  }

  // --- Delta
  // keel's part, and the rounding.
  EK_DEVICE float finished_delta(float delta, int own) const {
    const float lse = p.lse[head_rows + own];
    if (plan.keel != 0 && lse != kNone) delta = __fsub_rn(delta, __fmul_rn(__fmul_rn(2.0f, plan.keel), lse));
    return round_one<RoundKind::any>(delta, plan.at(Site::delta), stream_key(p, plan, Site::delta),
                                     static_cast<uint64_t>(head) * pitch + own);
  }
  // delta = dO . O, features in order; or as the pass before left it. A thread a row.
  EK_DEVICE void find_delta() {
    const int i = threadIdx.x, own = block_row + i;
    float delta = 0;
    if (own < sight.rows) {
      if (plan.probs_delta)
        delta = p.used_delta[head_rows + own];
      else
        delta = finished_delta(dot_with_output<kD, kAny>(
                                   p, plan.saves_output ? p.o_for_delta + (head_rows + own) * p.D : nullptr,
                                   output_row(p.o, b, h, own), shared + (grad_tile - q_tile), i, grad_parts),
                               own);
    }
    block_delta[i] = delta;
    if (own < p.T) {
      p.used_delta[head_rows + own] = delta;
      if (p.delta && has_facts) p.delta[head_rows + own] = delta;
    }
  }
  EK_DEVICE void take_row_values() {
    for (int i = 0; i < 2; ++i) {
      const float2 saved = row[i] < p.T ? p.row_values[head_rows + row[i]] : float2{0.0f, 1.0f};
      values[i] = {saved.x, saved.y, kDeltaOnly ? 0.0f : block_delta[warp * kWarpRows + group + 8 * i]};
    }
  }
  // zero_sum's.
  EK_DEVICE void add_to_delta(const Scores& s, const Scores& dp) {
#pragma unroll
    for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        delta_sum[e / 2] = __fmaf_rn(s[n][e], dp[n][e], delta_sum[e / 2]);
        delta_weight[e / 2] = __fadd_rn(delta_weight[e / 2], s[n][e]);
      }
  }
  EK_DEVICE void finish_delta() {
    for (int i = 0; i < 2; ++i) {
      const float sum = quad_sum(delta_sum[i]), weight = quad_sum(delta_weight[i]);
      if (quad != 0 || row[i] >= p.T) continue;
      const float delta = finished_delta(weight == 0 ? 0.0f : __fdiv_rn(sum, weight), row[i]);
      p.used_delta[head_rows + row[i]] = row[i] < sight.rows ? delta : 0.0f;
    }
  }

  // --- One step of keys. part: where they lie in the tiles of keys and of values
  EK_DEVICE void take_step(int key, uint32_t part) {
    const uint32_t keys = k_tile + part, vectors = v_tile + part;
    Scores s = {}, dp = {};
    float slope[kAny ? kStepFragments : 1][4];
    multiply_rows<kD, kStepFragments, kAny>(s, q_tile, kOwnedRows, warp * kWarpRows, q_parts, keys,
                                            kBackwardStep, 0, k_parts, lane);
    multiply_rows<kD, kStepFragments, kAny>(dp, grad_tile, kOwnedRows, warp * kWarpRows, grad_parts, vectors,
                                            kBackwardStep, 0, v_parts, lane);
    const Elements elements{(static_cast<uint64_t>(head) * p.N + key + 2 * quad) * pitch + row[0], 1, pitch};
    const auto values_of = [&](int, int e) { return values[e / 2]; };
    const auto masked = [&](int n, int e) {
      const int i = row[e / 2], j = key + 8 * n + 2 * quad + e % 2;
      return !sight.sees(i, j) || (kAny && p.visible && visible_at(p, b, h, i, j) == 0);
    };
    const bool whole = warp_sight.whole(key, kBackwardStep) && !(kAny && p.visible);
    recompute<kVariant, kAny>(s, dp, slope, p, plan, sites, elements, whole, masked, values_of);
    if constexpr (kDeltaOnly) {
      add_to_delta(s, dp);
    } else {
      score_gradients(s, dp, p.scale, values_of);
      if (tells_facts && (wants_error || sums_in_fp64)) add_to_sums(s, dp);
      finish_score_gradients(s, dp, slope, elements);
      multiply_columns<kD, kStepFragments, kAny>(dq, dp, dscores_parts, keys, kBackwardStep, 0, k_parts, lane,
                                                 [&](const uint32_t(&left)[4]) {
                                                   if (tells_facts && !sums_in_fp64) add_to_residual(left);
                                                 });
    }
  }
  // Softcap's derivative and the rounding of dS. With softcap the residual is taken before its derivative, whose
  // slopes would hide it.
  EK_DEVICE void finish_score_gradients(const Scores& s, Scores& dp,
                                        const float (&slope)[kAny ? kStepFragments : 1][4],
                                        const Elements& elements) {
    const bool capped = kAny && p.softcap > 0;
    if constexpr (kAny)
      if (capped) {
        if (tells_facts) measure(s, dp, RoundKind::any, kFp32.significand_bits, kFp32MinExponent);
#pragma unroll
        for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) dp[n][e] = __fmul_rn(dp[n][e], slope[n][e]);
      }
    if (is_rounded_apart<kVariant>(sites.dscores) || (tells_facts && sums_in_fp64))
      round_operand<kVariant>(dp, sites.dscores, stream_key(p, plan, Site::dscores), elements);
    if (tells_facts && sums_in_fp64 && !capped)
      measure(s, dp, sites.dscores.kind, sites.dscores.rounding->significand_bits,
              sites.dscores.rounding->min_exponent);
  }

  // --- Facts
  // sum P and sum a P (dP - delta): what delta lacks of sum P dP / sum P.
  EK_DEVICE void add_to_sums(const Scores& s, const Scores& dp) {
    float weight[2] = {0, 0}, gradient[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (sums_in_fp64) {
          prob_sum[e / 2] += s[n][e];
          gradient_sum[e / 2] += dp[n][e];
        } else {
          weight[e / 2] += s[n][e];
          gradient[e / 2] += dp[n][e];
        }
      }
    if (!sums_in_fp64)
      for (int i = 0; i < 2; ++i) {
        quick_prob_sum[i] += weight[i];
        gradient_sum[i] += gradient[i];
      }
  }
  // The residual and its floor, of a dS in this format.
  EK_DEVICE void measure(const Scores& s, const Scores& dp, RoundKind kind, int significand_bits,
                         int min_exponent) {
#pragma unroll
    for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (s[n][e] == 0) continue;
        residual[e / 2] += dp[n][e];
        const double gap = device_ulp(kind, significand_bits, min_exponent, dp[n][e]);
        floor[e / 2] = fma(gap, gap, floor[e / 2]);
      }
  }
  // The same of a dS in BF16, as it is multiplied.
  EK_DEVICE void add_to_residual(const uint32_t (&left)[4]) {
    multiply_add(dscore_sums, left, kBf16Ones, kBf16Ones);
    if (!wants_floor) return;
    // 2^7 ulps of a normal bf16 number: its power of two.
    uint32_t gaps[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) gaps[e] = square_bf16(left[e] & 0x7f807f80u);
    multiply_add(gap_sums, gaps, kBf16Ones, kBf16Ones);
  }
  EK_DEVICE void finish_facts() {
    for (int i = 0; i < 2; ++i) {
      const double weight = quad_sum(sums_in_fp64 ? prob_sum[i] : static_cast<double>(quick_prob_sum[i]));
      const double gradient = quad_sum(gradient_sum[i]);
      // A sum by tensor cores is whole in every lane.
      const double rest = sums_in_fp64 ? quad_sum(residual[i]) : static_cast<double>(dscore_sums[2 * i]);
      const double gaps = sums_in_fp64 ? quad_sum(floor[i]) : gap_sums[2 * i] * 0x1p-14;
      if (quad != 0 || row[i] >= p.T) continue;
      const float lse = p.lse[head_rows + row[i]];
      const bool exists = row[i] < sight.rows;
      // keel leaves 2 z L sum P in the row on purpose.
      const double keel = exists && lse != kNone ? 2.0 * plan.keel * lse : 0.0;
      if (p.residual)
        p.residual[head_rows + row[i]] = exists ? static_cast<float>(rest / p.scale - keel * weight) : 0.0f;
      if (p.residual_floor)
        p.residual_floor[head_rows + row[i]] =
            exists ? static_cast<float>(sqrt(gaps / 12) / fabs(p.scale)) : 0.0f;
      if (p.delta_error)
        p.delta_error[head_rows + row[i]] =
            exists && weight != 0 ? static_cast<float>(keel - gradient / p.scale / weight) : 0.0f;
    }
  }

  // --- Finish
  // A row of dS sums to zero but for keel's part, so centred keys give the same dQ but for that part.
  EK_DEVICE void add_mean_key() {
    const float* mean = p.mean_key + (static_cast<int64_t>(b) * p.G + h / (p.H / p.G)) * p.D;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float lse = row[e / 2] < sight.rows ? p.lse[head_rows + row[e / 2]] : kNone;
      if (lse == kNone) continue;
      const float sum = __fmul_rn(__fmul_rn(__fmul_rn(p.scale, 2.0f), plan.keel), lse);
#pragma unroll
      for (int n = 0; n < kD / 8; ++n)
        if (const int d = 8 * n + 2 * quad + e % 2; d < p.D)
          dq[n][e] = __fadd_rn(dq[n][e], __fmul_rn(sum, mean[d]));
    }
  }
  EK_DEVICE void finish_dq() {
    if (plan.centres_keys && plan.keel != 0) add_mean_key();
    const StreamKey dq_key = stream_key(p, plan, Site::dq);
    const SiteRounding dq_site = plan.at(Site::dq);
    const RowWriter writer(p, p.dq, b, h, row, sight.rows, p.T);
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      float x[1][4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[0][e] = row[e / 2] < sight.rows ? dq[n][e] : 0.0f;
      round_fragments<RoundKind::any>(
          x, dq_site, dq_key,
          {(static_cast<uint64_t>(head) * p.D + 8 * n + 2 * quad) * pitch + row[0], 1, pitch});
      writer.write(8 * n + 2 * quad, x[0]);
    }
  }
};

template <int kD, Variant kVariant, RowTask kTask>
__global__ void __launch_bounds__(BackwardShape<kD, kVariant>::kThreads, BackwardShape<kD, kVariant>::kBlocks)
    backward_rows_kernel(const __grid_constant__ Problem p) {
  const int row_tiles = (p.T + kOwnedRows - 1) / kOwnedRows;
  const int head = blockIdx.x / row_tiles, block_row = (row_tiles - 1 - blockIdx.x % row_tiles) * kOwnedRows;
  const DevicePlan& plan = plan_of(p, head % p.H);
  if (plan.backward != kVariant || (kTask == RowTask::zero_sum_delta && !plan.probs_delta)) return;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float block_delta[kOwnedRows];
  const int first_row = block_row + threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4;
  const int row[2] = {first_row, first_row + 8};
  BackwardRows<kD, kVariant, kTask>(p, head, block_row, plan, row, shared, block_delta).run();
}

}  // namespace evenkeel::any_plan
