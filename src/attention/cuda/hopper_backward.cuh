// Hopper's backward pass, as its host code calls it. Internal to src/attention.
#pragma once

#include "attention/cuda/hopper_backward_problem.cuh"

namespace evenkeel::hopper::backward {

// kv heads that one launch computes.
struct KeyGroup {
  Consistent consistent;  // their query heads
  HeadList list;
};

// The rows' facts, and dQ, dK, dV of all groups. Compiled once for each type of tensors.
template <class Pairs>
void launch_backward(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                     Backward p, const std::vector<KeyGroup>& groups, cudaStream_t stream);

// The whole pass, of large heads, without forms and with them. `workspace`: as ampere::large_facts_sizes counts it.
template <class Pairs>
void launch_large_backward(const AttentionProblem& problem, const PassInputs& in,
                           const DeviceTensor& grad_output, const ForwardPass& saved, const BackwardPass& out,
                           void* workspace, cudaStream_t stream);
template <class Pairs>
void launch_large_backward_forms(const AttentionProblem& problem, const PassInputs& in,
                                 const DeviceTensor& grad_output, const ForwardPass& saved,
                                 const BackwardPass& out, void* workspace, cudaStream_t stream);

}  // namespace evenkeel::hopper::backward

namespace evenkeel::hopper {

// zero_sum's delta: sum P dP / sum P by a pass of its own, for the heads of `group`. (B, H, T). log_sum: log2 of sum P, or null.
void exact_delta(const AttentionProblem& problem, const HeadGroup& group, const PassInputs& in,
                 const DeviceTensor& grad_output, const float* lse, float* delta, float* log_sum,
                 cudaStream_t stream);

}  // namespace evenkeel::hopper
