// How much of a head's keys they all share: |mean key|^2 over the mean |key|^2, from 0 to 1. A part that all keys share
// moves the scores of a row alike, which softmax cannot see; drift feeds on it (docs/study.md).
#pragma once

#include <cstdint>
#include <vector>

namespace evenkeel {

// keys: (rows, D), rows `stride` apart, of one sequence. Keys that are all zero share nothing. O(rows D) in FP64.
template <class T>
double key_share(const T* keys, int64_t rows, int64_t D, int64_t stride) {
  std::vector<double> sum(static_cast<size_t>(D));
  double squares = 0, of_sum = 0;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t d = 0; d < D; ++d) {
      const double x = static_cast<double>(keys[row * stride + d]);
      sum[static_cast<size_t>(d)] += x;
      squares += x * x;
    }
  for (const double x : sum) of_sum += x * x;
  return squares == 0 ? 0 : of_sum / (static_cast<double>(rows) * squares);
}

}  // namespace evenkeel
