#include "diagnosis/probes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/sizes.h"
#include "base/threads.h"
#include "diagnosis/double_kernels.h"
#include "diagnosis/health.h"
#include "model/key_share.h"
#include "records/schema.h"

namespace evenkeel {
namespace {

// Their meanings are those of the records' table.
ProbeField row(std::string_view name, double HeadProbe::*value) {
  return {name, value, find_field(RecordFile::metrics, "probe", name)->meaning};
}

const std::array kFields = {
    row("largest_score", &HeadProbe::largest_score),
    row("row_mean", &HeadProbe::row_mean),
    row("offset", &HeadProbe::largest_row_mean),
    row("row_spread", &HeadProbe::row_spread),
    row("largest_row_spread", &HeadProbe::largest_row_spread),
    row("mean_lse", &HeadProbe::mean_lse),
    row("largest_lse", &HeadProbe::largest_lse),
    row("key_share", &HeadProbe::key_share),
    row("entropy", &HeadProbe::entropy),
    row("sink_mass", &HeadProbe::sink_mass),
    row("heaviest_mass", &HeadProbe::heaviest_mass),
    row("tied_rows", &HeadProbe::tied_rows),
    row("leak_mean", &HeadProbe::residual_mean),
    row("leak_error", &HeadProbe::residual_error),
    row("leak_z", &HeadProbe::residual_z),
    row("leak_rms", &HeadProbe::residual_rms),
    row("delta_rms", &HeadProbe::delta_rms),
    row("leak_size", &HeadProbe::residual_share),
    row("delta_error_sum", &HeadProbe::delta_error_sum),
    row("delta_error_running", &HeadProbe::delta_error_running),
    row("norm_q", &HeadProbe::norm_q),
    row("norm_k", &HeadProbe::norm_k),
    row("norm_v", &HeadProbe::norm_v),
    row("weight_entropy", &HeadProbe::weight_entropy),
    row("score_entropy", &HeadProbe::score_entropy),
    row("one_signed", &HeadProbe::one_signed),
    row("largest_one_signed", &HeadProbe::largest_one_signed),
    row("sign_purity", &HeadProbe::sign_purity),
    row("gradient_norm", &HeadProbe::gradient_norm),
    row("gradient_error", &HeadProbe::gradient_error),
    row("gradient_share", &HeadProbe::gradient_share),
    row("gradient_rank_1", &HeadProbe::gradient_rank_1),
    row("leak_share", &HeadProbe::leak_share),
    row("similarity", &HeadProbe::similarity),
    row("coherence", &HeadProbe::coherence),
    row("mean_q", &HeadProbe::mean_q),
    row("mean_k", &HeadProbe::mean_k),
    row("mean_x", &HeadProbe::mean_x),
    row("mean_score", &HeadProbe::mean_score),
    row("effective_size", &HeadProbe::effective_size),
    row("leak_along", &HeadProbe::leak_along),
    row("gradient_along", &HeadProbe::gradient_along),
    row("leak_lag_1", &HeadProbe::leak_lag_1),
    row("nonfinite", &HeadProbe::nonfinite),
};

double dot(const double* x, const double* y, int64_t n) { return double_kernels().dot(x, y, n); }

double norm(std::span<const double> x) {
  return std::sqrt(dot(x.data(), x.data(), static_cast<int64_t>(x.size())));
}

constexpr double kNoSink = -std::numeric_limits<double>::infinity();

// One head of a capture: sizes, and its rows in FP64 where a sum needs them.
struct Head {
  const Capture& capture;
  const int64_t h, g, B, T, D;
  const double scale;

  Head(const Capture& c, int64_t head)
      : capture(c),
        h(head),
        g(c.group_of(head)),
        B(c.q.shape()[0]),
        T(c.q.shape()[2]),
        D(c.q.shape()[3]),
        scale(problem_of(c.attention_problem(), c.inputs()).scale) {}

