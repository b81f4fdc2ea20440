// What |computed - exact| may be at most, for every element of every output of attention. This is the error analysis of the
// formulas in precision_plan.h, run in FP64 on the problem itself, the worst case at every step. Let u be half an ulp of FP32,
// n the number of visible keys, x.y a sum of products of magnitudes.
//
//   S      (D + 2) u a q.k and the operands' roundings, then its site's rounding at both ends of that range
//   Pb     relative: exp(error of S - m) - 1
//   l      P-weighted mean of Pb's errors, (n + 6 tiles) u, one rounding of row_sum for each tile
//   O      P.v with the errors of Pb, probs, v, (n + 6 tiles) u, a rounding of pv for each tile; l's; output
//   L      l's error as a logarithm, 4 u (|m| + |L| + 1)
//   P      relative: exp(error of S + error of L) - 1
//   delta  dO.(error of O for delta), (D + 2) u dO.O; zero_sum: P.(errors of dP, P); keel: 2 z (error of L)
//   dP, dS, dQ, dK, dV: likewise, (D, n, rows of the group + 2) u, each with its site's rounding at the end
//
// Infinite where a row's sum is not known to one half (coarse formats on large scores): nothing is promised.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "attention_cases.h"
#include "attention_runs.h"
#include "base/threads.h"

namespace evenkeel::attention_bounds {

using attention_runs::size_of;
using cases::Problem;

inline constexpr double kUnit = 0x1p-24;  // half an ulp of 1 in FP32
inline constexpr double kTiny =
    0x1p-149;  // FP32's smallest number: a product that underflows loses at most this
inline constexpr double kLostProb =
    0x1p-110;  // a probability that exp rounds to zero, undone by the largest shift

// Half a gap of the format at a magnitude (a whole one where the mode is not a nearest one): what one
// rounding may do. FP32's own rounding is counted apart, by kUnit.
inline double rounding_error(const Rounding& r, double magnitude) {
  if (is_identity(r)) return 0;
  const double gap = std::ldexp(
      double{ulp(r.format, static_cast<float>(std::ldexp(magnitude, r.scale_exponent)))}, -r.scale_exponent);
  return r.mode <= RoundingMode::nearest_away ? gap / 2 : gap;
}

// What the rounding of an operand does to it: known exactly, but for random bits.
inline double operand_error(const Rounding& r, double x) {
  if (r.mode == RoundingMode::stochastic) return rounding_error(r, std::fabs(x));
  return std::fabs(round_to(r, static_cast<float>(x)) - x);
}

struct Bounds {
  Tensor<double> o, lse, delta, dq, dk, dv;
  Tensor<double> dk_size, dv_size;  // sums of |values| that dk and dv round at the end

  explicit Bounds(const AttentionProblem& s)
      : o({s.B, s.H, s.T, s.D}),
        lse({s.B, s.H, s.T, 1}),
        delta({s.B, s.H, s.T, 1}),
        dq({s.B, s.H, s.T, s.D}),
        dk({s.B, s.G, s.N, s.D}),
        dv({s.B, s.G, s.N, s.D}),
        dk_size({s.B, s.G, s.N, s.D}),
        dv_size({s.B, s.G, s.N, s.D}) {}
};

// The part of one head: its plan with what its stabiliser changes, and the errors of its keys and values.
class HeadBounds {
 public:
  HeadBounds(const AttentionProblem& shape, const Problem& problem, int64_t batch, int64_t head,
             Bounds& bounds)
      : shape_(shape),
        p_(problem),
        b_(batch),
        h_(head),
        g_(head / (shape.H / shape.G)),
        D_(shape.D),
        bounds_(bounds),
        plan_(shape.plans[shape.plans.size() == 1 ? 0 : size_of(head)]),
        rules_(rules_of(plan_.stabiliser)),
        consistent_(rules_.sum == SumRule::rounded_probs),
        wide_(rules_.output == OutputRule::wide),
        a_(std::fabs(double{shape.scale})),
        cap_(shape.softcap),
        tiles_(shape.tile_keys == 0 ? 1 : std::ceil(double(shape.N) / double(shape.tile_keys))) {
    if (wide_ && plan_.at(Site::output_for_delta) == plan_.at(Site::output))
      plan_.at(Site::output_for_delta) = Rounding{};
    if (consistent_) plan_.at(Site::dprobs) = Rounding{};
    if (rules_.output == OutputRule::stochastic)
      for (Site site : {Site::output, Site::output_for_delta}) plan_.at(site).mode = RoundingMode::stochastic;
    // Tensor cores truncate every term they align, to two bits below FP32's last, and the sum.
    u_ = plan_.accumulate == Accumulate::tensor_core ? 8 * kUnit : kUnit;
    set_key_errors();
  }

