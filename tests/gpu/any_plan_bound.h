// How far the any-plan kernels may be from the CPU where sums are not exact.
//
// Two orders of adding n products differ by at most n u sum |a||b| each way, u = 2^-23. Tensor cores
// truncate, so an addition may cost a whole unit in the last place of FP32, not half of one. A rounding site
// then turns a difference, however small, into one step of its format where it meets a boundary: 2^-m of the
// value. Everything is linear in these, to first order. Arguments are those of unrounded attention in FP64,
// and a factor of 2 covers that the rounded ones are not quite those (bf16: under 3 % of S at |S| < 6).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_cases.h"

namespace evenkeel {

// Of every value of each output, (B, H, T, D), (B, G, N, D) and (B, H, T), contiguous.
struct Bound {
  std::vector<double> o, lse, dq, dk, dv, delta, residual;

  Bound(const cases::Problem& p, const AttentionProblem& config, bool bf16_store);
};

// The part of one head of one sequence.
class HeadBound {
 public:
  HeadBound(Bound& to, const cases::Problem& p, const AttentionProblem& config, bool bf16_store, int64_t b,
            int64_t h)
      : to_(to),
        p_(p),
        config_(config),
        shape_(problem_of(config, p.in)),
        plan_(config.plans[config.plans.size() == 1 ? 0 : static_cast<size_t>(h)]),
        bf16_store_(bf16_store),
        b_(b),
        h_(h),
        g_(h / (shape_.H / shape_.G)),
        q_(rounded(p.in.q, Site::q, h)),
        k_(rounded(p.in.k, Site::k, g_)),
        v_(rounded(p.in.v, Site::v, g_)),
        grad_(rounded(p.grad_output, Site::grad_output, h)) {}

  // centre_keys: q . mean comes off every score; what is left may be smaller, its error is not larger.
  void add_row(int64_t i) {
    Row row(shape_.N);
    row.at = static_cast<size_t>((b_ * shape_.H + h_) * shape_.T + i);
    find_scores(i, row);
    if (row.top == -INFINITY) return;
    bound_probabilities(row);
    bound_outputs(i, row);
    bound_delta(row);
    for (int64_t j = 0; j < shape_.N; ++j)
      if (row.s[static_cast<size_t>(j)] != -INFINITY) add_key(i, j, row);
  }

 private:
  static constexpr double u = 0x1p-23;

  // A row of unrounded attention, and the errors found so far.
  struct Row {
    explicit Row(int64_t N)
        : s(static_cast<size_t>(N), -INFINITY), dp(s.size()), dp_size(s.size()), P(s.size()) {}
    size_t at = 0;  // in (B, H, T)
    std::vector<double> s, dp, dp_size, P;
    double top = -INFINITY, largest = 0, sums = 0;  // of scores: the largest, by size, of their terms
    double l = 0, L = 0;
    double ds = 0;                       // error of S
    double forward = 0, recomputed = 0;  // relative, of Pb / l and of P
    double d_delta = 0, delta_size = 0, dp_error = 0, spread = 0, keel = 0;
  };

  double step(Site site) const {
    const Rounding& r = plan_.at(site);
    return is_identity(r) ? 0.0 : std::ldexp(1.0, -r.format.significand_bits);
  }
  double least(Site site) const {  // below this a step is no longer relative
    const Rounding& r = plan_.at(site);
    return is_identity(r) ? 0.0 : std::ldexp(static_cast<double>(min_subnormal(r.format)), -r.scale_exponent);
  }
  std::vector<double> rounded(const View<const float>& x, Site site, int64_t head) const {
    std::vector<double> values;
    for (int64_t row = 0; row < x.shape[2]; ++row)
      for (int64_t d = 0; d < shape_.D; ++d)
        values.push_back(round_to(plan_.at(site), *x.at(b_, head, row, d)));
    return values;
  }
  double operand(const std::vector<double>& x, int64_t row, int64_t d) const {
    return x[static_cast<size_t>(row * shape_.D + d)];
  }
  double tiles() const { return config_.tile_keys == 0 ? 1 : static_cast<double>((shape_.N + 63) / 64); }
  double store() const { return bf16_store_ ? 0x1p-7 : 0; }

