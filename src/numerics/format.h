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
  int exponent_bits;     // 2..8; 0: whole numbers, which are stored as subnormals are, in steps of 1
  int significand_bits;  // stored fraction bits, without the implicit leading one: 1..23
  // true: IEEE 754 style, the topmost exponent holds Inf and NaN.
  // false: OCP "fn" style, the topmost exponent holds numbers too, only the all-ones code is NaN, no Inf.
  bool has_infinity = true;
  // false: every code is a number. Beyond the largest there is nothing else, so that roundings stop at it.
  bool has_nan = true;
  // HiFloat8: fewer significand bits the farther the exponent is from 0 (kTapers).
  bool tapered = false;

  friend constexpr bool operator==(const Format&, const Format&) = default;
};

inline constexpr Format kFp32{8, 23};
inline constexpr Format kTf32{8, 10};
inline constexpr Format kBf16{8, 7};
inline constexpr Format kFp16{5, 10};
inline constexpr Format kE4m3{4, 3, /*has_infinity=*/false};        // OCP OFP8 1.0, "e4m3fn"
inline constexpr Format kE5m2{5, 2};                                // OCP OFP8 1.0
inline constexpr Format kE2m3{2, 3, false, /*has_nan=*/false};      // OCP MX 1.0: FP6
inline constexpr Format kE3m2{3, 2, false, false};                  // OCP MX 1.0: FP6
inline constexpr Format kE2m1{2, 1, false, false};                  // OCP MX 1.0: FP4
inline constexpr Format kInt8{0, 7, false, false};                  // -127..127; two's complement
inline constexpr Format kInt4{0, 3, false, false};                  // -7..7
inline constexpr Format kHif8{4, 3, true, true, /*tapered=*/true};  // HiFloat8, arXiv 2409.16626

struct NamedFormat {
  std::string_view name;
  Format format;
};
inline constexpr NamedFormat kNamedFormats[] = {
    {"fp32", kFp32}, {"tf32", kTf32}, {"bf16", kBf16}, {"fp16", kFp16}, {"e4m3", kE4m3}, {"e5m2", kE5m2},
    {"e2m3", kE2m3}, {"e3m2", kE3m2}, {"e2m1", kE2m1}, {"int8", kInt8}, {"int4", kInt4}, {"hif8", kHif8}};

// HiFloat8: after the sign comes a prefix code (the dot field) that says how many bits of exponent follow: a sign and
// the magnitude without its leading one. The rest of the eight bits is the significand. Without an exponent's bits and
// with the last code, the three remaining bits count the powers of two below the smallest normal number.
struct Taper {
  int dot_code, dot_bits;
  int exponent_bits;
  int largest_exponent;  // in magnitude
};
inline constexpr Taper kTapers[] = {{1, 4, 0, 0}, {1, 3, 1, 1}, {1, 2, 2, 3}, {2, 2, 3, 7}, {3, 2, 4, 15}};
inline constexpr int kTaperedLeast = -22;  // exponent of HiFloat8's smallest number

constexpr bool is_whole(Format f) { return f.exponent_bits == 0; }

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

// REQUIRES: neither whole numbers nor tapered.
constexpr int bias(Format f) { return (1 << (f.exponent_bits - 1)) - 1; }
// Of the smallest normal number. Whole numbers are all below it.
constexpr int min_exponent(Format f) {
  return f.tapered ? -15 : is_whole(f) ? f.significand_bits : 1 - bias(f);
}
constexpr int max_exponent(Format f) {
  return f.tapered ? 15 : is_whole(f) ? f.significand_bits - 1 : bias(f) + (f.has_infinity ? 0 : 1);
}
constexpr int code_bits(Format f) { return f.tapered ? 8 : 1 + f.exponent_bits + f.significand_bits; }
// The place before the point of a number whose leading one is at 2^leading: below the smallest normal number it stays.
constexpr int point_exponent(Format f, int leading) {
  const int least = f.tapered ? kTaperedLeast : min_exponent(f);
  return leading > least ? leading : least;
}
// Exponent of the gap between neighbours there.
constexpr int gap_exponent(Format f, int leading) {
  const int exponent = point_exponent(f, leading);
  if (!f.tapered) return exponent - f.significand_bits;
  const int size = exponent < 0 ? -exponent : exponent;
  for (const Taper& row : kTapers)
    if (size <= row.largest_exponent) return exponent - (7 - row.dot_bits - row.exponent_bits);
  return exponent > 0 ? exponent - 1 : exponent;  // beyond the largest number; powers of two alone
}
// Distance from 1 to the next number.
constexpr float epsilon(Format f) { return power_of_two(gap_exponent(f, 0)); }
constexpr float min_normal(Format f) { return power_of_two(min_exponent(f)); }
constexpr float min_subnormal(Format f) {
  return power_of_two(f.tapered ? kTaperedLeast : min_exponent(f) - f.significand_bits);
}
constexpr float max_finite(Format f) {
  if (f.tapered) return power_of_two(max_exponent(f));  // the code above it is Inf
  if (is_whole(f)) return power_of_two(f.significand_bits) - 1.0f;
  // All-ones significand; one code less where that code is the NaN.
  const float top = 2.0f - epsilon(f) - (f.has_infinity || !f.has_nan ? 0.0f : epsilon(f));
  return top * power_of_two(max_exponent(f));
}

// What the largest value of a block is scaled to: the largest number, or of tapered formats the largest that has all its
// significand bits.
constexpr float scale_target(Format f) {
  return f.tapered ? power_of_two(kTapers[2].largest_exponent) * (2.0f - epsilon(f)) : max_finite(f);
}
constexpr int scale_target_exponent(Format f) {
  return f.tapered ? kTapers[2].largest_exponent : max_exponent(f);
}

static_assert(epsilon(kBf16) == 0.0078125f && epsilon(kFp32) == 0x1p-23f);
static_assert(max_finite(kE4m3) == 448.0f && max_finite(kE5m2) == 57344.0f && max_finite(kFp16) == 65504.0f);
static_assert(max_finite(kFp32) == 0x1.fffffep127f && max_finite(kBf16) == 0x1.fep127f);
static_assert(min_subnormal(kE4m3) == 0x1p-9f && min_subnormal(kE5m2) == 0x1p-16f);
static_assert(min_subnormal(kFp32) == 0x1p-149f && min_subnormal(kBf16) == 0x1p-133f);
static_assert(max_finite(kE2m1) == 6.0f && max_finite(kE2m3) == 7.5f && max_finite(kE3m2) == 28.0f);
static_assert(max_finite(kInt8) == 127.0f && max_finite(kInt4) == 7.0f && min_subnormal(kInt8) == 1.0f);
static_assert(max_finite(kHif8) == 32768.0f && min_subnormal(kHif8) == 0x1p-22f && epsilon(kHif8) == 0.125f &&
              scale_target(kHif8) == 15.0f);

// "bf16" for a named row, else "e8m2". e4m3, e5m2, e2m3, e3m2 and e2m1 name the OCP rows.
std::string to_string(Format f);
std::string format_names();  // "fp32, tf32, bf16, ..."

// A name of the table or eXmY with 2 <= X <= 8 and 1 <= Y <= 23 (IEEE style).
// Throws std::invalid_argument that lists what is known.
Format parse_format(std::string_view text);

// The value of a code (its low code_bits) and the code of a value.
float decode(Format f, uint32_t code);
// REQUIRES: value is a number of the format, or NaN, or Inf where the format has it (else: the NaN code, and 0 where
// there is none). A format without a negative zero gives both zeros one code.
uint32_t encode(Format f, float value);

}  // namespace evenkeel
