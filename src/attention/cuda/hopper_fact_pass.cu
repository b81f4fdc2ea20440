// The launches of the pass for facts of rows on Hopper.
#include "attention/cuda/hopper_fact_pass.cuh"

#include "gpu/cuda/launch.h"

namespace evenkeel {
namespace hopper::facts {
namespace {

template <class Block>
__global__ void __launch_bounds__(Block::kThreads)
    fact_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap grad_map,
                const __grid_constant__ FactArguments arguments) {
  Block::run(q_map, k_map, v_map, grad_map, arguments);
}

}  // namespace
}  // namespace hopper::facts

void hopper_facts(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                  const ForwardPass& saved, const FactPass& out, void* stream_handle) {
  using namespace hopper::facts;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const BlockMaps maps(problem, in, grad_output);
  with_block_of(problem, [&]<class Block>() {
    const auto kernel = fact_kernel<Block>;
    allow_shared_memory(kernel, Block::kSharedBytes);
    for_fact_groups(problem, saved, out, [&](const FactArguments& a, int blocks) {
      kernel<<<blocks, Block::kThreads, Block::kSharedBytes, stream>>>(maps.q, maps.k, maps.v,
                                                                       maps.grad_output, a);
      check_launch("starting the Hopper kernel of rows' facts");
    });
  });
}

}  // namespace evenkeel