  const float* q(int64_t b, int64_t t) const { return capture.q.view().at(b, h, t); }
  const float* k(int64_t b, int64_t t) const { return capture.k.view().at(b, g, t); }
  const float* v(int64_t b, int64_t t) const { return capture.v.view().at(b, g, t); }
  const float* d_o(int64_t b, int64_t t) const { return capture.d_o.view().at(b, h, t); }
  const float* x(int64_t b, int64_t t) const { return capture.x.view().at(b, 0, t); }
  bool has_x() const { return !capture.x.values().empty(); }
  int64_t C() const { return capture.x.shape()[3]; }
  int64_t keys_of(int64_t row) const { return capture.causal ? row + 1 : T; }
  double slope() const { return capture.slopes.empty() ? 0 : double{capture.slopes[at(h)]}; }
  double sink() const { return capture.sinks.empty() ? kNoSink : double{capture.sinks[at(h)]}; }

  // S of a row, FP64: (keys)
  void scores(int64_t b, int64_t row, std::vector<double>& s) const {
    const double c = capture.softcap;
    s.resize(at(keys_of(row)));
    for (int64_t j = 0; j < keys_of(row); ++j) {
      double sum = 0;
      const float *qi = q(b, row), *kj = k(b, j);
      for (int64_t d = 0; d < D; ++d) sum += double{qi[d]} * kj[d];
      sum = scale * sum - slope() * static_cast<double>(std::abs(row - j));
      s[at(j)] = c > 0 ? c * std::tanh(sum / c) : sum;
    }
  }
};

// L of a row of scores, which become its probabilities.
double softmax(std::vector<double>& s, double sink) {
  const double m = std::max(sink, *std::max_element(s.begin(), s.end()));
  double l = std::exp(sink - m);
  for (double& x : s) l += x = std::exp(x - m);
  for (double& x : s) x /= l;
  return m + std::log(l);
}

// What is not finite of the forward pass (q, k and v) and of the gradient that comes in (dO).
struct Nonfinite {
  int64_t forward = 0, gradient = 0;
};
Nonfinite count_nonfinite(const Head& head) {
  Nonfinite count;
  const auto of_row = [&](const float* row) {
    return std::count_if(row, row + head.D, [](float x) { return !std::isfinite(x); });
  };
  for (int64_t b = 0; b < head.B; ++b)
    for (int64_t t = 0; t < head.T; ++t) {
      count.forward += of_row(head.q(b, t)) + of_row(head.k(b, t)) + of_row(head.v(b, t));
      count.gradient += of_row(head.d_o(b, t));
    }
  return count;
}

// --- Scores and probabilities

// (rows, columns) in FP64; rows of the source may lie apart.
std::vector<double> widened(const float* from, int64_t rows, int64_t columns, int64_t stride) {
  std::vector<double> to(at(rows * columns));
  for (int64_t i = 0; i < rows; ++i) std::copy_n(from + i * stride, columns, to.begin() + i * columns);
  return to;
}
std::vector<double> transposed(const std::vector<double>& from, int64_t rows, int64_t columns) {
  std::vector<double> to(from.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) to[at(j * rows + i)] = from[at(i * columns + j)];
  return to;
}

// One head's attention in FP64, as attention_reference and pk_rows define it, by products of matrices: a block of rows at
// a time, scores computed once for all figures.
struct ExactHead {
  std::vector<double> delta;   // (B T)
  std::vector<double> pk, dq;  // (B T, D)
};

// What the rows of scores add up to.
struct ScoreSums {
  double largest = -std::numeric_limits<double>::infinity(), mean = 0, largest_mean = 0, spread = 0,
         largest_spread = 0, lse = 0, largest_lse = 0, entropy = 0, sink = 0, heaviest = 0;