  void find_scores(int64_t i, Row& row) const {
    const double a = shape_.scale;
    for (int64_t j = 0; j < shape_.N; ++j) {
      if (!cases::sees(p_, b_, h_, i, j)) continue;
      double dot = 0, magnitude = 0;
      for (int64_t d = 0; d < shape_.D; ++d) {
        const double qk = operand(q_, i, d) * operand(k_, j, d);
        dot += qk, magnitude += std::abs(qk);
        const double gv = operand(grad_, i, d) * operand(v_, j, d);
        row.dp[static_cast<size_t>(j)] += gv, row.dp_size[static_cast<size_t>(j)] += std::abs(gv);
      }
      double& value = row.s[static_cast<size_t>(j)];
      value = a * dot;
      if (config_.softcap > 0) value = config_.softcap * std::tanh(value / config_.softcap);
      row.top = std::max(row.top, value);
      row.largest = std::max(row.largest, std::abs(value));
      row.sums = std::max(row.sums, std::abs(a) * magnitude);
    }
  }

  void bound_probabilities(Row& row) {
    for (double value : row.s) row.l += std::exp(value - row.top);
    row.L = row.top + std::log(row.l);
    double reach = 0;  // of scores that count
    for (double value : row.s)
      if (value > row.top - 90) reach = std::max(reach, row.top - value);
    const double capped = config_.softcap > 0 ? 8 * u * config_.softcap : 0;
    // Of S, and of S - m.
    row.ds = static_cast<double>(shape_.D + 4) * u * row.sums + capped + step(Site::scores) * row.largest +
             least(Site::scores) + 4 * u * (row.largest + std::abs(row.L));
    const double dx = row.ds + step(Site::shifted) * (reach + 1) + least(Site::shifted);
    const double dl = 2 * dx + static_cast<double>(shape_.N + 8) * u + tiles() * step(Site::row_sum) +
                      (plan_.stabiliser == Stabiliser::consistent ? step(Site::probs) : 0.0);
    row.forward = dx + dl + step(Site::probs);
    row.recomputed = 2 * row.ds + dl + step(Site::probs);
    to_.lse[row.at] = dx + dl + 4 * u * std::abs(row.L);
    for (size_t j = 0; j < row.s.size(); ++j) row.P[j] = std::exp(row.s[j] - row.L);
  }

  // O, and what its errors leave in delta.
  void bound_outputs(int64_t i, Row& row) {
    for (int64_t d = 0; d < shape_.D; ++d) {
      double value = 0, weight = 0, most = 0;
      for (int64_t j = 0; j < shape_.N; ++j)
        if (row.P[static_cast<size_t>(j)] > 0) {
          const double v = operand(v_, j, d);
          value += row.P[static_cast<size_t>(j)] * v, weight += row.P[static_cast<size_t>(j)] * std::abs(v);
          most = std::max(most, std::abs(v));
        }
      const double mine =
          (row.forward + static_cast<double>(shape_.N + 8) * u + tiles() * step(Site::pv)) * weight +
          static_cast<double>(shape_.N) * least(Site::probs) / row.l * most +
          least(Site::pv) * tiles() / row.l;
      const double grad = std::abs(operand(grad_, i, d));
      to_.o[row.at * static_cast<size_t>(shape_.D) + static_cast<size_t>(d)] =
          2 * mine + (step(Site::output) + store()) * (std::abs(value) + mine) + least(Site::output) +
          (bf16_store_ ? 0x1p-133 : 0);
      row.d_delta +=
          grad * (2 * mine + step(Site::output_for_delta) * std::abs(value) + least(Site::output_for_delta));
      row.delta_size += grad * std::abs(value);
    }
  }

