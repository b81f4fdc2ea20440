#include "diagnosis/conform_bounds.h"

#include <algorithm>
#include <cmath>

#include "base/threads.h"

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

// One row of a head, and what it adds to the scales of keys.
class RowScales {
 public:
  RowScales(const AttentionProblem& problem, const AttentionInputs& in, View<const float> d_o, int64_t h,
            int64_t i)
      : in_(in), shape_(problem), h_(h), i_(i), q_(in.q.at(0, h, i)), grad_(d_o.at(0, h, i)) {
    const auto [first, last] = problem.key_range(0, i);
    for (int64_t j = first; j < last; ++j)
      if (!problem.mask.visible.present() || *problem.mask.visible.at(0, h, i, j) != 0) add_key(j);
    double sum = 0;
    for (Key& key : keys_) sum += key.p = std::exp(key.score - m_);
    for (Key& key : keys_) {
      key.p /= sum;
      W_ += key.p * key.g;
      delta_ += key.p * key.dp;
    }
  }

  void add_to(OutputScales& out) const {
    const auto head = static_cast<size_t>(h_);
    const int64_t D = shape_.D;
    const double a = std::fabs(double{shape_.scale});
    std::vector<double> mean_key(static_cast<size_t>(D));
    double* const o = out.o.view().at(0, h_, i_);
    for (const Key& key : keys_) {
      out.score[head] = std::max(out.score[head], key.size);
      if (key.score > m_ - kNear) out.near_score[head] = std::max(out.near_score[head], key.size);
      const float *k = in_.k.at(0, h_, key.j), *v = in_.v.at(0, h_, key.j);
      double* const dv = out.dv.view().at(0, h_, key.j);
      const double terms[] = {a * key.p * std::fabs(key.dp - delta_), a * key.p * (key.g + W_),
                              a * key.p * W_};
      for (size_t part = 0; part < 3; ++part) {
        double *dq = out.dq[part].view().at(0, h_, i_), *dk = out.dk[part].view().at(0, h_, key.j);
        for (int64_t d = 0; d < D; ++d) {
          if (part < 2) dq[d] += terms[part] * std::fabs(k[d]);
          dk[d] += terms[part] * std::fabs(q_[d]);
        }
      }
      for (int64_t d = 0; d < D; ++d) {
        o[d] += key.p * std::fabs(v[d]);
        dv[d] += key.p * std::fabs(grad_[d]);
        mean_key[static_cast<size_t>(d)] += key.p * double{k[d]};
      }
    }
    for (int64_t d = 0; d < D; ++d)
      *out.dq[2].view().at(0, h_, i_, d) = a * W_ * std::fabs(mean_key[static_cast<size_t>(d)]);
  }

 private:
  struct Key {
    int64_t j;
    double score, size, g, dp, p = 0;
  };
  void add_key(int64_t j) {
    const float *k = in_.k.at(0, h_, j), *v = in_.v.at(0, h_, j);
    Key key{j, 0, 0, 0, 0};
    for (int64_t d = 0; d < shape_.D; ++d) {
      const double of_score = double{shape_.scale} * q_[d] * k[d], of_dp = double{grad_[d]} * v[d];
      key.score += of_score, key.size += std::fabs(of_score);
      key.dp += of_dp, key.g += std::fabs(of_dp);
    }
    m_ = std::max(m_, key.score);
    keys_.push_back(key);
  }

  const AttentionInputs& in_;
  const AttentionProblem& shape_;
  const int64_t h_, i_;
  const float *q_, *grad_;
  std::vector<Key> keys_;
  double m_ = -HUGE_VAL, W_ = 0, delta_ = 0;
};

double largest_of(View<const float> x) {
  double largest = 0;
  for (int64_t h = 0; h < x.shape[1]; ++h)
    for (int64_t i = 0; i < x.shape[2]; ++i)
      for (int64_t d = 0; d < x.shape[3]; ++d)
        largest = std::max(largest, std::fabs(double{*x.at(0, h, i, d)}));
  return largest;
}

}  // namespace

OutputScales output_scales(const AttentionProblem& config, const AttentionInputs& in,
                           View<const float> grad_output) {
  const AttentionProblem shape = problem_of(config, in);
  OutputScales out;
  out.o = Tensor<double>(in.q.shape);
  out.dv = Tensor<double>(in.k.shape);
  out.dq.fill(out.o);
  out.dk.fill(out.dv);
  out.v_low = out.v_high = Tensor<double>({1, shape.H, 1, shape.D});
  out.score.assign(static_cast<size_t>(shape.H), 0.0);
  out.near_score = out.score;
  out.largest = {largest_of(in.q), largest_of(in.k), largest_of(in.v), largest_of(grad_output)};
  parallel_for(shape.H, [&](int64_t h, int) {
    for (int64_t d = 0; d < shape.D; ++d) {
      double &low = *out.v_low.view().at(0, h, 0, d), &high = *out.v_high.view().at(0, h, 0, d);
      low = HUGE_VAL, high = -HUGE_VAL;
      for (int64_t j = 0; j < shape.N; ++j) {
        const double value = *in.v.at(0, h, j, d);
        low = std::min(low, value), high = std::max(high, value);
      }
    }
    for (int64_t i = 0; i < shape.T; ++i) RowScales(shape, in, grad_output, h, i).add_to(out);
  });
  return out;
}

OutputBounds output_bounds(const AttentionProblem& shape, const OutputScales& scales, int64_t head) {
  const PrecisionPlan& plan = shape.plans[0];
  const auto u = [&](Site site, double largest = 0) { return relative_error(plan.at(site), largest); };
  const auto eta = [&](Site site) { return absolute_error(plan.at(site)); };
  const auto both = [](double x, double y) { return x + y + x * y; };  // (1 + x)(1 + y) - 1
  const auto N = static_cast<double>(shape.N), T = static_cast<double>(shape.T),
             D = static_cast<double>(shape.D);
  const auto [q, k, v, d_o] = scales.largest;
  const double a = std::fabs(double{shape.scale}), of_v = u(Site::v, v), of_d_o = u(Site::grad_output, d_o);
  // FP32 arithmetic: an ulp (tensor cores truncate) for each term of the longest chain of sums, exp, log and division.
  const double arithmetic = 0x1p-23 * (2 * D + 2 * N + T + 64);
  const double tiles = shape.tile_keys > 0 ? std::ceil(N / static_cast<double>(shape.tile_keys)) : 1;
  const bool centred = plan.stabiliser == Stabiliser::centre_keys;

  // A score's absolute error. Keys less their mean are up to twice as large.
  const double of_score =
      (centred ? 2 : 1) *
      both(both(u(Site::q, q), u(Site::k, k)), u(Site::scores) + 2 * u(Site::shifted) + 0x1p-23 * (D + 16));
  const double lost_scores =
      D * a * (eta(Site::q) * k + eta(Site::k) * q) + eta(Site::scores) + eta(Site::shifted);
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
  const double of_ds = both(backward, u(Site::dscores) + arithmetic);
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
