// One attention problem: everything that is asked, besides the numbers themselves. CPU, GPU and C interface take this one
// description, and one check() refuses what the definition does not allow. Plain C++, in every build.
//
// One alphabet of sizes: B batch, H query heads, G key/value heads (H a multiple of G), T query rows, N keys,
// D head size, Dv that of v and o.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/precision_plan.h"
#if defined(__CUDACC__)
// A view of const has a conversion to itself, which nvcc remarks on.
#pragma nv_diag_suppress 554
#endif
#include "base/tensor.h"

namespace evenkeel {

enum class TensorType : uint8_t { bf16, fp32, fp64, fp16 };
inline constexpr std::array<std::string_view, 4> kTensorTypeNames = {"bf16", "fp32", "fp64", "fp16"};
constexpr std::string_view name(TensorType type) { return kTensorTypeNames[static_cast<size_t>(type)]; }
constexpr size_t element_bytes(TensorType type) {
  return type == TensorType::fp32 ? 4 : type == TensorType::fp64 ? 8 : 2;
}

// What is attended to. Lengths, offsets and `visible` lie in the memory of the device that runs the problem.
struct AttentionMask {
  bool causal = false;
  // Sliding window: row i sees keys within [i - left, i + right] of its own position; < 0 is unbounded.
  int64_t window_left = -1, window_right = -1;
  // Rows and keys of sequence b that exist, (B) each; empty: all T, all N. What lies beyond is not read; outputs there
  // are zero (L and m: -inf) in a padded tensor and do not exist in a packed one. The last row is aligned with the last
  // key (as FlashAttention does), so with causal row i sees keys up to i + keys - rows.
  std::span<const int32_t> query_lengths, key_lengths;
  // Packed sequences, (B) each, or empty: where sequence b's first row lies on the row axis of a tensor whose batch
  // stride is 0. Needs the lengths too, and the rows of all sequences together.
  std::span<const int32_t> query_offsets, key_offsets;
  int64_t query_rows = 0, key_rows = 0;
  // Nonzero: key visible. (B, H, T, N), broadcast by strides of 0.
  View<const uint8_t> visible;
};

struct AttentionProblem {
  // T and N: those of the longest sequence. The calls of attention.h take the sizes from their tensors, and do not look
  // at the type.
  int64_t B = 0, H = 0, G = 0, T = 0, N = 0, D = 0;
  int64_t Dv = 0;                      // features of v, o and their gradients; 0: D
  TensorType type = TensorType::fp32;  // of q, k, v, o and their gradients

  // --- changes the bits
  std::vector<PrecisionPlan> plans;  // one for all heads, or one per query head
  float scale = 0;                   // a; 0 means 1 / sqrt(D)
  float softcap = 0;                 // c tanh(S / c); 0 is off
  // Of each head, (H) or empty, in the memory of the device that runs the problem. Slopes (ALiBi): a score falls by slope
  // times |distance|. The row's position is where `mask` has it. Not with softcap. Sinks: one more score that every row
  // sees. It has no value, takes its share of the probability, and counts in L.
  std::span<const float> slopes, sinks;
  AttentionMask mask;
  int64_t tile_keys = 64;  // keys a tile; 0: all keys in one. Decides where pv and row_sum are rounded
  uint32_t step = 0;       // of the random numbers: a training step
  uint32_t layer = 0;      // of the random numbers
  int64_t first_sequence =
      0;  // of the random numbers: sequence b of the call draws as number first_sequence + b
  const uint32_t* device_step = nullptr;  // device memory, or null: instead of `step`, for replayed graphs

  // --- what is asked for besides o, lse and the gradients
  bool with_facts = false;     // ties, delta, residual, residual_floor or delta_error, in either pass
  int64_t fact_sequences = 0;  // facts of the first so many sequences; the rest is left as it is. 0: of all B

  // --- changes only the speed
  int64_t tile_rows = 32;  // queries a tile on the CPU, rounded up to 32
  // Promised for every tensor of both passes: see is_aligned. False: the fast kernels do not take the problem.
  bool aligned = true;
  // --- changes only what happens on bad input
  bool allow_nonfinite = false;  // false: on the CPU, NaN or Inf in an input is an error that says where

  const PrecisionPlan& plan(int64_t h) const { return plans[plans.size() == 1 ? 0 : static_cast<size_t>(h)]; }
  // Rows and keys of sequence b. REQUIRES, as for key_range: lengths in host memory.
  int64_t rows(int64_t b) const {
    return mask.query_lengths.empty() ? T : mask.query_lengths[static_cast<size_t>(b)];
  }
  int64_t keys(int64_t b) const {
    return mask.key_lengths.empty() ? N : mask.key_lengths[static_cast<size_t>(b)];
  }
  // The key that row i of sequence b stands at: its last row at its last key. Negative where rows outnumber keys.
  int64_t position(int64_t b, int64_t i) const { return i + keys(b) - rows(b); }
  // Keys [first, last) that row i of sequence b may see by causal and window alone.
  std::pair<int64_t, int64_t> key_range(int64_t b, int64_t i) const;
};

// Throws std::invalid_argument (what was expected, what was found) where the definition does not allow the problem.
// Reads no memory but the problem's own: the lengths' values are the CPU's to check.
void check(const AttentionProblem& problem);
// A soft-capped softmax sees a constant added to a row, so a plan that shifts keys cannot go with it.
bool takes_softcap(const PrecisionPlan& plan);

// The problem checked, Dv, scale and fact_sequences set, one plan where all heads have the same.
AttentionProblem complete(AttentionProblem problem);

}  // namespace evenkeel
