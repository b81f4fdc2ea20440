#include "diagnosis/spectrum.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "diagnosis/double_kernels.h"
#include "numerics/cpu.h"
#include "numerics/random.h"

namespace evenkeel {

const DoubleKernels& double_kernels() { return EVENKEEL_OF_TARGET(cpu_target(), kDoubleKernels); }

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Column by column: column j is values[j * rows, ...).
struct Columns {
  int64_t rows, columns;
  std::vector<double> values;

  double* column(int64_t j) { return values.data() + j * rows; }
  const double* column(int64_t j) const { return values.data() + j * rows; }
  bool finite() const {
    return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
  }
};

Columns columns_of(const Matrix& a, int64_t rows, int64_t columns) {
  Columns c{rows, columns, std::vector<double>(static_cast<size_t>(rows * columns))};
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t i = 0; i < rows; ++i) c.column(j)[i] = a.data[i * a.row + j * a.column];
  return c;
}

double length(std::span<const double> x) {
  // Scaled by the largest, so that no square overflows or vanishes.
  double largest = 0;
  for (double v : x) largest = std::max(largest, std::fabs(v));
  if (largest == 0) return 0;
  double sum = 0;
  for (double v : x) sum += v / largest * (v / largest);
  return largest * std::sqrt(sum);
}

// Rotates pairs of columns until all are orthogonal; their lengths are then the singular values.
std::vector<double> jacobi(Columns a) {
  const auto count = static_cast<size_t>(a.columns);
  if (!a.finite()) return std::vector<double>(count, kNan);
  double largest = 0;
  for (double x : a.values) largest = std::max(largest, std::fabs(x));
  if (largest == 0) return std::vector<double>(count, 0.0);
  for (double& x : a.values) x /= largest;

  const DoubleKernels& kernels = double_kernels();
  constexpr double kOrthogonal = 1e-15;  // cosine of two columns
  constexpr int kMostSweeps = 60;        // some 10 are enough
  bool rotated = true;
  for (int sweep = 0; sweep < kMostSweeps && rotated; ++sweep) {
    rotated = false;
    for (int64_t p = 0; p < a.columns; ++p)
      for (int64_t q = p + 1; q < a.columns; ++q) {
        double *x = a.column(p), *y = a.column(q);
        const double xx = kernels.dot(x, x, a.rows), yy = kernels.dot(y, y, a.rows),
                     xy = kernels.dot(x, y, a.rows);
        if (std::fabs(xy) <= kOrthogonal * std::sqrt(xx * yy)) continue;
        rotated = true;
        const double zeta = (yy - xx) / (2 * xy);
        const double tangent = (zeta >= 0 ? 1 : -1) / (std::fabs(zeta) + std::sqrt(1 + zeta * zeta));
        const double cosine = 1 / std::sqrt(1 + tangent * tangent), sine = cosine * tangent;
        kernels.rotate(x, y, a.rows, cosine, sine);
      }
  }
  std::vector<double> values;
  for (int64_t j = 0; j < a.columns; ++j)
    values.push_back(largest * std::sqrt(kernels.dot(a.column(j), a.column(j), a.rows)));
  std::sort(values.begin(), values.end(), std::greater<>());
  return values;
}

// R of A = QR, (min(rows, columns), columns), by Householder reflections.
Columns triangle(Columns a) {
  const DoubleKernels& kernels = double_kernels();
  const int64_t steps = std::min(a.rows, a.columns);
  for (int64_t k = 0; k < steps; ++k) {
    double* const v = a.column(k) + k;
    const int64_t n = a.rows - k;
    const double norm = length({v, static_cast<size_t>(n)});
    if (norm == 0) continue;
    const double diagonal = v[0] > 0 ? -norm : norm;  // away from v[0]: no cancellation
    std::vector<double> w(v, v + n);
    w[0] -= diagonal;
    const double ww = kernels.dot(w.data(), w.data(), n);
    for (int64_t j = k; j < a.columns; ++j) {
      double* const x = a.column(j) + k;
      kernels.add_scaled(x, -2 * kernels.dot(w.data(), x, n) / ww, w.data(), n);
    }
  }
  Columns r{steps, a.columns, std::vector<double>(static_cast<size_t>(steps * a.columns))};
  for (int64_t j = 0; j < a.columns; ++j)
    for (int64_t i = 0; i <= std::min(j, steps - 1); ++i) r.column(j)[i] = a.column(j)[i];
  return r;
}

}  // namespace

std::vector<double> singular_values(const Matrix& a, int64_t rows, int64_t columns) {
  if (columns <= rows) return jacobi(columns_of(a, rows, columns));
  return jacobi(columns_of({a.data, a.column, a.row}, columns, rows));
}

std::vector<double> product_singular_values(const Matrix& a, int64_t m, const Matrix& b, int64_t n,
                                            int64_t D) {
  Columns left = columns_of(a, m, D), right = columns_of(b, n, D);
  if (!left.finite() || !right.finite())
    return std::vector<double>(static_cast<size_t>(std::min({m, n, D})), kNan);
  left = triangle(std::move(left));
  right = triangle(std::move(right));
  // The product of the triangles, turned so that it has no more columns than rows.
  if (left.rows < right.rows) std::swap(left, right);
  Columns product{left.rows, right.rows, std::vector<double>(static_cast<size_t>(left.rows * right.rows))};
  double_kernels().multiply({right.rows, left.rows, D, right.values.data(), 1, right.rows, left.values.data(),
                             left.rows, product.values.data(), left.rows});
  return jacobi(std::move(product));
}

