// The host side that the Hopper kernels share: tensor maps, and the layout of what forward saves.
// Internal to src/attention.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/family_calls.h"
#include "gpu/cuda/tensor_map.h"

namespace evenkeel::hopper {

// Tensor maps of q-like (rows T, heads H) and k-like (rows N, heads G) tensors of a problem, packed or not.
CUtensorMap query_map(const AttentionProblem& problem, const DeviceTensor& tensor, int box_rows);
CUtensorMap key_map(const AttentionProblem& problem, const DeviceTensor& tensor, int box_rows);
int multiprocessors();

// What forward leaves for backward in `saved`, one behind the other. Null where no head needs it; of a head that does not,
// nothing is written there and nothing read.
struct Saved {
  int8_t* residue = nullptr;  // (B, H, T, D): wide outputs
  float *row_max = nullptr,  // (B, H, T), where l sums rounded probabilities: M, a whole number (m = M log 2)
      *row_sum = nullptr;    // (B, H, T): that sum
  size_t bytes = 0;
};
Saved saved_layout(const AttentionProblem& problem, void* saved);

}  // namespace evenkeel::hopper
