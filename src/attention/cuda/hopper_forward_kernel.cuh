// The forward kernel of Hopper and its launch. Included by hopper_forward_bf16.cu and hopper_forward_fp16.cu, which compile
// side by side.
//
// A block stays on its multiprocessor and takes query tiles from a counter, the longest first. One thread of
// the last warpgroup drives the copy engine. Each of the others owns 64 rows and works alone on them. It issues
// the scores of the next key tile (across the border of query tiles too) before the product P V of this one. So
// the softmax of one is computed while the tensor cores do the other. Key tiles run from the last to the first:
// the masked ones come first, and a warpgroup leaves out those that none of its rows sees.
#pragma once

#include <algorithm>

#include "attention/cuda/hopper_forward.cuh"
#include "attention/cuda/hopper_forward_tiles.cuh"
#include "attention/cuda/hopper_forward_worker.cuh"
#include "base/sizes.h"

namespace evenkeel::hopper::forward {

template <class Pairs, int kHeadSize, Shift kShift, bool kForms, bool kFacts>
__global__ void __launch_bounds__(Tiles<kHeadSize>::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map,
                   const __grid_constant__ ForwardArguments arguments) {
  using T = Tiles<kHeadSize>;
  extern __shared__ uint8_t memory[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(memory + (-shared_address(memory) & 1023));
  if (threadIdx.x == 0) {
    constexpr int kWarps = T::kWorkers / 32;
    for (int i = 0; i < T::kQueryStages; ++i)
      barrier_init(&shared.q_full[i], 1), barrier_init(&shared.q_empty[i], kWarps);
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(&shared.k_full[i], 1), barrier_init(&shared.k_empty[i], kWarps);
      barrier_init(&shared.v_full[i], 1), barrier_init(&shared.v_empty[i], kWarps);
    }
    barrier_init_fence();
    prefetch_map(q_map), prefetch_map(k_map), prefetch_map(v_map), prefetch_map(o_map);
  }
  for (int at = threadIdx.x * 4; at < sizeof(shared.ones); at += T::kThreads * 4)
    *reinterpret_cast<uint32_t*>(shared.ones + at) = Pairs::kOnes;
  store_fence();
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (group == T::kWarpgroups) {
    give_registers<T::kCopyRegisters>();
    if (threadIdx.x == T::kWorkers) copy_tiles<kForms>(shared, q_map, k_map, v_map, arguments, T{});
  } else {
    take_registers<T::kWorkRegisters>();
    Worker<Pairs, kHeadSize, kShift, kForms, kFacts>(shared, arguments, o_map, group).run();
  }
}

template <class Pairs, int kHeadSize, Shift kShift, bool kForms, bool kFacts>
void launch(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out, ForwardArguments a,
            void* workspace, cudaStream_t stream) {
  using T = Tiles<kHeadSize>;
  static_assert(T::kSharedBytes <= 227 * 1024);
  const CUtensorMap q_map = query_map(problem, in.q, T::kRows), k_map = key_map(problem, in.k, T::kKeys),
                    v_map = key_map(problem, in.v, T::kKeys),
                    o_map = query_map(problem, out.o, kWarpgroupRows / 4);
  a.tiles_per_head = static_cast<int>(divide_up(problem.T, T::kRows));
  const auto kernel = forward_kernel<Pairs, kHeadSize, kShift, kForms, kFacts>;
  allow_shared_memory(kernel, T::kSharedBytes);
  const int tiles = a.tiles_per_head * a.heads, blocks = std::min(multiprocessors(), tiles);
  if (tiles > blocks) {
    a.next_tile = static_cast<uint32_t*>(workspace);
    check_cuda(cudaMemsetAsync(workspace, 0, sizeof(uint32_t), stream),
               "clearing the forward kernel's counter");
  }
  kernel<<<blocks, T::kThreads, T::kSharedBytes, stream>>>(q_map, k_map, v_map, o_map, a);
  check_launch("starting the Hopper forward kernel");
}

// The instance for the problem's head size and the heads' shift.
template <class Pairs, bool kForms, bool kFacts>
void launch_shift(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                  const ForwardArguments& a, void* workspace, cudaStream_t stream) {
  const auto with_head = [&]<int kHeadSize>() {
    const auto run = [&](auto start) { start(problem, in, out, a, workspace, stream); };
    if (a.rules.consistent)
      run(launch<Pairs, kHeadSize, Shift::consistent, kForms, kFacts>);
    else if (a.rules.paper_capped)
      run(launch<Pairs, kHeadSize, Shift::paper_capped, kForms, kFacts>);
    else
      run(launch<Pairs, kHeadSize, Shift::plain, kForms, kFacts>);
  };
  if (problem.D <= 64)
    with_head.template operator()<64>();
  else
    with_head.template operator()<128>();
}

template <class Pairs>
void launch_forward(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                    const ForwardArguments& a, bool forms, void* workspace, cudaStream_t stream) {
  (forms ? launch_shift<Pairs, true, false> : launch_shift<Pairs, false, false>)(problem, in, out, a,
                                                                                 workspace, stream);
}

}  // namespace evenkeel::hopper::forward