  // Scores become probabilities; returns L.
  double add(std::span<double> s, double sink_score) {
    const auto keys = static_cast<double>(s.size());
    double sum = 0, squares = 0, top = -std::numeric_limits<double>::infinity();
    for (double x : s) sum += x, top = std::max(top, x);
    const double row_mean = sum / keys;
    for (double x : s) {
      largest_spread = std::max(largest_spread, std::fabs(x - row_mean));
      squares += (x - row_mean) * (x - row_mean);
    }
    largest = std::max(largest, top);
    mean += row_mean;
    largest_mean = std::max(largest_mean, std::fabs(row_mean));
    spread += std::sqrt(squares / keys);
    // With x = S - m: -sum P log P = log l sum P - sum x exp(x) / l, of the keys alone.
    const double m = std::max(top, sink_score), of_sink = std::exp(sink_score - m);
    double l = of_sink, weighted = 0;
    for (double& x : s) {
      const double below = x - m;
      x = std::exp(below);
      l += x;
      weighted += below * x;
    }
    const double log_l = std::log(l), L = m + log_l;
    for (double& x : s) x /= l;
    lse += L;
    largest_lse = std::max(largest_lse, std::fabs(L));
    entropy += log_l * ((l - of_sink) / l) - weighted / l;
    sink += s[0];
    heaviest += std::exp(top - m) / l;
    return L;
  }
  void tell(HeadProbe& p, double rows) const {
    p.largest_score = largest;
    p.row_mean = mean / rows;
    p.largest_row_mean = largest_mean;
    p.row_spread = spread / rows;
    p.largest_row_spread = largest_spread;
    p.mean_lse = lse / rows;
    p.largest_lse = largest_lse;
    p.entropy = entropy / rows;
    p.sink_mass = sink / rows;
    p.heaviest_mass = heaviest / rows;
  }
};

// REQUIRES: q, k and v are finite (a product with a masked key's zero would spread what is not). Where dO is not, neither
// are delta and dQ of the result.
ExactHead probe_scores(const Head& head, HeadProbe& p) {
  constexpr int64_t kRows = 32;  // a block's: its scores stay in the cache
  const int64_t B = head.B, T = head.T, D = head.D;
  const double softcap = head.capture.softcap, z = head.capture.plans[at(head.h)].keel;
  const auto multiply = double_kernels().multiply;
  ExactHead out{std::vector<double>(at(B * T)), std::vector<double>(at(B * T * D)),
                std::vector<double>(at(B * T * D))};
  ScoreSums sums;
  double share = 0;
  std::vector<double> s(at(kRows * T)), dp(s), slope(softcap > 0 ? s.size() : 0), o(at(kRows * D)),
      L(at(kRows));
  for (int64_t b = 0; b < B; ++b) {
    const std::vector<double> q = widened(head.q(b, 0), T, D, D), k = widened(head.k(b, 0), T, D, D),
                              v = widened(head.v(b, 0), T, D, D), d_o = widened(head.d_o(b, 0), T, D, D),
                              k_columns = transposed(k, T, D), v_columns = transposed(v, T, D);  // (D, T)
    share += key_share(k.data(), T, D, D);
    for (int64_t first = 0; first < T; first += kRows) {
      const int64_t rows = std::min(kRows, T - first), keys = head.keys_of(first + rows - 1);
      const double* const block_d_o = d_o.data() + first * D;
      std::fill(s.begin(), s.end(), 0.0);
      multiply({rows, keys, D, q.data() + first * D, D, 1, k_columns.data(), T, s.data(), T});
      for (int64_t i = 0; i < rows; ++i) {
        double* const row = s.data() + i * T;
        const int64_t seen = head.keys_of(first + i);
        for (int64_t j = 0; j < seen; ++j) {
          row[j] = head.scale * row[j] - head.slope() * static_cast<double>(std::abs(first + i - j));
          if (softcap > 0) {
            const double bent = std::tanh(row[j] / softcap);
            row[j] = softcap * bent;
            slope[at(i * T + j)] = 1 - bent * bent;
          }
        }
        L[at(i)] = sums.add({row, at(seen)}, head.sink());
        std::fill(row + seen, row + keys, 0.0);
      }
      // Now s is P.
      multiply({rows, D, keys, s.data(), T, 1, k.data(), D, out.pk.data() + (b * T + first) * D, D});
      std::fill(o.begin(), o.end(), 0.0);
      multiply({rows, D, keys, s.data(), T, 1, v.data(), D, o.data(), D});
      std::fill(dp.begin(), dp.end(), 0.0);
      multiply({rows, keys, D, block_d_o, D, 1, v_columns.data(), T, dp.data(), T});
      for (int64_t i = 0; i < rows; ++i) {
        const double delta = dot(block_d_o + i * D, o.data() + i * D, D);
        out.delta[at(b * T + first + i)] = delta;
        for (size_t n = at(i * T), end = n + at(keys); n < end; ++n)
          dp[n] = head.scale * s[n] * (dp[n] - delta + 2 * z * L[at(i)]) * (softcap > 0 ? slope[n] : 1);
      }
      // And dp is dS.
      multiply({rows, D, keys, dp.data(), T, 1, k.data(), D, out.dq.data() + (b * T + first) * D, D});
    }
  }
  sums.tell(p, static_cast<double>(B * T));
  p.key_share = share / static_cast<double>(B);
  return out;
}

// --- What the plan's roundings did

void probe_ties(const Head& head, const AttentionBuffers& ran, HeadProbe& p) {
  int64_t tied = 0;
  for (int64_t b = 0; b < head.B; ++b)
    for (int64_t i = 0; i < head.T; ++i) tied += *ran.ties.view().at(b, head.h, i) > 1;
  p.tied_rows = static_cast<double>(tied) / static_cast<double>(head.B * head.T);
}

void probe_roundings(const Head& head, const AttentionBuffers& ran, const ExactHead& exact, HeadProbe& p) {
  const auto rows = static_cast<double>(head.B * head.T);
  const double z = head.capture.plans[at(head.h)].keel;
  double sum = 0, squares = 0, delta_squares = 0, error_sum = 0;
  for (int64_t b = 0; b < head.B; ++b)
    for (int64_t i = 0; i < head.T; ++i) {
      const double rho = *ran.residual.view().at(b, head.h, i);
      // delta as it was used has keel's part in it: delta - 2 z L.
      const double delta = *ran.delta.view().at(b, head.h, i) + 2 * z * *ran.lse.view().at(b, head.h, i);
      sum += rho;
      squares += rho * rho;
      delta_squares += delta * delta;
      error_sum += delta - exact.delta[at(b * head.T + i)];
    }
  p.residual_mean = sum / rows;
  p.residual_rms = std::sqrt(squares / rows);
  const double variance = squares / rows - p.residual_mean * p.residual_mean;
  p.residual_error = std::sqrt(std::max(0.0, variance) / std::max(1.0, rows - 1));
  p.residual_z = p.residual_mean == 0 ? 0 : p.residual_mean / p.residual_error;
  p.delta_rms = std::sqrt(delta_squares / rows);
  p.residual_share = p.residual_rms == 0 ? 0 : p.residual_rms / p.delta_rms;
  p.delta_error_sum = error_sum;
}

// --- Means over rows, and what happens along them

std::vector<double> mean_of_rows(int64_t rows, int64_t size, const auto& row_at) {
  std::vector<double> sum(at(size));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t d = 0; d < size; ++d) sum[at(d)] += row_at(row)[d];
  for (double& value : sum) value /= static_cast<double>(rows);
  return sum;
}

void probe_means(const Head& head, HeadProbe& p) {
  const int64_t rows = head.B * head.T;
  const auto q = mean_of_rows(rows, head.D, [&](int64_t n) { return head.q(n / head.T, n % head.T); });
  const auto k = mean_of_rows(rows, head.D, [&](int64_t n) { return head.k(n / head.T, n % head.T); });
  double sum = 0, squares = 0;
  for (size_t d = 0; d < q.size(); ++d) sum += q[d] * k[d], squares += q[d] * k[d] * q[d] * k[d];
  p.mean_q = norm(q);
  p.mean_k = norm(k);
  p.mean_score = head.scale * sum;
  p.effective_size = squares == 0 ? 0 : sum * sum / squares;
}

// leak: sum rho M; gradient and error: of W_Q; (D, C) each.
void probe_along(const Head& head, const std::vector<double>& x, std::span<const double> leak,
                 std::span<const double> gradient, std::span<const double> error, HeadProbe& p) {
  const int64_t rows = head.B * head.T, C = head.C();
  const auto k = mean_of_rows(rows, head.D, [&](int64_t n) { return head.k(n / head.T, n % head.T); });
  const auto mean_x = mean_of_rows(rows, C, [&](int64_t n) { return x.data() + n * C; });
  p.mean_x = norm(mean_x);
  const double length = norm(k) * p.mean_x;
  if (!(length > 0)) return;
  double along = 0, squares = 0;
  for (int64_t d = 0; d < head.D; ++d)
    for (int64_t c = 0; c < C; ++c) {
      const double weight = k[at(d)] * mean_x[at(c)] / length,
                   of_plan = weight * (gradient[at(d * C + c)] + error[at(d * C + c)]);
      along += weight * leak[at(d * C + c)];
      squares += of_plan * of_plan;
    }
  p.leak_along = head.scale * along;
  p.gradient_along = std::sqrt(squares);
}

// x: (B T, C), what the head's rows of x are in FP64.
void probe_gradient(const Head& head, const std::vector<double>& x, const AttentionBuffers& ran,
                    const ExactHead& exact, SpectralNorm& error_norm, HeadProbe& p) {
  const int64_t C = head.C(), D = head.D, rows = head.B * head.T, size_of = D * C;
  // Sums over rows of outer products with x, side by side in one product (4 D, rows) (rows, C): of dQ, of its error, and of
  // PK by two weights.
  std::vector<double> left(at(rows * 4 * D)), sums(at(4 * size_of));
  double sizes = 0, counted = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t b = row / head.T, t = row % head.T;
    const double *const dq = exact.dq.data() + row * D, *const pk = exact.pk.data() + row * D;
    const double size = norm({pk, at(D)}) * norm({x.data() + row * C, at(C)}),
                 rho = *ran.residual.view().at(b, head.h, t);
    double* const of_row = left.data() + row * 4 * D;
    for (int64_t d = 0; d < D; ++d) {
      of_row[d] = dq[d];
      of_row[D + d] = *ran.dq.view().at(b, head.h, t, d) - dq[d];
      of_row[2 * D + d] = size > 0 ? pk[d] / size : 0;
      of_row[3 * D + d] = rho * pk[d];
    }
    if (!(size > 0)) continue;
    ++counted;
    sizes += std::fabs(rho) * size;
  }
  double_kernels().multiply({4 * D, C, rows, left.data(), 1, 4 * D, x.data(), C, sums.data(), C});
  const auto part = [&](int64_t n) { return std::span(sums).subspan(at(n * size_of), at(size_of)); };
  const std::span<const double> gradient = part(0), error = part(1), direction = part(2), leak = part(3);
  p.gradient_norm = norm(gradient);
  p.gradient_error = norm(error);
  p.gradient_share = p.gradient_error == 0 ? 0 : p.gradient_error / p.gradient_norm;
  // |sum of n matrices of length 1|^2 = n + the sum over ordered pairs of their cosines.
  const double n = counted, length = norm(direction);
  p.similarity = n < 2 ? kNotKnown : (length * length - n) / (n * (n - 1));
  p.coherence = sizes == 0 ? 0 : norm(leak) / sizes;
  p.leak_share = sizes == 0 ? 0 : head.scale * norm(leak) / p.gradient_norm;
  probe_along(head, x, leak, gradient, error, p);
  if (p.gradient_error > 0) {
    // In units of the error's own norm: float has room for it then.
    std::vector<float> scaled(error.size());
    std::transform(error.begin(), error.end(), scaled.begin(),
                   [&](double v) { return static_cast<float>(v / p.gradient_error); });
    const double largest = error_norm.of(Matrix::rows_of(scaled.data(), C), D, C);
    p.gradient_rank_1 = largest * largest;
  }
}

