#include "numerics/rounding.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <stdexcept>

#include "numerics/names.h"

namespace evenkeel {
namespace {

// Exponent of the gap between neighbours of the format around a nonzero magnitude.
int gap_around(Format f, FloatParts p) {
  return gap_exponent(f, 31 - std::countl_zero(p.significand) + p.exponent);
}

// Does the magnitude go up from `kept`, given the `discarded` low bits of which there are `shift`?
bool rounds_up(RoundingMode mode, bool negative, uint64_t kept, uint64_t discarded, int shift,
               uint32_t random) {
  if (discarded == 0) return false;
  const uint64_t half = uint64_t{1} << (shift - 1);
  switch (mode) {
    case RoundingMode::nearest_even:
      return discarded > half || (discarded == half && (kept & 1));
    case RoundingMode::nearest_away:
      return discarded >= half;
    case RoundingMode::toward_zero:
      return false;
    case RoundingMode::up:
      return !negative;
    case RoundingMode::down:
      return negative;
    case RoundingMode::stochastic: {
      // discarded / 2^shift as a fraction of 2^32, against a uniform number below it.
      const uint64_t fraction = shift <= 32 ? discarded << (32 - shift) : discarded >> (shift - 32);
      return random < fraction;
    }
  }
  return false;
}

}  // namespace

float round_to(const Rounding& r, float x, uint32_t random) {
  const Format f = r.format;
  const bool negative = std::signbit(x);
  if (std::isnan(x)) return std::bit_cast<float>(std::bit_cast<uint32_t>(x) | 0x00400000u);
  // Beyond the format's range: Inf, NaN without Inf, or the largest number.
  const float overflow = saturates(r)     ? std::ldexp(max_finite(f), -r.scale_exponent)
                         : f.has_infinity ? std::numeric_limits<float>::infinity()
                                          : std::numeric_limits<float>::quiet_NaN();
  if (std::isinf(x)) return std::copysign(overflow, x);
  if (x == 0) return x;

  FloatParts p = split(x);
  p.exponent += r.scale_exponent;
  const int gap = gap_around(f, p);
  // Shifts past 62 would leave nothing of 24 bits: 62 keeps "something was discarded" and its size class.
  const int shift = std::min(gap - p.exponent, 62);
  uint64_t kept = p.significand;
  if (shift > 0) {
    kept = uint64_t{p.significand} >> shift;
    const uint64_t discarded = p.significand & ((uint64_t{1} << shift) - 1);
    if (rounds_up(r.mode, negative, kept, discarded, shift, random)) ++kept;
  }
  // The result before the range check is kept * 2^step, at most 25 bits: exact in double.
  const int step = shift > 0 ? gap : p.exponent;
  const double magnitude = std::ldexp(static_cast<double>(kept), step);
  if (magnitude > max_finite(f)) {
    // Directed modes stop at the largest number on the side they round to.
    const bool stops = r.mode == RoundingMode::toward_zero || (r.mode == RoundingMode::up && negative) ||
                       (r.mode == RoundingMode::down && !negative);
    const float limit = stops ? std::ldexp(max_finite(f), -r.scale_exponent) : overflow;
    return std::copysign(limit, x);
  }
  return std::copysign(static_cast<float>(std::ldexp(magnitude, -r.scale_exponent)), x);
}

float ulp(Format f, float x) {
  if (!std::isfinite(x)) return std::numeric_limits<float>::quiet_NaN();
  return x == 0 ? min_subnormal(f) : power_of_two(gap_around(f, split(x)));
}

int64_t ulp_distance(Format f, float a, float b) {
  // Codes of one sign count the numbers from zero upward; tapered ones do not, and are counted.
  const auto ordinal = [&](float v) {
    auto magnitude = static_cast<int64_t>(encode(f, std::fabs(v)));
    if (f.tapered) {
      magnitude = 0;
      for (uint32_t code = 0; code < 128; ++code)
        magnitude += decode(f, code) > 0 && decode(f, code) <= std::fabs(v);
    }
    return std::signbit(v) ? -magnitude : magnitude;
  };
  return ordinal(b) - ordinal(a);
}

RoundingMode parse_rounding_mode(std::string_view text) {
  if (const auto mode = value_named<RoundingMode>(text, kRoundingModeNames)) return *mode;
  throw std::invalid_argument("unknown rounding mode '" + std::string(text) +
                              "': expected nearest_even, nearest_away, toward_zero, up, down or stochastic");
}

Rounding parse_rounding(std::string_view text) {
  Rounding r;
  size_t slash = text.find('/');
  std::string_view head = text.substr(0, slash);
  if (const size_t star = head.find('*'); star != std::string_view::npos) {
    r.shared = parse_shared_scale(head.substr(star + 1));
    head = head.substr(0, star);
  }
  if (const size_t caret = head.find('^'); caret != std::string_view::npos) {
    const std::string_view digits = head.substr(caret + 1);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), r.scale_exponent);
    if (error != std::errc() || end != digits.data() + digits.size() || digits.empty() ||
        r.scale_exponent < -32 || r.scale_exponent > 32)
      throw std::invalid_argument("bad scale '^" + std::string(digits) + "' in '" + std::string(text) +
                                  "': expected a whole exponent of two in -32..32, as in e4m3^8");
    head = head.substr(0, caret);
  }
  r.format = parse_format(head);
  if (r.shared != SharedScale{}) {
    if (r.format.exponent_bits == kFp32.exponent_bits || r.scale_exponent != 0)
      throw std::invalid_argument(
          "'" + std::string(text) +
          "': a shared scale goes with a format of less range than FP32 and without ^SHIFT, as "
          "in e4m3*block32");
    r.saturate = true;
  }
  bool mode_seen = false;
  while (slash != std::string_view::npos) {
    const size_t next = text.find('/', slash + 1);
    const std::string_view word =
        text.substr(slash + 1, next == std::string_view::npos ? next : next - slash - 1);
    if (word == "saturate" && !r.saturate && r.shared == SharedScale{}) {
      r.saturate = true;
    } else if (!mode_seen) {
      r.mode = parse_rounding_mode(word);
      mode_seen = true;
    } else {
      throw std::invalid_argument(
          "'" + std::string(word) + "' does not fit in '" + std::string(text) +
          "': expected FORMAT[^SHIFT][/MODE][/saturate] or FORMAT*GROUP[@SCALE][*OUTER][/MODE]");
    }
    slash = next;
  }
  return r;
}

std::string to_string(const Rounding& r) {
  std::string text = to_string(r.format);
  if (r.shared != SharedScale{}) text += "*" + to_string(r.shared);
  if (r.scale_exponent != 0) text += "^" + std::to_string(r.scale_exponent);
  if (r.mode != RoundingMode::nearest_even)
    text += "/" + std::string(kRoundingModeNames[static_cast<size_t>(r.mode)]);
  if (r.saturate && r.shared == SharedScale{}) text += "/saturate";
  return text;
}

}  // namespace evenkeel
