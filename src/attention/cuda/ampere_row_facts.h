// The Ampere class's kernels before those of dQ, dK and dV, for Hopper's kernel of large heads, which takes the same arguments.
// Internal to src/attention.
#pragma once

#include "attention/cuda/ampere_problem.cuh"
#include "attention/family_calls.h"

namespace evenkeel::ampere {

// `workspace`: as much as the class itself asks for.
Problem find_large_row_facts(const AttentionProblem& problem, const PassInputs& in,
                             const DeviceTensor& grad_output, const ForwardPass& saved,
                             const BackwardPass& out, void* workspace, void* stream);

}  // namespace evenkeel::ampere