// --- Weights and V

void probe_weights(const Head& head, HeadNorms& norms, HeadProbe& p) {
  const Capture& c = head.capture;
  if (c.has_weights()) {
    const int64_t C = c.w_q.shape()[2], D = head.D;
    const Matrix q = Matrix::rows_of(c.w_q.view().at(0, head.h, 0), D),
                 k = Matrix::rows_of(c.w_k.view().at(0, head.g, 0), D),
                 v = Matrix::rows_of(c.w_v.view().at(0, head.g, 0), D);
    p.norm_q = norms.q.of(q, C, D);
    p.norm_k = norms.k.of(k, C, D);
    p.norm_v = norms.v.of(v, C, D);
    p.weight_entropy = spectral_entropy(product_singular_values(q, C, k, C, D));
  }
  double entropy = 0;
  for (int64_t b = 0; b < head.B; ++b)
    entropy +=
        spectral_entropy(product_singular_values(Matrix::rows_of(head.q(b, 0), head.D), head.T,
                                                 Matrix::rows_of(head.k(b, 0), head.D), head.T, head.D));
  p.score_entropy = entropy / static_cast<double>(head.B);

  double sum_share = 0, largest = 0, sum_purity = 0;
  for (int64_t d = 0; d < head.D; ++d) {
    double sum = 0, sizes = 0, positive = 0, negative = 0;
    for (int64_t b = 0; b < head.B; ++b)
      for (int64_t t = 0; t < head.T; ++t) {
        const double value = head.v(b, t)[d];
        sum += value;
        sizes += std::fabs(value);
        positive += value > 0;
        negative += value < 0;
      }
    const double share = sizes == 0 ? 0 : std::fabs(sum) / sizes;
    sum_share += share;
    largest = std::max(largest, share);
    if (positive + negative > 0) sum_purity += std::max(positive, negative) / (positive + negative);
  }
  p.one_signed = sum_share / static_cast<double>(head.D);
  p.largest_one_signed = largest;
  p.sign_purity = sum_purity / static_cast<double>(head.D);
}

}  // namespace

