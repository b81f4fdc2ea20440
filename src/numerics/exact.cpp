#include "numerics/exact.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace evenkeel {

void ExactSum::add_shifted(uint64_t significand, int exponent, bool negative) {
  (negative ? saw_minus_ : saw_plus_) = true;
  if (significand == 0) return;
  saw_minus_ = saw_plus_ = true;  // from now on a zero is a cancellation
  const int position = exponent - kLowestExponent;
  const auto wide = static_cast<unsigned __int128>(significand) << (position % 64);
  uint64_t part[2] = {static_cast<uint64_t>(wide), static_cast<uint64_t>(wide >> 64)};
  uint64_t carry = 0;
  for (int i = position / 64, k = 0; i < kWords; ++i, ++k) {
    const uint64_t operand = k < 2 ? part[k] : 0;
    const auto sum = negative ? static_cast<unsigned __int128>(words_[i]) - operand - carry
                              : static_cast<unsigned __int128>(words_[i]) + operand + carry;
    words_[i] = static_cast<uint64_t>(sum);
    carry = static_cast<uint64_t>(sum >> 64) & 1;
  }
}

void ExactSum::note_special(float x) {
  nan_ |= std::isnan(x);
  plus_infinity_ |= std::isinf(x) && x > 0;
  minus_infinity_ |= std::isinf(x) && x < 0;
}

void ExactSum::add(float x) {
  if (!std::isfinite(x)) return note_special(x);
  const FloatParts p = split(x);
  add_shifted(p.significand, p.exponent, std::signbit(x));
}

void ExactSum::add_product(float a, float b) {
  // The float product of a NaN or an infinity with anything is right, if not its finite size.
  if (!std::isfinite(a) || !std::isfinite(b)) return note_special(a * b);
  const FloatParts p = split(a), q = split(b);
  add_shifted(uint64_t{p.significand} * q.significand, p.exponent + q.exponent,
              std::signbit(a) != std::signbit(b));
}

void ExactSum::add(const ExactSum& other) {
  uint64_t carry = 0;
  for (int i = 0; i < kWords; ++i) {
    const auto sum = static_cast<unsigned __int128>(words_[i]) + other.words_[i] + carry;
    words_[i] = static_cast<uint64_t>(sum);
    carry = static_cast<uint64_t>(sum >> 64);
  }
  nan_ |= other.nan_;
  plus_infinity_ |= other.plus_infinity_;
  minus_infinity_ |= other.minus_infinity_;
  saw_plus_ |= other.saw_plus_;
  saw_minus_ |= other.saw_minus_;
}

void ExactSum::subtract(const ExactSum& other) {
  ExactSum negated = other;
  uint64_t carry = 1;
  for (uint64_t& word : negated.words_) {
    word = ~word + carry;
    carry = carry && word == 0;
  }
  std::swap(negated.plus_infinity_, negated.minus_infinity_);
  std::swap(negated.saw_plus_, negated.saw_minus_);
  add(negated);
}

std::optional<float> ExactSum::special() const {
  if (nan_ || (plus_infinity_ && minus_infinity_)) return std::numeric_limits<float>::quiet_NaN();
  if (plus_infinity_) return std::numeric_limits<float>::infinity();
  if (minus_infinity_) return -std::numeric_limits<float>::infinity();
  return std::nullopt;
}

bool ExactSum::is_zero() const {
  return std::all_of(words_.begin(), words_.end(), [](uint64_t word) { return word == 0; });
}

int ExactSum::sign() const { return is_zero() ? 0 : is_negative() ? -1 : 1; }

ExactSum::Words ExactSum::magnitude() const {
  Words result = words_;
  if (!is_negative()) return result;
  uint64_t carry = 1;
  for (uint64_t& word : result) {
    word = ~word + carry;
    carry = carry && word == 0;
  }
  return result;
}

int ExactSum::leading() const {
  const Words words = magnitude();
  for (int i = kWords - 1; i >= 0; --i)
    if (words[i] != 0) return kLowestExponent + 64 * i + 63 - std::countl_zero(words[i]);
  return kLowestExponent;
}

int ExactSum::trailing() const {
  // Negation keeps the lowest one where it is.
  for (int i = 0; i < kWords; ++i)
    if (words_[i] != 0) return kLowestExponent + 64 * i + std::countr_zero(words_[i]);
  return kLowestExponent;
}

