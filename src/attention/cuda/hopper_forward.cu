// The forward pass on Hopper: O = softmax(a Q K^T) V, tile by tile, never in memory.
//
// A block stays on its multiprocessor and takes query tiles from a counter, the longest first. One thread of
// the last warpgroup drives the copy engine; each of the others owns 64 rows and works alone on them: it
// issues the scores of the next key tile (across the border of query tiles too) before the product P V of
// this one, and computes the softmax of the one while the tensor cores do the other. Key tiles run from the
// last to the first: the masked ones come first, and a warpgroup leaves out those that none of its rows sees.
#include <algorithm>

#include "attention/cuda/hopper_forward_tiles.cuh"
#include "attention/cuda/hopper_forward_worker.cuh"
#include "base/sizes.h"

namespace evenkeel {
namespace hopper::forward {
namespace {

template <int kHeadSize, Shift kShift>
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
    *reinterpret_cast<uint32_t*>(shared.ones + at) = 0x3f803f80;
  store_fence();
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (group == T::kWarpgroups) {
    give_registers<T::kCopyRegisters>();
    if (threadIdx.x == T::kWorkers) copy_tiles(shared, q_map, k_map, v_map, arguments, T{});
  } else {
    take_registers<T::kWorkRegisters>();
    Worker<kHeadSize, kShift>(shared, arguments, o_map, group).run();
  }
}

template <int kHeadSize, Shift kShift>
void launch(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out, ForwardArguments a,
            void* workspace, cudaStream_t stream) {
  using T = Tiles<kHeadSize>;
  static_assert(T::kSharedBytes <= 227 * 1024);
  const CUtensorMap q_map = query_map(problem, in.q, T::kRows), k_map = key_map(problem, in.k, T::kKeys),
                    v_map = key_map(problem, in.v, T::kKeys),
                    o_map = query_map(problem, out.o, kWarpgroupRows / 4);
  a.tiles_per_head = static_cast<int>(divide_up(problem.T, T::kRows));
  const auto kernel = forward_kernel<kHeadSize, kShift>;
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

template <int kHeadSize>
void launch(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
            const ForwardArguments& a, void* workspace, cudaStream_t stream) {
  switch (rules_of(problem.plans[0].stabiliser).shift) {
    case ShiftRule::power_of_two:
      return launch<kHeadSize, Shift::consistent>(problem, in, out, a, workspace, stream);
    case ShiftRule::paper_capped:
      return launch<kHeadSize, Shift::paper_capped>(problem, in, out, a, workspace, stream);
    default:
      return launch<kHeadSize, Shift::plain>(problem, in, out, a, workspace, stream);
  }
}

}  // namespace
}  // namespace hopper::forward

void hopper_forward(const AttentionProblem& problem, const FamilyPlan&, const PassInputs& in,
                    const ForwardPass& out, void* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  using namespace hopper;
  using namespace hopper::forward;
  const PrecisionPlan& plan = problem.plans[0];
  ForwardArguments a{};
  a.sequences = sequences(problem);
  a.o = static_cast<__nv_bfloat16*>(out.o.data);
  for (int axis = 0; axis < 3; ++axis) a.o_stride[axis] = out.o.stride[axis];
  a.lse = out.lse;
  a.saved = saved_layout(problem, out.saved);
  a.H = static_cast<int>(problem.H);
  a.heads_per_group = static_cast<int>(problem.H / problem.G);
  a.D = static_cast<int>(problem.D);
  a.causal = problem.mask.causal;
  a.scale = problem.scale;
  a.scale_log2 = problem.scale * kLog2E;
  // A shift may stay behind the row's largest score for a while: P is then at most 2^8, and O need not be
  // scaled for each new maximum (5 % of the time). Of a shift by powers of two that changes no rounding. row_max stays
  // exact: with a shift that lags, scores that tie with the maximum would no longer have P = 1, and the failure that
  // the stabiliser `none` is there to show would be hidden.
  const ShiftRule shift = rules_of(plan.stabiliser).shift;
  a.slack = may_lag(shift) ? 8.0f : 0.0f;
  a.dither = shift == ShiftRule::dither;
  a.random = {plan.seed, problem.step, problem.layer * 64 + 63};
  a.device_step = problem.device_step;
  a.beta = plan.beta, a.cap = plan.cap, a.tie_tolerance = plan.tie_tolerance;
  a.below_all = -1;
  a.heads = static_cast<int>(problem.B * problem.H);
  constexpr int64_t kCacheBytes = 32 << 20;                 // of the second-level cache, for keys and values
  const int64_t key_bytes = problem.N * problem.D * 2 * 2;  // K and V of one head
  a.section_heads = static_cast<int>(
      std::clamp<int64_t>(kCacheBytes / std::max<int64_t>(1, key_bytes) * a.heads_per_group, 1, a.heads));
  if (problem.D <= 64)
    launch<64>(problem, in, out, a, workspace, stream);
  else
    launch<128>(problem, in, out, a, workspace, stream);
}

}  // namespace evenkeel
