// The Ampere class's kernels before those of dQ, dK and dV, for Hopper's kernels of large heads, which take the same arguments.
// Internal to src/attention.
#pragma once

#include "attention/cuda/ampere_problem.cuh"
#include "attention/family_calls.h"

namespace evenkeel::ampere {

// What the pass asks for: the class's own without room for parts of dQ.
PassSizes large_facts_sizes(const AttentionProblem& problem);
Problem find_large_row_facts(const AttentionProblem& problem, const PassInputs& in,
                             const DeviceTensor& grad_output, const ForwardPass& saved,
                             const BackwardPass& out, void* workspace, void* stream);

}  // namespace evenkeel::ampere