  void bound_delta(Row& row) {
    for (size_t j = 0; j < row.s.size(); ++j)
      if (row.P[j] > 0) {
        row.dp_error =
            std::max(row.dp_error, static_cast<double>(shape_.D + 4) * u * row.dp_size[j] +
                                       step(Site::dprobs) * std::abs(row.dp[j]) + least(Site::dprobs));
        row.spread += row.P[j] * std::abs(row.dp[j]);
      }
    if (plan_.stabiliser == Stabiliser::zero_sum)
      row.d_delta = 2 * (row.recomputed + static_cast<double>(shape_.N) * u) * row.spread + 2 * row.dp_error;
    row.keel = 2.0 * plan_.keel * (std::abs(row.L) + to_.lse[row.at]);
    row.d_delta += static_cast<double>(shape_.D) * u * row.delta_size + 2.0 * plan_.keel * to_.lse[row.at] +
                   4 * u * row.keel + step(Site::delta) * (row.delta_size + row.spread + row.keel) +
                   least(Site::delta);
    to_.delta[row.at] = 2 * row.d_delta;
  }

  // What one key adds to the residual and to dQ, dK and dV.
  void add_key(int64_t i, int64_t j, const Row& row) {
    const double a = shape_.scale, prob = row.P[static_cast<size_t>(j)];
    const int64_t group = shape_.H / shape_.G;
    const double size_ds =
        std::abs(a) * prob *
        (std::abs(row.dp[static_cast<size_t>(j)]) + row.delta_size + row.spread + row.keel);
    const double error =
        2 * (std::abs(a) * prob * (row.dp_error + row.d_delta) + (row.recomputed + 8 * u) * size_ds +
             (config_.softcap > 0 ? 4 * row.ds / config_.softcap * size_ds : 0.0)) +
        step(Site::dscores) * size_ds + least(Site::dscores) + 0x1p-120;
    to_.residual[row.at] += error / std::abs(a);
    const double p_error = 2 * (row.recomputed + 8 * u) * prob + step(Site::probs_bwd) * prob +
                           least(Site::probs_bwd) + 0x1p-120;
    const double adding = static_cast<double>(std::max(shape_.N, shape_.T * group) + 8) * u;
    for (int64_t d = 0; d < shape_.D; ++d) {
      const double k = std::abs(operand(k_, j, d)), q = std::abs(operand(q_, i, d)),
                   grad = std::abs(operand(grad_, i, d));
      // centre_keys moves keys by their mean: at most the largest key.
      to_.dq[row.at * static_cast<size_t>(shape_.D) + static_cast<size_t>(d)] +=
          (error + adding * size_ds) * (plan_.stabiliser == Stabiliser::centre_keys ? k + 4 : k) +
          (step(Site::dq) + store()) * size_ds * k;
      const auto at = static_cast<size_t>(((b_ * shape_.G + g_) * shape_.N + j) * shape_.D + d);
      to_.dk[at] += (error + adding * size_ds) * q + (step(Site::dk) + store()) * size_ds * q;
      to_.dv[at] += (p_error + adding * prob) * grad + (step(Site::dv) + store()) * prob * grad;
    }
  }

  Bound& to_;
  const cases::Problem& p_;
  const AttentionProblem& config_;
  const AttentionProblem shape_;
  const PrecisionPlan& plan_;
  const bool bf16_store_;
  const int64_t b_, h_, g_;
  const std::vector<double> q_, k_, v_, grad_;
};

inline Bound::Bound(const cases::Problem& p, const AttentionProblem& config, bool bf16_store) {
  const AttentionProblem shape = problem_of(config, p.in);
  const int64_t H = shape.H, G = shape.G, T = shape.T, N = shape.N, D = shape.D;
  o.resize(static_cast<size_t>(shape.B * H * T * D)), dq = o;
  lse.resize(static_cast<size_t>(shape.B * H * T)), delta = residual = lse;
  dk.resize(static_cast<size_t>(shape.B * G * N * D)), dv = dk;
  for (int64_t b = 0; b < shape.B; ++b)
    for (int64_t h = 0; h < H; ++h) {
      HeadBound head(*this, p, config, bf16_store, b, h);
      for (int64_t i = 0; i < T; ++i) head.add_row(i);
    }
  // The last of three bf16 parts keeps nothing below 2^-133.
  for (std::vector<double>* x : {&o, &dq, &dk, &dv})
    for (double& value : *x) value += static_cast<double>(N + T * (H / G)) * 0x1p-132;
}

}  // namespace evenkeel
