// How far a kernel's outputs may lie from FP64, by the roundings of its plan. The bounds are worst cases: what lies beyond
// is not rounding but a wrong scale, mask or index, or a result that was not computed (docs/numerics.md, section 5).
#pragma once

#include <array>
#include <span>
#include <vector>

#include "attention/attention.h"

namespace evenkeel {

// Sums of the absolute values of an output's terms, from exact inputs: what relative errors of the terms are relative to.
// P: probabilities, G = |dO| |V|^T, W_i = sum_j P_ij G_ij (which bounds |delta|).
struct OutputScales {
  // Shapes are those of the outputs (attention_truth.h).
  Tensor<double> o;  // (B, H, T, Dv): sum_j P |v|
  // (B, H or G, T or N, D) each. Errors relative to dS: a sum P |dP - delta| |k|. Errors of dP's terms: a sum P (G + W) |k|.
  // The error of delta, which is common to a row: a W |sum P k|. For dK: with |q|, and sums of absolute values.
  std::array<Tensor<double>, 3> dq, dk;
  Tensor<double> dv;             // (B, G, N, Dv): sum_i P |dO|
  Tensor<double> v_low, v_high;  // (B, G, 1, Dv): O is a mean of V's rows, so it lies between
  // (B, H): largest a sum_d |q| |k| of a score, and of one within kNear of its row's largest.
  std::vector<double> score, near_score;
  std::array<double, 4> largest;  // |q|, |k|, |v|, |dO|, over all heads
};
// Scores further below hold e^-60 of a row at most: their errors do not matter unless they are as large as half of that distance.
inline constexpr double kNear = 60;

// Bounds of head `head` of (B, H): |found - exact| <= relative * scale (summed over the scales of dQ and dK) + absolute.
struct OutputBounds {
  struct Bound {
    double relative = 0, absolute = 0;
  };
  struct GradientBound {
    std::array<double, 3> relative = {};
    double absolute = 0;
  };
  Bound o, dv;
  GradientBound dq, dk;
  Bound lse;         // relative: of |L|
  double hull = 0;   // how far O may lie outside of V's rows, however wrong the scores are
  double score = 0;  // how far a score may be off
};
// REQUIRES: sizes and scale are set (problem_of).
OutputBounds output_bounds(const AttentionProblem& problem, const OutputScales& scales, int64_t head);
// With these rules in the place of those of the plan's stabiliser.
OutputBounds output_bounds(const AttentionProblem& problem, const OutputScales& scales, int64_t head,
                           const StabiliserRules& rules);

// A row that sees one key has P = 1, O = V and dS = 0, wherever its score lies. So errors of scores and of L, which make the
// bounds above wide where scores are large, have no part in O and dP - delta. A rounding of numbers that its format has is
// none: `v` are the head's values, and 1 is P where the plan shifts by the largest score.
struct OneKeyBound {
  double output = 0,
         leak = 0;        // by the plan's roundings: of O relative to |v|, of dP - delta to sum_d |dO| |v|
  double arithmetic = 0;  // FP32's own worst case, which is not in these two
};
// REQUIRES: as output_bounds.
OneKeyBound one_key_bound(const AttentionProblem& problem, std::span<const float> v);

}  // namespace evenkeel