const std::span<const ProbeField> kProbeFields = kFields;

std::vector<HeadProbe> probe(const Capture& capture, std::span<HeadNorms> norms) {
  const int64_t H = capture.q.shape()[1];
  std::vector<HeadNorms> own;
  if (norms.empty()) {
    own.resize(at(H));
    norms = own;
  }
  require(static_cast<int64_t>(norms.size()) == H, "[probe] expected norms of {} heads, got {}", H,
          norms.size());
  const AttentionProblem config = capture.attention_problem();
  const AttentionInputs in = capture.inputs();
  const View<const float> d_o = capture.d_o.view();
  AttentionBuffers ran(in, /*with_facts=*/true);
  attention_forward(config, in, ran.forward());
  attention_backward(config, in, d_o, ran.forward(), ran.backward());
  std::vector<double> x;  // (B T, C)
  if (!capture.x.values().empty()) x.assign(capture.x.values().begin(), capture.x.values().end());
  std::vector<HeadProbe> probes(at(H));
  parallel_for(H, [&](int64_t h, int) {
    const Head head(capture, h);
    HeadProbe& p = probes[at(h)];
    const Nonfinite nonfinite = count_nonfinite(head);
    p.nonfinite = static_cast<double>(nonfinite.forward + nonfinite.gradient);
    if (nonfinite.forward > 0) return;  // no other figure would mean anything
    const ExactHead exact = probe_scores(head, p);
    probe_ties(head, ran, p);
    probe_weights(head, norms[at(h)], p);
    probe_means(head, p);
    if (nonfinite.gradient > 0) return;  // as loss scaling makes now and then: the forward figures hold
    probe_roundings(head, ran, exact, p);
    if (head.has_x()) probe_gradient(head, x, ran, exact, norms[at(h)].gradient, p);
  });
  return probes;
}

