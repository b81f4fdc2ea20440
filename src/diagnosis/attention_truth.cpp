#include "diagnosis/attention_truth.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/threads.h"
#include "diagnosis/double_kernels.h"

namespace evenkeel {
namespace {

// A matrix of rows x columns, contiguous.
struct DoubleMatrix {
  DoubleMatrix() = default;
  DoubleMatrix(int64_t r, int64_t c) : rows(r), columns(c), values(static_cast<size_t>(r * c)) {}
  double* row(int64_t i) { return values.data() + i * columns; }
  const double* row(int64_t i) const { return values.data() + i * columns; }

  int64_t rows = 0, columns = 0;
  std::vector<double> values;
};

DoubleMatrix absolute(DoubleMatrix x) {
  for (double& value : x.values) value = std::fabs(value);
  return x;
}
DoubleMatrix transposed(const DoubleMatrix& x) {
  DoubleMatrix out(x.columns, x.rows);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.columns; ++j) out.row(j)[i] = x.row(i)[j];
  return out;
}
// `count` rows of a head from `first` on.
DoubleMatrix rows_of(View<const float> x, int64_t b, int64_t h, int64_t first, int64_t count) {
  DoubleMatrix out(count, x.shape[3]);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < out.columns; ++d) out.row(i)[d] = double{*x.at(b, h, first + i, d)};
  return out;
}

// c += a b.
void add_product(const DoubleMatrix& a, const DoubleMatrix& b, double* c) {
  double_kernels().multiply({a.rows, b.columns, a.columns, a.values.data(), a.columns, 1, b.values.data(),
                             b.columns, c, b.columns});
}
// c += a^T b.
void add_transposed_product(const DoubleMatrix& a, const DoubleMatrix& b, double* c) {
  double_kernels().multiply({a.columns, b.columns, a.rows, a.values.data(), 1, a.columns, b.values.data(),
                             b.columns, c, b.columns});
}
DoubleMatrix product(const DoubleMatrix& a, const DoubleMatrix& b) {
  DoubleMatrix out(a.rows, b.columns);
  add_product(a, b, out.values.data());
  return out;
}

// The gap of a format at x, for numbers that are not beyond it.
double gap(const Format& format, double x) {
  const int exponent = static_cast<int>(std::bit_cast<uint64_t>(x) >> 52 & 0x7ff) - 1023;
  const double normal = std::bit_cast<double>(
      static_cast<uint64_t>(std::max(1, 1023 + exponent - format.significand_bits)) << 52);
  return std::max(normal, double{min_subnormal(format)});
}

// One sequence: where its rows and keys lie on the row axes of the tensors.
struct Sequence {
  int64_t number, batch, first_row, rows, first_key, keys;
};

// What all heads of a call share.
struct Task {
  AttentionProblem problem;  // complete
  const AttentionInputs& in;
  View<const float> grad_output;
  const TruthOptions& options;
  int64_t Dv;
  AttentionTruth& out;

  Sequence sequence(int64_t b) const {
    const AttentionMask& mask = problem.mask;
    const auto at = [b](std::span<const int32_t> x) {
      return x.empty() ? int64_t{0} : int64_t{x[static_cast<size_t>(b)]};
    };
    return {b,
            mask.query_offsets.empty() ? b : 0,
            at(mask.query_offsets),
            problem.rows(b),
            at(mask.key_offsets),
            problem.keys(b)};
  }
};

// A block of rows of one head against all keys of its sequence. Matrices of scores are transposed: (keys, rows).
class RowBlock {
 public:
  RowBlock(Task& task, const Sequence& of, int64_t h, int64_t first, int64_t count)
      : task_(task),
        of_(of),
        h_(h),
        first_(first),
        rows_(count),
        q_(rows_of(task.in.q, of.batch, h, of.first_row + first, count)),
        d_o_(rows_of(task.grad_output, of.batch, h, of.first_row + first, count)),
        m_(static_cast<size_t>(count), kNoScore) {}

  void run(const DoubleMatrix& k, const DoubleMatrix& k_size, const DoubleMatrix& v,
           const DoubleMatrix& v_size) {
    find_scores(k, k_size);
    find_probabilities();
    find_gradient_of_scores(v, v_size);
    add_outputs(k, k_size, v, v_size);
  }

