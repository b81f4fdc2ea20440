#include "diagnosis/spectrum.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "numerics/random.h"

namespace evenkeel {
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

double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
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

  constexpr double kOrthogonal = 1e-15;  // cosine of two columns
  constexpr int kMostSweeps = 60;        // some 10 are enough
  bool rotated = true;
  for (int sweep = 0; sweep < kMostSweeps && rotated; ++sweep) {
    rotated = false;
    for (int64_t p = 0; p < a.columns; ++p)
      for (int64_t q = p + 1; q < a.columns; ++q) {
        double *x = a.column(p), *y = a.column(q);
        const double xx = dot(x, x, a.rows), yy = dot(y, y, a.rows), xy = dot(x, y, a.rows);
        if (std::fabs(xy) <= kOrthogonal * std::sqrt(xx * yy)) continue;
        rotated = true;
        const double zeta = (yy - xx) / (2 * xy);
        const double tangent = (zeta >= 0 ? 1 : -1) / (std::fabs(zeta) + std::sqrt(1 + zeta * zeta));
        const double cosine = 1 / std::sqrt(1 + tangent * tangent), sine = cosine * tangent;
        for (int64_t i = 0; i < a.rows; ++i) {
          const double before = x[i];
          x[i] = cosine * before - sine * y[i];
          y[i] = sine * before + cosine * y[i];
        }
      }
  }
  std::vector<double> values;
  for (int64_t j = 0; j < a.columns; ++j)
    values.push_back(largest * std::sqrt(dot(a.column(j), a.column(j), a.rows)));
  std::sort(values.begin(), values.end(), std::greater<>());
  return values;
}

// R of A = QR, (min(rows, columns), columns), by Householder reflections.
Columns triangle(Columns a) {
  const int64_t steps = std::min(a.rows, a.columns);
  for (int64_t k = 0; k < steps; ++k) {
    double* const v = a.column(k) + k;
    const int64_t n = a.rows - k;
    const double norm = length({v, static_cast<size_t>(n)});
    if (norm == 0) continue;
    const double diagonal = v[0] > 0 ? -norm : norm;  // away from v[0]: no cancellation
    std::vector<double> w(v, v + n);
    w[0] -= diagonal;
    const double ww = dot(w.data(), w.data(), n);
    for (int64_t j = k; j < a.columns; ++j) {
      double* const x = a.column(j) + k;
      const double factor = 2 * dot(w.data(), x, n) / ww;
      for (int64_t i = 0; i < n; ++i) x[i] -= factor * w[static_cast<size_t>(i)];
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
  for (int64_t d = 0; d < D; ++d)
    for (int64_t j = 0; j < right.rows; ++j) {
      const double factor = right.column(d)[j];
      for (int64_t i = 0; i < left.rows; ++i) product.column(j)[i] += factor * left.column(d)[i];
    }
  return jacobi(std::move(product));
}

double SpectralNorm::of(const Matrix& a, int64_t rows, int64_t columns) {
  if (a.column != 1) return of({a.data, a.column, a.row}, columns, rows);  // the transpose has the same norm
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

  std::vector<double> next(n);
  double sigma = 0;
  for (iterations_ = 1; iterations_ <= kMostIterations; ++iterations_) {
    // With v of length 1, |A v| is never above the norm; A^T A v is the next v.
    std::fill(next.begin(), next.end(), 0.0);
    double square = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const float* const row = a.data + i * a.row;
      double image = 0;  // of v, row i
      for (size_t j = 0; j < n; ++j) image += row[j] * vector_[j];
      for (size_t j = 0; j < n; ++j) next[j] += image * row[j];
      square += image * image;
    }
    const double before = sigma, norm = length(next);
    sigma = std::sqrt(square);
    if (!std::isfinite(sigma) || !std::isfinite(norm)) {
      vector_.clear();  // the next call starts afresh
      return kNan;
    }
    if (norm == 0) break;  // a matrix of zeros
    to_unit_length(next, norm);
    vector_.swap(next);
    if (sigma - before <= kTolerance * sigma) break;
  }
  return sigma;
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