std::vector<double> pk_rows(const Capture& capture, int64_t head_number) {
  const Head head(capture, head_number);
  std::vector<double> pk(at(head.B * head.T * head.D)), s;
  for (int64_t b = 0; b < head.B; ++b)
    for (int64_t i = 0; i < head.T; ++i) {
      head.scores(b, i, s);
      if (!std::isfinite(softmax(s, head.sink()))) continue;
      double* const row = pk.data() + (b * head.T + i) * head.D;
      for (int64_t j = 0; j < head.keys_of(i); ++j)
        for (int64_t d = 0; d < head.D; ++d) row[d] += s[at(j)] * head.k(b, j)[d];
    }
  return pk;
}

std::vector<double> common_direction(const Capture& capture, int64_t head_number) {
  const Head head(capture, head_number);
  require(head.has_x(), "[probe] expected a capture with x, got one without");
  const std::vector<double> pk = pk_rows(capture, head_number);
  std::vector<double> direction(at(head.D * head.C())), x(at(head.C()));
  const auto rows = static_cast<double>(head.B * head.T);
  for (int64_t b = 0; b < head.B; ++b)
    for (int64_t t = 0; t < head.T; ++t) {
      std::copy_n(head.x(b, t), head.C(), x.begin());
      const double* const pk_t = pk.data() + (b * head.T + t) * head.D;
      const double size = norm({pk_t, at(head.D)}) * norm(x);
      if (!(size > 0)) continue;
      for (int64_t d = 0; d < head.D; ++d)
        double_kernels().add_scaled(direction.data() + d * head.C(), pk_t[d] / (size * rows), x.data(),
                                    head.C());
    }
  return direction;
}