  // Sets the bounds of row i, and adds its part to those of the keys.
  void add_row(int64_t i) {
    Row r;
    for (int64_t j = 0; j < shape_.N; ++j)
      if (cases::sees(p_, b_, h_, i, j)) r.seen.push_back(j);
    if (r.seen.empty()) return;
    r.i = i;
    for (int64_t d = 0; d < D_; ++d) {
      r.q.push_back(*p_.in.q.at(b_, h_, i, d));
      r.grad.push_back(*p_.grad_output.at(b_, h_, i, d));
      r.q_error.push_back(operand_error(plan_.at(Site::q), r.q.back()));
      r.grad_error.push_back(operand_error(plan_.at(Site::grad_output), r.grad.back()));
    }
    set_scores(r);
    set_probabilities(r);
    set_outputs(r);
    set_log_sum(r);
    set_dprobs(r);
    set_delta(r);
    set_dscores(r);
    set_dq(r);
    add_to_keys(r);
  }

 private:
  // Of the visible keys s = 0 ... n - 1 of one row, and of its features d. "relative" errors are parts of the value.
  struct Row {
    int64_t i = 0;
    std::vector<int64_t> seen;
    std::vector<double> q, grad, q_error, grad_error;
    std::vector<double> S, slope, S_error;
    double M = -INFINITY, worst_S = 0;  // the largest S, and the largest error of one
    double shift = 0;                   // how far the shift may lie from M
    double L = 0;
    std::vector<double> P, P_error;                    // P_error: relative, of Pb
    double sum_error = 0, wide_sum_error = 0;          // relative; wide: without the roundings of row_sum
    std::vector<double> O, delta_O_error;              // delta_O_error: of the O that delta uses
    double mean_part = 0, L_error = 0, lse_error = 0;  // mean_part: the mean key's part of L (centre_keys)
    std::vector<double> dP, dP_error,
        Q_error;  // Q_error: relative, of the P that the backward pass recomputes
    double delta = 0, delta_error = 0;
    std::vector<double> dS, dS_error;  // dS: magnitudes
    size_t n() const { return seen.size(); }
  };

  double at_site(Site site, double magnitude) const { return rounding_error(plan_.at(site), magnitude); }
  double relative(Site site) const { return at_site(site, 1.0); }

  double q(const Row& r, int64_t d) const { return r.q[size_of(d)]; }
  double grad(const Row& r, int64_t d) const { return r.grad[size_of(d)]; }
  double v(const Row& r, size_t s, int64_t d) const { return v_[size_of(r.seen[s] * D_ + d)]; }
  double k(const Row& r, size_t s, int64_t d) const { return k_[size_of(r.seen[s] * D_ + d)]; }
  double k_error(const Row& r, size_t s, int64_t d) const { return k_error_[size_of(r.seen[s] * D_ + d)]; }
  double v_error(const Row& r, size_t s, int64_t d) const { return v_error_[size_of(r.seen[s] * D_ + d)]; }

  void set_key_errors() {
    const bool centred = rules_.keys == KeyRule::centred;
    const int64_t keys = shape_.keys(b_);
    mean_.resize(size_of(D_));
    if (centred)
      for (int64_t d = 0; d < D_; ++d) {
        for (int64_t j = 0; j < keys; ++j)
          mean_[size_of(d)] += double{*p_.in.k.at(b_, g_, j, d)} / double(keys);
        mean_[size_of(d)] = static_cast<float>(mean_[size_of(d)]);
      }
    for (auto* values : {&k_, &v_, &k_error_, &v_error_}) values->resize(size_of(shape_.N * D_));
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t d = 0; d < D_; ++d) {
        const double m = std::fabs(mean_[size_of(d)]), key = *p_.in.k.at(b_, g_, j, d) - mean_[size_of(d)];
        k_[size_of(j * D_ + d)] = key;
        k_error_[size_of(j * D_ + d)] =
            !centred ? operand_error(plan_.at(Site::k), key)
                     : at_site(Site::k, std::fabs(key)) + 2 * kUnit * (m + std::fabs(key));
        v_[size_of(j * D_ + d)] = *p_.in.v.at(b_, g_, j, d);
        v_error_[size_of(j * D_ + d)] = operand_error(plan_.at(Site::v), v_[size_of(j * D_ + d)]);
      }
  }

