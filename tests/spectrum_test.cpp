// Singular values against planted ones, and power iteration against the whole decomposition.
#include "diagnosis/spectrum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "numerics/random.h"

namespace evenkeel {
namespace {

using Floats = std::vector<float>;

size_t at(int64_t n) { return static_cast<size_t>(n); }

// Columns of length 1, orthogonal to one another: (rows, columns) with columns <= rows. Gram and Schmidt, twice.
std::vector<double> orthonormal(int64_t rows, int64_t columns, RandomStream& draw) {
  std::vector<double> q(at(rows * columns));
  for (double& x : q) x = draw.normal();
  for (int pass = 0; pass < 2; ++pass)
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t k = 0; k < j; ++k) {
        double product = 0;
        for (int64_t i = 0; i < rows; ++i) product += q[at(i * columns + j)] * q[at(i * columns + k)];
        for (int64_t i = 0; i < rows; ++i) q[at(i * columns + j)] -= product * q[at(i * columns + k)];
      }
      double squares = 0;
      for (int64_t i = 0; i < rows; ++i) squares += q[at(i * columns + j)] * q[at(i * columns + j)];
      for (int64_t i = 0; i < rows; ++i) q[at(i * columns + j)] /= std::sqrt(squares);
    }
  return q;
}

// U diag(values) V^T, (rows, columns), in FP32.
Floats planted(int64_t rows, int64_t columns, const std::vector<double>& values, uint64_t seed) {
  RandomStream draw({seed, 0, 0});
  const auto count = static_cast<int64_t>(values.size());
  const std::vector<double> u = orthonormal(rows, count, draw), v = orthonormal(columns, count, draw);
  Floats a(at(rows * columns));
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < count; ++k) sum += u[at(i * count + k)] * values[at(k)] * v[at(j * count + k)];
      a[at(i * columns + j)] = static_cast<float>(sum);
    }
  return a;
}

void expect_values(const std::vector<double>& found, std::vector<double> expected, double tolerance) {
  expected.resize(std::max(expected.size(), found.size()), 0.0);  // the rest of the rank
  ASSERT_EQ(found.size(), expected.size());
  for (size_t n = 0; n < found.size(); ++n) EXPECT_NEAR(found[n], expected[n], tolerance * expected[0]) << n;
}

struct Case {
  int64_t rows, columns;
  std::vector<double> values;  // largest first
};
const std::vector<Case> kCases = {
    {1, 1, {3}},
    {1, 9, {0.25}},
    {9, 1, {4}},
    {7, 7, {5, 4, 3, 2, 1, 0.5, 0.25}},
    {20, 5, {3, 3, 3, 3, 3}},              // all equal
    {5, 20, {2, 2, 1, 1e-3, 1e-6}},        // the two largest equal
    {33, 17, {1000, 1}},                   // of rank 2
    {16, 16, {1, 0.999, 0.99, 0.9, 0.1}},  // hardly apart
    {128, 32, {50, 3, 2, 1, 1, 1}},        // as a derailed W_Q
};
constexpr double kFloatError = 1e-6;  // the planted matrix is rounded to FP32

TEST(Spectrum, jacobi_finds_planted_singular_values) {
  for (const Case& c : kCases) {
    const Floats a = planted(c.rows, c.columns, c.values, 1);
    expect_values(singular_values(Matrix::rows_of(a.data(), c.columns), c.rows, c.columns), c.values,
                  kFloatError);
    // The same matrix, looked at as its transpose.
    expect_values(singular_values(Matrix::transposed(a.data(), c.columns), c.columns, c.rows), c.values,
                  kFloatError);
  }
}

TEST(Spectrum, the_product_has_the_singular_values_of_the_matrix_multiplied_out) {
  struct Sizes {
    int64_t m, n, D;
  };
  for (const auto& [m, n, D] :
       {Sizes{1, 1, 1}, {1, 7, 3}, {7, 2, 5}, {3, 3, 8}, {40, 30, 6}, {128, 128, 32}}) {
    RandomStream draw({2, 0, 0});
    Floats a(at(m * D)), b(at(n * D)), product(at(m * n));
    for (float& x : a) x = static_cast<float>(draw.normal());
    for (float& x : b) x = static_cast<float>(draw.normal() + 1);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t d = 0; d < D; ++d) sum += double{a[at(i * D + d)]} * b[at(j * D + d)];
        product[at(i * n + j)] = static_cast<float>(sum);
      }
    std::vector<double> expected = singular_values(Matrix::rows_of(product.data(), n), m, n);
    expected.resize(at(std::min({m, n, D})));
    expect_values(
        product_singular_values(Matrix::rows_of(a.data(), D), m, Matrix::rows_of(b.data(), D), n, D),
        expected, kFloatError);
  }
}

