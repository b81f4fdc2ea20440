// The pass before Hopper's backward kernel: delta and the other facts of each row. Included by
// hopper_backward_kernel.cuh alone.
#pragma once

#include "attention/cuda/hopper_backward_problem.cuh"
#include "attention/cuda/row_facts.cuh"

namespace evenkeel::hopper::backward {

// Eight (sixteen) threads a row.
template <class Pairs, int D>
__global__ void __launch_bounds__(256) row_facts_kernel(const Backward p) {
  constexpr int kThreads = D / 8, kBlockRows = 256 / kThreads;
  const int head = blockIdx.x, b = head / p.H, h = head % p.H;
  const int row = blockIdx.y * kBlockRows + threadIdx.x / kThreads, feature = threadIdx.x % kThreads * 8;
  const HeadRules& rules = p.rules_of(h);
  const Band band(p, b);
  const Sequence& s = band.s;
  const int T = p.sequences.T;
  if (blockIdx.y == 0 && head == 0 && threadIdx.x < kMostLaunches) p.next_item[threadIdx.x] = 0;
  if (blockIdx.y == 0)
    for (int n = threadIdx.x; n < p.row_tiles * 2; n += 256) p.turn[head * p.row_tiles * 2 + n] = 0;

  float dot = 0;
  const bool exists = row < s.rows;
  if (exists && !rules.exact_delta && feature < p.D) {
    const int64_t at = s.first_row + row;
    const uint4 g =
        *reinterpret_cast<const uint4*>(p.grad_output + s.query_batch * p.grad_output_stride[0] +
                                        h * p.grad_output_stride[1] + at * p.grad_output_stride[2] + feature);
    const uint4 o = *reinterpret_cast<const uint4*>(p.o + s.query_batch * p.o_stride[0] + h * p.o_stride[1] +
                                                    at * p.o_stride[2] + feature);
    uint2 residue = {0, 0};
    if (rules.wide)
      residue =
          *reinterpret_cast<const uint2*>(p.residue + (static_cast<int64_t>(head) * T + row) * p.D + feature);
    dot = dot_of_eight<Pairs>(g, o, residue);
  }
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
  if (feature != 0 || row >= p.padded_rows) return;

  const int64_t slot = static_cast<int64_t>(head) * p.padded_rows + row_slot(row);
  const int64_t at = static_cast<int64_t>(head) * T + row;
  RowFact fact = exists ? row_fact(p, rules, at, dot) : RowFact{};
  if (p.log_sum && rules.exact_delta && fact.shift < kInfinity) fact.shift += p.log_sum[at];
  if (p.delta_out && row < T) p.delta_out[at] = fact.delta;
  clear_unseen_row(
      p, band, row, kTileRows<D>, kTileKeys,
      p.dq + s.query_batch * p.dq_stride[0] + h * p.dq_stride[1] + (s.first_row + row) * p.dq_stride[2]);
  p.facts.shift[slot] = fact.shift;
  p.facts.delta[slot] = fact.delta;
  if (p.facts.inverse) p.facts.inverse[slot] = fact.inverse;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) sink_gradient_kernel(const Backward p) {
  __shared__ float sums[kThreads / kWarp];
  add_up_sink_gradient<kThreads>(
      p, sums, [&](int64_t head, int row) { return p.facts.delta[head * p.padded_rows + row_slot(row)]; });
}

}  // namespace evenkeel::hopper::backward
