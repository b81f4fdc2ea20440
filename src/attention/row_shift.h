// The shift m of one softmax row, found as its keys stream by, tile by tile: the largest score, or what a
// stabiliser puts in its place. Knows nothing of tiles' layout, threads or masks.
//
// Any m gives the same softmax in exact arithmetic. It decides which numbers get rounded: with m = max the
// largest probability is exactly 1, and so are all that tie with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/precision_plan.h"

namespace evenkeel {

inline constexpr double kLog2 = 0.693147180559945309417232;

struct RowShift {
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  float max = kNone;  // the largest score so far; kNone: no visible key yet
  float m = kNone;    // the shift, or for a power shift m / log 2, a whole number
  int32_t ties = 0;   // paper_capped: scores so far that tie with max

  // Scores at or above this count as ties in a tile whose largest is tile_max.
  float tie_threshold(const PrecisionPlan& plan, float tile_max) const {
    const float top = plan.stabiliser == Stabiliser::paper ? tile_max : std::max(max, tile_max);
    return top - plan.tie_tolerance;
  }
  static bool counts_ties(const PrecisionPlan& plan) {
    return plan.stabiliser == Stabiliser::paper || plan.stabiliser == Stabiliser::paper_capped;
  }

  // Takes in one more tile: its largest visible score (kNone: the row sees none of it), how many of its
  // scores reach tie_threshold, and this row's own random number in (0, 1). m never falls but for dither's
  // and none's plain maximum, which cannot fall either.
  void add_tile(const PrecisionPlan& plan, bool power_shift, float tile_max, int32_t tile_ties, float unit) {
    if (tile_max == kNone) return;
    const float before = max;
    max = std::max(max, tile_max);
    switch (plan.stabiliser) {
      case Stabiliser::paper: {
        // Section 4 of the paper, on the tile alone, and the larger of that and what was there. Holes kept:
        // no tie across tiles is seen, a maximum of 0 is not moved, exp(m) may underflow.
        float adjusted = tile_max;
        if (tile_ties > 1) adjusted = tile_max > 0 ? plan.beta * tile_max : tile_max < 0 ? 0.0f : tile_max;
        m = std::max(m, adjusted);
        break;
      }
      case Stabiliser::paper_capped: {
        // Earlier ties stand while the maximum moves by no more than the tolerance. The shift begins with the tile that
        // completes the tie: what came before is scaled by exp(m before - m now), not rounded again.
        ties = (max - before <= plan.tie_tolerance ? ties : 0) + tile_ties;
        float moved = max;
        if (ties > 1) {
          // Bounded on both sides, each bound the row's own: a common one would be a fixed offset, with a
          // bias of its own (the paper's Appendix C). The lower one moves the largest probability to 0.5 ..
          // 0.84.
          const float least = static_cast<float>(kLog2) * (0.25f + 0.75f * unit);
          const float most = std::max(least, plan.cap * (0.5f + 0.5f * unit));
          moved += std::clamp(max > 0 ? (plan.beta - 1) * max : -max, least, most);
        }
        m = std::max(m, moved);
        break;
      }
      case Stabiliser::dither:
        m = max + unit * static_cast<float>(kLog2);
        break;
      default:
        m = power_shift ? std::ceil(max * static_cast<float>(1 / kLog2)) : max;
        break;
    }
  }
};

}  // namespace evenkeel
