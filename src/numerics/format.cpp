#include "numerics/format.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace evenkeel {
namespace {

std::string spell_out(int exponent_bits, int significand_bits) {
  return "e" + std::to_string(exponent_bits) + "m" + std::to_string(significand_bits);
}

// The rows of kTapers, and for the last dot code the powers of two below the smallest normal number.
float decode_tapered(uint32_t code) {
  const float sign = code & 0x80 ? -1.0f : 1.0f;
  for (const Taper& row : kTapers) {
    if ((code & 0x7f) >> (7 - row.dot_bits) != static_cast<uint32_t>(row.dot_code)) continue;
    const int bits = 7 - row.dot_bits - row.exponent_bits;
    const uint32_t fraction = code & ((1u << bits) - 1);
    int exponent = 0;
    if (row.exponent_bits > 0) {
      const uint32_t field = code >> bits & ((1u << row.exponent_bits) - 1),
                     leading_one = 1u << (row.exponent_bits - 1);
      const auto size = static_cast<int>(field % leading_one + leading_one);
      exponent = field & leading_one ? -size : size;
    }
    if (exponent == max_exponent(kHif8) && fraction != 0)
      return sign * std::numeric_limits<float>::infinity();
    return sign * std::ldexp(static_cast<float>((1u << bits) + fraction), exponent - bits);
  }
  const auto number = static_cast<int>(code & 7);
  if (number == 0) return sign < 0 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  return sign * power_of_two(kTaperedLeast - 1 + number);
}

// By search: 256 codes. Both zeros have the one code there is.
uint32_t encode_tapered(float value) {
  for (uint32_t code = 0; code < 256; ++code) {
    const float number = decode_tapered(code);
    if (number == value || (std::isnan(number) && std::isnan(value))) return code;
  }
  return 0;
}

}  // namespace

std::string format_names() {
  std::string names;
  for (const NamedFormat& row : kNamedFormats) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

std::string to_string(Format f) {
  for (const NamedFormat& row : kNamedFormats)
    if (row.format == f) return std::string(row.name);
  return spell_out(f.exponent_bits, f.significand_bits);
}

Format parse_format(std::string_view text) {
  for (const NamedFormat& row : kNamedFormats)
    if (row.name == text) return row.format;
  int exponent_bits = 0, significand_bits = 0;
  const char* end = text.data() + text.size();
  if (text.size() >= 4 && text[0] == 'e') {
    auto [after_e, error] = std::from_chars(text.data() + 1, end, exponent_bits);
    if (error == std::errc() && after_e != end && *after_e == 'm') {
      auto [after_m, error_m] = std::from_chars(after_e + 1, end, significand_bits);
      // One spelling per format: e04m3 would slip past the table's e4m3 and mean another format.
      if (error_m == std::errc() && after_m == end && exponent_bits >= 2 && exponent_bits <= 8 &&
          significand_bits >= 1 && significand_bits <= 23 &&
          text == spell_out(exponent_bits, significand_bits))
        return Format{exponent_bits, significand_bits};
    }
  }
  throw std::invalid_argument("unknown format '" + std::string(text) + "': expected " + format_names() +
                              ", or eXmY with exponent bits X in 2..8 and significand bits Y in 1..23");
}

float decode(Format f, uint32_t code) {
  if (f.tapered) return decode_tapered(code);
  if (is_whole(f)) {
    const uint32_t sign_bit = 1u << f.significand_bits, low = code & (2 * sign_bit - 1);
    return static_cast<float>(static_cast<int32_t>(low ^ sign_bit) - static_cast<int32_t>(sign_bit));
  }
  const int m = f.significand_bits;
  const uint32_t fraction = code & ((1u << m) - 1);
  const uint32_t exponent_mask = (1u << f.exponent_bits) - 1;
  const uint32_t exponent = (code >> m) & exponent_mask;
  const float sign = (code >> (m + f.exponent_bits)) & 1 ? -1.0f : 1.0f;
  if (exponent == exponent_mask) {
    if (f.has_infinity && fraction == 0) return sign * std::numeric_limits<float>::infinity();
    if (f.has_infinity || (f.has_nan && fraction == (1u << m) - 1))
      return std::copysign(std::numeric_limits<float>::quiet_NaN(), sign);
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), min_exponent(f) - m);
  return sign *
         std::ldexp(static_cast<float>((1u << m) + fraction), static_cast<int>(exponent) - bias(f) - m);
}

uint32_t encode(Format f, float value) {
  if (f.tapered) return encode_tapered(value);
  if (is_whole(f))
    return std::isfinite(value)
               ? static_cast<uint32_t>(static_cast<int32_t>(value)) & ((2u << f.significand_bits) - 1)
               : 0;
  const int m = f.significand_bits;
  const uint32_t exponent_mask = (1u << f.exponent_bits) - 1;
  const uint32_t sign = std::signbit(value) ? 1u << (m + f.exponent_bits) : 0;
  if (!f.has_nan && !std::isfinite(value)) return sign;
  if (std::isnan(value) || (std::isinf(value) && !f.has_infinity)) {
    // IEEE: quiet NaN, top fraction bit set. OCP: the all-ones code.
    const uint32_t fraction = f.has_infinity ? 1u << (m - 1) : (1u << m) - 1;
    return sign | exponent_mask << m | fraction;
  }
  if (std::isinf(value)) return sign | exponent_mask << m;
  if (value == 0) return sign;
  const int exponent = std::max(std::ilogb(value), min_exponent(f));
  // Significand as an integer with its leading one at bit m (below it for subnormals).
  const auto scaled = static_cast<uint32_t>(std::ldexp(std::fabs(value), m - exponent));
  if (scaled >> m == 0) return sign | scaled;
  return sign | static_cast<uint32_t>(exponent + bias(f)) << m | (scaled & ((1u << m) - 1));
}

}  // namespace evenkeel
