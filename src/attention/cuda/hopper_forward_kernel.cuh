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
                  ForwardArguments a, void* workspace, cudaStream_t stream) {
  with_block_of<Pairs, kLarge, kForms, kFacts>(problem, a.rules, [&]<class Block>() {
    using T = typename Block::T;
    const BlockMaps<T> maps(problem, in, out);
    a.tiles_per_head = static_cast<int>(divide_up(problem.T, T::kRows));
    const auto kernel = forward_kernel<Block>;
    allow_shared_memory(kernel, T::kSharedBytes);
    const int tiles = a.tiles_per_head * a.heads, blocks = std::min(multiprocessors(), tiles);
    if (tiles > blocks) {
      a.next_tile = static_cast<uint32_t*>(workspace);
      check_cuda(cudaMemsetAsync(workspace, 0, sizeof(uint32_t), stream),
                 "clearing the forward kernel's counter");
    }
    kernel<<<blocks, T::kThreads, T::kSharedBytes, stream>>>(maps.q, maps.k, maps.v, maps.o, a);
    check_launch("starting the Hopper forward kernel");
  });
}

}  // namespace evenkeel::hopper::forward
