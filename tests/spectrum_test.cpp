// Singular values against planted ones, power iteration against the whole decomposition, and the loops below against plain
// ones.
#include "diagnosis/spectrum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "diagnosis/double_kernels.h"
#include "numerics/cpu.h"
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
    {128, 32, {50, 3, 2, 1, 1, 1}},        // as W_Q of a failed run
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
      EXPECT_NEAR(found, expected, 1e-5 * expected) << start << " " << c.rows << " x " << c.columns;
    }
    EXPECT_NEAR(norm.of(Matrix::transposed(a.data(), c.columns), c.columns, c.rows), expected,
                1e-5 * expected);
  }
}

// Random weights have no value that stands out: the worst case, and every run's first.
TEST(Spectrum, the_norm_of_random_matrices_takes_few_iterations) {
  RandomStream draw({11, 0, 0});
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{200, 150}, {150, 200}, {300, 64}}) {
    Floats a(at(rows * columns));
    for (float& x : a) x = static_cast<float>(0.02 * draw.normal());
    const Matrix matrix = Matrix::rows_of(a.data(), columns);
    const double expected = singular_values(matrix, rows, columns)[0];
    SpectralNorm norm;
    const double found = norm.of(matrix, rows, columns);
    EXPECT_LE(found, expected * (1 + 1e-12));
    EXPECT_NEAR(found, expected, 1e-4 * expected) << rows << " x " << columns;
    EXPECT_LT(norm.iterations(), SpectralNorm::kMostIterations) << rows << " x " << columns;
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

// Odd sizes, strides, one row; the same bits on every CPU target.
TEST(DoubleKernels, do_what_plain_loops_do) {
  std::vector<const DoubleKernels*> targets = {&baseline::kDoubleKernels};
#if defined(__x86_64__)
  if (cpu_target() >= CpuTarget::avx2) targets.push_back(&avx2::kDoubleKernels);
  if (cpu_target() >= CpuTarget::avx512) targets.push_back(&avx512::kDoubleKernels);
#endif
  RandomStream draw({12, 0, 0});
  const auto random = [&](int64_t count) {
    std::vector<double> values(at(count));
    for (double& x : values) x = draw.normal();
    return values;
  };
  for (const int64_t columns : {1, 2, 7, 15, 16, 17, 33, 64, 70})
    for (const int64_t rows : {1, 3, 4, 9})
      for (const int64_t depth : {0, 1, 5, 40}) {
        const std::vector<double> a = random(rows * depth), b = random(depth * (columns + 3)),
                                  v = random(columns), w = random(columns);
        const std::vector<double> c = random(rows * (columns + 2));
        Floats floats(at(rows * (columns + 1)));
        for (float& x : floats) x = static_cast<float>(draw.normal());
        std::vector<std::vector<double>> all;  // by target
        for (const DoubleKernels* kernels : targets) {
          std::vector<double> product = c, turned_product = c, x = v, y = w, next = w, sum = v;
          kernels->multiply(
              {rows, columns, depth, a.data(), depth, 1, b.data(), columns + 3, product.data(), columns + 2});
          kernels->multiply({rows, columns, depth, a.data(), 1, rows, b.data(), columns + 3,
                             turned_product.data(), columns + 2});
          kernels->rotate(x.data(), y.data(), columns, 0.8, 0.6);
          kernels->add_scaled(sum.data(), -0.7, w.data(), columns);
          const double dot = kernels->dot(v.data(), w.data(), columns),
                       squares = kernels->power_step(floats.data(), rows, columns, columns + 1, v.data(),
                                                     next.data());
          // Plain loops.
          double plain_dot = 0, plain_squares = 0;
          std::vector<double> plain_next = w;
          for (int64_t j = 0; j < columns; ++j) {
            plain_dot += v[at(j)] * w[at(j)];
            EXPECT_EQ(x[at(j)], 0.8 * v[at(j)] - 0.6 * w[at(j)]);
            EXPECT_EQ(y[at(j)], 0.6 * v[at(j)] + 0.8 * w[at(j)]);
            EXPECT_EQ(sum[at(j)], v[at(j)] + -0.7 * w[at(j)]);
          }
          for (int64_t i = 0; i < rows; ++i) {
            double image = 0;
            for (int64_t j = 0; j < columns + 2; ++j) {
              double plain = c[at(i * (columns + 2) + j)], turned = plain;
              for (int64_t k = 0; k < depth && j < columns; ++k) {
                plain += a[at(i * depth + k)] * b[at(k * (columns + 3) + j)];
                turned += a[at(k * rows + i)] * b[at(k * (columns + 3) + j)];
              }
              EXPECT_EQ(product[at(i * (columns + 2) + j)], plain);
              EXPECT_EQ(turned_product[at(i * (columns + 2) + j)], turned);
            }
            const float* const row = floats.data() + i * (columns + 1);
            for (int64_t j = 0; j < columns; ++j) image += row[j] * v[at(j)];
            for (int64_t j = 0; j < columns; ++j) plain_next[at(j)] += image * row[j];
            plain_squares += image * image;
          }
          EXPECT_NEAR(dot, plain_dot, 1e-13);
          EXPECT_NEAR(squares, plain_squares, 1e-12 * plain_squares + 1e-12);
          for (int64_t j = 0; j < columns; ++j) EXPECT_NEAR(next[at(j)], plain_next[at(j)], 1e-11);
          next.push_back(dot);
          next.push_back(squares);
          all.push_back(next);
          EXPECT_EQ(all.back(), all.front());
        }
      }
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