  // S, and the error of S after its site.
  void set_scores(Row& r) const {
    r.slope.assign(r.n(), 1.0);
    for (size_t s = 0; s < r.n(); ++s) {
      double dot = 0, size = 0, operands = 0, products = 0;  // a product with zero adds no error
      for (int64_t d = 0; d < D_; ++d) {
        const double qd = q(r, d), kd = k(r, s, d);
        dot += qd * kd;
        size += std::fabs(qd * kd);
        products += qd * kd != 0;
        operands +=
            r.q_error[size_of(d)] * (std::fabs(kd) + k_error(r, s, d)) + std::fabs(qd) * k_error(r, s, d);
      }
      double S = double{shape_.scale} * dot;
      double e = a_ * ((products + 2) * u_ * size + operands + double(D_) * kTiny) + kTiny;
      if (cap_ > 0) {
        const double t = std::tanh(S / cap_);
        S = cap_ * t;
        r.slope[s] = 1 - t * t;
        e += 4 * kUnit * std::fabs(S) + kTiny;
      }
      e = score_error_after_rounding(S, e);
      r.S.push_back(S);
      r.S_error.push_back(e);
      r.worst_S = std::max(r.worst_S, e);
      r.M = std::max(r.M, S);
    }
  }

  double score_error_after_rounding(double S, double e) const {
    const Rounding& rounding = plan_.at(Site::scores);
    if (is_identity(rounding)) return e;
    const double low = round_to(rounding, static_cast<float>(S - e)),
                 high = round_to(rounding, static_cast<float>(S + e));
    return rounding.mode <= RoundingMode::nearest_away
               ? std::max(std::fabs(low - S), std::fabs(high - S)) + kUnit * std::fabs(S)
               : e + at_site(Site::scores, std::fabs(S) + e);
  }

  double farthest_shift(double M) const {
    switch (rules_.shift) {
      case ShiftRule::paper:
        return std::max(plan_.beta - 1.0, 1.0) * std::fabs(M);
      case ShiftRule::paper_capped:
        return plan_.cap;
      case ShiftRule::dither:
      case ShiftRule::power_of_two:
        return 1.0;
      default:
        return 0.0;
    }
  }

  // Pb, P and their sum.
  void set_probabilities(Row& r) const {
    r.shift = farthest_shift(r.M);
    double l = 0;
    for (double S : r.S) l += std::exp(S - r.M);
    r.L = r.M + std::log(l);
    r.sum_error = (double(r.n()) + 6 * tiles_) * kUnit + tiles_ * relative(Site::row_sum);
    r.wide_sum_error = (double(r.n()) + 6 * tiles_) * kUnit;
    for (size_t s = 0; s < r.n(); ++s) {
      const double P = std::exp(r.S[s] - r.M) / l;
      const double distance = std::fabs(r.S[s] - r.M) + r.shift + 2 * r.worst_S;
      const double error = std::expm1(
          std::min(300.0, r.S_error[s] + at_site(Site::shifted, distance) + kUnit * (distance + 8)));
      const double own = error + (consistent_ ? relative(Site::probs) * (1 + error) : 0);
      r.P.push_back(P);
      r.P_error.push_back(error);
      r.sum_error += P * own;
      r.wide_sum_error += P * own;
    }
    if (r.sum_error >= 0.5) r.sum_error = r.wide_sum_error = INFINITY;
  }

