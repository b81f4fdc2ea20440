// Hopper's forward pass: the shift and the sum of a row. Included by hopper_forward_kernel.cuh alone.
#pragma once

#include "attention/cuda/hopper_forward_tiles.cuh"

namespace evenkeel::hopper::forward {

// The state of the two rows a thread holds (with three others) of its warpgroup's 64.
template <Shift kShift>
struct Rows {
  float shift[2];  // in force, in powers of two; -inf: no key yet
  float sum[2];    // l: this thread's part of it
  float unit[2];   // dither: added to the shift; paper_capped: the row's random number; exact: its residue
  float max[2];    // paper_capped: the largest score so far, scaled; exact: the score that set the shift
  int ties[2];     // paper_capped

  EK_DEVICE void start(const ForwardArguments& a, int head, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shift[r] = max[r] = kMinusInfinity;
      sum[r] = 0;
      unit[r] = 0;
      ties[r] = 0;
      if (kShift == Shift::paper_capped || (kShift == Shift::plain && a.rules.dither)) {
        RandomKey key = a.random;
        if (a.device_step) key.step = *a.device_step;
        unit[r] = row_random_unit(key, static_cast<uint64_t>(head) * a.sequences.T + row + 8 * r);
      }
    }
  }

  // What rounding took from a far shift: the score that set it less the shift, exactly. That score's probability is one, and
  // BF16 must not round it. A fused multiply-add alone leaves 2^residue, and BF16 rounds that while the sum l does not: O of a
  // row that sees one key is then not that key's V, and its row of dS does not add up to zero. Nearer than kFar the residue is
  // left out, so that near rows have the bits of plain shifts. To ask for it at each tile costs 4 to 8 % of the pass; so plain
  // shifts only note that there are far rows, and a second launch computes everything with exact ones.
  static constexpr bool kHasResidue = kShift == Shift::exact;
  EK_DEVICE float residue(int r) const { return kHasResidue ? unit[r] : 0.0f; }
  // After a tile, `before` and `used` being the shifts. Returns how far the residue fell.
  EK_DEVICE float move_residue(const ForwardArguments& a, int r, float tile_max, float before, float used) {
    if (before == used) return 0;
    const float was = unit[r];
    unit[r] = fabsf(used) < kFar ? 0.0f : fmaf(tile_max, a.score_log2, -used);
    max[r] = tile_max;
    return was - unit[r];
  }

  // The shift with a tile whose largest score (unscaled; -inf: none) is tile_max, of which `tile_ties` tie.
  EK_DEVICE float moved(const ForwardArguments& a, int r, float tile_max, int tile_ties) {
    if constexpr (kShift == Shift::plain) {
      return fmaf(tile_max, a.score_log2, unit[r]);
    } else if constexpr (kShift == Shift::exact) {
      return tile_max * a.score_log2;
    } else if constexpr (kShift == Shift::consistent) {
      return ceilf(tile_max * a.score_log2);
    } else {
      const float before = max[r], scaled = tile_max * a.score_unit;
      if (scaled == kMinusInfinity) return kMinusInfinity;
      max[r] = fmaxf(before, scaled);
      ties[r] = (max[r] - before <= a.rules.tie_tolerance ? ties[r] : 0) + tile_ties;
      float m = max[r];
      if (ties[r] > 1) {
        const float least = kLn2 * (0.25f + 0.75f * unit[r]);
        const float most = fmaxf(least, a.rules.cap * (0.5f + 0.5f * unit[r]));
        m += fminf(fmaxf(max[r] > 0 ? (a.rules.beta - 1) * max[r] : -max[r], least), most);
      }
      return m * kLog2E;
    }
  }
};

}  // namespace evenkeel::hopper::forward