 private:
  double* row_of(Tensor<double>& x, int64_t i) const {
    return x.view().at(of_.batch, h_, of_.first_row + first_ + i);
  }
  static double& at(std::vector<double>& x, int64_t i) { return x[static_cast<size_t>(i)]; }

  // S, soft-capped, -inf where a key is not seen; the slope of the soft cap; the largest |q| |k| a.
  void find_scores(const DoubleMatrix& k, const DoubleMatrix& k_size) {
    const AttentionProblem& p = task_.problem;
    const double a = p.scale, c = p.softcap;
    s_ = product(k, transposed(q_));
    size_ = product(k_size, transposed(absolute(q_)));
    if (c > 0) slope_ = DoubleMatrix(s_.rows, s_.columns);
    std::vector<std::pair<int64_t, int64_t>> range;
    for (int64_t i = 0; i < rows_; ++i) range.push_back(p.key_range(of_.number, first_ + i));
    const View<const uint8_t>& visible = p.mask.visible;
    for (int64_t j = 0; j < s_.rows; ++j)
      for (int64_t i = 0; i < rows_; ++i) {
        double& score = s_.row(j)[i];
        const auto [begin, end] = range[static_cast<size_t>(i)];
        if (j < begin || j >= end || (visible.present() && *visible.at(of_.number, h_, first_ + i, j) == 0)) {
          score = kNoScore;
          continue;
        }
        score *= a;
        if (c > 0) {
          const double t = std::tanh(score / c);
          score = c * t;
          slope_.row(j)[i] = 1 - t * t;
        }
        at(m_, i) = std::max(at(m_, i), score);
      }
  }

  void note_sizes() {
    const double a = std::fabs(double{task_.problem.scale});
    const auto head = static_cast<size_t>(of_.number * task_.problem.H + h_);
    double &largest = task_.out.scales.score[head], &near = task_.out.scales.near_score[head];
    for (int64_t j = 0; j < s_.rows; ++j)
      for (int64_t i = 0; i < rows_; ++i) {
        const double score = s_.row(j)[i], size = a * size_.row(j)[i];
        if (score == kNoScore) continue;
        largest = std::max(largest, size);
        if (score > at(m_, i) - kNear) near = std::max(near, size);
      }
  }

  // P in place of S, and L. A row that sees nothing has P = 0.
  void find_probabilities() {
    const bool has_sink = !task_.options.sinks.empty();
    const double sink = has_sink ? double{task_.options.sinks[static_cast<size_t>(h_)]} : kNoScore;
    for (double& m : m_) m = std::max(m, sink);
    note_sizes();
    std::vector<double> l(m_.size());
    sink_.assign(m_.size(), 0);
    for (int64_t i = 0; i < rows_; ++i)
      if (has_sink) at(l, i) = at(sink_, i) = std::exp(sink - at(m_, i));
    for (int64_t j = 0; j < s_.rows; ++j)
      for (int64_t i = 0; i < rows_; ++i) {
        double& score = s_.row(j)[i];
        score = score == kNoScore ? 0 : std::exp(score - at(m_, i));
        at(l, i) += score;
      }
    for (int64_t i = 0; i < rows_; ++i) {
      if (at(l, i) > 0) *row_of(task_.out.lse, i) = at(m_, i) + std::log(at(l, i));
      at(l, i) = at(l, i) > 0 ? 1 / at(l, i) : 0;
      at(sink_, i) *= at(l, i);
    }
    for (int64_t j = 0; j < s_.rows; ++j)
      for (int64_t i = 0; i < rows_; ++i) s_.row(j)[i] *= at(l, i);
  }

