// The pass before Hopper's backward kernel: delta and the other facts of each row. Included by
// hopper_backward_kernel.cuh alone.
#pragma once

#include "attention/cuda/hopper_backward_problem.cuh"

namespace evenkeel::hopper::backward {

// delta = dO . O' (or the exact one), less 2 z L and the gradient of L; and the rest of a row's facts. Eight (sixteen) threads
// a row.
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

  float delta = 0;
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
    const uint32_t gs[4] = {g.x, g.y, g.z, g.w}, os[4] = {o.x, o.y, o.z, o.w}, rs[2] = {residue.x, residue.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = static_cast<int8_t>(rs[i / 2] >> (16 * (i % 2))),
                high = static_cast<int8_t>(rs[i / 2] >> (16 * (i % 2) + 8));
      delta = fmaf(Pairs::low(gs[i]), Pairs::with_residue(os[i] & 0xffff, low), delta);
      delta = fmaf(Pairs::high(gs[i]), Pairs::with_residue(os[i] >> 16, high), delta);
    }
  }
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
  if (feature != 0 || row >= p.padded_rows) return;

  const int64_t slot = static_cast<int64_t>(head) * p.padded_rows + row_slot(row);
  float shift = INFINITY, inverse = 0;
  if (exists) {
    const int64_t at = static_cast<int64_t>(head) * T + row;
    const float lse = p.lse[at];
    if (rules.exact_delta) delta = p.exact_delta[at];
    if (lse == -INFINITY) {
      delta = 0;
    } else {
      delta -= 2 * rules.keel * lse;
      if (p.grad_lse) delta -= p.grad_lse[at];
      if (!rules.consistent) shift = lse * kLog2E;
      if (rules.consistent && p.row_sum[at] > 0) {  // else it sees a sink alone
        shift = p.row_max[at];
        inverse = 1 / p.row_sum[at];
      }
    }
    if (p.delta_out) p.delta_out[at] = delta;
  } else if (p.delta_out && row < T) {
    p.delta_out[static_cast<int64_t>(head) * T + row] = 0;
  }
  // Rows of a tile that sees no key: nobody else writes their dQ.
  constexpr int kRows = kTileRows<D>;
  if (band.end_key_tile(row / kRows * kRows, kRows, kTileKeys) == 0 &&
      row < (p.sequences.query_offsets ? s.rows : T)) {
    uint16_t* const dq =
        p.dq + s.query_batch * p.dq_stride[0] + h * p.dq_stride[1] + (s.first_row + row) * p.dq_stride[2];
    for (int n = 0; n < p.D; n += 8) *reinterpret_cast<uint4*>(dq + n) = uint4{0, 0, 0, 0};
  }
  p.facts.shift[slot] = shift;
  p.facts.delta[slot] = delta;
  if (p.facts.inverse) p.facts.inverse[slot] = inverse;
}

// dsinks: P of the sink times (0 - delta), over all rows of a head. A block a head; one order of sums.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) sink_gradient_kernel(const Backward p) {
  __shared__ float sums[kThreads / kWarp];
  const int h = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  float sum = 0;
  for (int b = 0; b < p.B; ++b) {
    const int64_t head = b * p.H + h;
    const int rows = sequence(p.sequences, b).rows;
    for (int row = thread; row < rows; row += kThreads)
      sum -= exp2_approx(sink_log2(p, h) - p.lse[head * p.sequences.T + row] * kLog2E) *
             p.facts.delta[head * p.padded_rows + row_slot(row)];
  }
  sum = warp_sum(sum);
  if (thread % kWarp == 0) sums[thread / kWarp] = sum;
  __syncthreads();
  if (thread != 0) return;
  for (int n = 1; n < kThreads / kWarp; ++n) sum += sums[n];
  p.dsinks[h] = sum;
}

}  // namespace evenkeel::hopper::backward
