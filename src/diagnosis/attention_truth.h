// The definition of attention (attention_reference.cpp) as matrix products in FP64, with everything that the judge asks
// about. That includes value heads of their own size, sinks, packed sequences and the gradient of the log-sum-exp. With
// it come the scales of the error bounds (conform_bounds.h), which need the same probabilities. Tested against the definition.
#pragma once

#include <limits>
#include <span>

#include "attention/attention.h"
#include "diagnosis/conform_bounds.h"

namespace evenkeel {

inline constexpr double kNoScore =
    -std::numeric_limits<double>::infinity();  // of a key that a row does not see

// What the problem does not say.
struct TruthOptions {
  // (H), or empty: a score of each head that takes part in the softmax and has no value.
  // O = sum_j P_j v_j with P_j = exp(S_j) / (exp(sink) + sum exp(S)).
  std::span<const float> sinks;
  View<const float> grad_lse;  // (B, H, T, 1), or none: the loss depends on L too; dS gains a P dL
  // The format of dS: `forced` is what rounding dS to it must leave in a row's sum.
  Rounding dscores;
};

struct AttentionTruth {
  // (B, H, T, Dv or D), (B, G, N, D or Dv), (B, H, T, 1); of packed sequences (1, ., rows of all, .). Rows that see neither
  // a key nor a sink, and rows beyond a sequence's length: O and gradients 0, L = -inf.
  Tensor<double> o, lse, dq, dk, dv, delta;
  Tensor<double> row_sum;    // (B, H, T, 1): sum_j dS / a: 0 unless there are sinks, a soft cap or grad_lse
  Tensor<double> forced;     // (B, H, T, 1): sqrt(sum_j ulp(dS)^2 / 12) / a
  Tensor<double> grad_sink;  // (1, H, 1, 1): 0 without sinks
  double largest_ds = 0;     // |dS| as the second product reads it, without the factor a
  OutputScales scales;
};

// Takes what attention_reference takes, ignores plans and keel. v may have another last size than q and k.
AttentionTruth attention_truth(const AttentionProblem& problem, const AttentionInputs& in,
                               View<const float> grad_output, const TruthOptions& options = {});

}  // namespace evenkeel
