// What a floating-point format is: a row of data. Every limit is derived from the row.
// Knows nothing of rounding; values of every format are held in FP32, which contains them all.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace evenkeel {

struct Format {
  int exponent_bits;     // 2..8
  int significand_bits;  // stored fraction bits, without the implicit leading one: 1..23
  // true: IEEE 754 style, the topmost exponent holds Inf and NaN.
  // false: OCP "fn" style, the topmost exponent holds numbers too, only the all-ones code is NaN, no Inf.
  bool has_infinity = true;

  friend constexpr bool operator==(const Format&, const Format&) = default;
};

inline constexpr Format kFp32{8, 23};
inline constexpr Format kTf32{8, 10};
inline constexpr Format kBf16{8, 7};
inline constexpr Format kFp16{5, 10};
inline constexpr Format kE4m3{4, 3, /*has_infinity=*/false};  // OCP OFP8 1.0, "e4m3fn"
inline constexpr Format kE5m2{5, 2};                          // OCP OFP8 1.0

struct NamedFormat {
  std::string_view name;
  Format format;
};
inline constexpr NamedFormat kNamedFormats[] = {{"fp32", kFp32}, {"tf32", kTf32}, {"bf16", kBf16},
                                                {"fp16", kFp16}, {"e4m3", kE4m3}, {"e5m2", kE5m2}};

// 2^e as a float, exactly. REQUIRES: -149 <= e <= 127.
constexpr float power_of_two(int e) {
  return e >= -126 ? std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23)
                   : std::bit_cast<float>(uint32_t{1} << (e + 149));
}

// A finite float's magnitude as significand * 2^exponent, exactly.
struct FloatParts {
  uint32_t significand;  // 24 bits, fewer for subnormals
  int exponent;
};
constexpr FloatParts split(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x) & 0x7fffffffu, biased = bits >> 23;
  return biased == 0 ? FloatParts{bits, -149}
                     : FloatParts{(bits & 0x7fffffu) | 0x800000u, static_cast<int>(biased) - 150};
}

constexpr int bias(Format f) { return (1 << (f.exponent_bits - 1)) - 1; }
constexpr int min_exponent(Format f) { return 1 - bias(f); }  // of the smallest normal number
constexpr int max_exponent(Format f) { return bias(f) + (f.has_infinity ? 0 : 1); }
constexpr int code_bits(Format f) { return 1 + f.exponent_bits + f.significand_bits; }
// Distance from 1 to the next number.
constexpr float epsilon(Format f) { return power_of_two(-f.significand_bits); }
constexpr float min_normal(Format f) { return power_of_two(min_exponent(f)); }
constexpr float min_subnormal(Format f) { return power_of_two(min_exponent(f) - f.significand_bits); }
constexpr float max_finite(Format f) {
  // All-ones significand; one code less where that code is the NaN.
  const float top = 2.0f - epsilon(f) - (f.has_infinity ? 0.0f : epsilon(f));
  return top * power_of_two(max_exponent(f));
}

static_assert(epsilon(kBf16) == 0.0078125f && epsilon(kFp32) == 0x1p-23f);
static_assert(max_finite(kE4m3) == 448.0f && max_finite(kE5m2) == 57344.0f && max_finite(kFp16) == 65504.0f);
static_assert(max_finite(kFp32) == 0x1.fffffep127f && max_finite(kBf16) == 0x1.fep127f);
static_assert(min_subnormal(kE4m3) == 0x1p-9f && min_subnormal(kE5m2) == 0x1p-16f);
static_assert(min_subnormal(kFp32) == 0x1p-149f && min_subnormal(kBf16) == 0x1p-133f);

// "bf16" for a named row, else "e8m2". e4m3 and e5m2 name the OCP rows.
std::string to_string(Format f);

// A name of the table or eXmY with 2 <= X <= 8 and 1 <= Y <= 23 (IEEE style).
// Throws std::invalid_argument that lists what is known.
Format parse_format(std::string_view text);

// The value of a code (its low code_bits) and the code of a value.
float decode(Format f, uint32_t code);
// REQUIRES: value is a number of the format, or NaN, or Inf where the format has it (else: the NaN code).
uint32_t encode(Format f, float value);

}  // namespace evenkeel
