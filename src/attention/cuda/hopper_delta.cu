// The launches of zero_sum's delta on Hopper.
#include "attention/cuda/hopper_delta.cuh"

#include "attention/cuda/hopper_backward.cuh"
#include "base/sizes.h"
#include "gpu/cuda/launch.h"

namespace evenkeel::hopper {
namespace {

template <class Pairs, int kHeadSize, bool kForms>
void launch(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
            delta::DeltaArguments a, cudaStream_t stream) {
  using T = delta::Tiles<kHeadSize>;
  static_assert(T::kSharedBytes <= 227 * 1024);
  const CUtensorMap q_map = query_map(problem, in.q, T::kRows), k_map = key_map(problem, in.k, T::kKeys),
                    v_map = key_map(problem, in.v, T::kKeys),
                    grad_map = query_map(problem, grad_output, T::kRows);
  a.tiles_per_head = static_cast<int>(divide_up(problem.T, T::kRows));
  const auto kernel = delta::delta_rows<Pairs, kHeadSize, kForms>;
  allow_shared_memory(kernel, T::kSharedBytes);
  const int blocks = std::min(multiprocessors(), a.tiles_per_head * a.heads);
  kernel<<<blocks, T::kThreads, T::kSharedBytes, stream>>>(q_map, k_map, v_map, grad_map, a);
  check_launch("starting the Hopper delta kernel");
}

}  // namespace

void exact_delta(const AttentionProblem& problem, const HeadGroup& group, const PassInputs& in,
                 const DeviceTensor& grad_output, const float* lse, float* row_delta, float* log_sum,
                 cudaStream_t stream) {
  const delta::DeltaArguments a = delta::arguments_of(problem, group, lse, row_delta, log_sum);
  const auto with_head = [&]<class Pairs, int kHeadSize>() {
    (has_forms(problem) ? launch<Pairs, kHeadSize, true>
                        : launch<Pairs, kHeadSize, false>)(problem, in, grad_output, a, stream);
  };
  const auto with_type = [&]<class Pairs>() {
    if (problem.D <= 64)
      with_head.template operator()<Pairs, 64>();
    else
      with_head.template operator()<Pairs, 128>();
  };
  if (problem.type == TensorType::fp16)
    with_type.template operator()<Fp16Pairs>();
  else
    with_type.template operator()<Bf16Pairs>();
}

}  // namespace evenkeel::hopper