  // O and the O for delta.
  void set_outputs(Row& r) const {
    const double lost = kLostProb + at_site(Site::probs, 0.0) * std::exp(std::min(r.shift, 80.0));
    std::vector<double> Pv_error(r.n());
    for (size_t s = 0; s < r.n(); ++s)
      Pv_error[s] = (1 + r.P_error[s]) * (1 + relative(Site::probs)) - 1 + (double(r.n()) + 6 * tiles_) * u_;
    for (int64_t d = 0; d < D_; ++d) {
      double O = 0, size = 0, error = double(r.n()) * kTiny;
      for (size_t s = 0; s < r.n(); ++s) {
        const double vd = v(r, s, d);
        O += r.P[s] * vd;
        size += r.P[s] * std::fabs(vd);
        error += r.P[s] * std::fabs(vd) * Pv_error[s] + r.P[s] * v_error(r, s, d) + lost * std::fabs(vd);
      }
      const double magnitude = std::fabs(O);
      const auto normalised = [&](double numerator, double sum) {
        return (numerator + sum * magnitude) / (1 - sum) + kUnit * magnitude + kTiny;
      };
      const double rounded_pv = error + tiles_ * relative(Site::pv) * (size + error);
      const bool unknown = r.sum_error == INFINITY;
      const double e = unknown ? INFINITY : normalised(rounded_pv, r.sum_error);
      const double e_delta = unknown ? INFINITY : wide_ ? normalised(error, r.wide_sum_error) : e;
      r.O.push_back(O);
      r.delta_O_error.push_back(e_delta + at_site(Site::output_for_delta, magnitude + e_delta));
      *bounds_.o.view().at(b_, h_, r.i, d) = e + at_site(Site::output, magnitude + e);
    }
  }

  // L. The mean key's part (centre_keys) is added at the end.
  void set_log_sum(Row& r) const {
    double mean_size = 0;
    for (int64_t d = 0; d < D_; ++d) {
      r.mean_part += double{shape_.scale} * q(r, d) * mean_[size_of(d)];
      mean_size += a_ * std::fabs(q(r, d) * mean_[size_of(d)]) +
                   a_ * r.q_error[size_of(d)] * std::fabs(mean_[size_of(d)]) / kUnit;
    }
    const double from_sum =
        r.sum_error == INFINITY ? INFINITY : -std::log1p(-(consistent_ ? r.wide_sum_error : r.sum_error));
    r.L_error = from_sum + 4 * kUnit * (std::fabs(r.M) + r.shift + std::fabs(r.L) + 1);
    r.lse_error = r.L_error + 4 * kUnit * (std::fabs(r.mean_part) + mean_size);
    *bounds_.lse.view().at(b_, h_, r.i) = r.lse_error;
  }

  // dP, and P as the backward pass has it.
  void set_dprobs(Row& r) const {
    for (size_t s = 0; s < r.n(); ++s) {
      double dP = 0, size = 0, operands = double(D_) * kTiny;
      for (int64_t d = 0; d < D_; ++d) {
        const double gd = grad(r, d), vd = v(r, s, d);
        dP += gd * vd;
        size += std::fabs(gd * vd);
        operands +=
            r.grad_error[size_of(d)] * (std::fabs(vd) + v_error(r, s, d)) + std::fabs(gd) * v_error(r, s, d);
      }
      const double error = double(D_ + 2) * u_ * size + operands;
      r.dP.push_back(dP);
      r.dP_error.push_back(error + at_site(Site::dprobs, std::fabs(dP) + error));
      const double Q_error =
          consistent_
              ? (1 + r.P_error[s]) * (1 + relative(Site::probs)) / (1 - r.wide_sum_error) - 1 + 2 * kUnit
              : std::expm1(std::min(300.0, r.S_error[s] + r.L_error + kUnit * (std::fabs(r.S[s] - r.L) + 8)));
      r.Q_error.push_back(r.wide_sum_error == INFINITY ? INFINITY : Q_error);
    }
  }

