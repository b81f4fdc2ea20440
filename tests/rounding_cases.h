// What the tests of formats and roundings share: formats, modes, samples where roundings change, and a count of mismatches.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "numerics/format.h"
#include "numerics/rounding.h"
#include "sanitized.h"

namespace evenkeel::rounding_cases {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline constexpr RoundingMode kDeterministic[] = {RoundingMode::nearest_even, RoundingMode::nearest_away,
                                                  RoundingMode::toward_zero, RoundingMode::up,
                                                  RoundingMode::down};
inline constexpr RoundingMode kAllModes[] = {RoundingMode::nearest_even, RoundingMode::nearest_away,
                                             RoundingMode::toward_zero,  RoundingMode::up,
                                             RoundingMode::down,         RoundingMode::stochastic};

// Every named format, and rows that stretch each field: widest and narrowest exponent and significand, and the
// other kind of topmost exponent for both FP8 formats. Also formats in use below BF16.
inline const std::vector<Format>& formats() {
  static const std::vector<Format> all = [] {
    std::vector<Format> list;
    for (const NamedFormat& row : kNamedFormats) list.push_back(row.format);
    for (Format f : {Format{8, 2}, Format{5, 7}, Format{2, 1}, Format{3, 4}, Format{6, 9}, Format{8, 1},
                     Format{8, 22}, Format{7, 23}, Format{2, 23}, Format{4, 3}, Format{5, 2, false},
                     Format{2, 3, false}, Format{7, 12, false}})
      list.push_back(f);
    return list;
  }();
  return all;
}

inline uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
inline float from_bits(uint32_t b) { return std::bit_cast<float>(b); }

inline std::string describe(const Rounding& r, float x, float expected, float found) {
  return fmt::format("{}{}: x = {:a} ({:08x}): expected {:a} ({:08x}), found {:a} ({:08x})", to_string(r),
                     r.format.has_infinity ? "" : " (no Inf)", x, bits(x), expected, bits(expected), found,
                     bits(found));
}

// Counts, and keeps the first case for the message: a fault shows in millions of cases at once.
struct Mismatches {
  int64_t cases = 0, count = 0;
  std::string first;
  void check(bool good, const Rounding& r, float x, float expected, float found) {
    ++cases;
    if (!good && count++ == 0) first = describe(r, x, expected, found);
  }
  // Same bits; a NaN must be a NaN, be quiet and have the sign (payloads are ours alone).
  void check_same(const Rounding& r, float x, float expected, float found) {
    const bool good = std::isnan(expected) ? std::isnan(found) && (bits(found) & 0x00400000u)
                                           : bits(expected) == bits(found);
    check(good, r, x, expected, found);
  }
  void check_bits(const Rounding& r, float x, float expected, float found) {
    check(bits(expected) == bits(found), r, x, expected, found);
  }
};
#define EXPECT_NO_MISMATCH(m) EXPECT_EQ((m).count, 0) << (m).first << "\n  in " << (m).cases << " cases"

// All exponents (subnormals, Inf and NaN are two of them) with the significands where roundings change: each
// single bit, runs of ones from the top, and their neighbours; and random ones. Both signs. About 85,000 (with a sanitizer every third exponent, 0 and 255 among them).
inline const std::vector<float>& stratified_sample() {
  static const std::vector<float> sample = [] {
    std::mt19937_64 generator(20240101);
    std::vector<float> list;
    for (uint32_t exponent = 0; exponent < 256; exponent += kSanitized ? 3 : 1) {
      std::vector<uint32_t> significands = {0, 1, 2, 3, 0x7fffff, 0x7ffffe, 0x555555, 0x2aaaaa};
      for (int k = 0; k < 23; ++k)
        for (uint32_t pattern : {1u << k, 3u << k, 0x7fffffu & (0x7fffffu << k)})
          for (uint32_t near : {pattern - 1, pattern, pattern + 1}) significands.push_back(near & 0x7fffff);
      for (int k = 0; k < 24; ++k) significands.push_back(static_cast<uint32_t>(generator()) & 0x7fffff);
      std::sort(significands.begin(), significands.end());
      significands.erase(std::unique(significands.begin(), significands.end()), significands.end());
      for (uint32_t s : significands)
        for (uint32_t sign : {0u, 0x80000000u}) list.push_back(from_bits(sign | exponent << 23 | s));
    }
    return list;
  }();
  return sample;
}

// Numbers of the format, the middles between neighbours, and the floats next to both; the end of the range
// with them. Divided by 2^scale.
inline std::vector<float> neighbour_sample(Format f, int scale) {
  std::mt19937_64 generator(7);
  // Of numbers that are not negative; tapered codes are not in their order.
  const uint32_t codes = f.tapered ? 128 : encode(f, max_finite(f)) + 1;
  std::vector<uint32_t> chosen;
  for (uint32_t i = 0; i < std::min(codes, 300u); ++i) chosen.insert(chosen.end(), {i, codes - 1 - i});
  for (int i = 0; i < 3000 && codes > 600; ++i) chosen.push_back(static_cast<uint32_t>(generator() % codes));
  std::vector<float> list;
  for (uint32_t code : chosen) {
    const double value = decode(f, code);
    const double gap = ulp(f, static_cast<float>(value));
    for (double v : {value, value + gap / 2, value + gap, gap / 2, gap / 4}) {
      const auto x = static_cast<float>(std::ldexp(v, -scale));
      for (int step = -1; step <= 1; ++step) {
        const uint32_t b = bits(x) + static_cast<uint32_t>(step);
        if (b > 0x7f800000u) continue;
        list.insert(list.end(), {from_bits(b), -from_bits(b)});
      }
    }
  }
  return list;
}

inline std::vector<float> sample_for(const Rounding& r) {
  std::vector<float> sample = neighbour_sample(r.format, r.scale_exponent);
  sample.insert(sample.end(), stratified_sample().begin(), stratified_sample().end());
  return sample;
}

}  // namespace evenkeel::rounding_cases
