// Exact sums of floats and of their products: one wide fixed-point number that no addition can round.
// The slow, obvious definition behind `explain` and the tests. Knows nothing of how hardware adds.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "numerics/rounding.h"

namespace evenkeel {

// What a rounding did with an exact value. The magnitude, in steps of 2^step, is kept + what was cut off.
struct ExactRounding {
  float value = 0;          // the number of the format
  uint64_t kept = 0;        // magnitude in steps, truncated; at most 24 bits
  int step = 0;             // one unit in the last place is 2^step
  bool round_bit = false;   // the first bit that was cut off: half a step
  bool sticky_bit = false;  // is any bit after it set?
  bool up = false;          // the magnitude went up to kept + 1
  bool overflow = false;    // beyond max_finite: value is what the rounding makes of that

  bool exact() const { return !round_bit && !sticky_bit; }
  bool tie() const { return round_bit && !sticky_bit; }
};

// A two's complement integer of 640 bits; bit i weighs 2^(i - 298). The last bit is that of the smallest
// product of two floats, 2^-149 squared; 2^85 products of the largest still fit. An addition costs about ten
// word additions, a query as many again.
class ExactSum {
 public:
  static constexpr int kLowestExponent = -298;
  static constexpr int kHighestExponent = 340;  // below the sign bit

  // Inf and NaN are remembered apart, by the rules of IEEE 754 (Inf - Inf and Inf * 0 are NaN).
  void add(float x);
  void subtract(float x) { add(-x); }
  void add_product(float a, float b);
  void add(const ExactSum& other);
  void subtract(const ExactSum& other);

  // NaN or Inf where there is no finite sum. The other queries then concern the finite addends alone.
  std::optional<float> special() const;
  bool is_zero() const;
  int sign() const;  // -1, 0, 1

  // The magnitude's bits: exponents of the highest and of the lowest one, any single bit, any run as digits.
  int leading() const;   // REQUIRES: not zero
  int trailing() const;  // REQUIRES: not zero
  bool bit(int exponent) const;
  bool any_below(int exponent) const;                 // is a bit set whose exponent is less?
  std::string digits(int highest, int lowest) const;  // "0110": weights 2^highest down to 2^lowest

  double to_double() const;  // correctly rounded to nearest even; specials as they are
  // Correctly rounded, in one step, for every format and mode; `random` as in round_to. A zero has the sign
  // that IEEE 754 gives the sum: minus where all addends were -0, or where they cancel and the mode is down.
  ExactRounding round(const Rounding& rounding, uint32_t random = 0) const;

 private:
  static constexpr int kWords = 10;
  using Words = std::array<uint64_t, kWords>;

  void add_shifted(uint64_t significand, int exponent, bool negative);
  void note_special(float x);
  bool is_negative() const { return words_[kWords - 1] >> 63; }
  Words magnitude() const;

  Words words_{};  // lowest first
  bool nan_ = false, plus_infinity_ = false, minus_infinity_ = false;
  bool saw_plus_ = false,
       saw_minus_ = false;  // signs of addends, zeros included: they decide the sign of a zero
};

// Digits with a point after the place that weighs 2^point: "10.0101". From max(highest, point) down to
// min(lowest, point).
std::string point_digits(const ExactSum& sum, int highest, int point, int lowest);

}  // namespace evenkeel