  // dS, and the weights of the three scales of dQ and dK (OutputScales).
  void find_gradient_of_scores(const DoubleMatrix& v, const DoubleMatrix& v_size) {
    DoubleMatrix dp = product(v, transposed(d_o_));
    DoubleMatrix g = product(v_size, transposed(absolute(d_o_)));
    delta_.assign(m_.size(), 0);
    w_ = delta_;
    for (int64_t j = 0; j < s_.rows; ++j)
      for (int64_t i = 0; i < rows_; ++i) {
        at(delta_, i) += s_.row(j)[i] * dp.row(j)[i];
        at(w_, i) += s_.row(j)[i] * g.row(j)[i];
      }
    const View<const float>& grad_lse = task_.options.grad_lse;
    std::vector<double> grad_l(m_.size()), sum(m_.size()), variance(m_.size());
    for (int64_t i = 0; grad_lse.present() && i < rows_; ++i)
      at(grad_l, i) = *grad_lse.at(of_.batch, h_, of_.first_row + first_ + i);
    const double a = task_.problem.scale, size = std::fabs(a);
    const bool capped = task_.problem.softcap > 0, rounded = !is_identity(task_.options.dscores);
    for (DoubleMatrix& terms : terms_) terms = DoubleMatrix(s_.rows, rows_);
    ds_ = std::move(dp);
    for (int64_t j = 0; j < s_.rows; ++j)
      for (int64_t i = 0; i < rows_; ++i) {
        // The scales leave the soft cap's slope out: it is at most 1, and has an error that is not relative.
        const double p = s_.row(j)[i], away = ds_.row(j)[i] - at(delta_, i) + at(grad_l, i),
                     ds = p * away * (capped ? slope_.row(j)[i] : 1);
        terms_[0].row(j)[i] = size * p * std::fabs(away);
        terms_[1].row(j)[i] = size * p * (g.row(j)[i] + at(w_, i) + std::fabs(at(grad_l, i)));
        terms_[2].row(j)[i] = size * p * at(w_, i);
        ds_.row(j)[i] = a * ds;
        at(sum, i) += ds;
        largest_ds_ = std::max(largest_ds_, std::fabs(ds));
        if (rounded) {
          const double step = gap(task_.options.dscores.format, ds);
          at(variance, i) += step * step / 12;
        }
      }
    for (int64_t i = 0; i < rows_; ++i) {
      *row_of(task_.out.delta, i) = at(delta_, i);
      *row_of(task_.out.row_sum, i) = at(sum, i);
      *row_of(task_.out.forced, i) = std::sqrt(at(variance, i));
      // dS of the sink, whose dP is 0.
      grad_sink_ += at(sink_, i) * (at(grad_l, i) - at(delta_, i));
    }
  }

  void add_outputs(const DoubleMatrix& k, const DoubleMatrix& k_size, const DoubleMatrix& v,
                   const DoubleMatrix& v_size) {
    OutputScales& scales = task_.out.scales;
    const DoubleMatrix q_size = absolute(q_), d_o_size = absolute(d_o_);
    add_transposed_product(s_, v, row_of(task_.out.o, 0));
    add_transposed_product(s_, v_size, row_of(scales.o, 0));
    add_transposed_product(ds_, k, row_of(task_.out.dq, 0));
    add_transposed_product(terms_[0], k_size, row_of(scales.dq[0], 0));
    add_transposed_product(terms_[1], k_size, row_of(scales.dq[1], 0));
    double* const mean_key = row_of(scales.dq[2], 0);
    add_transposed_product(s_, k, mean_key);
    const double a = std::fabs(double{task_.problem.scale});
    for (int64_t i = 0; i < rows_; ++i)
      for (int64_t d = 0; d < k.columns; ++d)
        mean_key[i * k.columns + d] = a * at(w_, i) * std::fabs(mean_key[i * k.columns + d]);
    const int64_t group = h_ / (task_.problem.H / task_.problem.G);
    const auto of_keys = [&](Tensor<double>& x) { return x.view().at(of_.batch, group, of_.first_key); };
    add_product(s_, d_o_, of_keys(task_.out.dv));
    add_product(s_, d_o_size, of_keys(scales.dv));
    add_product(ds_, q_, of_keys(task_.out.dk));
    for (size_t part = 0; part < 3; ++part) add_product(terms_[part], q_size, of_keys(scales.dk[part]));
  }

 public:
  double largest_ds_ = 0, grad_sink_ = 0;

 private:
  Task& task_;
  const Sequence of_;
  const int64_t h_, first_, rows_;
  DoubleMatrix q_, d_o_, s_, size_, slope_, ds_;
  std::array<DoubleMatrix, 3> terms_;
  std::vector<double> m_, sink_, delta_, w_;
};

// rows: those that x holds. A view of packed sequences has the shape of the longest one, and may hold fewer or more.
double largest_of(View<const float> x, int64_t rows) {
  double largest = 0;
  const int64_t batches = x.stride[0] == 0 ? 1 : x.shape[0];
  for (int64_t b = 0; b < batches; ++b)
    for (int64_t h = 0; h < x.shape[1]; ++h)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < x.shape[3]; ++d)
          largest = std::max(largest, std::fabs(double{*x.at(b, h, i, d)}));
  return largest;
}

