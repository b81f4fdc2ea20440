// Hopper's forward pass, as its host code calls it. Internal to src/attention.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "attention/cuda/hopper_forward_tiles.cuh"

namespace evenkeel::hopper::forward {

// All launches of a call, for each group its own: the heads of its list, which all have its rules. The workspace has words for each
// group (LaunchWords), which one memset clears: at most one group a head, and it has hundreds of bytes a head. `forms`: with all that ScoreForms has besides a causal or full
// mask. Compiled once for each type of tensors.
template <class Pairs>
void launch_forward(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                    const std::vector<ForwardArguments>& groups, bool forms, void* workspace,
                    cudaStream_t stream);
// Of large heads, without forms and with them.
template <class Pairs>
void launch_large_forward(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                          const std::vector<ForwardArguments>& groups, void* workspace, cudaStream_t stream);
template <class Pairs>
void launch_large_forward_forms(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                                const std::vector<ForwardArguments>& groups, void* workspace,
                                cudaStream_t stream);
// With facts of the scores, where there are no forms; the bits of everything else are the same.
void launch_forward_facts(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                          const std::vector<ForwardArguments>& groups, void* workspace, cudaStream_t stream);

}  // namespace evenkeel::hopper::forward
