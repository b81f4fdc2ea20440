// The backward pass of the any-plan kernels, in two or three kernels without a single atomic. One owns rows and writes
// delta, dQ and the facts (any_plan_backward_rows.cuh). One owns keys and writes dK and dV (any_plan_backward_keys.cuh).
// It walks over the heads of a group and their rows in order. Each finds P and dP for itself. For zero_sum the first runs
// once more before, for delta alone. As row_tile_backward.cpp. Here is what they share.
#pragma once

#include "attention/cuda/any_plan_forward.cuh"
#include "attention/cuda/any_plan_problem.cuh"

namespace evenkeel::any_plan {

inline constexpr int kStepFragments = kBackwardStep / 8;

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

  // Are P or dS rounded to other formats than bf16?
  __device__ bool small_formats() const {
    return probs.kind != RoundKind::bf16 || probs_bwd.kind != RoundKind::bf16 ||
           dscores.kind != RoundKind::bf16;
  }
};

// From q . k and dO . v (fragments of one head): s = P, dp = dP, slope = softcap's derivative. Where not all are seen,
// `masked` says which fragments' values are not. Then values_of(n, e) is the RowValues of a value's row.
template <Variant kVariant, bool kAny, class Masked, class ValuesOf>
__device__ __forceinline__ void recompute(float (&s)[kStepFragments][4], float (&dp)[kStepFragments][4],
                                          float (&slope)[kAny ? kStepFragments : 1][4], const Problem& p,
                                          const DevicePlan& plan, const BackwardSites<kVariant>& sites,
                                          const Elements& elements, bool whole, Masked masked,
                                          ValuesOf values_of) {
  finish_scores<kVariant>(s, p, sites.scores, stream_key(p, plan, Site::scores), elements);
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
    exponentials<kVariant>(s, sites.power_shift, sites.shifted, stream_key(p, plan, Site::shifted), elements,
                           [&](int n, int e) { return values_of(n, e).shift; });
    round_operand<kVariant>(s, sites.probs, stream_key(p, plan, Site::probs), elements);
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
        // With formats of a few bits, or others than the forward pass reads, a score may be far above L.
        s[n][e] = kVariant == Variant::quick ? exp_low(x) : exp_any(x);
      }
  }
  round_fragments<kMostKind<kVariant>>(dp, sites.dprobs, stream_key(p, plan, Site::dprobs), elements);
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

}  // namespace evenkeel::any_plan
