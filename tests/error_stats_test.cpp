// ErrorStats against the formulas written out, in any split; and why its sample is the row.
#include "numerics/error_stats.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <vector>

#include "numerics/random.h"

namespace evenkeel {
namespace {

using Rows = std::vector<std::vector<double>>;

// Uniform in (-1, 1).
double uniform(uint32_t stream, uint64_t element) {
  return 2.0 * random_unit({1234, 0, stream}, element) - 1;
}

// 500 rows of 1 to 40 errors each, with a small common mean.
Rows some_rows() {
  Rows rows(500);
  uint64_t element = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].resize(1 + i * 7 % 40);
    for (double& error : rows[i]) error = 0.01 + uniform(1, element++);
  }
  return rows;
}

RowError row_error(const std::vector<double>& row, double ulp = 0) {
  RowError r;
  for (double error : row) r.add(error, ulp);
  return r;
}

ErrorStats stats_of(const Rows& rows, size_t begin, size_t end) {
  ErrorStats stats;
  for (size_t i = begin; i < end; ++i) stats.add(row_error(rows[i], 0.25));
  return stats;
}

void expect_close(double a, double b) { EXPECT_NEAR(a, b, 1e-12 * std::max(std::fabs(a), std::fabs(b))); }

void expect_same(const ErrorStats& a, const ErrorStats& b) {
  EXPECT_EQ(a.rows(), b.rows());
  EXPECT_EQ(a.values(), b.values());
  EXPECT_EQ(a.nonfinite_rows(), b.nonfinite_rows());
  EXPECT_EQ(a.positive_rows(), b.positive_rows());
  EXPECT_EQ(a.negative_rows(), b.negative_rows());
  EXPECT_EQ(a.max_abs(), b.max_abs());
  EXPECT_EQ(a.max_ulp(), b.max_ulp());
  expect_close(a.mean(), b.mean());
  expect_close(a.standard_error(), b.standard_error());
  expect_close(a.z(), b.z());
  expect_close(a.sign_z(), b.sign_z());
  expect_close(a.rms(), b.rms());
}

TEST(ErrorStats, direct_formulas) {
  const Rows rows = some_rows();
  std::vector<double> means;
  double squares = 0, max_abs = 0;
  int64_t values = 0, positive = 0, negative = 0;
  for (const auto& row : rows) {
    means.push_back(std::accumulate(row.begin(), row.end(), 0.0) / static_cast<double>(row.size()));
    positive += means.back() > 0;
    negative += means.back() < 0;
    for (double error : row) {
      squares += error * error;
      max_abs = std::max(max_abs, std::fabs(error));
      ++values;
    }
  }
  const auto n = static_cast<double>(means.size());
  const double mean = std::accumulate(means.begin(), means.end(), 0.0) / n;
  double deviations = 0;
  for (double m : means) deviations += (m - mean) * (m - mean);
  const double standard_error = std::sqrt(deviations / (n - 1)) / std::sqrt(n);

  const ErrorStats stats = stats_of(rows, 0, rows.size());
  EXPECT_EQ(stats.rows(), 500);
  EXPECT_EQ(stats.values(), values);
  EXPECT_EQ(stats.positive_rows(), positive);
  EXPECT_EQ(stats.negative_rows(), negative);
  EXPECT_EQ(stats.max_abs(), max_abs);
  EXPECT_EQ(stats.max_ulp(), max_abs / 0.25);
  expect_close(stats.mean(), mean);
  expect_close(stats.standard_error(), standard_error);
  expect_close(stats.z(), mean / standard_error);
  // Binomial with p = 1/2: mean n/2, standard deviation sqrt(n)/2.
  expect_close(stats.sign_z(), (static_cast<double>(positive) - n / 2) / (std::sqrt(n) / 2));
  expect_close(stats.rms(), std::sqrt(squares / static_cast<double>(values)));
}

TEST(ErrorStats, small_cases_by_hand) {
  ErrorStats stats;
  EXPECT_EQ(stats.z(), 0);
  EXPECT_EQ(stats.rms(), 0);
  EXPECT_EQ(stats.sign_z(), 0);
  stats.add(RowError{});  // an empty row is no row
  EXPECT_EQ(stats.rows(), 0);
  stats.add(3.0, 2.0);
  EXPECT_EQ(stats.rows(), 1);
  EXPECT_EQ(stats.mean(), 3.0);
  EXPECT_EQ(stats.standard_error(), 0);  // one row says nothing of its spread
  EXPECT_EQ(stats.z(), 0);
  EXPECT_EQ(stats.max_ulp(), 1.5);
  stats.add(-1.0, 0.5);
  EXPECT_EQ(stats.mean(), 1.0);
  EXPECT_EQ(stats.standard_error(), 2.0);  // deviations +-2: variance 8, over 2 rows 4
  EXPECT_EQ(stats.z(), 0.5);
  EXPECT_EQ(stats.max_ulp(), 2.0);
  EXPECT_EQ(stats.max_abs(), 3.0);
  EXPECT_EQ(stats.sign_z(), 0);

  ErrorStats constant;  // always the same error: no doubt about the bias
  for (int i = 0; i < 3; ++i) constant.add(-0.5);
  EXPECT_EQ(constant.z(), -INFINITY);
  EXPECT_NEAR(constant.sign_z(), -std::sqrt(3.0), 1e-15);

  ErrorStats exact;
  for (int i = 0; i < 3; ++i) exact.add(0.0);
  EXPECT_EQ(exact.z(), 0);
  EXPECT_EQ(exact.sign_z(), 0);
  EXPECT_EQ(exact.positive_rows() + exact.negative_rows(), 0);
}

