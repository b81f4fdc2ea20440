// Attention, forward and backward. attention_reference.cpp is the definition (FP64, no tiles, no rounding);
// attention_cpu.cpp runs any precision plan, tiled, with every rounding at its named site.
//
// One alphabet of sizes: B batch, H query heads, G key/value heads (H a multiple of G), T query rows, N keys,
// D head size. Tensors are FP32 with any strides; the definition takes FP64, too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/precision_plan.h"
#include "base/tensor.h"
#include "numerics/random.h"

namespace evenkeel {

template <class Real>
struct AttentionInputsOf {
  View<const Real> q;     // (B, H, T, D)
  View<const Real> k, v;  // (B, G, N, D)
};
using AttentionInputs = AttentionInputsOf<float>;

// The shape of the problem: what is attended to.
struct AttentionMask {
  bool causal = false;
  // Sliding window: row i sees keys within [i - left, i + right] of its own position; < 0 is unbounded.
  int64_t window_left = -1, window_right = -1;
  // Rows and keys of sequence b that exist, (B) each; empty: all T, all N. What lies beyond is not read, and
  // outputs there are zero (L and m: -inf). The last row is aligned with the last key (as FlashAttention does), so with
  // causal row i sees keys up to i + keys - rows.
  std::span<const int64_t> query_lengths, key_lengths;
  // Nonzero: key visible. (B, H, T, N), broadcast by strides of 0.
  View<const uint8_t> visible;
};

struct AttentionConfig {
  // --- changes the bits
  std::vector<PrecisionPlan> plans;  // one for all heads, or one per query head
  float scale = 0;                   // a; 0 means 1 / sqrt(D)
  float softcap = 0;                 // c tanh(S / c); 0 is off
  AttentionMask mask;
  int64_t tile_rows = 32;  // queries a tile, rounded up to 32; never changes a result, only speed
  int64_t tile_keys = 64;  // keys a tile; 0: all keys in one. Decides where pv and row_sum are rounded
  uint32_t step = 0;       // of the random numbers: a training step
  uint32_t layer = 0;      // of the random numbers
  int64_t first_sequence =
      0;  // of the random numbers: sequence b of the call draws as number first_sequence + b
  // --- changes only what happens on bad input
  bool allow_nonfinite = false;  // false: NaN or Inf in an input is an error that says where
};

// What a probe sees: the values that met at a site, before and after the rounding, as a block of one head.
// Rows are query rows (keys for the sites k, v, dk, dv), columns are keys or features; the value of
// (row + i, column + j) is exact[i * row_stride + j * column_stride]. Masked scores and probabilities are
// in the block, as -inf and 0.
struct SiteBlock {
  Site site;
  int64_t batch, head;
  int64_t row, column;
  int64_t rows, columns;
  int64_t row_stride, column_stride;
  const float *exact, *rounded;
};

// Called at every site, from several threads at once, but never for one (batch, head) row (or key) by two.
// Sites that both passes touch (q, k, v, scores, shifted, probs) are shown in the forward pass only.
class SiteObserver {
 public:
  virtual ~SiteObserver() = default;
  virtual void observe(const SiteBlock& block) = 0;
};

// What forward leaves for backward, and per-row facts on request.
struct AttentionForward {
  View<float> o;    // (B, H, T, D)
  View<float> lse;  // (B, H, T, 1): L, -inf for a row that sees no key
  // Needed by backward: the O that delta uses, and m and l apart.
  View<float> o_for_delta;  // (B, H, T, D)
  View<float> row_max;      // (B, H, T, 1): m, the shift (for consistent: its whole number of log 2)
  View<float> row_sum;      // (B, H, T, 1): l; for consistent: the sum of the rounded probabilities
  View<int32_t> ties;  // (B, H, T, 1), optional: visible scores within tie_tolerance of the row's maximum
};

struct AttentionBackward {
  View<float> dq;      // (B, H, T, D)
  View<float> dk, dv;  // (B, G, N, D)
  View<float> delta;   // (B, H, T, 1), optional: delta as used, keel included
  // Optional, (B, H, T, 1): rho = sum_j dS_ij / a, with dS as dQ and dK receive it (after the site dscores,
  // before softcap's derivative), summed in FP64, keel's own part 2 z L sum P taken out; and the root of the
  // variance that rounding dS at its site must cause: sqrt(sum ulp(dS_ij)^2 / 12) / a.
  View<double> residual, residual_floor;
};

// REQUIRES: shapes as above; anything else throws std::invalid_argument. Thread count never changes a bit.
void attention_forward(const AttentionConfig& config, const AttentionInputs& in, const AttentionForward& out,
                       SiteObserver* observer = nullptr);
// `saved` is what attention_forward wrote, with the same config and inputs.
void attention_backward(const AttentionConfig& config, const AttentionInputs& in,
                        View<const float> grad_output, const AttentionForward& saved,
                        const AttentionBackward& out, SiteObserver* observer = nullptr);

// The definition: FP64, whole rows, no rounding. Ignores plans but for keel.
struct AttentionReference {
  Tensor<double> o, lse;             // (B, H, T, D), (B, H, T, 1)
  Tensor<double> dq, dk, dv, delta;  // empty where no grad_output was given; delta without keel's part
};
AttentionReference attention_reference(const AttentionConfig& config, const AttentionInputs& in,
                                       View<const float> grad_output = {});
AttentionReference attention_reference(const AttentionConfig& config, const AttentionInputsOf<double>& in,
                                       View<const double> grad_output = {});

// Owns everything that a forward and backward write.
struct AttentionBuffers {
  AttentionBuffers(const AttentionInputs& in, bool with_facts);
  AttentionForward forward();
  AttentionBackward backward();

  Tensor<float> o, lse, o_for_delta, row_max, row_sum, dq, dk, dv, delta;
  Tensor<int32_t> ties;
  Tensor<double> residual, residual_floor;
};

// Shapes checked, defaults filled in; shared by the implementations.
struct AttentionShape {
  int64_t B, H, G, T, N, D;
  float scale;

  // Throws std::invalid_argument with what was expected and what was found.
  template <class Real>
  AttentionShape(const AttentionConfig& config, const AttentionInputsOf<Real>& in);
  int64_t rows(const AttentionMask& mask, int64_t b) const;  // of sequence b
  int64_t keys(const AttentionMask& mask, int64_t b) const;
  // Keys [first, last) that row i of sequence b may see by causal and window alone.
  std::pair<int64_t, int64_t> key_range(const AttentionMask& mask, int64_t b, int64_t i) const;
};

}  // namespace evenkeel
