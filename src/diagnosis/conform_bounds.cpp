#include "diagnosis/conform_bounds.h"

#include <algorithm>
#include <cmath>

namespace evenkeel {
namespace {

// Largest relative error of a rounding where the result is normal, and largest absolute one where it is not.
double relative_error(const Rounding& r, double largest = 0) {
  if (is_identity(r)) return 0;
  const bool shared = r.shared != SharedScale{};
  if (!shared && std::ldexp(largest, r.scale_exponent) > double{max_finite(r.format)}) return 1;  // saturates
  const bool nearest = r.mode == RoundingMode::nearest_even || r.mode == RoundingMode::nearest_away;
  // Tapered: one bit is all that the largest and the smallest numbers have.
  const double error = std::ldexp(nearest ? 0.5 : 1.0, r.format.tapered ? -1 : -r.format.significand_bits);
  if (!shared) return error;
  // The largest value saturates where its scale was rounded down: to a power of two, or to E4M3's three bits.
  if (r.shared.rule == ScaleRule::e8m0)
    return std::max(error,
                    1 - std::ldexp(double{max_finite(r.format)}, -scale_target_exponent(r.format) - 1));
  return r.shared.rule == ScaleRule::e4m3 ? std::max(error, 0x1p-4) : error;
}
// GPUs may flush what is below FP32's normal numbers.
constexpr double kSmallestNormal = 0x1p-126;
double absolute_error(const Rounding& r, double largest) {
  if (is_identity(r)) return kSmallestNormal;
  // A shared scale is at most twice what makes the largest value the format's largest.
  if (r.shared != SharedScale{})
    return std::max(kSmallestNormal, 2 * largest / scale_target(r.format) * min_subnormal(r.format));
  return std::max(kSmallestNormal, std::ldexp(double{min_subnormal(r.format)}, -r.scale_exponent));
}

// The errors of a plan's sites; of both readings where a value is read twice.
class SiteErrors {
 public:
  SiteErrors(const AttentionProblem& shape, const OutputScales& scales, const StabiliserRules& rules)
      : plan_(shape.plans[0]),
        centred_(rules.keys == KeyRule::centred || plan_.keys == KeyRule::centred),
        largest_(scales.largest),
        D_(static_cast<double>(std::max(shape.D, scales.o.shape()[3]))) {}

  bool centred() const { return centred_; }
  bool centred_queries() const { return plan_.queries == QueryRule::centred; }
  double relative(Site site, double largest) const {
    return of_both(site, [&](const Rounding& r) { return relative_error(r, largest); });
  }
  double absolute(Site site) const {
    return of_both(site, [&](const Rounding& r) { return absolute_error(r, largest_at(site)); });
  }

 private:
  template <class Error>
  double of_both(Site site, Error error) const {
    double most = error(plan_.at(site));
    for (const SecondReading& row : kSecondReadings)
      if (row.first == site && site != Site::output) most = std::max(most, error(plan_.at(row.site)));
    return most;
  }
  // The largest magnitude that meets at a site, for scales that are shared. Probabilities are at most 1.
  double largest_at(Site site) const {
    const auto [q, k, v, d_o] = largest_;
    switch (site) {
      case Site::q:
        return (centred_queries() ? 2 : 1) * q;
      case Site::k:
        return (centred() ? 2 : 1) * k;
      case Site::v:
        return v;
      case Site::grad_output:
        return d_o;
      case Site::dscores:
        return 2 * D_ * d_o * v;
      default:
        return 1;
    }
  }

