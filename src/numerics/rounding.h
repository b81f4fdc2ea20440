// Rounding a float to a format: the slow, obvious definition, one value at a time, integer arithmetic only.
// round_array.h is the fast version and is tested against this one.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

#include "numerics/format.h"
#include "numerics/shared_scale.h"

namespace evenkeel {

enum class RoundingMode { nearest_even, nearest_away, toward_zero, up, down, stochastic };
inline constexpr std::string_view kRoundingModeNames[] = {"nearest_even", "nearest_away", "toward_zero",
                                                          "up",           "down",         "stochastic"};

// Everything that decides the result of a rounding, besides the value and (stochastic) the random bits.
struct Rounding {
  Format format = kFp32;
  RoundingMode mode = RoundingMode::nearest_even;
  // What lies beyond max_finite: Inf (NaN where the format has none), or with saturate max_finite, for Inf too.
  bool saturate = false;
  // The value is multiplied by 2^scale_exponent before the rounding and divided after it: FP8 kernels scale
  // probabilities so (FlashAttention-3: 2^8), to use the format's range.
  int scale_exponent = 0;
  // A scale that a block of values shares, found from the values: shared_scale.h. Such a rounding saturates.
  SharedScale shared = {};

  friend constexpr bool operator==(const Rounding&, const Rounding&) = default;
};

// Does nothing to any float?
constexpr bool is_identity(const Rounding& r) {
  return r.format == kFp32 && !r.saturate && r.scale_exponent == 0 && r.shared == SharedScale{};
}
// Does it stop at the largest number of the format? A format without Inf and NaN leaves no choice.
constexpr bool saturates(const Rounding& r) {
  return r.saturate || !(r.format.has_infinity || r.format.has_nan);
}

// FORMAT[^SHIFT][/MODE][/saturate], as in `bf16`, `e4m3^8/saturate`, `row_sum=e5m2/stochastic`. With a shared scale
// FORMAT*GROUP[@SCALE][*OUTER][/MODE], as in `e4m3*block32@e8m0`, `int8*tile`, `e2m1*block16@e4m3*tensor`.
// Throws std::invalid_argument saying what was expected.
Rounding parse_rounding(std::string_view text);
std::string to_string(const Rounding& r);
RoundingMode parse_rounding_mode(std::string_view text);

// x rounded. NaN stays NaN (quiet). Zeros keep their sign, also in a format that has none or one zero. `random` is used by
// stochastic alone: 32 uniform bits. A value between two neighbours goes to the upper one (in magnitude) with probability
// equal to its position between them. That is exact where at most 32 bits are discarded. Otherwise the probability is
// rounded down to a multiple of 2^-32 (only values under 2^-8 of a format's smallest subnormal discard more).
// A shared scale is the block's, not the value's: round_block of shared_scale.h, not this function, applies it.
float round_to(const Rounding& r, float x, uint32_t random = 0);

// One step of the target format at x: the gap between its neighbours there (the subnormal gap near zero).
float ulp(Format f, float x);

// Number of representable values between a and b, signed: (b - a) in units in the last place.
// REQUIRES: both are numbers of the format.
int64_t ulp_distance(Format f, float a, float b);

}  // namespace evenkeel
