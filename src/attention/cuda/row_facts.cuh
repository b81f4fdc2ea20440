// What a backward kernel must know of a query row before it meets its keys. For all fast kernels. Internal to
// src/attention.
#pragma once

#include "attention/cuda/head_rules.cuh"
#include "attention/cuda/pairs.cuh"
#include "attention/cuda/score_forms.cuh"
#include "gpu/cuda/warp.cuh"

namespace evenkeel {

// Eight features' part of dO . O', where O' is O and its residue.
template <class Pairs>
EK_DEVICE float dot_of_eight(const uint4& g, const uint4& o, const uint2& residue) {
  const uint32_t gs[4] = {g.x, g.y, g.z, g.w}, os[4] = {o.x, o.y, o.z, o.w}, rs[2] = {residue.x, residue.y};
  float dot = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int low = static_cast<int8_t>(rs[i / 2] >> (16 * (i % 2))),
              high = static_cast<int8_t>(rs[i / 2] >> (16 * (i % 2) + 8));
    dot = fmaf(Pairs::low(gs[i]), Pairs::with_residue(os[i] & 0xffff, low), dot);
    dot = fmaf(Pairs::high(gs[i]), Pairs::with_residue(os[i] >> 16, high), dot);
  }
  return dot;
}

// P = 2^(score - shift), times `inverse` where the head is consistent. As it stands here: P = 0, of a row that is not there
// or sees nothing.
struct RowFact {
  float shift = kInfinity, inverse = 0, delta = 0;
};

// Of row `at` of (B, H, T), which exists. dot: dO . O'. delta is that (or the exact one), less 2 z L and the gradient of L.
template <class Problem>
EK_DEVICE RowFact row_fact(const Problem& p, const HeadRules& rules, int64_t at, float dot) {
  RowFact fact;
  const float lse = p.lse[at];
  if (lse == -kInfinity) return fact;
  fact.delta = (rules.exact_delta ? p.exact_delta[at] : dot) - 2 * rules.keel * lse;
  if (p.grad_lse) fact.delta -= p.grad_lse[at];
  if (!rules.consistent) fact.shift = lse * gpu::kLog2E;
  if (rules.consistent && p.row_sum[at] > 0) {  // else it sees a sink alone
    fact.shift = p.row_max[at];
    fact.inverse = 1 / p.row_sum[at];
  }
  return fact;
}

// A row of a tile that sees no key: nobody else writes its dQ.
template <class Problem>
EK_DEVICE void clear_unseen_row(const Problem& p, const Band& band, int row, int tile_rows, int tile_keys,
                                uint16_t* dq) {
  if (band.end_key_tile(row / tile_rows * tile_rows, tile_rows, tile_keys) > 0) return;
  if (row >= (p.sequences.query_offsets ? band.s.rows : p.sequences.T)) return;
  for (int n = 0; n < p.D; n += 8) *reinterpret_cast<uint4*>(dq + n) = uint4{0, 0, 0, 0};
}

// dsinks: P of the sink times (0 - delta), over all rows of a head. A block a head; one order of sums. `sums`: a float for
// each warp, in shared memory. delta_of(head, row): head is b H + h.
template <int kThreads, class Problem, class DeltaOf>
EK_DEVICE void add_up_sink_gradient(const Problem& p, float* sums, DeltaOf delta_of) {
  using gpu::kWarp;
  const int h = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  float sum = 0;
  for (int b = 0; b < p.B; ++b) {
    const int64_t head = b * p.H + h;
    const int rows = sequence(p.sequences, b).rows;
    for (int row = thread; row < rows; row += kThreads)
      sum -= gpu::exp2_approx(sink_log2(p, h) - p.lse[head * p.sequences.T + row] * gpu::kLog2E) *
             delta_of(head, row);
  }
  sum = gpu::warp_sum(sum);
  if (thread % kWarp == 0) sums[thread / kWarp] = sum;
  __syncthreads();
  if (thread != 0) return;
  for (int n = 1; n < kThreads / kWarp; ++n) sum += sums[n];
  p.dsinks[h] = sum;
}

}  // namespace evenkeel