namespace {

// A symmetric matrix of k by k with nothing beside its diagonal and the lines next to it; those are positive.
struct Tridiagonal {
  std::vector<double> diagonal;  // (k)
  std::vector<double> beside;    // (k - 1)

  // Is x above every eigenvalue? If so, pivots (k) are those of x - T, all positive.
  bool is_below(double x, std::vector<double>& pivots) const {
    pivots.resize(diagonal.size());
    for (size_t i = 0; i < diagonal.size(); ++i) {
      pivots[i] = x - diagonal[i] - (i > 0 ? beside[i - 1] * beside[i - 1] / pivots[i - 1] : 0);
      if (!(pivots[i] > 0)) return false;
    }
    return true;
  }

  // A pair of numbers around the largest eigenvalue, as close as FP64 has them, by bisection: not above, above. low: one
  // that is not above it.
  std::pair<double, double> largest(double low) const {
    std::vector<double> pivots;
    double high = 0;  // no sum over a row is smaller (Gershgorin)
    for (size_t i = 0; i < diagonal.size(); ++i)
      high = std::max(high, diagonal[i] + (i > 0 ? beside[i - 1] : 0) + (i < beside.size() ? beside[i] : 0));
    for (high *= 1 + kClose; high - low > kClose * high;) {
      const double middle = low + (high - low) / 2;
      (is_below(middle, pivots) ? high : low) = middle;
    }
    return {low, high};
  }

  // The vector that goes with it, of any length: inverse iteration from a number just above. All its values are positive,
  // so that a start from ones cannot miss it.
  std::vector<double> vector_at(double above) const {
    const size_t k = diagonal.size();
    std::vector<double> pivots, y(k, 1.0);
    if (!is_below(above, pivots)) return y;
    constexpr int kRounds = 3;
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 1; i < k; ++i) y[i] += beside[i - 1] / pivots[i - 1] * y[i - 1];
      for (size_t i = k; i-- > 0;) y[i] = (y[i] + (i + 1 < k ? beside[i] * y[i + 1] : 0)) / pivots[i];
      const double size = length(y);
      for (double& value : y) value /= size;
    }
    return y;
  }

  static constexpr double kClose = 1e-14;
};

}  // namespace

double SpectralNorm::of(const Matrix& a, int64_t rows, int64_t columns) {
  if (a.column != 1) return of({a.data, a.column, a.row}, columns, rows);  // the transpose has the same norm
  const DoubleKernels& kernels = double_kernels();
  const auto n = static_cast<size_t>(columns);
  if (vector_.size() != n) vector_.assign(n, 0.0);
  const auto to_unit_length = [](std::vector<double>& x, double norm) {
    for (double& value : x) value /= norm;
  };
  // The start: the last call's vector and a good part of a random one, another in every call. Without it, a direction
  // that has overtaken the old one would be seen late or never.
  constexpr uint64_t kSeed = 1;
  constexpr double kFresh = 0.5;
  RandomStream draw({kSeed, calls_++, 0});
  std::vector<double> fresh(n);
  for (double& x : fresh) x = draw.normal();
  to_unit_length(fresh, length(fresh));
  for (size_t j = 0; j < n; ++j) vector_[j] += kFresh * fresh[j];
  to_unit_length(vector_, length(vector_));

  std::vector<std::vector<double>> passed;  // orthogonal, of length 1
  Tridiagonal seen;                         // A^T A, as far as they know it
  std::pair<double, double> square{0, 0};   // around the norm's square
  for (iterations_ = 1;; ++iterations_) {
    std::vector<double> next(n);
    seen.diagonal.push_back(kernels.power_step(a.data, rows, columns, a.row, vector_.data(), next.data()));
    passed.push_back(std::move(vector_));
    if (!std::isfinite(seen.diagonal.back()) || !std::isfinite(length(next))) {
      vector_.clear();  // the next call starts afresh
      return kNan;
    }
    const double before = square.first;
    square = seen.largest(std::max(before, seen.diagonal.back()));
    // What is new in the next vector. In exact arithmetic only the last two have a part in it.
    for (const std::vector<double>& v : passed)
      kernels.add_scaled(next.data(), -kernels.dot(v.data(), next.data(), columns), v.data(), columns);
    const double rest = length(next);
    // Of squares, 2 tolerances are 1 of the norm.
    if (square.first - before <= 2 * kTolerance * square.first || rest <= kTolerance * square.first ||
        iterations_ == kMostIterations)
      break;
    seen.beside.push_back(rest);
    to_unit_length(next, rest);
    vector_ = std::move(next);
  }
  vector_.assign(n, 0.0);
  const std::vector<double> shares = seen.vector_at(square.second);
  for (size_t i = 0; i < passed.size(); ++i)
    kernels.add_scaled(vector_.data(), shares[i], passed[i].data(), columns);
  return std::sqrt(square.first);
}

double spectral_entropy(std::span<const double> values) {
  double sum = 0, entropy = 0;
  for (double x : values) sum += x;
  if (std::isnan(sum)) return kNan;
  for (double x : values)
    if (x > 0) entropy -= x / sum * std::log(x / sum);
  return std::max(0.0, entropy);
}

}  // namespace evenkeel