void find_range(const DoubleMatrix& v, bool with_zero, double* low, double* high) {
  for (int64_t d = 0; d < v.columns; ++d) {
    low[d] = with_zero || v.rows == 0 ? 0 : HUGE_VAL, high[d] = with_zero || v.rows == 0 ? 0 : -HUGE_VAL;
    for (int64_t j = 0; j < v.rows; ++j)
      low[d] = std::min(low[d], v.row(j)[d]), high[d] = std::max(high[d], v.row(j)[d]);
  }
}

void prepare(Task& task) {
  const AttentionProblem& p = task.problem;
  AttentionTruth& out = task.out;
  const bool packed = !p.mask.query_offsets.empty();
  const int64_t batch = packed ? 1 : p.B, rows = packed ? p.mask.query_rows : p.T,
                keys = packed ? p.mask.key_rows : p.N;
  out.o = out.scales.o = Tensor<double>({batch, p.H, rows, task.Dv});
  out.dv = out.scales.dv = Tensor<double>({batch, p.G, keys, task.Dv});
  out.dq = Tensor<double>({batch, p.H, rows, p.D});
  out.dk = Tensor<double>({batch, p.G, keys, p.D});
  out.scales.dq.fill(out.dq);
  out.scales.dk.fill(out.dk);
  out.lse = out.delta = out.row_sum = out.forced = Tensor<double>({batch, p.H, rows, 1});
  std::fill(out.lse.values().begin(), out.lse.values().end(), kNoScore);
  out.grad_sink = Tensor<double>({1, p.H, 1, 1});
  out.scales.v_low = out.scales.v_high = Tensor<double>({p.B, p.G, 1, task.Dv});
  out.scales.score.assign(static_cast<size_t>(p.B * p.H), 0.0);
  out.scales.near_score = out.scales.score;
  out.scales.largest = {largest_of(task.in.q, rows), largest_of(task.in.k, keys), largest_of(task.in.v, keys),
                        largest_of(task.grad_output, rows)};
}

}  // namespace

AttentionTruth attention_truth(const AttentionProblem& asked, const AttentionInputs& in,
                               View<const float> grad_output, const TruthOptions& options) {
  AttentionTruth out;
  Task task{
      problem_of(asked, AttentionInputs{in.q, in.k, in.k}), in, grad_output, options, in.v.shape[3], out};
  prepare(task);
  const AttentionProblem& p = task.problem;
  const int64_t group = p.H / p.G;
  // Rows at a time: the matrices of scores stay in a core's cache.
  const int64_t block = std::clamp<int64_t>((int64_t{1} << 14) / p.N, 8, 64);
  std::vector<double> largest(static_cast<size_t>(p.B * p.G));
  std::vector<double> grad_sink(static_cast<size_t>(p.B * p.H));
  parallel_for(p.B * p.G, [&](int64_t item, int) {
    const int64_t b = item / p.G, g = item % p.G;
    const Sequence of = task.sequence(b);
    const DoubleMatrix k = rows_of(in.k, of.batch, g, of.first_key, of.keys),
                       v = rows_of(in.v, of.batch, g, of.first_key, of.keys), k_size = absolute(k),
                       v_size = absolute(v);
    find_range(v, !options.sinks.empty(), out.scales.v_low.view().at(b, g, 0),
               out.scales.v_high.view().at(b, g, 0));
    for (int64_t h = g * group; h < (g + 1) * group; ++h)
      for (int64_t i = 0; i < of.rows; i += block) {
        RowBlock rows(task, of, h, i, std::min(block, of.rows - i));
        rows.run(k, k_size, v, v_size);
        double& most = largest[static_cast<size_t>(item)];
        most = std::max(most, rows.largest_ds_);
        grad_sink[static_cast<size_t>(b * p.H + h)] += rows.grad_sink_;
      }
  });
  for (double most : largest) out.largest_ds = std::max(out.largest_ds, most);
  for (int64_t n = 0; n < p.B * p.H; ++n)
    *out.grad_sink.view().at(0, n % p.H, 0) += grad_sink[static_cast<size_t>(n)];
  return out;
}

}  // namespace evenkeel
