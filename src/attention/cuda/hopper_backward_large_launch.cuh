// The launches of Hopper's backward kernels for large heads. Included by the files that compile them for a type of tensors each.
#pragma once

#include <algorithm>

#include "attention/cuda/ampere_row_facts.h"
#include "attention/cuda/hopper_backward.cuh"
#include "attention/cuda/hopper_backward_large.cuh"
#include "gpu/cuda/launch.h"

namespace evenkeel::hopper::backward {

template <class Block>
__global__ void __launch_bounds__(Block::T::kThreads, 1)
    large_backward_kernel(const __grid_constant__ large::Maps maps, const __grid_constant__ large::Pass p) {
  Block::run(maps, p);
}

template <class Pairs, bool kForms>
void launch_large(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                  const ForwardPass& saved, const BackwardPass& out, void* workspace, cudaStream_t stream) {
  const ampere::Problem facts =
      ampere::find_large_row_facts(problem, in, grad_output, saved, out, workspace, stream);
  large::for_both_kernels<Pairs, kForms>(
      problem, in, grad_output, facts, [&]<class Block>(const large::Maps& maps, const large::Pass& p) {
        const auto kernel = large_backward_kernel<Block>;
        allow_shared_memory(kernel, Block::T::kSharedBytes);
        const int blocks = std::min(Block::items(p), multiprocessors());
        kernel<<<blocks, Block::T::kThreads, Block::T::kSharedBytes, stream>>>(maps, p);
        check_launch("starting a backward kernel of large heads");
      });
}

}  // namespace evenkeel::hopper::backward
