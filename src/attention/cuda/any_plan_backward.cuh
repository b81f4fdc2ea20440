// The backward pass of the any-plan kernels, in two or three kernels without a single atomic. One owns rows
// and writes delta, dQ and the facts; one owns keys and writes dK and dV, walking over the heads of a group
// and their rows in order. Each finds P and dP for itself. For zero_sum the first runs once more before, for
// delta alone. As row_tile_backward.cpp.
#pragma once

#include "attention/cuda/any_plan_forward.cuh"
#include "attention/cuda/any_plan_problem.cuh"

namespace evenkeel::any_plan {

inline constexpr int kStepFragments = kBackwardStep / 8;
inline constexpr int kFp32MinExponent = min_exponent(kFp32);

enum class RowTask { gradients, gradients_and_facts, zero_sum_delta };

template <int kD, Variant kVariant>
struct BackwardShape {
  static constexpr bool kAny = kVariant == Variant::any;
  static constexpr int kWarps = kOwnedRows / kWarpRows, kThreads = kWarps * 32;
  static constexpr int kStages = kAny ? 1 : 2;
  static constexpr int kBlocks = kAny ? 1 : kD == 128 ? 2 : 3;
  // Rows or keys that arrive together; more of them, fewer barriers. They are worked on in steps of
  // kBackwardStep.
  static constexpr int kLoad = kAny || kD == 128 ? kBackwardStep : 2 * kBackwardStep;
  static constexpr int kOwnedBytes = kOwnedRows * kTileRowBytes<kD>, kLoadBytes = kLoad * kTileRowBytes<kD>;
  static constexpr int kValueBytes = kLoad * 3 * sizeof(float);

  static size_t shared_bytes_rows(const Problem& p) {
    return kAny ? size_t{kOwnedBytes} * (p.most_q + p.most_grad) + size_t{kLoadBytes} * (p.most_k + p.most_v)
                : size_t{2} * kOwnedBytes + size_t{kStages} * 2 * kLoadBytes;
  }
  static size_t shared_bytes_keys(const Problem& p) {
    return kStages * kValueBytes +
           (kAny ? size_t{kOwnedBytes} * (p.most_k + p.most_v) + size_t{kLoadBytes} * (p.most_q + p.most_grad)
                 : size_t{2} * kOwnedBytes + size_t{kStages} * 2 * kLoadBytes);
  }
};

// What a row brings to the backward pass.
struct RowValues {
  float shift, sum, delta;
};

// What the loops ask of the plan, read once.
template <Variant kVariant>
struct BackwardSites {
  SiteRounding scores, shifted, probs, probs_bwd, dprobs, dscores;
  bool sums_rounded, power_shift;

  __device__ explicit BackwardSites(const DevicePlan& plan)
      : scores(plan.at(Site::scores)),
        shifted(plan.at(Site::shifted)),
        probs(plan.at(Site::probs)),
        probs_bwd(plan.at(Site::probs_bwd)),
        dprobs(plan.at(Site::dprobs)),
        dscores(plan.at(Site::dscores)),
        sums_rounded(kVariant != Variant::quick && plan.sums_rounded),
        power_shift(kVariant != Variant::quick && plan.shift.rule == ShiftRule::power_of_two) {}
};

// From q . k and dO . v (fragments of one head): s = P, dp = dP, slope = softcap's derivative. `masked` says
// which fragments' values are not seen, where not all are; values_of(n, e) is the RowValues of a value's row.
template <Variant kVariant, bool kAny, class Masked, class ValuesOf>
__device__ __forceinline__ void recompute(float (&s)[kStepFragments][4], float (&dp)[kStepFragments][4],
                                          float (&slope)[kAny ? kStepFragments : 1][4], const Problem& p,
                                          const DevicePlan& plan, const BackwardSites<kVariant>& sites,
                                          const Elements& elements, bool whole, Masked masked,
                                          ValuesOf values_of) {
  finish_scores<kAny>(s, p, sites.scores, stream_key(p, plan, Site::scores), elements);
  if (!whole) {
#pragma unroll
    for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (masked(n, e)) s[n][e] = kNone;
  }
  if constexpr (kAny)
    if (p.softcap > 0) {
#pragma unroll
      for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float t = s[n][e] == kNone ? 0.0f : __fdiv_rn(s[n][e], p.softcap);
          slope[n][e] = __fsub_rn(1.0f, __fmul_rn(t, t));
        }
    }
  if (sites.sums_rounded) {
    // The very Pb of the forward pass, over their own sum.
    exponentials<kAny>(s, sites.power_shift, sites.shifted, stream_key(p, plan, Site::shifted), elements,
                       [&](int n, int e) { return values_of(n, e).shift; });
    round_fragments<kAny>(s, sites.probs, stream_key(p, plan, Site::probs), elements);
#pragma unroll
    for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = __fdiv_rn(s[n][e], values_of(n, e).sum);
  } else {
#pragma unroll
    for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = __fsub_rn(s[n][e], values_of(n, e).shift);
        s[n][e] = kAny ? exp_any(x) : exp_low(x);
      }
  }
  round_fragments<kAny>(dp, sites.dprobs, stream_key(p, plan, Site::dprobs), elements);
}