  void set_delta(Row& r) const {
    double error = double(D_) * kTiny;
    for (int64_t d = 0; d < D_; ++d) r.delta += grad(r, d) * r.O[size_of(d)];
    if (rules_.delta == DeltaRule::probs) {
      double weight = 0;
      for (size_t s = 0; s < r.n(); ++s) weight += r.P[s] * r.Q_error[s];
      for (size_t s = 0; s < r.n(); ++s)
        error +=
            (r.P[s] * r.Q_error[s] * (std::fabs(r.dP[s] - r.delta) + r.dP_error[s]) + r.P[s] * r.dP_error[s] +
             double(r.n() + 3) * kUnit * r.P[s] * (std::fabs(r.dP[s]) + std::fabs(r.delta))) /
            std::max(1 - weight, 0.1);
    } else {
      for (int64_t d = 0; d < D_; ++d) {
        const double O_error = r.delta_O_error[size_of(d)], size = std::fabs(grad(r, d));
        error += size * O_error + (r.grad_error[size_of(d)] + double(D_ + 2) * kUnit * size) *
                                      (std::fabs(r.O[size_of(d)]) + O_error);
      }
    }
    const double z = plan_.keel, L = r.L + r.mean_part;
    r.delta -= 2 * z * L;
    error += 2 * z * (r.lse_error + 4 * kUnit * std::fabs(L)) + 2 * kUnit * std::fabs(r.delta);
    r.delta_error = error + at_site(Site::delta, std::fabs(r.delta) + error);
    *bounds_.delta.view().at(b_, h_, r.i) = r.delta_error;
  }

  void set_dscores(Row& r) const {
    for (size_t s = 0; s < r.n(); ++s) {
      const double x = r.dP[s] - r.delta, x_error = r.dP_error[s] + r.delta_error + kUnit * std::fabs(x);
      const double raw = a_ * r.P[s] * std::fabs(x);
      double e = a_ * (r.P[s] * r.Q_error[s] + kLostProb) * (std::fabs(x) + x_error) + a_ * r.P[s] * x_error +
                 4 * kUnit * raw + 4 * kTiny;
      if (cap_ > 0) e = e * r.slope[s] + (raw + e) * (4 * kUnit + 2 * r.S_error[s] / cap_);
      const double dS = raw * r.slope[s];
      r.dS.push_back(dS);
      r.dS_error.push_back(e + at_site(Site::dscores, dS + e));
    }
  }

  void set_dq(const Row& r) const {
    const double z = plan_.keel;
    for (int64_t d = 0; d < D_; ++d) {
      double error = double(r.n()) * kTiny, size = 0;
      for (size_t s = 0; s < r.n(); ++s) {
        const double k_size = std::fabs(k(r, s, d)) + k_error(r, s, d);
        error +=
            r.dS_error[s] * k_size + r.dS[s] * k_error(r, s, d) + double(r.n() + 2) * u_ * r.dS[s] * k_size;
        size += r.dS[s] * k_size;
      }
      // centre_keys: keel's part of the mean key is added apart.
      error += 2 * z * a_ * std::fabs(mean_[size_of(d)]) *
               (r.lse_error + 8 * kUnit * std::fabs(r.L + r.mean_part));
      *bounds_.dq.view().at(b_, h_, r.i, d) = error + at_site(Site::dq, size + error);
    }
  }

  // What dS does to dK, and P to dV. Most of the time goes here: nothing is computed for a feature that holds for the row.
  void add_to_keys(const Row& r) const {
    const double terms = double(shape_.T * (shape_.H / shape_.G));
    std::vector<double> q_size(size_of(D_)), grad_size(size_of(D_));
    for (size_t d = 0; d < size_of(D_); ++d) {
      q_size[d] = std::fabs(r.q[d]) + r.q_error[d];
      grad_size[d] = std::fabs(r.grad[d]) + r.grad_error[d];
    }
    for (size_t s = 0; s < r.n(); ++s) {
      const double P = r.P[s], dS = r.dS[s], dS_error = r.dS_error[s];
      const double p_error = P * r.Q_error[s] + kLostProb + at_site(Site::probs_bwd, P * (1 + r.Q_error[s]));
      const auto of_key = [&](Tensor<double>& tensor) { return tensor.view().at(b_, g_, r.seen[s], 0); };
      double *const dv = of_key(bounds_.dv), *const dv_size = of_key(bounds_.dv_size),
                    *const dk = of_key(bounds_.dk), *const dk_size = of_key(bounds_.dk_size);
      for (size_t d = 0; d < size_of(D_); ++d) {
        const double e =
            p_error * grad_size[d] + P * r.grad_error[d] + (terms + 2) * u_ * P * grad_size[d] + kTiny;
        dv[d] += e;
        dv_size[d] += P * grad_size[d] + e;
        const double f = dS_error * q_size[d] + dS * r.q_error[d] + (terms + 2) * u_ * dS * q_size[d] + kTiny;
        dk[d] += f;
        dk_size[d] += dS * q_size[d] + f;
      }
    }
  }

