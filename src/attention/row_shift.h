// The shift m of one softmax row, found as its keys stream by, tile by tile: the largest score, or what a
// stabiliser's shift rule puts in its place. Knows nothing of tiles' layout, threads or masks.
// One code for CPU and GPU. Device code never fuses these operations, host code is built without contraction: the bits
// are the same.
//
// Any m gives the same softmax in exact arithmetic. It decides which numbers get rounded: with m = max the
// largest probability is exactly 1, and so are all that tie with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/stabiliser.h"

#if defined(__CUDA_ARCH__)
#define EVENKEEL_ON(device, host) (device)
#else
#define EVENKEEL_ON(device, host) (host)
#endif

namespace evenkeel {

inline constexpr double kLog2 = 0.693147180559945309417232;

// What a plan says of the shift.
struct ShiftParameters {
  ShiftRule rule = ShiftRule::row_max;
  float beta = 0, cap = 0, tie_tolerance = 0;  // as in PrecisionPlan
};

namespace row_shift {
// One operation, one rounding to nearest.
EVENKEEL_HOST_DEVICE inline float add(float x, float y) { return EVENKEEL_ON(__fadd_rn(x, y), x + y); }
EVENKEEL_HOST_DEVICE inline float subtract(float x, float y) { return EVENKEEL_ON(__fsub_rn(x, y), x - y); }
EVENKEEL_HOST_DEVICE inline float multiply(float x, float y) { return EVENKEEL_ON(__fmul_rn(x, y), x * y); }
EVENKEEL_HOST_DEVICE inline float larger(float x, float y) {
  return EVENKEEL_ON(fmaxf(x, y), std::max(x, y));
}
EVENKEEL_HOST_DEVICE inline float smaller(float x, float y) {
  return EVENKEEL_ON(fminf(x, y), std::min(x, y));
}
}  // namespace row_shift

struct RowShift {
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  float max = kNone;  // the largest score so far; kNone: no visible key yet
  float m = kNone;    // the shift; of power_of_two: m / log 2, a whole number
  int32_t ties = 0;   // paper_capped: scores so far that tie with max

  // Scores at or above this count as ties in a tile whose largest is tile_max.
  EVENKEEL_HOST_DEVICE float tie_threshold(const ShiftParameters& p, float tile_max) const {
    const float top = p.rule == ShiftRule::paper ? tile_max : row_shift::larger(max, tile_max);
    return row_shift::subtract(top, p.tie_tolerance);
  }

  // Takes in one more tile: its largest visible score (kNone: the row sees none of it), how many of its
  // scores reach tie_threshold, and this row's own random number in (0, 1). m never falls.
  EVENKEEL_HOST_DEVICE void add_tile(const ShiftParameters& p, float tile_max, int32_t tile_ties,
                                     float unit) {
    using namespace row_shift;
    constexpr float kLog2Float = static_cast<float>(kLog2);
    if (tile_max == kNone) return;
    const float before = max;
    max = larger(max, tile_max);
    switch (p.rule) {
      case ShiftRule::paper: {
        // Section 4 of the paper, on the tile alone, and the larger of that and what was there. Holes kept:
        // no tie across tiles is seen, a maximum of 0 is not moved, exp(m) may underflow.
        float adjusted = tile_max;
        if (tile_ties > 1)
          adjusted = tile_max > 0 ? multiply(p.beta, tile_max) : tile_max < 0 ? 0.0f : tile_max;
        m = larger(m, adjusted);
        break;
      }
      case ShiftRule::paper_capped: {
        // Earlier ties stand while the maximum moves by no more than the tolerance. The shift begins with the tile that
        // completes the tie: what came before is scaled by exp(m before - m now), not rounded again.
        ties = (subtract(max, before) <= p.tie_tolerance ? ties : 0) + tile_ties;
        float moved = max;
        if (ties > 1) {
          // Bounded on both sides, each bound the row's own: a common one would be a fixed offset, with a
          // bias of its own (the paper's Appendix C). The lower one moves the largest probability to 0.5 ..
          // 0.84.
          const float least = multiply(kLog2Float, add(0.25f, multiply(0.75f, unit)));
          const float most = larger(least, multiply(p.cap, add(0.5f, multiply(0.5f, unit))));
          const float wanted = max > 0 ? multiply(subtract(p.beta, 1.0f), max) : -max;
          moved = add(moved, smaller(larger(wanted, least), most));
        }
        m = larger(m, moved);
        break;
      }
      case ShiftRule::dither:
        m = add(max, multiply(unit, kLog2Float));
        break;
      case ShiftRule::power_of_two:
        m = ceilf(multiply(max, static_cast<float>(1 / kLog2)));
        break;
      case ShiftRule::row_max:
      case ShiftRule::lagging_max:
        m = max;
        break;
    }
  }
};

}  // namespace evenkeel

#undef EVENKEEL_ON