TEST(Spectrum, power_iteration_agrees_with_jacobi_cold_and_warm) {
  for (const Case& c : kCases) {
    const Floats a = planted(c.rows, c.columns, c.values, 3);
    const Matrix matrix = Matrix::rows_of(a.data(), c.columns);
    const double expected = singular_values(matrix, c.rows, c.columns)[0];
    SpectralNorm norm;
    for (const char* start : {"cold", "warm", "warm again"}) {
      const double found = norm.of(matrix, c.rows, c.columns);
      EXPECT_LE(found, expected * (1 + 1e-12)) << start;
      // Stopped at a rise of 1e-6 an iteration: values that are hardly apart cost a little more than that.
      EXPECT_NEAR(found, expected, 1e-3 * expected) << start << " " << c.rows << " x " << c.columns;
    }
    EXPECT_NEAR(norm.of(Matrix::transposed(a.data(), c.columns), c.columns, c.rows), expected,
                1e-3 * expected);
  }
}

TEST(Spectrum, a_warm_start_is_cheaper_and_sees_a_direction_that_overtakes) {
  const Floats a = planted(128, 32, {10, 6, 5, 4, 3, 2, 1}, 4);
  Floats near = a;
  for (float& x : near) x *= 1.01f;
  SpectralNorm norm;
  norm.of(Matrix::rows_of(a.data(), 32), 128, 32);
  const int cold = norm.iterations();
  EXPECT_NEAR(norm.of(Matrix::rows_of(near.data(), 32), 128, 32), 10.1, 1e-3);
  EXPECT_LT(norm.iterations(), cold);
  // Diagonal: the old direction falls behind one that is exactly orthogonal to it.
  Floats diagonal(4 * 4);
  diagonal[0] = 2, diagonal[5] = 1;
  EXPECT_NEAR(norm.of(Matrix::rows_of(diagonal.data(), 4), 4, 4), 2, 1e-4);
  for (int n = 0; n < 20; ++n) norm.of(Matrix::rows_of(diagonal.data(), 4), 4, 4);
  diagonal[5] = 2.1f;
  EXPECT_NEAR(norm.of(Matrix::rows_of(diagonal.data(), 4), 4, 4), 2.1, 1e-3);
}

TEST(Spectrum, zeros_and_what_is_not_finite) {
  const Floats zeros(12);
  SpectralNorm norm;
  EXPECT_EQ(norm.of(Matrix::rows_of(zeros.data(), 4), 3, 4), 0);
  EXPECT_EQ(singular_values(Matrix::rows_of(zeros.data(), 4), 3, 4), std::vector<double>(3));
  EXPECT_EQ(
      product_singular_values(Matrix::rows_of(zeros.data(), 4), 3, Matrix::rows_of(zeros.data(), 4), 3, 4)[0],
      0);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Floats a(12, 1.0f);
    a[5] = bad;
    const Matrix matrix = Matrix::rows_of(a.data(), 4);
    EXPECT_TRUE(std::isnan(norm.of(matrix, 3, 4)));
    EXPECT_TRUE(std::isnan(singular_values(matrix, 3, 4)[0]));
    EXPECT_TRUE(std::isnan(product_singular_values(matrix, 3, Matrix::rows_of(zeros.data(), 4), 3, 4)[0]));
    EXPECT_TRUE(std::isnan(spectral_entropy(singular_values(matrix, 3, 4))));
  }
  const Floats ones(12, 1.0f);
  EXPECT_NEAR(norm.of(Matrix::rows_of(ones.data(), 4), 3, 4), std::sqrt(12.0), 1e-6);  // and after a NaN
  const Floats huge(12, 1e38f), tiny(12, 1e-38f);
  EXPECT_NEAR(norm.of(Matrix::rows_of(huge.data(), 4), 3, 4) / 1e38, std::sqrt(12.0), 1e-6);
  EXPECT_NEAR(singular_values(Matrix::rows_of(tiny.data(), 4), 3, 4)[0] / 1e-38, std::sqrt(12.0), 1e-6);
}

TEST(Spectrum, entropy_of_known_spectra) {
  EXPECT_EQ(spectral_entropy(std::vector<double>{}), 0);
  EXPECT_EQ(spectral_entropy(std::vector<double>{0, 0}), 0);
  EXPECT_EQ(spectral_entropy(std::vector<double>{7, 0, 0}), 0);
  EXPECT_NEAR(spectral_entropy(std::vector<double>(5, 0.3)), std::log(5.0), 1e-12);
  EXPECT_NEAR(spectral_entropy(std::vector<double>{3, 1}), -(0.75 * std::log(0.75) + 0.25 * std::log(0.25)),
              1e-12);
}

}  // namespace
}  // namespace evenkeel
