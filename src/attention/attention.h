// Attention, forward and backward. attention_reference.cpp is the definition (FP64, no tiles, no rounding);
// attention_cpu.cpp runs any precision plan, tiled, with every rounding at its named site.
// Tensors are FP32 with any strides; the definition takes FP64, too. Sizes: attention_problem.h. A problem's Dv is that of v.
#pragma once

#include <cstdint>

#include "attention/attention_problem.h"
#include "base/tensor.h"
#include "numerics/random.h"

namespace evenkeel {

template <class Real>
struct AttentionInputsOf {
  View<const Real> q;  // (B, H, T, D)
  View<const Real> k;  // (B, G, N, D)
  View<const Real> v;  // (B, G, N, Dv)
};
using AttentionInputs = AttentionInputsOf<float>;

// What a probe sees: the values that met at a site, before and after the rounding, as a block of one head.
// Rows are query rows (keys where is_of_keys), columns are keys or features; the value of
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

constexpr bool is_of_keys(Site site) {
  const Site first = first_reading(site);
  return first == Site::k || first == Site::v || first == Site::dk || first == Site::dv;
}

// Called at every site, from several threads at once, but never for one (batch, head) row (or key) by two.
// Sites that both passes touch (q, k, v, scores, shifted, probs) are shown in the forward pass only.
class SiteObserver {
 public:
  virtual ~SiteObserver() = default;
  virtual void observe(const SiteBlock& block) = 0;
};

// What forward leaves for backward, and per-row facts on request.
struct AttentionForward {
  View<float> o;    // (B, H, T, Dv)
  View<float> lse;  // (B, H, T, 1): L, -inf for a row that sees no key
  // Needed by backward: the O that delta uses, and m and l apart.
  View<float> o_for_delta;  // (B, H, T, Dv)
  View<float> row_max;      // (B, H, T, 1): m, the shift (by powers of two: its whole number of log 2)
  View<float> row_sum;      // (B, H, T, 1): l, the sum of the probabilities, exact or rounded by the plan
  View<int32_t> ties;  // (B, H, T, 1), optional: visible scores within tie_tolerance of the row's maximum
};

struct AttentionBackward {
  View<float> dq;     // (B, H, T, D)
  View<float> dk;     // (B, G, N, D)
  View<float> dv;     // (B, G, N, Dv)
  View<float> delta;  // (B, H, T, 1), optional: delta as used, keel included
  // Optional, (B, H, T, 1): rho = sum_j dS_ij / a. dS is what dQ and dK receive: after the site dscores, before
  // softcap's derivative. The sum is in FP64, without keel's own part 2 z L sum P. And the root of the variance that
  // rounding dS at its site must cause: sqrt(sum ulp(dS_ij)^2 / 12) / a.
  View<double> residual, residual_floor;
  // Optional: the gradient of L, (B, H, T, 1), which is read; that of the sinks, (1, H, 1, 1), which needs delta.
  View<const float> grad_lse = {};
  View<float> dsinks = {};
};

// REQUIRES: shapes as above; anything else throws std::invalid_argument. Thread count never changes a bit.
void attention_forward(const AttentionProblem& problem, const AttentionInputs& in,
                       const AttentionForward& out, SiteObserver* observer = nullptr);
// `saved` is what attention_forward wrote, with the same problem and inputs.
void attention_backward(const AttentionProblem& problem, const AttentionInputs& in,
                        View<const float> grad_output, const AttentionForward& saved,
                        const AttentionBackward& out, SiteObserver* observer = nullptr);

// The definition: FP64, whole rows, no rounding. Ignores plans but for keel.
struct AttentionReference {
  Tensor<double> o, lse;  // (B, H, T, Dv), (B, H, T, 1)
  Tensor<double> dq, dk, dv,
      delta;              // empty where no grad_output was given; delta without keel's part and that of dL
  Tensor<double> dsinks;  // (1, H, 1, 1)
};
AttentionReference attention_reference(const AttentionProblem& problem, const AttentionInputs& in,
                                       View<const float> grad_output = {}, View<const float> grad_lse = {});
AttentionReference attention_reference(const AttentionProblem& problem, const AttentionInputsOf<double>& in,
                                       View<const double> grad_output = {}, View<const double> grad_lse = {});

// Owns everything that a forward and backward write.
struct AttentionBuffers {
  AttentionBuffers(const AttentionInputs& in, bool with_facts);
  AttentionForward forward();
  AttentionBackward backward();

  Tensor<float> o, lse, o_for_delta, row_max, row_sum, dq, dk, dv, delta;
  Tensor<int32_t> ties;
  Tensor<double> residual, residual_floor;
};

// The problem of these tensors, complete: the sizes are theirs. Lengths are checked, too. Throws std::invalid_argument
// with what was expected and what was found.
template <class Real>
AttentionProblem problem_of(const AttentionProblem& asked, const AttentionInputsOf<Real>& in);

}  // namespace evenkeel