// dp = a P (dP - delta), before softcap and the rounding.
template <class ValuesOf>
__device__ __forceinline__ void score_gradients(const float (&s)[kStepFragments][4],
                                                float (&dp)[kStepFragments][4], float scale,
                                                ValuesOf values_of) {
#pragma unroll
  for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      dp[n][e] = __fmul_rn(__fmul_rn(scale, s[n][e]), __fsub_rn(dp[n][e], values_of(n, e).delta));
}

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

template <int kD, Variant kVariant, RowTask kTask>
__global__ void __launch_bounds__(BackwardShape<kD, kVariant>::kThreads, BackwardShape<kD, kVariant>::kBlocks)
    backward_rows_kernel(const __grid_constant__ Problem p) {
  using Shape = BackwardShape<kD, kVariant>;
  constexpr bool kAny = Shape::kAny;
  constexpr int kThreads = Shape::kThreads;
  constexpr bool kDeltaOnly = kTask == RowTask::zero_sum_delta,
                 kFacts = kTask == RowTask::gradients_and_facts;
  const int row_tiles = (p.T + kOwnedRows - 1) / kOwnedRows;
  const int head = blockIdx.x / row_tiles, block_row = (row_tiles - 1 - blockIdx.x % row_tiles) * kOwnedRows;
  const int b = head / p.H, h = head % p.H;
  const DevicePlan& plan = plan_of(p, h);
  if (plan.backward != kVariant || (kDeltaOnly && !plan.probs_delta)) return;
  const bool has_facts = b < p.fact_sequences, tells_facts = kFacts && has_facts;

  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float block_delta[kOwnedRows];
  const int q_parts = kAny ? plan.parts_q : 1, k_parts = kAny ? plan.parts_k : 1,
            v_parts = kAny ? plan.parts_v : 1, grad_parts = kAny ? plan.parts_grad : 1;
  const uint32_t q_tile = shared_address(shared),
                 grad_tile = q_tile + Shape::kOwnedBytes * (kAny ? p.most_q : 1);
  const uint32_t k_tile = grad_tile + Shape::kOwnedBytes * (kAny ? p.most_grad : 1);
  const uint32_t v_tile = k_tile + Shape::kLoadBytes * (kAny ? p.most_k : Shape::kStages);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int warp_row = block_row + warp * kWarpRows;
  const int row[2] = {warp_row + group, warp_row + group + 8};
  const Sight sight(p, b);
  const RowsSight warp_sight(sight, warp_row, kWarpRows);
  const BackwardSites<kVariant> sites(plan);
  const uint64_t pitch = row_pitch(p);
  const int64_t head_rows = static_cast<int64_t>(head) * p.T;

  int begin = 0, end = 0;  // loads of keys that some row sees
  if (const int bottom = min(block_row + kOwnedRows, sight.rows) - 1; bottom >= block_row) {
    begin = sight.first(block_row) / Shape::kLoad;
    end = (max(sight.last(bottom), 0) + Shape::kLoad - 1) / Shape::kLoad;
  }
  using Loader = TileLoader<kD, kThreads, kAny>;
  const Loader key_loader(p.k, p.D, b, h, sight.keys, k_parts),
      value_loader(p.v, p.D, b, h, sight.keys, v_parts);
  const auto load_step = [&](int step, int stage) {
    key_loader.template load<Shape::kLoad>(k_tile + stage * Shape::kLoadBytes, step * Shape::kLoad);
    value_loader.template load<Shape::kLoad>(v_tile + stage * Shape::kLoadBytes, step * Shape::kLoad);
    commit_copies();
  };
  Loader(p.q, p.D, b, h, sight.rows, q_parts).template load<kOwnedRows>(q_tile, block_row);
  Loader(p.grad, p.D, b, h, sight.rows, grad_parts).template load<kOwnedRows>(grad_tile, block_row);
  commit_copies();
  wait_for_copies();
  __syncthreads();
  if (Shape::kStages > 1 && begin < end) load_step(begin, 0);

  // delta = dO . O, features in order; or as the pass before left it.
  if (!kDeltaOnly && threadIdx.x < kOwnedRows) {
    const int i = threadIdx.x, own = block_row + i;
    float delta = 0;
    if (own < sight.rows) {
      if (plan.probs_delta) {
        delta = p.used_delta[head_rows + own];
      } else {
        delta = dot_with_output<kD, kAny>(
            p, plan.saves_output ? p.o_for_delta + (head_rows + own) * p.D : nullptr,
            output_row(p.o, b, h, own), shared + (grad_tile - q_tile), i, grad_parts);
        const float lse = p.lse[head_rows + own];
        if (plan.keel != 0 && lse != kNone)
          delta = __fsub_rn(delta, __fmul_rn(__fmul_rn(2.0f, plan.keel), lse));
        delta = round_one<true>(delta, plan.at(Site::delta), stream_key(p, plan, Site::delta),
                                static_cast<uint64_t>(head) * pitch + own);
      }
    }
    block_delta[i] = delta;
    if (own < p.T) {
      p.used_delta[head_rows + own] = delta;
      if (p.delta && has_facts) p.delta[head_rows + own] = delta;
    }
  }
  __syncthreads();

  RowValues values[2];
  for (int i = 0; i < 2; ++i) {
    const float2 saved = row[i] < p.T ? p.row_values[head_rows + row[i]] : float2{0.0f, 1.0f};
    values[i] = {saved.x, saved.y, kDeltaOnly ? 0.0f : block_delta[warp * kWarpRows + group + 8 * i]};
  }
  float dq[kDeltaOnly ? 1 : kD / 8][4] = {};
  // The facts' sums, in FP64. Without kAny dS is bf16, and tensor cores add it (and the squares of its powers
  // of two, for the floor) up: products with a matrix of ones, exact but for their sums in FP32.
  double prob_sum[2] = {0, 0}, gradient_sum[2] = {0, 0}, residual[2] = {0, 0}, floor[2] = {0, 0};
  float quick_prob_sum[2] = {0, 0}, dscore_sums[4] = {}, gap_sums[4] = {};
  // sum P is also what keel's part of the residual needs.
  const bool wants_floor = p.residual_floor != nullptr,
             wants_error = p.delta_error != nullptr || plan.keel != 0;
  const int dscores_parts = kAny ? plan.parts_dscores : 1;
  float delta_sum[2] = {0, 0}, delta_weight[2] = {0, 0};
  for (int step = begin; step < end; ++step) {
    const int stage = Shape::kStages > 1 ? (step - begin) & 1 : 0;
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
#pragma unroll 1
    for (int start = 0; start < Shape::kLoad; start += kBackwardStep) {
      const int key = step * Shape::kLoad + start;
      if (!warp_sight.any(key, kBackwardStep)) continue;

      const uint32_t part = stage * Shape::kLoadBytes + start * kTileRowBytes<kD>, keys = k_tile + part,
                     vectors = v_tile + part;
      float s[kStepFragments][4] = {}, dp[kStepFragments][4] = {}, slope[kAny ? kStepFragments : 1][4];
      multiply_rows<kD, kStepFragments, kAny>(s, q_tile, kOwnedRows, warp * kWarpRows, q_parts, keys,
                                              kBackwardStep, 0, k_parts, lane);
      multiply_rows<kD, kStepFragments, kAny>(dp, grad_tile, kOwnedRows, warp * kWarpRows, grad_parts,
                                              vectors, kBackwardStep, 0, v_parts, lane);
      const Elements elements{(static_cast<uint64_t>(head) * p.N + key + 2 * quad) * pitch + row[0], 1,
                              pitch};
      const auto values_of = [&](int, int e) { return values[e / 2]; };
      const auto masked = [&](int n, int e) {
        const int i = row[e / 2], j = key + 8 * n + 2 * quad + e % 2;
        return !sight.sees(i, j) || (kAny && p.visible && !is_visible(p, b, h, i, j));
      };
      const bool whole = warp_sight.whole(key, kBackwardStep) && !(kAny && p.visible);
      recompute<kVariant, kAny>(s, dp, slope, p, plan, sites, elements, whole, masked, values_of);

      if constexpr (kDeltaOnly) {
#pragma unroll
        for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            delta_sum[e / 2] = __fmaf_rn(s[n][e], dp[n][e], delta_sum[e / 2]);
            delta_weight[e / 2] = __fadd_rn(delta_weight[e / 2], s[n][e]);
          }
        continue;
      }
      score_gradients(s, dp, p.scale, values_of);
      // sum P and sum a P (dP - delta): what delta lacks of sum P dP / sum P.
      if (tells_facts && (wants_error || kAny)) {
        float weight[2] = {0, 0}, gradient[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if constexpr (kAny) {
              prob_sum[e / 2] += s[n][e];
              gradient_sum[e / 2] += dp[n][e];
            } else {
              weight[e / 2] += s[n][e];
              gradient[e / 2] += dp[n][e];
            }
          }
        if constexpr (!kAny)
          for (int i = 0; i < 2; ++i) {
            quick_prob_sum[i] += weight[i];
            gradient_sum[i] += gradient[i];
          }
      }
      // With softcap the residual is taken before its derivative, whose slopes would hide it.
      const auto measure = [&](int significand_bits, int min_exponent) {
#pragma unroll
        for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (s[n][e] == 0) continue;
            residual[e / 2] += dp[n][e];
            const double gap = device_ulp(significand_bits, min_exponent, dp[n][e]);
            floor[e / 2] = fma(gap, gap, floor[e / 2]);
          }
      };
      if constexpr (kAny) {
        if (p.softcap > 0) {
          if (tells_facts) measure(kFp32.significand_bits, kFp32MinExponent);
#pragma unroll
          for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) dp[n][e] = __fmul_rn(dp[n][e], slope[n][e]);
        }
        round_fragments<kAny>(dp, sites.dscores, stream_key(p, plan, Site::dscores), elements);
        if (tells_facts && !(p.softcap > 0))
          measure(sites.dscores.rounding->significand_bits, sites.dscores.rounding->min_exponent);
      }
      if constexpr (!kDeltaOnly)
        multiply_columns<kD, kStepFragments, kAny>(dq, dp, dscores_parts, keys, kBackwardStep, 0, k_parts,
                                                   lane, [&](const uint32_t(&left)[4]) {
                                                     if (tells_facts) {
                                                       multiply_add(dscore_sums, left, kBf16Ones, kBf16Ones);
                                                       if (!wants_floor) return;
                                                       // 2^7 ulps of a normal bf16 number: its power of two.
                                                       uint32_t gaps[4];
#pragma unroll
                                                       for (int e = 0; e < 4; ++e)
                                                         gaps[e] = square_bf16(left[e] & 0x7f807f80u);
                                                       multiply_add(gap_sums, gaps, kBf16Ones, kBf16Ones);
                                                     }
                                                   });
    }
  }

  if constexpr (kDeltaOnly) {
    for (int i = 0; i < 2; ++i) {
      const float sum = quad_sum(delta_sum[i]), weight = quad_sum(delta_weight[i]);
      if (quad != 0 || row[i] >= p.T) continue;
      float delta = weight == 0 ? 0.0f : __fdiv_rn(sum, weight);
      const float lse = p.lse[head_rows + row[i]];
      if (plan.keel != 0 && lse != kNone)
        delta = __fsub_rn(delta, __fmul_rn(__fmul_rn(2.0f, plan.keel), lse));
      delta = round_one<true>(delta, plan.at(Site::delta), stream_key(p, plan, Site::delta),
                              static_cast<uint64_t>(head) * pitch + row[i]);
      p.used_delta[head_rows + row[i]] = row[i] < sight.rows ? delta : 0.0f;
    }
    return;
  }
  if (tells_facts) {
    for (int i = 0; i < 2; ++i) {
      const double weight = quad_sum(kAny ? prob_sum[i] : static_cast<double>(quick_prob_sum[i]));
      const double gradient = quad_sum(gradient_sum[i]);
      // A sum by tensor cores is whole in every lane.
      const double rest = kAny ? quad_sum(residual[i]) : static_cast<double>(dscore_sums[2 * i]);
      const double gaps = kAny ? quad_sum(floor[i]) : gap_sums[2 * i] * 0x1p-14;
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
  if constexpr (!kDeltaOnly) {
    if (plan.centres_keys && plan.keel != 0) {
      // A row of dS sums to zero but for keel's part, so centred keys give the same dQ but for that part.
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
    const StreamKey dq_key = stream_key(p, plan, Site::dq);
    const SiteRounding dq_site = plan.at(Site::dq);
    const RowWriter writer(p, p.dq, b, h, row, sight.rows, p.T);
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      float x[1][4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[0][e] = row[e / 2] < sight.rows ? dq[n][e] : 0.0f;
      round_fragments<true>(
          x, dq_site, dq_key,
          {(static_cast<uint64_t>(head) * p.D + 8 * n + 2 * quad) * pitch + row[0], 1, pitch});
      writer.write(8 * n + 2 * quad, x[0]);
    }
  }
}

// Scores are transposed here, keys in the rows of the fragments: P^T and dS^T come out as the left operands
// of dV and dK.
template <int kD, Variant kVariant>
__global__ void __launch_bounds__(BackwardShape<kD, kVariant>::kThreads, BackwardShape<kD, kVariant>::kBlocks)
    backward_keys_kernel(const __grid_constant__ Problem p) {
  using Shape = BackwardShape<kD, kVariant>;
  constexpr bool kAny = Shape::kAny;
  constexpr int kThreads = Shape::kThreads;
  const int key_tiles = (p.N + kOwnedRows - 1) / kOwnedRows;
  const int kv_head = blockIdx.x / key_tiles, block_key = blockIdx.x % key_tiles * kOwnedRows;
  const int b = kv_head / p.G, g = kv_head % p.G, heads = p.H / p.G;
  const DevicePlan& first_plan = plan_of(p, g * heads);
  if (first_plan.backward != kVariant) return;

  extern __shared__ __align__(128) uint8_t shared[];
  const int room_q = kAny ? p.most_q : 1, room_k = kAny ? p.most_k : 1, room_v = kAny ? p.most_v : 1,
            room_grad = kAny ? p.most_grad : 1;
  const uint32_t k_tile = shared_address(shared), v_tile = k_tile + Shape::kOwnedBytes * room_k;
  const uint32_t q_tile = v_tile + Shape::kOwnedBytes * room_v;
  const uint32_t grad_tile = q_tile + Shape::kLoadBytes * Shape::kStages * room_q;
  const uint32_t value_tile = grad_tile + Shape::kLoadBytes * Shape::kStages * room_grad;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int warp_key = block_key + warp * kWarpRows;
  const int key[2] = {warp_key + group, warp_key + group + 8};
  const Sight sight(p, b);
  const uint64_t pitch = row_pitch(p);

  const KeysSight warp_sight(sight, warp_key, kWarpRows), block_sight(sight, block_key, kOwnedRows);
  // Loads of rows that see some of these keys.
  const int begin = block_sight.first / Shape::kLoad;
  const int end = max(begin, (block_sight.last + Shape::kLoad - 1) / Shape::kLoad);

  float dk[kD / 8][4] = {}, dv[kD / 8][4] = {};
  for (int h = g * heads; h < (g + 1) * heads; ++h) {
    const int head = b * p.H + h;
    const DevicePlan& plan = plan_of(p, h);
    const int q_parts = kAny ? plan.parts_q : 1, k_parts = kAny ? plan.parts_k : 1,
              v_parts = kAny ? plan.parts_v : 1, grad_parts = kAny ? plan.parts_grad : 1;
    const BackwardSites<kVariant> sites(plan);
    const int probs_parts = kAny ? plan.parts_probs_bwd : 1, dscores_parts = kAny ? plan.parts_dscores : 1;
    using Loader = TileLoader<kD, kThreads, kAny>;
    const Loader row_loader(p.q, p.D, b, h, sight.rows, q_parts),
        grad_loader(p.grad, p.D, b, h, sight.rows, grad_parts);
    const auto load_step = [&](int step, int stage) {
      row_loader.template load<Shape::kLoad>(q_tile + stage * Shape::kLoadBytes, step * Shape::kLoad);
      grad_loader.template load<Shape::kLoad>(grad_tile + stage * Shape::kLoadBytes, step * Shape::kLoad);
      if (threadIdx.x < Shape::kLoad) {
        // Rows behind the last read its values: they are masked.
        const int64_t at = static_cast<int64_t>(head) * p.T +
                           min(step * Shape::kLoad + static_cast<int>(threadIdx.x), p.T - 1);
        const uint32_t target = value_tile + stage * Shape::kValueBytes + threadIdx.x * 4;
        copy_4_async(target, &p.row_values[at].x);
        copy_4_async(target + Shape::kLoad * 4, p.used_delta + at);
        if constexpr (kVariant != Variant::quick)
          copy_4_async(target + Shape::kLoad * 8, &p.row_values[at].y);
      }
      commit_copies();
    };
    __syncthreads();  // the head before is done with its tiles
    Loader(p.k, p.D, b, h, sight.keys, k_parts).template load<kOwnedRows>(k_tile, block_key);
    Loader(p.v, p.D, b, h, sight.keys, v_parts).template load<kOwnedRows>(v_tile, block_key);
    commit_copies();
    if (Shape::kStages > 1 && begin < end) load_step(begin, 0);
    for (int step = begin; step < end; ++step) {
      const int stage = Shape::kStages > 1 ? (step - begin) & 1 : 0;
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
#pragma unroll 1
      for (int start = 0; start < Shape::kLoad; start += kBackwardStep) {
        const int row = step * Shape::kLoad + start;
        if (!warp_sight.any(row, kBackwardStep)) continue;

        const uint32_t part = stage * Shape::kLoadBytes + start * kTileRowBytes<kD>, rows = q_tile + part,
                       grads = grad_tile + part;
        float s[kStepFragments][4] = {}, dp[kStepFragments][4] = {}, slope[kAny ? kStepFragments : 1][4];
        multiply_rows<kD, kStepFragments, kAny>(s, k_tile, kOwnedRows, warp * kWarpRows, k_parts, rows,
                                                kBackwardStep, 0, q_parts, lane);
        multiply_rows<kD, kStepFragments, kAny>(dp, v_tile, kOwnedRows, warp * kWarpRows, v_parts, grads,
                                                kBackwardStep, 0, grad_parts, lane);
        const Elements elements{(static_cast<uint64_t>(head) * p.N + key[0]) * pitch + row + 2 * quad, pitch,
                                1};
        const float* const values =
            reinterpret_cast<const float*>(shared + (value_tile - k_tile) + stage * Shape::kValueBytes) +
            start + 2 * quad;
        RowValues of_column[kStepFragments][2];
#pragma unroll
        for (int n = 0; n < kStepFragments; ++n) {
          const float2 shift = *reinterpret_cast<const float2*>(values + 8 * n);
          const float2 delta = *reinterpret_cast<const float2*>(values + Shape::kLoad + 8 * n);
          float2 sum{1.0f, 1.0f};
          if constexpr (kVariant != Variant::quick)
            sum = *reinterpret_cast<const float2*>(values + 2 * Shape::kLoad + 8 * n);
          of_column[n][0] = {shift.x, sum.x, delta.x};
          of_column[n][1] = {shift.y, sum.y, delta.y};
        }
        const auto values_of = [&](int n, int e) { return of_column[n][e % 2]; };
        const auto masked = [&](int n, int e) {
          const int i = row + 8 * n + 2 * quad + e % 2, j = key[e / 2];
          return !sight.sees(i, j) || (kAny && p.visible && !is_visible(p, b, h, i, j));
        };
        const bool whole = warp_sight.whole(row, kBackwardStep) && !(kAny && p.visible);
        recompute<kVariant, kAny>(s, dp, slope, p, plan, sites, elements, whole, masked, values_of);

        // P as operand of dV is rounded apart from the P that dS uses.
        if constexpr (kAny) {
          float operand[kStepFragments][4];
#pragma unroll
          for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) operand[n][e] = s[n][e];
          round_fragments<kAny>(operand, sites.probs_bwd, stream_key(p, plan, Site::probs_bwd), elements);
          multiply_columns<kD, kStepFragments, kAny>(dv, operand, probs_parts, grads, kBackwardStep, 0,
                                                     grad_parts, lane);
        } else {
          multiply_columns<kD, kStepFragments, kAny>(dv, s, 1, grads, kBackwardStep, 0, 1, lane);
        }
        score_gradients(s, dp, p.scale, values_of);
        if constexpr (kAny) {
          if (p.softcap > 0) {
#pragma unroll
            for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
              for (int e = 0; e < 4; ++e) dp[n][e] = __fmul_rn(dp[n][e], slope[n][e]);
          }
          round_fragments<kAny>(dp, sites.dscores, stream_key(p, plan, Site::dscores), elements);
        }
        multiply_columns<kD, kStepFragments, kAny>(dk, dp, dscores_parts, rows, kBackwardStep, 0, q_parts,
                                                   lane);
      }
    }
  }

  // Heads of a group share dK and dV: their first head's plan rounds them.
  const SiteRounding dk_site = first_plan.at(Site::dk), dv_site = first_plan.at(Site::dv);
  const StreamKey dk_key = stream_key(p, first_plan, Site::dk), dv_key = stream_key(p, first_plan, Site::dv);
  const RowWriter dk_writer(p, p.dk, b, g, key, sight.keys, p.N),
      dv_writer(p, p.dv, b, g, key, sight.keys, p.N);
#pragma unroll
  for (int n = 0; n < kD / 8; ++n) {
    const Elements elements{(static_cast<uint64_t>(kv_head) * p.N + key[0]) * p.D + 8 * n + 2 * quad,
                            static_cast<uint64_t>(p.D), 1};
    const auto write = [&](const float(&sums)[4], const SiteRounding& site, const StreamKey& stream,
                           const RowWriter& to) {
      float x[1][4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[0][e] = key[e / 2] < sight.keys ? sums[e] : 0.0f;
      round_fragments<true>(x, site, stream, elements);
      to.write(8 * n + 2 * quad, x[0]);
    };
    write(dk[n], dk_site, dk_key, dk_writer);
    write(dv[n], dv_site, dv_key, dv_writer);
  }
}

}  // namespace evenkeel::any_plan
