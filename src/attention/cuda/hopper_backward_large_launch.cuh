// The launch of Hopper's backward kernel for large heads. Included by the files that compile it for a type of tensors each.
#pragma once

#include <algorithm>

#include "attention/cuda/ampere_row_facts.h"
#include "attention/cuda/hopper_backward.cuh"
#include "attention/cuda/hopper_backward_large.cuh"
#include "gpu/cuda/launch.h"

namespace evenkeel::hopper::backward {

template <class Block>
__global__ void __launch_bounds__(Block::T::kThreads, 1)
    large_backward_kernel(const __grid_constant__ large::Maps maps,
                          const __grid_constant__ ampere::Problem p) {
  Block::run(maps, p);
}

template <class Pairs>
void launch_large(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                  const ForwardPass& saved, const BackwardPass& out, void* workspace, cudaStream_t stream) {
  const ampere::Problem p =
      ampere::find_large_row_facts(problem, in, grad_output, saved, out, workspace, stream);
  large::with_block_of<Pairs>(problem, [&]<class Block>() {
    const auto kernel = large_backward_kernel<Block>;
    allow_shared_memory(kernel, Block::T::kSharedBytes);
    const int items = p.B * p.G * p.key_tiles, blocks = std::min(items, multiprocessors());
    kernel<<<blocks, Block::T::kThreads, Block::T::kSharedBytes, stream>>>(
        large::Maps(problem, in, grad_output), p);
    check_launch("starting the backward kernel of large heads");
  });
}

}  // namespace evenkeel::hopper::backward