  const PrecisionPlan& plan_;
  bool centred_;
  decltype(OutputScales::largest) largest_;
  double D_;
};

}  // namespace

OutputBounds output_bounds(const AttentionProblem& problem, const OutputScales& scales, int64_t head) {
  return output_bounds(problem, scales, head, rules_of(problem.plans[0].stabiliser));
}

OutputBounds output_bounds(const AttentionProblem& shape, const OutputScales& scales, int64_t head,
                           const StabiliserRules& rules) {
  const PrecisionPlan& plan = shape.plans[0];
  const SiteErrors errors(shape, scales, rules);
  const auto u = [&](Site site, double largest = 0) { return errors.relative(site, largest); };
  const auto eta = [&](Site site) { return errors.absolute(site); };
  const auto both = [](double x, double y) { return x + y + x * y; };  // (1 + x)(1 + y) - 1
  const int64_t rows = shape.T * (shape.H / shape.G);                  // that share a key and a value
  const auto N = static_cast<double>(shape.N), T = static_cast<double>(rows),
             D = static_cast<double>(std::max(shape.D, scales.o.shape()[3]));
  const auto [q, k, v, d_o] = scales.largest;
  const double a = std::fabs(double{shape.scale}), of_v = u(Site::v, v), of_d_o = u(Site::grad_output, d_o);
  // FP32 arithmetic: an ulp (tensor cores truncate) for each term of the longest chain of sums, exp, log and division.
  const double arithmetic = 0x1p-23 * (2 * D + 2 * N + T + 64);
  const double tiles = shape.tile_keys > 0 ? std::ceil(N / static_cast<double>(shape.tile_keys)) : 1;
  const bool centred = errors.centred(), centred_queries = errors.centred_queries();
  // The tanh of a soft cap: 11 bits in hardware, where kernels of 16 bits take it from there.
  const bool rounds = std::ranges::any_of(plan.rounding, [](const Rounding& r) { return !is_identity(r); });
  const double tanh_error = shape.softcap > 0 ? (rounds ? 0x1p-10 : 0x1p-20) : 0;

  // A score's absolute error. Keys less their mean are up to twice as large, and so are queries.
  const double of_score =
      (centred ? 2 : 1) * (centred_queries ? 2 : 1) *
      both(both(u(Site::q, q), u(Site::k, k)), u(Site::scores) + 2 * u(Site::shifted) + 0x1p-23 * (D + 16));
  const double lost_scores = D * a * (eta(Site::q) * k + eta(Site::k) * q) + eta(Site::scores) +
                             eta(Site::shifted) + double{shape.softcap} * tanh_error;
  const auto n = static_cast<size_t>(head);
  // The mean key has part of all keys, the mean query of all rows.
  const bool far_matter = centred || centred_queries || 4 * of_score * scales.score[n] > kNear / 2;
  const double score = of_score * (far_matter ? scales.score[n] : scales.near_score[n]) + lost_scores;
  const double far = far_matter ? 0 : N * std::exp(-kNear / 2);  // of a row, at most

  // The sum of a row: exact, rounded behind each tile, or of the rounded probabilities.
  const double row_sum = u(Site::row_sum) * (tiles + 1) + arithmetic + far +
                         (rules.sum == SumRule::rounded_probs ? u(Site::probs) : 0);
  OutputBounds bounds;
  bounds.score = score;
  bounds.lse = {0x1p-22, 2 * score + row_sum};
  // Probabilities: every score of a row is off by at most `score`, and so is the logarithm of their sum.
  const double forward = both(std::expm1(2 * score), row_sum);
  const double backward = both(forward, std::expm1(bounds.lse.absolute));
  const double of_output = u(Site::pv) * (tiles + 1) + arithmetic +
                           (rules.output == OutputRule::stochastic ? 2 : 1) * u(Site::output);
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
  // Of the mean query: what is rounded is as large as q and it. |dS| is at most 2 a D |dO| |v|.
  const double of_mean_query = centred_queries ? 2 * a * D * d_o * v * (u(Site::q, q) + arithmetic) : 0.0;
  bounds.dk = gradient(u(Site::q, q), Site::dk, T * (lost_weight + of_mean_query) * q);
  return bounds;
}

OneKeyBound one_key_bound(const AttentionProblem& shape, std::span<const float> v) {
  PrecisionPlan plan = shape.plans[0];
  const StabiliserRules& rules = rules_of(plan.stabiliser);
  const bool wide = rules.output == OutputRule::wide, sums_rounded = rules.sum == SumRule::rounded_probs;
  // As the rules change the sites (stabiliser.h).
  if (wide && plan.at(Site::output_for_delta) == plan.at(Site::output)) plan.at(Site::output_for_delta) = {};
  if (sums_rounded) plan.at(Site::dprobs) = {};
  const auto u = [&](Site site) { return relative_error(plan.at(site)); };
  const auto has = [&](Site site, std::span<const float> values) {
    const Rounding& r = plan.at(site);
    const auto is_kept = [&](float x) { return round_to(r, x) == x; };
    return is_identity(r) || (r.shared == SharedScale{} && std::ranges::all_of(values, is_kept));
  };
  // Numbers that were rounded are any numbers to the site that reads them next.
  bool exact = true;
  const auto next = [&](Site site, std::span<const float> values) {
    exact = exact && has(site, values);
    return exact ? 0.0 : u(site);
  };
  const double tiles = shape.tile_keys > 0
                           ? std::ceil(static_cast<double>(shape.N) / static_cast<double>(shape.tile_keys))
                           : 1;
  constexpr float kOne[] = {1};
  OneKeyBound bound;
  bound.arithmetic = 0x1p-23 * static_cast<double>(2 * std::max(shape.D, shape.Dv) + 2 * shape.N + 64);

  // P over l: 1, or any number under the shifts that are not the largest score.
  exact = rules.shift != ShiftRule::dither && rules.shift != ShiftRule::power_of_two;
  const double probs = next(Site::probs, kOne), row_sum = next(Site::row_sum, kOne) * (tiles + 1);
  const double of_p = sums_rounded ? 0 : probs;
  const double of_v = next(Site::v, v), pv = next(Site::pv, v) * (tiles + 1);
  const bool before = exact;
  bound.output = of_p + row_sum + of_v + pv + 2 * next(Site::output, v);  // stochastically: an ulp

  if (rules.delta == DeltaRule::probs) {  // sum P dP / sum P, of the dP that dS has
    bound.leak = u(Site::delta);
    return bound;
  }
  exact = before;
  const double read = 2 * next(Site::output_for_delta, v);
  exact = true;
  const double read_again = next(Site::v_bwd, v);
  bound.leak = of_p + (wide ? 0 : row_sum + pv) + of_v + read + read_again + u(Site::delta) + u(Site::dprobs);
  return bound;
}

}  // namespace evenkeel
