// Singular values: all of a small matrix, the largest of a large one, and how evenly they are spread. FP64 inside.
// Where a number is NaN or infinite the answers are NaN; nothing here loops for ever.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/matrix_product.h"

namespace evenkeel {

// All of them, largest first: one-sided Jacobi, the definition that the others are tested against. a: (rows, columns);
// there are min(rows, columns). Each is exact to a few units of 2^-52 times the largest. O(rows columns^2) a sweep, some
// 6 to 10 sweeps, with columns the shorter side.
std::vector<double> singular_values(const Matrix& a, int64_t rows, int64_t columns);

// Those of the product A B^T of A (m, D) and B (n, D), at most D of them, without forming the product. Both are first
// brought to triangles of D by D (Householder), whose product has the same singular values. O((m + n) D^2 + D^3).
std::vector<double> product_singular_values(const Matrix& a, int64_t m, const Matrix& b, int64_t n,
                                            int64_t D);

// The largest, by power iteration on A^T A that forgets no direction it has passed through (Lanczos, 1950). An iteration
// costs 4 rows columns operations. The last direction alone would take the square of their number. The vector is
// kept from one call to the next, which takes fewer where the matrix is the same weights some steps later.
class SpectralNorm {
 public:
  // Stops where an iteration raises the estimate by less than this, relatively. The estimate is never above the norm.
  static constexpr double kTolerance = 1e-6;
  static constexpr int kMostIterations = 64;

  // a: (rows, columns). Starts from the last call's vector where the sizes are the same, and a little of a random one.
  double of(const Matrix& a, int64_t rows, int64_t columns);
  int iterations() const { return iterations_; }  // of the last call

 private:
  std::vector<double> vector_;  // (columns), of length 1
  uint32_t calls_ = 0;
  int iterations_ = 0;
};

// -sum p log p with p = sigma / sum sigma, in nats. It is log n where n values are equal, and 0 where one is all there is
// (its exponential is the effective rank of Roy and Vetterli, 2007). It is 0 for no values and for a zero matrix, too.
double spectral_entropy(std::span<const double> values);

}  // namespace evenkeel
