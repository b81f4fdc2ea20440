// The launches of Hopper's backward pass. Included by the files that compile it for a type of tensors each.
#pragma once

#include <algorithm>

#include "attention/cuda/hopper_backward.cuh"
#include "attention/cuda/hopper_backward_kernel.cuh"
#include "attention/cuda/hopper_row_facts.cuh"
#include "base/sizes.h"
#include "gpu/cuda/launch.h"

namespace evenkeel::hopper::backward {

template <class Pairs, int D, Consistent kConsistent, Form kForm>
void launch(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
            const Backward& p, cudaStream_t stream) {
  constexpr int kRows = kTileRows<D>;
  constexpr size_t kShared = sizeof(SharedMemory<D>);
  const auto kernel = backward_kernel<Pairs, D, kConsistent, kForm>;
  allow_shared_memory(kernel, kShared);
  const int items = p.B * p.list.count * p.key_tiles, blocks = std::min(items, multiprocessors());
  kernel<<<blocks, (1 + kConsumers) * kWarpgroup, kShared, stream>>>(
      p, query_map(problem, in.q, kRows), key_map(problem, in.k, kTileKeys),
      key_map(problem, in.v, kTileKeys), query_map(problem, grad_output, kRows));
  check_launch("starting the backward kernel");
}

template <class Pairs, int D>
void launch_row_facts(const AttentionProblem& problem, const Backward& p, cudaStream_t stream) {
  constexpr int kFactRows = 256 / (D / 8);
  const dim3 fact_blocks(grid(problem.B * problem.H), grid(divide_up(p.padded_rows, kFactRows)));
  row_facts_kernel<Pairs, D><<<fact_blocks, 256, 0, stream>>>(p);
  check_launch("starting the kernel of rows' facts");
  if (!p.dsinks) return;
  constexpr int kThreads = 256;
  sink_gradient_kernel<kThreads><<<grid(problem.H), kThreads, 0, stream>>>(p);
  check_launch("starting the kernel of sinks' gradients");
}

// Everything with a soft cap shares one instance, which asks the head whether it is consistent.
template <class Pairs, int D>
void launch_keys(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                 const Backward& p, Consistent consistent, cudaStream_t stream) {
  const auto run = [&](auto start) { start(problem, in, grad_output, p, stream); };
  const auto with_form = [&]<Form kForm>() {
    if (consistent == Consistent::by_head)
      run(launch<Pairs, D, Consistent::by_head, kForm>);
    else if (consistent == Consistent::every_head)
      run(launch<Pairs, D, Consistent::every_head, kForm>);
    else
      run(launch<Pairs, D, Consistent::no_head, kForm>);
  };
  if (problem.softcap > 0)
    run(launch<Pairs, D, Consistent::by_head, Form::capped>);
  else if (has_forms(problem))
    with_form.template operator()<Form::banded>();
  else
    with_form.template operator()<Form::plain>();
}

template <class Pairs>
void launch_backward(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                     Backward p, const std::vector<KeyGroup>& groups, cudaStream_t stream) {
  const auto with_head = [&]<int D>() {
    launch_row_facts<Pairs, D>(problem, p, stream);
    for (const KeyGroup& group : groups) {
      p.list = group.list;
      launch_keys<Pairs, D>(problem, in, grad_output, p, group.consistent, stream);
      ++p.next_item;
    }
  };
  if (problem.D <= 64)
    with_head.template operator()<64>();
  else
    with_head.template operator()<128>();
}

}  // namespace evenkeel::hopper::backward
