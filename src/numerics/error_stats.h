// Statistics of rounding errors that keep the sign. Two verbs: add and merge.
//
// Errors inside one attention row are correlated (they share q, m, l). So the sample of the mean, of its
// standard error and of the sign test is the *row*. Add every error of a row to a RowError, then the row to
// the statistics. A lone value is a row of one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace evenkeel {

// The errors of one row: their sum, count and extremes.
struct RowError {
  double sum = 0;      // of signed errors
  double squares = 0;  // of errors, for the root mean square over values
  double max_abs = 0;
  double max_ulp = 0;  // largest |error| in units in the last place of the result
  int64_t count = 0;

  void add(double error, double ulp = 0) {
    sum += error;
    squares += error * error;
    max_abs = std::max(max_abs, std::fabs(error));
    if (ulp > 0) max_ulp = std::max(max_ulp, std::fabs(error) / ulp);
    ++count;
  }
};

class ErrorStats {
 public:
  void add(const RowError& row) {
    if (row.count == 0) return;
    if (!std::isfinite(
            row.sum)) {  // one Inf or NaN would drown every other number here: counted, and kept out
      ++nonfinite_rows_;
      return;
    }
    values_ += row.count;
    squares_ += row.squares;
    max_abs_ = std::max(max_abs_, row.max_abs);
    max_ulp_ = std::max(max_ulp_, row.max_ulp);
    const double mean = row.sum / static_cast<double>(row.count);
    positive_ += mean > 0;
    negative_ += mean < 0;
    // Welford: the running mean and the sum of squared deviations from it.
    ++rows_;
    const double delta = mean - mean_;
    mean_ += delta / static_cast<double>(rows_);
    deviations_ += delta * (mean - mean_);
  }
  void add(double error, double ulp = 0) {
    RowError row;
    row.add(error, ulp);
    add(row);
  }
  void merge(const ErrorStats& other) {
    values_ += other.values_;
    squares_ += other.squares_;
    max_abs_ = std::max(max_abs_, other.max_abs_);
    max_ulp_ = std::max(max_ulp_, other.max_ulp_);
    nonfinite_rows_ += other.nonfinite_rows_;
    positive_ += other.positive_;
    negative_ += other.negative_;
    if (other.rows_ == 0) return;
    const auto a = static_cast<double>(rows_), b = static_cast<double>(other.rows_);
    const double delta = other.mean_ - mean_;
    rows_ += other.rows_;
    mean_ += delta * b / (a + b);
    deviations_ += other.deviations_ + delta * delta * a * b / (a + b);
  }

  // Everything below is over the rows whose errors are finite; the others are counted.
  int64_t rows() const { return rows_; }
  int64_t values() const { return values_; }
  int64_t nonfinite_rows() const { return nonfinite_rows_; }
  double mean() const { return mean_; }  // of the rows' mean errors, signed
  double standard_error() const {
    if (rows_ < 2) return 0;
    const auto n = static_cast<double>(rows_);
    return std::sqrt(deviations_ / (n - 1) / n);
  }
  // Mean over its standard error. A mean without any spread is infinitely significant.
  double z() const {
    const double error = standard_error();
    if (error > 0) return mean_ / error;
    return mean_ == 0 || rows_ < 2 ? 0 : std::copysign(INFINITY, mean_);
  }
  int64_t positive_rows() const { return positive_; }
  int64_t negative_rows() const { return negative_; }
  // Sign test: how many standard deviations the count of positive rows is from one half. Deaf to outliers.
  double sign_z() const {
    const auto n = static_cast<double>(positive_ + negative_);
    return n == 0 ? 0 : static_cast<double>(positive_ - negative_) / std::sqrt(n);
  }
  double rms() const { return values_ == 0 ? 0 : std::sqrt(squares_ / static_cast<double>(values_)); }
  double max_abs() const { return max_abs_; }
  double max_ulp() const { return max_ulp_; }

 private:
  int64_t rows_ = 0, values_ = 0, nonfinite_rows_ = 0, positive_ = 0, negative_ = 0;
  double mean_ = 0, deviations_ = 0, squares_ = 0, max_abs_ = 0, max_ulp_ = 0;
};

}  // namespace evenkeel