double cosine(std::span<const double> a, std::span<const double> b) {
  return dot(a.data(), b.data(), static_cast<int64_t>(std::min(a.size(), b.size()))) / (norm(a) * norm(b));
}

// --- Words

int64_t worst_head(std::span<const HeadProbe> probes) {
  const auto badness = [](const HeadProbe& p) {
    const double share = std::isnan(p.leak_share) ? p.residual_share : p.leak_share;
    return p.nonfinite > 0 || std::isnan(share) ? std::numeric_limits<double>::infinity() : share;
  };
  int64_t worst = -1;
  for (size_t n = 0; n < probes.size(); ++n)
    if (worst < 0 || badness(probes[n]) > badness(probes[at(worst)])) worst = static_cast<int64_t>(n);
  return worst;
}

std::string in_words(const HeadProbe& p, const std::string& name) {
  if (p.nonfinite > 0 && std::isnan(p.largest_row_mean))
    return fmt::format("{}: {:.0f} of its numbers are not finite; the failure lies before this step.", name,
                       p.nonfinite);
  // What FP32 leaves by itself is some 1e-6 of delta; BF16's one rounding of O some 1e-3.
  constexpr double kLeak = 1e-4;
  const std::string common = fmt::format("the offset is {} (the scores of a row spread by {})",
                                         offset_text(p.largest_row_mean), offset_text(p.row_spread));
  if (p.nonfinite > 0)
    return fmt::format(
        "{}: {:.0f} numbers of its gradient dO are not finite, as loss scaling makes now and then, so "
        "nothing is "
        "known of its leak; {}.",
        name, p.nonfinite, common);
  if (p.residual_share < kLeak)
    return fmt::format(
        "{}: no leak: the rows of dS sum to zero within {:.1e} of delta; {}.", name, p.residual_share,
        p.largest_row_mean > kLowestDriftLimit ? common + ", from earlier steps or from training itself"
                                               : common);
  const std::string size = p.leak_share < 1 ? fmt::format("{:.3g} % of", 100 * p.leak_share)
                                            : fmt::format("{:.3g} times", p.leak_share);
  const std::string share = std::isnan(p.leak_share)
                                ? ""
                                : fmt::format(
                                      " In the gradient of its W_Q that is {} the gradient itself, and "
                                      "{:.0f} % of the gradient's error is of rank 1.",
                                      size, 100 * p.gradient_rank_1);
  return fmt::format(
      "{}: the rows of dS leak {:.1e} of delta (root mean square; mean {:+.1e}, z {:+.1f}).{} Nothing pulls "
      "back what this adds to the offset: {}.",
      name, p.residual_share, p.residual_mean, p.residual_z, share, common);
}

}  // namespace evenkeel