  const AttentionProblem& shape_;
  const Problem& p_;
  const int64_t b_, h_, g_, D_;
  Bounds& bounds_;
  PrecisionPlan plan_;
  const StabiliserRules& rules_;
  const bool consistent_, wide_;
  const double a_, cap_, tiles_;
  double u_ = kUnit;
  std::vector<double> mean_;                       // (D), of the keys; zero but for centre_keys
  std::vector<double> k_, v_, k_error_, v_error_;  // (N, D)
};

inline Bounds error_bounds(const AttentionProblem& config, const Problem& p) {
  const AttentionProblem shape = problem_of(config, p.in);
  Bounds bounds(shape);
  // One key/value head is one item, as in the reference.
  parallel_for(shape.B * shape.G, [&](int64_t item, int) {
    const int64_t b = item / shape.G, g = item % shape.G, heads = shape.H / shape.G;
    for (int64_t h = g * heads; h < (g + 1) * heads; ++h) {
      HeadBounds head(shape, p, b, h, bounds);
      for (int64_t i = 0; i < shape.T; ++i) head.add_row(i);
    }
    const PrecisionPlan& plan = config.plans[config.plans.size() == 1 ? 0 : size_of(g * heads)];
    for (int64_t j = 0; j < shape.N; ++j)
      for (int64_t d = 0; d < shape.D; ++d) {
        *bounds.dk.view().at(b, g, j, d) +=
            rounding_error(plan.at(Site::dk), *bounds.dk_size.view().at(b, g, j, d));
        *bounds.dv.view().at(b, g, j, d) +=
            rounding_error(plan.at(Site::dv), *bounds.dv_size.view().at(b, g, j, d));
      }
  });
  return bounds;
}

// The largest |error| / bound over a tensor: at most 1 where all is well, infinite for NaN and for an error
// where none is allowed. Infinities must be met exactly.
inline double worst_ratio(const Tensor<float>& got, const Tensor<double>& exact,
                          const Tensor<double>& bound) {
  double worst = 0;
  for (size_t n = 0; n < exact.values().size(); ++n) {
    const double x = got.values()[n], y = exact.values()[n], limit = bound.values()[n];
    if (std::isinf(y) && x == y) continue;
    const double error = std::fabs(x - y);
    if (!std::isfinite(limit) && std::isfinite(x)) continue;  // the formats promise nothing here
    const double ratio = error == 0 ? 0 : limit > 0 ? error / limit : INFINITY;
    worst = std::isnan(error) ? INFINITY : std::max(worst, ratio);
  }
  return worst;
}

struct Ratios {
  double o, lse, delta, dq, dk, dv;
  double largest() const { return std::max({o, lse, delta, dq, dk, dv}); }
};

inline Ratios ratios_of(const AttentionProblem& config, const Problem& p, const Bounds& bounds,
                        const AttentionBuffers& got, const AttentionReference& exact) {
  Tensor<double> delta = exact.delta;  // with keel's part
  for (int64_t b = 0; b < p.shape.B; ++b)
    for (int64_t h = 0; h < p.shape.H; ++h)
      for (int64_t i = 0; i < p.shape.T; ++i) {
        const double L = *exact.lse.view().at(b, h, i);
        if (std::isfinite(L))
          *delta.view().at(b, h, i) -= 2.0 * config.plans[config.plans.size() == 1 ? 0 : size_of(h)].keel * L;
      }
  return {worst_ratio(got.o, exact.o, bounds.o),       worst_ratio(got.lse, exact.lse, bounds.lse),
          worst_ratio(got.delta, delta, bounds.delta), worst_ratio(got.dq, exact.dq, bounds.dq),
          worst_ratio(got.dk, exact.dk, bounds.dk),    worst_ratio(got.dv, exact.dv, bounds.dv)};
}

}  // namespace evenkeel::attention_bounds