bool ExactSum::bit(int exponent) const {
  if (exponent < kLowestExponent || exponent > kHighestExponent) return false;
  const int position = exponent - kLowestExponent;
  return magnitude()[position / 64] >> (position % 64) & 1;
}

bool ExactSum::any_below(int exponent) const { return !is_zero() && trailing() < exponent; }

std::string ExactSum::digits(int highest, int lowest) const {
  const Words words = magnitude();
  std::string text;
  for (int exponent = highest; exponent >= lowest; --exponent) {
    const int position = exponent - kLowestExponent;
    const bool outside = position < 0 || position >= 64 * kWords;
    text += !outside && (words[position / 64] >> (position % 64) & 1) ? '1' : '0';
  }
  return text;
}

double ExactSum::to_double() const {
  if (const auto x = special()) return *x;
  if (is_zero()) return saw_minus_ && !saw_plus_ ? -0.0 : 0.0;
  // 53 bits from the leading one; even the smallest product is far above double's subnormals.
  const int step = leading() - 52;
  uint64_t kept = 0;
  for (int i = 52; i >= 0; --i) kept = kept << 1 | (bit(step + i) ? 1 : 0);
  if (bit(step - 1) && (any_below(step - 1) || (kept & 1))) ++kept;
  const double result = std::ldexp(static_cast<double>(kept), step);
  return is_negative() ? -result : result;
}

ExactRounding ExactSum::round(const Rounding& rounding, uint32_t random) const {
  const Format f = rounding.format;
  ExactRounding r;
  r.step = std::ilogb(min_subnormal(f)) - rounding.scale_exponent;
  if (const auto x = special()) {
    r.value = round_to(rounding, *x);
    return r;
  }
  if (is_zero()) {
    const bool cancels = saw_minus_ && saw_plus_;
    const bool minus = cancels ? rounding.mode == RoundingMode::down : saw_minus_;
    r.value = minus ? -0.0f : 0.0f;
    return r;
  }

  const bool negative = is_negative();
  const int scaled_leading = leading() + rounding.scale_exponent;
  r.step = gap_exponent(f, scaled_leading) - rounding.scale_exponent;
  for (int exponent = leading(); exponent >= r.step; --exponent)
    r.kept = r.kept << 1 | (bit(exponent) ? 1 : 0);
  r.round_bit = bit(r.step - 1);
  r.sticky_bit = any_below(r.step - 1);
  switch (rounding.mode) {
    case RoundingMode::nearest_even:
      r.up = r.round_bit && (r.sticky_bit || (r.kept & 1));
      break;
    case RoundingMode::nearest_away:
      r.up = r.round_bit;
      break;
    case RoundingMode::toward_zero:
      r.up = false;
      break;
    case RoundingMode::up:
      r.up = !r.exact() && !negative;
      break;
    case RoundingMode::down:
      r.up = !r.exact() && negative;
      break;
    case RoundingMode::stochastic: {
      // The first 32 bits that were cut off, as a fraction of a step, against a uniform number.
      uint32_t fraction = 0;
      for (int i = 1; i <= 32; ++i) fraction = fraction << 1 | (bit(r.step - i) ? 1 : 0);
      r.up = random < fraction;
      break;
    }
  }

  // At most 25 bits: exact in double.
  const double scaled = std::ldexp(static_cast<double>(r.kept + r.up), r.step + rounding.scale_exponent);
  r.overflow = scaled > max_finite(f);
  double result = std::ldexp(scaled, -rounding.scale_exponent);
  if (r.overflow) {
    // Directed modes stop at the largest number on the side they round to.
    const bool stops = saturates(rounding) || rounding.mode == RoundingMode::toward_zero ||
                       (rounding.mode == RoundingMode::up && negative) ||
                       (rounding.mode == RoundingMode::down && !negative);
    result = stops            ? std::ldexp(static_cast<double>(max_finite(f)), -rounding.scale_exponent)
             : f.has_infinity ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  }
  r.value = static_cast<float>(std::copysign(result, negative ? -1.0 : 1.0));
  return r;
}

std::string point_digits(const ExactSum& sum, int highest, int point, int lowest) {
  std::string text = sum.digits(std::max(highest, point), point);
  if (lowest < point) text += "." + sum.digits(point - 1, lowest);
  return text;
}

}  // namespace evenkeel
