// The definition of attention: FP64, whole rows, one loop per line of the formula. No tiles, no rounding, no
// shortcuts; every other implementation is tested against this one.
#include <cmath>
#include <limits>

#include "attention/attention.h"
#include "base/error.h"
#include "base/threads.h"

namespace evenkeel {
namespace {

template <class Real>
struct Task {
  AttentionProblem problem;  // complete
  const AttentionInputsOf<Real>& in;
  View<const Real> grad_output;  // (B, H, T, Dv), or none
  View<const Real> grad_lse;     // (B, H, T, 1), or none
};

template <class Real>
bool is_visible(const Task<Real>& task, int64_t b, int64_t h, int64_t i, int64_t j) {
  const View<const uint8_t>& visible = task.problem.mask.visible;
  const auto [first, last] = task.problem.key_range(b, i);
  return j >= first && j < last && (!visible.present() || *visible.at(b, h, i, j) != 0);
}

template <class Real>
double dot(int64_t D, View<const Real> x, int64_t x_head, int64_t x_row, View<const Real> y, int64_t y_head,
           int64_t y_row, int64_t b) {
  double sum = 0;
  for (int64_t d = 0; d < D; ++d)
    sum += double{*x.at(b, x_head, x_row, d)} * double{*y.at(b, y_head, y_row, d)};
  return sum;
}

// One row of one head. Adds to dk, dv and dsinks.
template <class Real>
void reference_row(const Task<Real>& task, int64_t b, int64_t h, int64_t i, AttentionReference& out) {
  const View<const Real>& grad_output = task.grad_output;
  const AttentionProblem& p = task.problem;
  const int64_t N = p.N, D = p.D, Dv = p.Dv, g = h / (p.H / p.G);
  const double a = p.scale, c = p.softcap;

  constexpr double kNone = -std::numeric_limits<double>::infinity();
  const double sink = p.sinks.empty() ? kNone : double{p.sinks[static_cast<size_t>(h)]};
  double m = sink;
  std::vector<double> S(N, kNone), slope(N, 1.0);  // slope: of the soft cap at S
  for (int64_t j = 0; j < N; ++j) {
    if (!is_visible(task, b, h, i, j)) continue;
    S[j] = a * dot(D, task.in.q, h, i, task.in.k, g, j, b);
    if (c > 0) {
      const double t = std::tanh(S[j] / c);
      S[j] = c * t;
      slope[j] = 1 - t * t;
    }
    if (!p.slopes.empty())
      S[j] -= double{p.slopes[static_cast<size_t>(h)]} * static_cast<double>(std::abs(p.position(b, i) - j));
    m = std::max(m, S[j]);
  }
  *out.lse.view().at(b, h, i) = m;
  if (m == kNone) return;  // sees neither key nor sink: O = 0, L = -inf, no gradient

  double l = std::exp(sink - m);
  for (double s : S) l += std::exp(s - m);
  const double L = m + std::log(l);
  *out.lse.view().at(b, h, i) = L;
  std::vector<double> P(N), O(Dv);
  for (int64_t j = 0; j < N; ++j) P[j] = std::exp(S[j] - m) / l;
  for (int64_t j = 0; j < N; ++j)
    if (P[j] != 0)
      for (int64_t d = 0; d < Dv; ++d) O[d] += P[j] * double{*task.in.v.at(b, g, j, d)};
  for (int64_t d = 0; d < Dv; ++d) *out.o.view().at(b, h, i, d) = O[d];
  if (!grad_output.present()) return;

  double delta = 0;
  for (int64_t d = 0; d < Dv; ++d) delta += double{*grad_output.at(b, h, i, d)} * O[d];
  *out.delta.view().at(b, h, i) = delta;
  const double z = p.plan(h).keel;
  const double dL = task.grad_lse.present() ? double{*task.grad_lse.at(b, h, i)} : 0.0;
  if (sink != kNone) *out.dsinks.view().at(0, h, 0) += std::exp(sink - L) * (2 * z * L + dL - delta);
  for (int64_t j = 0; j < N; ++j) {
    if (P[j] == 0) continue;
    const double dP = dot(Dv, grad_output, h, i, task.in.v, g, j, b);
    const double dS = a * slope[j] * P[j] * (dP - delta + 2 * z * L + dL);
    for (int64_t d = 0; d < Dv; ++d)
      *out.dv.view().at(b, g, j, d) += P[j] * double{*grad_output.at(b, h, i, d)};
    for (int64_t d = 0; d < D; ++d) {
      *out.dq.view().at(b, h, i, d) += dS * double{*task.in.k.at(b, g, j, d)};
      *out.dk.view().at(b, g, j, d) += dS * double{*task.in.q.at(b, h, i, d)};
    }
  }
}

template <class Real>
AttentionReference reference(const AttentionProblem& asked, const AttentionInputsOf<Real>& in,
                             View<const Real> grad_output, View<const Real> grad_lse) {
  const Task<Real> task{problem_of(asked, in), in, grad_output, grad_lse};
  const AttentionProblem& p = task.problem;
  const std::array<int64_t, 4> per_value{p.B, p.H, p.T, p.Dv}, per_row{p.B, p.H, p.T, 1};

  AttentionReference out;
  out.o = Tensor<double>(per_value);
  out.lse = Tensor<double>(per_row);
  for (double& L : out.lse.values()) L = -std::numeric_limits<double>::infinity();
  if (grad_output.present()) {
    require(grad_output.shape == per_value,
            "[attention] expected grad_output of o's shape ({}, {}, {}, {}), got ({}, {}, {}, {})", p.B, p.H,
            p.T, p.Dv, grad_output.shape[0], grad_output.shape[1], grad_output.shape[2],
            grad_output.shape[3]);
    out.dq = Tensor<double>({p.B, p.H, p.T, p.D});
    out.dk = Tensor<double>({p.B, p.G, p.N, p.D});
    out.dv = Tensor<double>({p.B, p.G, p.N, p.Dv});
    out.delta = Tensor<double>(per_row);
    out.dsinks = Tensor<double>({1, p.H, 1, 1});
    require(!grad_lse.present() || grad_lse.shape == per_row,
            "[attention] expected grad_lse of shape ({}, {}, {}, 1)", p.B, p.H, p.T);
  }
  // One key/value head with its query heads is one item: no two items add to the same dk and dv. All sequences add to the
  // same dsinks.
  const bool by_sequence = p.sinks.empty();
  parallel_for(by_sequence ? p.B * p.G : p.G, [&](int64_t item, int) {
    const int64_t g = item % p.G, group = p.H / p.G;
    for (int64_t b = by_sequence ? item / p.G : 0; b < (by_sequence ? item / p.G + 1 : p.B); ++b)
      for (int64_t h = g * group; h < (g + 1) * group; ++h)
        for (int64_t i = 0; i < p.rows(b); ++i) reference_row(task, b, h, i, out);
  });
  return out;
}

}  // namespace

AttentionReference attention_reference(const AttentionProblem& problem, const AttentionInputs& in,
                                       View<const float> grad_output, View<const float> grad_lse) {
  return reference(problem, in, grad_output, grad_lse);
}
AttentionReference attention_reference(const AttentionProblem& problem, const AttentionInputsOf<double>& in,
                                       View<const double> grad_output, View<const double> grad_lse) {
  return reference(problem, in, grad_output, grad_lse);
}

}  // namespace evenkeel
