// The launch of Hopper's forward kernel. Included by the files that compile its instances side by side.
#pragma once

#include <algorithm>

#include "attention/cuda/hopper_forward.cuh"
#include "attention/cuda/hopper_forward_block.cuh"
#include "gpu/cuda/launch.h"

namespace evenkeel::hopper::forward {

template <class Block>
__global__ void __launch_bounds__(Block::T::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map,
                   const __grid_constant__ ForwardArguments arguments) {
  Block::run(q_map, k_map, v_map, o_map, arguments);
}

template <class Pairs, bool kLarge, bool kForms, bool kFacts>
void launch_block(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                  const ForwardArguments& group, void* workspace, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(workspace, 0, sizeof(LaunchWords), stream),
             "clearing the forward kernels' counters");
  with_blocks_of<Pairs, kLarge, kForms, kFacts>(problem, group.rules, [&]<class Block>() {
    using T = typename Block::T;
    const BlockMaps<T> maps(problem, in, out);
    const auto kernel = forward_kernel<Block>;
    allow_shared_memory(kernel, T::kSharedBytes);
    int blocks;
    const ForwardArguments a = launch_arguments<Block>(problem, group, static_cast<LaunchWords*>(workspace),
                                                       multiprocessors(), blocks);
    kernel<<<blocks, T::kThreads, T::kSharedBytes, stream>>>(maps.q, maps.k, maps.v, maps.o, a);
    check_launch("starting the Hopper forward kernel");
  });
}

}  // namespace evenkeel::hopper::forward