TEST(ErrorStats, merge_of_any_split_is_the_whole) {
  const Rows rows = some_rows();
  const ErrorStats whole = stats_of(rows, 0, rows.size());
  for (size_t cut = 0; cut <= rows.size(); cut += 50) {
    ErrorStats left = stats_of(rows, 0, cut);
    left.merge(stats_of(rows, cut, rows.size()));
    expect_same(left, whole);
    ErrorStats right = stats_of(rows, cut, rows.size());
    right.merge(stats_of(rows, 0, cut));
    expect_same(right, whole);
  }
  ErrorStats many;  // one by one, and in a tree
  for (size_t i = 0; i < rows.size(); ++i) many.merge(stats_of(rows, i, i + 1));
  expect_same(many, whole);
  std::vector<ErrorStats> leaves;
  for (size_t i = 0; i < rows.size(); i += 7)
    leaves.push_back(stats_of(rows, i, std::min(i + 7, rows.size())));
  for (; leaves.size() > 1; leaves.pop_back()) leaves[(leaves.size() - 1) / 2].merge(leaves.back());
  expect_same(leaves[0], whole);
}

// A mean far from zero with a tiny spread: sums of squares would cancel, Welford does not.
TEST(ErrorStats, keeps_the_spread_beside_a_large_mean) {
  ErrorStats stats, halves[2];
  for (int i = 0; i < 1000; ++i) {
    const double error = 1e6 + (i % 2 ? 1e-3 : -1e-3);
    stats.add(error);
    halves[i / 500].add(error);
  }
  const double expected = 1e-3 * std::sqrt(1000.0 / 999) / std::sqrt(1000.0);
  EXPECT_NEAR(stats.standard_error() / expected, 1, 1e-6);
  halves[0].merge(halves[1]);
  EXPECT_NEAR(halves[0].standard_error() / expected, 1, 1e-6);
}

TEST(ErrorStats, rows_that_are_not_finite_are_counted_and_kept_out) {
  constexpr double kInf = std::numeric_limits<double>::infinity(),
                   kNan = std::numeric_limits<double>::quiet_NaN();
  const Rows rows = some_rows();
  const ErrorStats clean = stats_of(rows, 0, rows.size());
  ErrorStats stats, other;
  stats.add(row_error({1.0, kNan}));
  for (const auto& row : rows) stats.add(row_error(row, 0.25));
  stats.add(row_error({kInf, 2.0}));
  other.add(row_error({kInf, -kInf, 5.0}));
  stats.merge(other);
  EXPECT_EQ(stats.nonfinite_rows(), 3);
  EXPECT_EQ(stats.rows(), clean.rows());
  EXPECT_EQ(stats.values(), clean.values());
  EXPECT_EQ(stats.mean(), clean.mean());
  EXPECT_EQ(stats.rms(), clean.rms());
  EXPECT_EQ(stats.max_abs(), clean.max_abs());
  EXPECT_EQ(stats.z(), clean.z());
}

// The errors of a row share a part (they share q, m and l). Without any bias, z must be of size 1. It is, by
// rows; by single values it is sqrt(64) times too large, and would cry wolf nearly every time.
TEST(ErrorStats, correlated_errors_need_rows) {
  constexpr int kTrials = 200, kRows = 100, kValues = 64;
  double square_by_rows = 0, square_by_values = 0;
  int alarms_by_rows = 0, alarms_by_values = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    ErrorStats by_rows, by_values;
    for (int row = 0; row < kRows; ++row) {
      const uint64_t id = static_cast<uint64_t>(trial) * kRows + row;
      const double shared = uniform(2, id);
      RowError errors;
      for (int i = 0; i < kValues; ++i) {
        const double error = shared + 0.1 * uniform(3, id * kValues + i);
        errors.add(error);
        by_values.add(error);
      }
      by_rows.add(errors);
    }
    EXPECT_EQ(by_rows.values(), by_values.values());
    expect_close(by_rows.rms(), by_values.rms());
    square_by_rows += by_rows.z() * by_rows.z() / kTrials;
    square_by_values += by_values.z() * by_values.z() / kTrials;
    alarms_by_rows += std::fabs(by_rows.z()) > 4;
    alarms_by_values += std::fabs(by_values.z()) > 4;
  }
  EXPECT_NEAR(std::sqrt(square_by_rows), 1, 0.2);  // the spread of a root mean square of 200 is 5 per cent
  EXPECT_EQ(alarms_by_rows, 0);
  EXPECT_GT(std::sqrt(square_by_values), 6);
  EXPECT_GT(alarms_by_values, kTrials / 3);
}

// A true bias is found: 0.2 beside a shared part of standard deviation 0.58 is z = 15, and six rows in ten
// positive.
TEST(ErrorStats, finds_a_bias) {
  ErrorStats stats;
  for (uint64_t row = 0; row < 2000; ++row) {
    RowError errors;
    const double shared = uniform(4, row);
    for (int i = 0; i < 16; ++i) errors.add(0.2 + shared + uniform(5, row * 16 + i));
    stats.add(errors);
  }
  EXPECT_GT(stats.z(), 4);
  EXPECT_GT(stats.sign_z(), 4);
}

}  // namespace
}  // namespace evenkeel
