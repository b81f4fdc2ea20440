// The host side that the Hopper kernels share: tensor maps, and the layout of what forward saves.
// Internal to src/attention.
#pragma once

#include "attention/family_calls.h"
#include "gpu/cuda/tensor_map.h"

namespace evenkeel::hopper {

// Tensor maps of tensors of a problem, packed or not: with the rows and heads of queries (T, H) or of keys (N, G), and the
// features of either (D) or of values and outputs (Dv).
CUtensorMap query_map(const AttentionProblem& problem, const DeviceTensor& tensor, int box_rows);
CUtensorMap output_map(const AttentionProblem& problem, const DeviceTensor& tensor, int box_rows);
CUtensorMap key_map(const AttentionProblem& problem, const DeviceTensor& tensor, int box_rows);
CUtensorMap value_map(const AttentionProblem& problem, const DeviceTensor& tensor, int box_rows);
int multiprocessors();

// What forward leaves for backward in `saved`, one behind the other. Null where no head needs it; of a head that does not,
// nothing is written there and nothing read.
struct Saved {
  int8_t* residue = nullptr;  // (B, H, T, Dv): wide outputs
  float *row_max = nullptr,  // (B, H, T), where l sums rounded probabilities: M, a whole number (m = M log 2)
      *row_sum = nullptr;    // (B, H, T): that sum
  size_t bytes = 0;
};
Saved saved_layout(const AttentionProblem& problem, void* saved);

}  // namespace evenkeel::hopper
