#include "diagnosis/conform_bounds.h"

#include <algorithm>
#include <cmath>

namespace evenkeel {
namespace {

// Largest relative error of a rounding where the result is normal, and largest absolute one where it is not.
double relative_error(const Rounding& r, double largest = 0) {
  if (is_identity(r)) return 0;
  if (std::ldexp(largest, r.scale_exponent) > double{max_finite(r.format)}) return 1;  // saturates
  const bool nearest = r.mode == RoundingMode::nearest_even || r.mode == RoundingMode::nearest_away;
  return std::ldexp(nearest ? 0.5 : 1.0, -r.format.significand_bits);
}
// GPUs may flush what is below FP32's normal numbers.
constexpr double kSmallestNormal = 0x1p-126;
double absolute_error(const Rounding& r) {
  if (is_identity(r)) return kSmallestNormal;
  return std::max(kSmallestNormal, std::ldexp(double{min_subnormal(r.format)}, -r.scale_exponent));
}

}  // namespace

OutputBounds output_bounds(const AttentionProblem& shape, const OutputScales& scales, int64_t head) {
  const PrecisionPlan& plan = shape.plans[0];
  const auto u = [&](Site site, double largest = 0) { return relative_error(plan.at(site), largest); };
  const auto eta = [&](Site site) { return absolute_error(plan.at(site)); };
  const auto both = [](double x, double y) { return x + y + x * y; };  // (1 + x)(1 + y) - 1
  const auto N = static_cast<double>(shape.N), T = static_cast<double>(shape.T * (shape.H / shape.G)),
             D = static_cast<double>(std::max(shape.D, scales.o.shape()[3]));
  const auto [q, k, v, d_o] = scales.largest;
  const double a = std::fabs(double{shape.scale}), of_v = u(Site::v, v), of_d_o = u(Site::grad_output, d_o);
  // FP32 arithmetic: an ulp (tensor cores truncate) for each term of the longest chain of sums, exp, log and division.
  const double arithmetic = 0x1p-23 * (2 * D + 2 * N + T + 64);
  const double tiles = shape.tile_keys > 0 ? std::ceil(N / static_cast<double>(shape.tile_keys)) : 1;
  const bool centred = plan.stabiliser == Stabiliser::centre_keys;
  // The tanh of a soft cap: 11 bits in hardware, where kernels of 16 bits take it from there.
  const bool rounds = std::ranges::any_of(plan.rounding, [](const Rounding& r) { return !is_identity(r); });
  const double tanh_error = shape.softcap > 0 ? (rounds ? 0x1p-10 : 0x1p-20) : 0;

  // A score's absolute error. Keys less their mean are up to twice as large.
  const double of_score =
      (centred ? 2 : 1) *
      both(both(u(Site::q, q), u(Site::k, k)), u(Site::scores) + 2 * u(Site::shifted) + 0x1p-23 * (D + 16));
  const double lost_scores = D * a * (eta(Site::q) * k + eta(Site::k) * q) + eta(Site::scores) +
                             eta(Site::shifted) + double{shape.softcap} * tanh_error;
  const auto n = static_cast<size_t>(head);
  const bool far_matter =
      centred || 4 * of_score * scales.score[n] > kNear / 2;  // the mean key has part of all
  const double score = of_score * (far_matter ? scales.score[n] : scales.near_score[n]) + lost_scores;
  const double far = far_matter ? 0 : N * std::exp(-kNear / 2);  // of a row, at most

  // The sum of a row: exact, rounded behind each tile, or (consistent) of the rounded probabilities.
  const double row_sum = u(Site::row_sum) * (tiles + 1) + arithmetic + far +
                         (plan.stabiliser == Stabiliser::consistent ? u(Site::probs) : 0);
  OutputBounds bounds;
  bounds.lse = {0x1p-22, 2 * score + row_sum};
  // Probabilities: every score of a row is off by at most `score`, and so is the logarithm of their sum.
  const double forward = both(std::expm1(2 * score), row_sum);
  const double backward = both(forward, std::expm1(bounds.lse.absolute));
  const double of_output = u(Site::pv) * (tiles + 1) + arithmetic +
                           (plan.stabiliser == Stabiliser::stochastic_output ? 2 : 1) * u(Site::output);
  bounds.o.relative = both(both(forward, u(Site::probs) + of_v), of_output);
  bounds.o.absolute =
      N * (eta(Site::probs) * v + eta(Site::v)) + tiles * eta(Site::pv) + eta(Site::output) + far * v;
  bounds.hull = both(both(row_sum, u(Site::probs) + of_v), of_output) * v + bounds.o.absolute;
  bounds.dv.relative =
      both(both(backward, u(Site::probs) + u(Site::probs_bwd) + of_d_o), u(Site::dv) + arithmetic);
  bounds.dv.absolute = T * (eta(Site::probs_bwd) * d_o + eta(Site::grad_output) + far * d_o) + eta(Site::dv);
  // dS = P (dP - delta): relative errors of P and dS, of dP's terms, and of delta, from O or from sum P dP.
  const double of_ds = both(backward, u(Site::dscores) + arithmetic + 2 * tanh_error);
  const double d_probs = of_d_o + of_v + u(Site::dprobs) + arithmetic;
  const double delta =
      bounds.o.relative + u(Site::output_for_delta) + of_d_o + u(Site::delta) + 2 * backward + d_probs;
  // What is lost among subnormals and far keys, and (centred keys) what errors make of the mean key.
  const double lost =
      eta(Site::dscores) + eta(Site::dprobs) + eta(Site::delta) +
      D * d_o * (eta(Site::output_for_delta) + (far + (centred ? of_ds + d_probs + delta : 0)) * v);
  const double lost_weight = std::max(a, 1.0) * lost;  // dS may be rounded with its factor a or before it
  const auto gradient = [&](double operand, Site site, double absolute) {
    const double last = operand + u(site) + arithmetic, grown = (1 + of_ds) * (1 + last);
    return OutputBounds::GradientBound{{both(of_ds, last), grown * d_probs, grown * delta},
                                       absolute + eta(site)};
  };
  bounds.dq = gradient(u(Site::k, k), Site::dq, N * lost_weight * k);
  bounds.dk = gradient(u(Site::q, q), Site::dk, T * lost_weight * q);
  return bounds;
}

}  // namespace evenkeel
