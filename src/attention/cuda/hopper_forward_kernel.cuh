// The launches of Hopper's forward kernel. Included by the files that compile its instances side by side.
#pragma once

#include <atomic>
#include <vector>

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

// Once for each kernel and device: a call costs the host about as much as a launch.
template <auto kKernel>
void allow_shared_memory_once(size_t bytes) {
  static std::atomic<uint64_t> done{0};  // a bit for each of the first 64 devices
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (done.load(std::memory_order_relaxed) & bit) return;
  allow_shared_memory(kKernel, bytes);
  done.fetch_or(bit, std::memory_order_relaxed);
}

template <class Pairs, bool kLarge, bool kForms, bool kFacts>
void launch_groups(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                   const std::vector<ForwardArguments>& groups, void* workspace, cudaStream_t stream) {
  auto* const words = static_cast<LaunchWords*>(workspace);
  check_cuda(cudaMemsetAsync(words, 0, groups.size() * sizeof(LaunchWords), stream),
             "clearing the forward kernels' counters");
  for_each_launch<Pairs, kLarge, kForms, kFacts>(
      problem, in, out, groups, words, multiprocessors(),
      [&]<class Block>(const BlockMaps<typename Block::T>& maps, const ForwardArguments& a, int blocks) {
        using T = typename Block::T;
        allow_shared_memory_once<forward_kernel<Block>>(T::kSharedBytes);
        forward_kernel<Block>
            <<<blocks, T::kThreads, T::kSharedBytes, stream>>>(maps.q, maps.k, maps.v, maps.o, a);
        check_launch("starting the Hopper forward kernel");
      });
}

}  // namespace evenkeel::hopper::forward
