// Formats, rounding and random numbers against judges that share no code with them: the value formula, MPFR,
// the host code of the CUDA headers, the CPU's own FP16 conversion, Random123. Exhaustive where the domain is
// small.
//
// EVENKEEL_SLOW=1 adds the tests over all 2^32 floats: about 75 minutes of one core, on all cores.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpfr.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/threads.h"
#include "numerics/error_stats.h"
#include "numerics/format.h"
#include "numerics/random.h"
#include "numerics/round_array.h"
#include "numerics/round_array_kernels.h"
#include "numerics/rounding.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __has_include(<Random123/philox.h>)
#include <Random123/philox.h>
#define EVENKEEL_HAVE_RANDOM123
#endif
#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

namespace evenkeel {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

constexpr RoundingMode kDeterministic[] = {RoundingMode::nearest_even, RoundingMode::nearest_away,
                                           RoundingMode::toward_zero, RoundingMode::up, RoundingMode::down};
constexpr RoundingMode kAllModes[] = {RoundingMode::nearest_even, RoundingMode::nearest_away,
                                      RoundingMode::toward_zero,  RoundingMode::up,
                                      RoundingMode::down,         RoundingMode::stochastic};

// Every named format, and rows that stretch each field: widest and narrowest exponent and significand, the
// other kind of topmost exponent for both FP8 formats, and what people try below BF16.
const std::vector<Format>& formats() {
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

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
float from_bits(uint32_t b) { return std::bit_cast<float>(b); }

std::string describe(const Rounding& r, float x, float expected, float found) {
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

// --- samples
// -------------------------------------------------------------------------------------------------------

// All exponents (subnormals, Inf and NaN are two of them) with the significands where roundings change: each
// single bit, runs of ones from the top, and their neighbours; and random ones. Both signs. About 85,000.
const std::vector<float>& stratified_sample() {
  static const std::vector<float> sample = [] {
    std::mt19937_64 generator(20240101);
    std::vector<float> list;
    for (uint32_t exponent = 0; exponent < 256; ++exponent) {
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
std::vector<float> neighbour_sample(Format f, int scale) {
  std::mt19937_64 generator(7);
  const uint32_t codes = encode(f, max_finite(f)) + 1;  // of numbers that are not negative
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

std::vector<float> sample_for(const Rounding& r) {
  std::vector<float> sample = neighbour_sample(r.format, r.scale_exponent);
  sample.insert(sample.end(), stratified_sample().begin(), stratified_sample().end());
  return sample;
}

// --- oracle
// --------------------------------------------------------------------------------------------------------

// The definition with MPFR: scale so that the gap between neighbours is 1, round to a whole number, scale
// back. Takes nothing from the code under test but the fields of Rounding. Not thread-safe: one per thread.
class Oracle {
 public:
  Oracle() {
    mpfr_init2(x_, 64);
    mpfr_init2(limit_, 64);
  }
  ~Oracle() {
    mpfr_clear(x_);
    mpfr_clear(limit_);
  }
  Oracle(const Oracle&) = delete;

  // x may be any double: also what no float holds. REQUIRES: r.mode is deterministic.
  float round(const Rounding& r, double x) {
    const Format f = r.format;
    const int m = f.significand_bits;
    const int bias = (1 << (f.exponent_bits - 1)) - 1;
    const int low = 1 - bias, high = f.has_infinity ? bias : bias + 1;
    // Largest number: all significand bits one; without Inf the last of them zero.
    mpfr_set_ui_2exp(limit_, (2u << m) - (f.has_infinity ? 1 : 2), high - m, MPFR_RNDN);
    if (std::isnan(x)) return std::numeric_limits<float>::quiet_NaN();
    if (std::isinf(x)) return beyond(r, x < 0);
    mpfr_set_d(x_, x, MPFR_RNDN);
    if (mpfr_zero_p(x_)) return static_cast<float>(x);
    mpfr_mul_2si(x_, x_, r.scale_exponent, MPFR_RNDN);
    const int gap = std::max(static_cast<int>(mpfr_get_exp(x_)) - 1, low) - m;
    mpfr_mul_2si(x_, x_, -gap, MPFR_RNDN);
    switch (r.mode) {
      case RoundingMode::nearest_even:
        mpfr_roundeven(x_, x_);
        break;
      case RoundingMode::nearest_away:
        mpfr_round(x_, x_);
        break;
      case RoundingMode::toward_zero:
        mpfr_trunc(x_, x_);
        break;
      case RoundingMode::up:
        mpfr_ceil(x_, x_);
        break;
      case RoundingMode::down:
        mpfr_floor(x_, x_);
        break;
      case RoundingMode::stochastic:
        ADD_FAILURE() << "no oracle";
        break;
    }
    mpfr_mul_2si(x_, x_, gap, MPFR_RNDN);
    if (mpfr_cmpabs(x_, limit_) > 0) {
      const bool negative = mpfr_signbit(x_) != 0;
      const bool inward = r.mode == RoundingMode::toward_zero || (r.mode == RoundingMode::up && negative) ||
                          (r.mode == RoundingMode::down && !negative);
      return inward ? largest(r, negative) : beyond(r, negative);
    }
    mpfr_mul_2si(x_, x_, -r.scale_exponent, MPFR_RNDN);
    return mpfr_get_flt(x_, MPFR_RNDN);
  }

 private:
  float largest(const Rounding& r, bool negative) {
    mpfr_mul_2si(x_, limit_, -r.scale_exponent, MPFR_RNDN);
    const float value = mpfr_get_flt(x_, MPFR_RNDN);
    return negative ? -value : value;
  }
  float beyond(const Rounding& r, bool negative) {
    if (r.saturate) return largest(r, negative);
    if (!r.format.has_infinity) return std::numeric_limits<float>::quiet_NaN();
    return negative ? -kInf : kInf;
  }

  mpfr_t x_, limit_;
};

bool slow_tests() {
  const char* wish = std::getenv("EVENKEEL_SLOW");
  return wish && std::string(wish) == "1";
}
#define SKIP_UNLESS_SLOW() \
  if (!slow_tests()) GTEST_SKIP() << "over all 2^32 floats: set EVENKEEL_SLOW=1 to run it"

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// --- formats
// -------------------------------------------------------------------------------------------------------

TEST(Format, EveryCodeAgreesWithTheValueFormula) {
  int64_t codes_seen = 0;
  for (Format f : formats()) {
    if (code_bits(f) > 16) continue;
    const int m = f.significand_bits;
    const auto top = (1u << f.exponent_bits) - 1;
    const double bias_value = std::pow(2.0, f.exponent_bits - 1) - 1;
    for (uint32_t code = 0; code < 1u << code_bits(f); ++code) {
      ++codes_seen;
      const uint32_t fraction = code % (1u << m), exponent = code / (1u << m) % (top + 1);
      const bool negative = code / (1u << m) / (top + 1) == 1;
      const float value = decode(f, code);
      const std::string where = fmt::format("{} code {:#x}", to_string(f), code);
      ASSERT_EQ(std::signbit(value), negative) << where;
      const bool special = exponent == top && (f.has_infinity || fraction == (1u << m) - 1);
      if (special && (fraction != 0 || !f.has_infinity)) {
        ASSERT_TRUE(std::isnan(value)) << where;
        ASSERT_TRUE(std::isnan(decode(f, encode(f, value)))) << where;
        continue;
      }
      double expected = kInf;
      if (!special)
        expected = std::pow(2.0, std::max(exponent, 1u) - bias_value) *
                   (fraction / std::pow(2.0, m) + (exponent > 0));
      ASSERT_EQ(value, negative ? -expected : expected) << where;
      ASSERT_EQ(encode(f, value), code) << where;
      // It stays what it is, in every mode.
      for (RoundingMode mode : kAllModes) {
        ASSERT_EQ(bits(round_to({f, mode}, value, 0)), bits(value)) << where;
      }
    }
  }
  RecordProperty("codes", std::to_string(codes_seen));
}

TEST(Format, OcpTables) {
  EXPECT_EQ(decode(kE4m3, 0x7e), 448.0f);
  EXPECT_TRUE(std::isnan(decode(kE4m3, 0x7f)));
  EXPECT_EQ(decode(kE4m3, 0x01), 0x1p-9f);
  EXPECT_EQ(decode(kE4m3, 0x08), 0x1p-6f);
  EXPECT_EQ(encode(kE4m3, kInf), 0x7fu);
  EXPECT_EQ(decode(kE5m2, 0x7b), 57344.0f);
  EXPECT_EQ(decode(kE5m2, 0x7c), kInf);
  EXPECT_EQ(decode(kE5m2, 0x01), 0x1p-16f);
  EXPECT_EQ(decode(kFp16, 0x0001), 0x1p-24f);
  EXPECT_EQ(decode(kBf16, 0xc097), -4.71875f);
}

TEST(Format, UlpAndItsDistance) {
  EXPECT_EQ(ulp(kBf16, 1.0f), 0x1p-7f);
  EXPECT_EQ(ulp(kBf16, std::nextafter(1.0f, 0.0f)), 0x1p-8f);
  EXPECT_EQ(ulp(kBf16, -3.9f), 0x1p-6f);
  EXPECT_EQ(ulp(kE4m3, 0.0f), 0x1p-9f);
  EXPECT_EQ(ulp(kE4m3, 1e-30f), 0x1p-9f);
  EXPECT_EQ(ulp(kFp32, 0x1p-149f), 0x1p-149f);
  EXPECT_TRUE(std::isnan(ulp(kBf16, kInf)));
  EXPECT_EQ(ulp_distance(kBf16, 1.0f, 1.0f + 3 * 0x1p-7f), 3);
  EXPECT_EQ(ulp_distance(kBf16, 0x1p-133f, -0x1p-133f), -2);
  EXPECT_EQ(ulp_distance(kE4m3, 0.0f, 448.0f), 0x7e);
}

// --- names
// ---------------------------------------------------------------------------------------------------------

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "(no error)";
}

TEST(Names, FormatsGoThereAndBack) {
  for (const NamedFormat& row : kNamedFormats) {
    EXPECT_EQ(parse_format(row.name), row.format);
    EXPECT_EQ(to_string(row.format), row.name);
  }
  for (int e = 2; e <= 8; ++e)
    for (int m = 1; m <= 23; ++m) {
      if (e == 4 && m == 3) continue;  // the name is the OCP row's
      EXPECT_EQ(parse_format(to_string(Format{e, m})), (Format{e, m}));
    }
  EXPECT_EQ(to_string(parse_format("e8m7")), "bf16");
  EXPECT_FALSE(parse_format("e4m3").has_infinity);
}

TEST(Names, BadFormatsSayWhatIsKnown) {
  for (const char* text : {"", "bf", "BF16", "e9m2", "e1m2", "e5m0", "e5m24", "e5", "em", "e5m2x", "e-5m2",
                           "e5m-2", "e04m3", "e4m03", "e+5m2", "e5m2 ", " bf16", "e99999999999m2"}) {
    const std::string message = message_of([&] { parse_format(text); });
    EXPECT_NE(message.find(fmt::format("unknown format '{}'", text)), std::string::npos) << message;
    EXPECT_NE(message.find("fp32, tf32, bf16, fp16, e4m3, e5m2"), std::string::npos) << message;
    EXPECT_NE(message.find("2..8"), std::string::npos) << message;
  }
}

TEST(Names, RoundingsGoThereAndBack) {
  for (Format f : formats()) {
    if (parse_format(to_string(f)) != f) continue;
    for (RoundingMode mode : kAllModes)
      for (bool saturate : {false, true})
        for (int scale : {-32, -1, 0, 8, 32}) {
          const Rounding r{f, mode, saturate, scale};
          EXPECT_EQ(parse_rounding(to_string(r)), r) << to_string(r);
        }
  }
  EXPECT_EQ(to_string(parse_rounding("bf16")), "bf16");
  EXPECT_EQ(to_string(parse_rounding("e4m3^8/saturate")), "e4m3^8/saturate");
  EXPECT_EQ(to_string(parse_rounding("e5m2/saturate/stochastic")), "e5m2/stochastic/saturate");
  EXPECT_EQ(parse_rounding("bf16/nearest_even"), Rounding{kBf16});
  for (RoundingMode mode : kAllModes)
    EXPECT_EQ(parse_rounding_mode(kRoundingModeNames[static_cast<size_t>(mode)]), mode);
}

TEST(Names, BadRoundingsSayWhatWasExpected) {
  const std::map<std::string, std::string> cases = {
      {"bf16/sideways",
       "unknown rounding mode 'sideways': expected nearest_even, nearest_away, toward_zero, up, down "
       "or stochastic"},
      {"bf16/", "unknown rounding mode ''"},
      {"bf17", "unknown format 'bf17'"},
      {"", "unknown format ''"},
      {"bf16^", "bad scale '^'"},
      {"bf16^x", "expected a whole exponent of two in -32..32, as in e4m3^8"},
      {"bf16^33", "bad scale '^33' in 'bf16^33'"},
      {"bf16^8x", "bad scale '^8x'"},
      {"bf16/up/down", "'down' does not fit in 'bf16/up/down': expected FORMAT[^SHIFT][/MODE][/saturate]"},
      {"bf16/saturate/saturate", "unknown rounding mode 'saturate'"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string message = message_of([&, &t = text] { parse_rounding(t); });
    EXPECT_NE(message.find(expected), std::string::npos) << "'" << text << "': " << message;
  }
}

// --- properties
// ----------------------------------------------------------------------------------------------------

RoundingMode mirrored(RoundingMode mode) {
  if (mode == RoundingMode::up) return RoundingMode::down;
  if (mode == RoundingMode::down) return RoundingMode::up;
  return mode;
}

TEST(Properties, IdempotentSymmetricAndWithinTheErrorBound) {
  Mismatches idempotent, symmetric, bounded, representable;
  for (Format f : formats())
    for (RoundingMode mode : kAllModes) {
      const Rounding r{f, mode}, mirror{f, mirrored(mode)};
      const bool nearest = mode == RoundingMode::nearest_even || mode == RoundingMode::nearest_away;
      uint32_t random = 1;
      for (float x : stratified_sample()) {
        if (std::isnan(x)) continue;
        random = random * 1664525u + 1013904223u;
        const float y = round_to(r, x, random);
        symmetric.check_bits(
            mirror, -x, std::isnan(y) ? y : -y,
            std::isnan(y) ? std::copysign(round_to(mirror, -x, random), y) : round_to(mirror, -x, random));
        if (std::isnan(y) || std::isinf(y)) continue;  // overflow has its own rules: the oracle judges them
        idempotent.check_bits(r, y, y, round_to(r, y, ~random));
        representable.check_bits(r, x, y, decode(f, encode(f, y)));
        // Where x is tiny beside the gap the difference is not exact in double, so that "< gap" may read "=
        // gap".
        const double error = std::fabs(static_cast<double>(y) - x), gap = ulp(f, x);
        if (std::fabs(x) <= max_finite(f)) bounded.check(error <= (nearest ? gap / 2 : gap), r, x, x, y);
      }
    }
  EXPECT_NO_MISMATCH(idempotent);
  EXPECT_NO_MISMATCH(symmetric);
  EXPECT_NO_MISMATCH(bounded);
  EXPECT_NO_MISMATCH(representable);
}

TEST(Properties, Monotonic) {
  Mismatches mismatches;
  for (Format f : formats())
    for (RoundingMode mode : kAllModes) {
      const Rounding r{f, mode, /*saturate=*/true};
      std::vector<float> sorted = sample_for(r);
      std::erase_if(sorted, [](float x) { return std::isnan(x); });
      std::sort(sorted.begin(), sorted.end());
      // The same random bits for all: then stochastic rounding is monotonic too, on either side of zero.
      for (size_t i = 1; i < sorted.size(); ++i) {
        const float a = round_to(r, sorted[i - 1], 0x9e3779b9u), b = round_to(r, sorted[i], 0x9e3779b9u);
        mismatches.check(a <= b, r, sorted[i], a, b);
      }
    }
  EXPECT_NO_MISMATCH(mismatches);
}

TEST(Properties, NanStaysQuietAndZeroKeepsItsSign) {
  for (Format f : formats())
    for (RoundingMode mode : kAllModes)
      for (bool saturate : {false, true}) {
        const Rounding r{f, mode, saturate};
        for (uint32_t nan : {0x7f800001u, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu, 0xff812345u}) {
          EXPECT_EQ(bits(round_to(r, from_bits(nan))), nan | 0x00400000u);
          float array[3] = {from_bits(nan), 0.0f, -0.0f};
          round_array(r, array, array, 3);
          EXPECT_EQ(bits(array[0]), nan | 0x00400000u);
          EXPECT_EQ(bits(array[1]), 0u);
          EXPECT_EQ(bits(array[2]), 0x80000000u);
        }
      }
}

// --- the MPFR oracle
// -----------------------------------------------------------------------------------------------

void compare_with_oracle(const Rounding& base, Mismatches& mismatches) {
  Oracle oracle;
  const std::vector<float> sample = sample_for(base);
  std::vector<float> rounded(sample.size());
  for (bool saturate : {false, true}) {
    Rounding r = base;
    r.saturate = saturate;
    round_array(r, rounded.data(), sample.data(), sample.size());
    for (size_t i = 0; i < sample.size(); ++i) {
      const float expected = oracle.round(r, sample[i]);
      const float found = round_to(r, sample[i]);
      mismatches.check_same(r, sample[i], expected, found);
      mismatches.check_bits(r, sample[i], found, rounded[i]);
    }
  }
}

TEST(Mpfr, EveryFormatAndDeterministicMode) {
  Mismatches mismatches;
  for (Format f : formats())
    for (RoundingMode mode : kDeterministic) compare_with_oracle({f, mode}, mismatches);
  EXPECT_NO_MISMATCH(mismatches);
  RecordProperty("cases", std::to_string(mismatches.cases));
}

// Scales that leave FP32's normal range are among them, and absurd ones: the array version must notice.
TEST(Mpfr, ScaledRoundings) {
  Mismatches mismatches;
  for (const char* text :
       {"e4m3^8", "e4m3^-8", "e5m2^3", "e5m2^-32", "fp16^32", "fp16^-7", "e7m23^32", "e7m1^32", "bf16^8",
        "bf16^-8", "fp32^-3", "fp32^5", "tf32^1", "e8m8^-8", "e2m1^31"})
    for (RoundingMode mode : kDeterministic) {
      Rounding r = parse_rounding(text);
      r.mode = mode;
      compare_with_oracle(r, mismatches);
    }
  for (RoundingMode mode : kDeterministic)
    for (const Rounding& r : {Rounding{kBf16, mode, false, -60}, Rounding{kFp32, mode, false, -100},
                              Rounding{kE5m2, mode, false, 112}, Rounding{kE4m3, mode, false, -110},
                              Rounding{kFp16, mode, false, 130}, Rounding{kE4m3, mode, false, -119}})
      compare_with_oracle(r, mismatches);
  EXPECT_NO_MISMATCH(mismatches);
  RecordProperty("cases", std::to_string(mismatches.cases));
}

// The oracle judged in its turn: MPFR's own emulation of IEEE formats, with its exponent range and
// mpfr_subnormalize, gives the same floats in the four modes it has.
TEST(Mpfr, OracleAgreesWithMpfrSubnormalize) {
  const std::pair<RoundingMode, mpfr_rnd_t> modes[] = {{RoundingMode::nearest_even, MPFR_RNDN},
                                                       {RoundingMode::toward_zero, MPFR_RNDZ},
                                                       {RoundingMode::up, MPFR_RNDU},
                                                       {RoundingMode::down, MPFR_RNDD}};
  const mpfr_exp_t widest_min = mpfr_get_emin(), widest_max = mpfr_get_emax();
  Mismatches mismatches;
  Oracle oracle;
  for (Format f : formats()) {
    if (!f.has_infinity) continue;
    const int half_range = 1 << (f.exponent_bits - 1);
    mpfr_t x, y;
    mpfr_init2(x, 24);
    mpfr_init2(y, f.significand_bits + 1);
    for (const auto& [mode, direction] : modes)
      for (float value : sample_for({f})) {
        if (std::isnan(value)) continue;
        mpfr_set_flt(x, value, MPFR_RNDN);
        int inexact = mpfr_set(y, x, direction);
        // MPFR writes numbers as [1/2, 1) 2^e: one more than the exponents of IEEE 754.
        mpfr_set_emin(2 - half_range - f.significand_bits + 1);
        mpfr_set_emax(half_range - 1 + 1);
        inexact = mpfr_check_range(y, inexact, direction);
        mpfr_subnormalize(y, inexact, direction);
        mpfr_set_emin(widest_min);
        mpfr_set_emax(widest_max);
        const Rounding r{f, mode};
        mismatches.check_same(r, value, mpfr_get_flt(y, MPFR_RNDN), oracle.round(r, value));
      }
    mpfr_clear(x);
    mpfr_clear(y);
  }
  EXPECT_NO_MISMATCH(mismatches);
}

// --- round_array is round_to
// ---------------------------------------------------------------------------------------

// Every format there can be (both kinds of topmost exponent), every mode, on every CPU target of this
// machine.
TEST(RoundArray, IsRoundToOnEveryCpuTarget) {
  std::mt19937_64 generator(3);
  std::vector<float> sample;
  for (size_t i = 0; i < stratified_sample().size(); i += 1 + generator() % 17)
    sample.push_back(stratified_sample()[i]);
  std::vector<float> expected(sample.size()), rounded(sample.size());
  Mismatches mismatches;
  for (int e = 2; e <= 8; ++e)
    for (int m = 1; m <= 23; ++m)
      for (bool has_infinity : {true, false})
        for (RoundingMode mode : kAllModes) {
          if (e == 8 && !has_infinity) continue;  // FP32 does not hold its largest numbers
          const Rounding r{
              {e, m, has_infinity}, mode, generator() % 2 == 0, static_cast<int>(generator() % 65) - 32};
          for (int scale : {0, r.scale_exponent}) {
            Rounding scaled = r;
            scaled.scale_exponent = scale;
            const RandomKey key{generator(), static_cast<uint32_t>(generator()),
                                static_cast<uint32_t>(generator())};
            const uint64_t first = generator() % (uint64_t{1} << 40);
            for (size_t i = 0; i < sample.size(); ++i)
              expected[i] = round_to(scaled, sample[i], random_bits(key, first + i));
            for (int cpu = 0; cpu <= static_cast<int>(cpu_target()); ++cpu) {
              round_array_on(static_cast<CpuTarget>(cpu), scaled, rounded.data(), sample.data(),
                             sample.size(), key, first);
              for (size_t i = 0; i < sample.size(); ++i)
                mismatches.check_bits(scaled, sample[i], expected[i], rounded[i]);
            }
          }
        }
  EXPECT_NO_MISMATCH(mismatches);
  RecordProperty("cases", std::to_string(mismatches.cases));
}

// Any beginning, length, alignment, in place or not; nothing beyond the ends is written.
TEST(RoundArray, AnyLengthAndAlignment) {
  constexpr float kGuard = 12345.678f;
  std::vector<float> source(400), target(400);
  for (size_t i = 0; i < source.size(); ++i) source[i] = random_unit({5}, i) * 100 - 50;
  const RandomKey key{11, 22, 33};
  for (const char* text : {"bf16", "e4m3", "bf16/stochastic", "e4m3/stochastic", "bf16^8/stochastic"}) {
    const Rounding r = parse_rounding(text);
    for (uint64_t first : {0, 1, 63, 64, 100})
      for (size_t offset : {0, 1, 3})
        for (size_t count : {0, 1, 3, 4, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 300}) {
          std::fill(target.begin(), target.end(), kGuard);
          round_array(r, target.data() + offset, source.data() + 2 * offset, count, key, first);
          for (size_t i = 0; i < target.size(); ++i) {
            const bool inside = i >= offset && i < offset + count;
            const float expected =
                inside ? round_to(r, source[i + offset], random_bits(key, first + i - offset)) : kGuard;
            ASSERT_EQ(bits(target[i]), bits(expected)) << text << " count " << count << " first " << first;
          }
          std::vector<float> in_place = source;
          round_array(r, in_place.data() + 2 * offset, in_place.data() + 2 * offset, count, key, first);
          for (size_t i = 0; i < count; ++i)
            ASSERT_EQ(bits(in_place[2 * offset + i]), bits(target[offset + i])) << text;
        }
  }
}

// --- all 2^32 floats
// -------------------------------------------------------------------------------------------------

// round_array of every float, chunk by chunk on all threads, handed to judge(source, target, first, count,
// mismatches).
using Judge = std::function<void(const float*, const float*, uint64_t, int64_t, Mismatches&)>;
void judge_all_floats(const Rounding& r, const RandomKey& key, const Judge& judge) {
  constexpr int64_t kChunk = int64_t{1} << 20, kChunks = int64_t{1} << 12;
  const auto start = std::chrono::steady_clock::now();
  std::mutex mutex;
  Mismatches all;
  parallel_for(kChunks, [&](int64_t chunk, int) {
    const auto first = static_cast<uint64_t>(chunk * kChunk);
    std::vector<float> source(kChunk), target(kChunk);
    for (int64_t i = 0; i < kChunk; ++i) source[i] = from_bits(static_cast<uint32_t>(first + i));
    round_array(r, target.data(), source.data(), kChunk, key, first);
    Mismatches mine;
    judge(source.data(), target.data(), first, kChunk, mine);
    std::lock_guard lock(mutex);
    if (all.count == 0) all.first = mine.first;
    all.count += mine.count;
    all.cases += mine.cases;
  });
  EXPECT_NO_MISMATCH(all);
  EXPECT_EQ(all.cases, int64_t{1} << 32);
  fmt::print("  {:<28}{:.0f} s\n", to_string(r), seconds_since(start));
  std::fflush(stdout);
}

// 42 cases, about 1.5 minutes of one core each.
TEST(AllFloats, RoundArrayIsRoundToSlow) {
  SKIP_UNLESS_SLOW();
  const RandomKey key{42};
  for (const NamedFormat& row : kNamedFormats)
    for (RoundingMode mode : kAllModes)
      for (bool saturate : {false, true}) {
        if (saturate && mode != RoundingMode::nearest_even)
          continue;  // it changes overflow alone: once per format
        const Rounding r{row.format, mode, saturate};
        judge_all_floats(
            r, key,
            [&](const float* source, const float* target, uint64_t first, int64_t count, Mismatches& m) {
              for (int64_t i = 0; i < count; ++i) {
                const bool random = mode == RoundingMode::stochastic;
                const float expected = round_to(r, source[i], random ? random_bits(key, first + i) : 0);
                m.check_bits(r, source[i], expected, target[i]);
              }
            });
      }
}

// 2 cases, about 6 minutes of one core each.
TEST(AllFloats, RoundArrayIsMpfrSlow) {
  SKIP_UNLESS_SLOW();
  ASSERT_TRUE(mpfr_buildopt_tls_p()) << "this MPFR is not thread-safe";
  for (Format f : {kBf16, kE4m3}) {
    const Rounding r{f};
    judge_all_floats(r, {},
                     [&](const float* source, const float* target, uint64_t, int64_t count, Mismatches& m) {
                       Oracle oracle;
                       for (int64_t i = 0; i < count; ++i)
                         m.check_same(r, source[i], oracle.round(r, source[i]), target[i]);
                     });
  }
}

// --- other people's conversions
// ------------------------------------------------------------------------------------

#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
void compare_codes(const Rounding& r, const std::function<uint32_t(float)>& theirs) {
  Mismatches mismatches;
  for (float x : sample_for(r)) mismatches.check_same(r, x, decode(r.format, theirs(x)), round_to(r, x));
  EXPECT_NO_MISMATCH(mismatches);
  EXPECT_GT(mismatches.cases, 50000);
}
#endif

TEST(Cuda, Fp8HostConversions) {
#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
  for (bool saturate : {false, true}) {
    const auto limit = saturate ? __NV_SATFINITE : __NV_NOSAT;
    compare_codes({kE4m3, RoundingMode::nearest_even, saturate},
                  [=](float x) { return __nv_cvt_float_to_fp8(x, limit, __NV_E4M3); });
    compare_codes({kE5m2, RoundingMode::nearest_even, saturate},
                  [=](float x) { return __nv_cvt_float_to_fp8(x, limit, __NV_E5M2); });
  }
#else
  GTEST_SKIP() << "no cuda_fp8.h at build time";
#endif
}

TEST(Cuda, Fp16HostConversions) {
#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
  const auto code = [](__half h) -> uint32_t { return static_cast<__half_raw>(h).x; };
  compare_codes({kFp16, RoundingMode::nearest_even}, [=](float x) { return code(__float2half_rn(x)); });
  compare_codes({kFp16, RoundingMode::toward_zero}, [=](float x) { return code(__float2half_rz(x)); });
  compare_codes({kFp16, RoundingMode::up}, [=](float x) { return code(__float2half_ru(x)); });
  compare_codes({kFp16, RoundingMode::down}, [=](float x) { return code(__float2half_rd(x)); });
#else
  GTEST_SKIP() << "no cuda_fp16.h at build time";
#endif
}

TEST(Cuda, Bf16HostConversions) {
#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
  const auto code = [](__nv_bfloat16 h) -> uint32_t { return static_cast<__nv_bfloat16_raw>(h).x; };
  compare_codes({kBf16, RoundingMode::nearest_even}, [=](float x) { return code(__float2bfloat16_rn(x)); });
  compare_codes({kBf16, RoundingMode::toward_zero}, [=](float x) { return code(__float2bfloat16_rz(x)); });
  compare_codes({kBf16, RoundingMode::up}, [=](float x) { return code(__float2bfloat16_ru(x)); });
  compare_codes({kBf16, RoundingMode::down}, [=](float x) { return code(__float2bfloat16_rd(x)); });
#else
  GTEST_SKIP() << "no cuda_bf16.h at build time";
#endif
}

#if defined(__x86_64__)
template <int direction>
__attribute__((target("f16c"))) uint32_t hardware_half(float x) {
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), direction))) & 0xffffu;
}
#endif

TEST(Hardware, F16cConversions) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("f16c")) GTEST_SKIP() << "this CPU has no F16C";
  const std::pair<RoundingMode, uint32_t (*)(float)> modes[] = {
      {RoundingMode::nearest_even, hardware_half<_MM_FROUND_TO_NEAREST_INT>},
      {RoundingMode::toward_zero, hardware_half<_MM_FROUND_TO_ZERO>},
      {RoundingMode::up, hardware_half<_MM_FROUND_TO_POS_INF>},
      {RoundingMode::down, hardware_half<_MM_FROUND_TO_NEG_INF>}};
  Mismatches mismatches;
  for (const auto& [mode, convert] : modes) {
    const Rounding r{kFp16, mode};
    for (float x : sample_for(r)) mismatches.check_same(r, x, decode(kFp16, convert(x)), round_to(r, x));
    // And every 251st float there is.
    for (uint64_t b = 0; b < uint64_t{1} << 32; b += 251) {
      const float x = from_bits(static_cast<uint32_t>(b));
      mismatches.check_same(r, x, decode(kFp16, convert(x)), round_to(r, x));
    }
  }
  EXPECT_NO_MISMATCH(mismatches);
#else
  GTEST_SKIP() << "F16C is of x86-64";
#endif
}

// --- the planted fault
// ---------------------------------------------------------------------------------------------

// What a hasty kernel does: add half of the last place, cut. Ties go away from zero instead of to even.
float half_up_bf16(float x) { return from_bits((bits(x) + 0x8000u) & 0xffff0000u); }

// The one criterion that sees it is the sign. On sums of two BF16 numbers half of all roundings are ties (the
// sum of two 8-bit significands has 9 bits), half-up errs by as much as nearest-even, just always the same
// way.
TEST(PlantedFault, OnlyTheSignedMeanSeesHalfUp) {
  struct Judged {
    ErrorStats errors;
    double nmse = 0;
  };
  const auto judge = [](const std::function<float(float)>& round) {
    Judged judged;
    double energy = 0, squares = 0;
    for (uint64_t i = 0; i < 200000; ++i) {
      // Two negative BF16 numbers of one binade, as the products P V of a value column with one sign.
      const float a = -round_to({kBf16, RoundingMode::toward_zero}, 1 + random_unit({1}, i));
      const float b = -round_to({kBf16, RoundingMode::toward_zero}, 1 + random_unit({2}, i));
      const float sum = a + b;  // exact in FP32
      const double error = static_cast<double>(round(sum)) - sum;
      judged.errors.add(error, ulp(kBf16, sum));
      squares += error * error;
      energy += static_cast<double>(sum) * sum;
    }
    judged.nmse = squares / energy;
    return judged;
  };
  const auto unbiased = [](const ErrorStats& e) { return std::fabs(e.mean()) <= 4 * e.standard_error(); };

  const Judged even = judge([](float x) { return round_to({kBf16}, x); });
  const Judged faulty = judge(half_up_bf16);
  const Judged away = judge([](float x) { return round_to({kBf16, RoundingMode::nearest_away}, x); });

  // The usual criteria cannot tell them apart: equal to the last bit.
  EXPECT_EQ(even.errors.max_abs(), faulty.errors.max_abs());
  EXPECT_EQ(even.errors.max_ulp(), 0.5);
  EXPECT_EQ(faulty.errors.max_ulp(), 0.5);
  EXPECT_EQ(even.nmse, faulty.nmse);
  EXPECT_EQ(even.errors.rms(), faulty.errors.rms());
  // The signed mean can.
  EXPECT_TRUE(unbiased(even.errors)) << "z = " << even.errors.z();
  EXPECT_FALSE(unbiased(faulty.errors)) << "z = " << faulty.errors.z();
  EXPECT_FALSE(unbiased(away.errors)) << "z = " << away.errors.z();
  EXPECT_LT(faulty.errors.z(), -100);
  // Half of the sums are ties, each half a place off, all downward: a quarter of a place in the mean.
  EXPECT_NEAR(faulty.errors.mean(), -0.25 * 0x1p-6, 0.01 * 0x1p-6);
  // And so can the sign test: every tie goes down.
  EXPECT_EQ(faulty.errors.positive_rows(), 0);
  EXPECT_LT(std::fabs(even.errors.sign_z()), 4);
}

// --- stochastic rounding
// -------------------------------------------------------------------------------------------

// All values of the topmost `count` bits of the random number, the rest zeros or ones: how often does x go
// up?
int64_t times_up(const Rounding& r, float x, int count, uint32_t rest) {
  const float down = round_to({r.format, RoundingMode::toward_zero, true, r.scale_exponent}, x);
  int64_t up = 0;
  for (uint32_t top = 0; top < 1u << count; ++top) {
    const uint32_t random = top << (32 - count) | (rest >> count);
    up += bits(round_to(r, x, random)) != bits(down);
  }
  return up;
}

TEST(Stochastic, ProbabilityIsExactForDyadicFractions) {
  for (uint32_t rest : {0u, 0xffffffffu}) {
    // BF16 drops 16 bits: all 2^16 random numbers that matter, for every 997th and the first and last
    // fractions.
    for (uint32_t base : {0x3f800000u, 0xc2c80000u, 0x00010000u, 0x00000000u, 0x7f7e0000u})
      for (uint32_t fraction : {0u, 1u, 2u, 0x7fffu, 0x8000u, 0x8001u, 0xfffeu, 0xffffu})
        EXPECT_EQ(times_up({kBf16, RoundingMode::stochastic}, from_bits(base | fraction), 16, rest),
                  fraction);
    const Rounding e4m3{kE4m3, RoundingMode::stochastic};
    // Normal: 20 bits dropped. 1.40625 lies 1/4 of the way from 1.375 to 1.5.
    EXPECT_EQ(times_up(e4m3, 1.40625f, 12, rest), 1 << 10);
    EXPECT_EQ(times_up(e4m3, from_bits(0x3f800000u | 12345), 20, rest), 12345);
    // Subnormal: 2^-9 apart.
    EXPECT_EQ(times_up(e4m3, -1.25f * 0x1p-9f, 10, rest), 1 << 8);
    EXPECT_EQ(times_up(e4m3, 5.5f * 0x1p-9f, 10, rest), 1 << 9);
    // Below the smallest subnormal, down to where the fraction has no bits left among the topmost ones.
    EXPECT_EQ(times_up(e4m3, 0x1p-10f, 10, rest), 1 << 9);
    EXPECT_EQ(times_up(e4m3, 0.75f * 0x1p-9f, 10, rest), 3 << 8);
    EXPECT_EQ(times_up(e4m3, 0x1p-19f, 12, rest), 4);
    // Between the largest number, 448, and the 480 there is not.
    EXPECT_EQ(times_up(e4m3, 456.0f, 10, rest), 1 << 8);
    // Scaled by 2^8: the smallest subnormal is 2^-17.
    EXPECT_EQ(times_up({kE4m3, RoundingMode::stochastic, false, 8}, 0x1p-18f, 10, rest), 1 << 9);
  }
  // Far below the quantum: random 0 alone goes up while 2^-32 of it is left, then nothing does.
  const Rounding r{kE4m3, RoundingMode::stochastic};
  EXPECT_EQ(round_to(r, 0x1p-41f, 0), 0x1p-9f);
  EXPECT_EQ(round_to(r, 0x1p-41f, 1), 0.0f);
  EXPECT_EQ(round_to(r, std::nextafter(0x1p-41f, 0.0f), 0), 0.0f);
}

// A value goes up where its fraction exceeds the random number, and not where it equals it. Fractions are
// made for the random numbers of a stream, since the chance to meet an equal one is 2^-32.
TEST(Stochastic, TheThresholdIsSharp) {
  const RandomKey key{2024};
  std::vector<float> sources[2], targets[2];  // [0] fraction equal to the random number, [1] the next one up
  for (const char* text : {"bf16", "tf32", "fp16", "e4m3", "e5m2", "e2m1"}) {
    const Format f = parse_format(text);
    const Rounding r{f, RoundingMode::stochastic};
    const int dropped = 23 - f.significand_bits;
    for (bool small : {false, true}) {
      if (small && f.exponent_bits == 8) continue;
      sources[0].clear(), sources[1].clear();
      const double quantum = min_subnormal(f);
      std::vector<bool> meant;
      for (uint64_t element = 0; element < 8192; ++element) {
        const uint32_t random = random_bits(key, element);
        // Between 1 and the next number, `dropped` bits of fraction; or below the smallest subnormal, where
        // 32 bits count but a float holds 24 of them: those random numbers that begin with eight zeros.
        const bool fits = !small || random < 1u << 24;
        const uint32_t fraction = random >> (small ? 0 : 32 - dropped);
        for (uint32_t step : {0u, 1u})
          sources[step].push_back(
              !fits   ? 0.0f
              : small ? static_cast<float>((static_cast<double>(fraction) + step) * 0x1p-32 * quantum)
                      : from_bits(0x3f800000u + fraction + step));
        meant.push_back(fits && (small || fraction + 1 < 1u << dropped));
      }
      int64_t seen = 0;
      for (int step : {0, 1}) {
        targets[step].resize(sources[step].size());
        round_array(r, targets[step].data(), sources[step].data(), sources[step].size(), key);
      }
      const float down = small ? 0.0f : 1.0f, up = small ? min_subnormal(f) : 1 + epsilon(f);
      for (uint64_t element = 0; element < meant.size(); ++element) {
        if (!meant[element]) continue;
        ++seen;
        const uint32_t random = random_bits(key, element);
        ASSERT_EQ(round_to(r, sources[0][element], random), down) << text;
        ASSERT_EQ(round_to(r, sources[1][element], random), up) << text;
        ASSERT_EQ(targets[0][element], down) << text;
        ASSERT_EQ(targets[1][element], up) << text;
      }
      EXPECT_GT(seen, 10) << text;
    }
  }
}

// Formats whose smallest subnormal is so small that FP32's own subnormals are a visible part of it.
TEST(Stochastic, SubnormalsOfFp32) {
  std::vector<float> source(100000), target(source.size());
  for (size_t i = 0; i < source.size(); ++i) source[i] = from_bits(random_bits({6}, i) & 0x807fffffu);
  const RandomKey key{77};
  Mismatches mismatches;
  for (const char* text :
       {"e8m20^-30", "e8m23^-24", "e8m23^-1", "bf16^-8", "bf16^8", "e7m23^32", "e7m23^10", "bf16"}) {
    Rounding r = parse_rounding(text);
    r.mode = RoundingMode::stochastic;
    round_array(r, target.data(), source.data(), source.size(), key);
    for (size_t i = 0; i < source.size(); ++i)
      mismatches.check_bits(r, source[i], round_to(r, source[i], random_bits(key, i)), target[i]);
  }
  EXPECT_NO_MISMATCH(mismatches);
}

TEST(Stochastic, MeanIsTheValue) {
  constexpr int64_t kTimes = 1 << 16;
  std::vector<float> source(kTimes), target(kTimes);
  uint32_t tensor = 0;
  for (const char* text : {"bf16", "tf32", "fp16", "e4m3", "e5m2", "e8m2", "e5m7", "e4m3^8"})
    for (float x : {1.001f, -1.3f, 3.14159f, 0.1f, -0.017f, 0.0007f, -2e-5f, 100.7f}) {
      Rounding r = parse_rounding(text);
      r.mode = RoundingMode::stochastic;
      if (std::ldexp(std::fabs(x), r.scale_exponent) > max_finite(r.format)) continue;
      std::fill(source.begin(), source.end(), x);
      round_array(r, target.data(), source.data(), kTimes, RandomKey{99, 0, tensor++});
      Rounding cut = r;
      cut.mode = RoundingMode::toward_zero;
      const double down = round_to(cut, x),
                   gap = std::ldexp(ulp(r.format, std::ldexp(x, r.scale_exponent)), -r.scale_exponent);
      const double up = down + std::copysign(gap, x), position = std::fabs(x - down) / gap;
      double mean = 0;
      for (float y : target) {
        ASSERT_TRUE(y == down || y == up) << text << " " << x << " -> " << y;
        mean += (y - static_cast<double>(x)) / kTimes;
      }
      const double sigma = gap * std::sqrt(position * (1 - position) / kTimes);
      EXPECT_LE(std::fabs(mean), 4 * sigma) << text << " of " << x;
    }
}

// The same bits however the work is cut: chunks, alignment, threads, CPU targets; and across the end of the
// low word of the counter.
TEST(Stochastic, SameBitsHoweverTheWorkIsCut) {
  constexpr size_t kCount = 20000;
  const RandomKey key{0x123456789abcdefull, 7, 8};
  std::vector<float> source(kCount);
  for (size_t i = 0; i < kCount; ++i)
    source[i] = std::ldexp(random_unit({4}, i) - 0.5f, static_cast<int>(random_bits({5}, i) % 40) - 25);
  const int threads_before = thread_count();
  for (const char* text :
       {"bf16/stochastic", "e4m3/stochastic", "fp16/stochastic/saturate", "fp32/stochastic"}) {
    const Rounding r = parse_rounding(text);
    // Elements 64 (2^28 - 1).. hold counters up to 2^32 - 1; the next group carries.
    for (uint64_t first : {uint64_t{0}, uint64_t{37}, (uint64_t{1} << 34) - 1000, (uint64_t{1} << 63) + 5}) {
      std::vector<float> expected(kCount);
      for (size_t i = 0; i < kCount; ++i) expected[i] = round_to(r, source[i], random_bits(key, first + i));
      const auto expect_equal = [&](const float* found, const std::string& how) {
        EXPECT_EQ(std::memcmp(found, expected.data(), kCount * sizeof(float)), 0) << text << " " << how;
      };
      std::vector<float> target(kCount + 16);
      round_array(r, target.data(), source.data(), kCount, key, first);
      expect_equal(target.data(), "whole");
      std::mt19937 generator(1);
      for (size_t begin = 0; begin < kCount;) {
        const size_t count = std::min<size_t>(generator() % 300, kCount - begin);
        round_array(r, target.data() + 1 + begin, source.data() + begin, count, key, first + begin);
        begin += count;
      }
      expect_equal(target.data() + 1, "in chunks, not aligned");
      for (int threads : {1, 2, 5}) {
        set_thread_count(threads);
        constexpr size_t kPiece = 777;
        std::fill(target.begin(), target.end(), 0.0f);
        parallel_for((kCount + kPiece - 1) / kPiece, [&](int64_t piece, int) {
          const size_t begin = static_cast<size_t>(piece) * kPiece;
          round_array(r, target.data() + begin, source.data() + begin, std::min(kPiece, kCount - begin), key,
                      first + begin);
        });
        expect_equal(target.data(), fmt::format("by {} threads", threads));
      }
      for (int cpu = 0; cpu <= static_cast<int>(cpu_target()); ++cpu) {
        std::fill(target.begin(), target.end(), 0.0f);
        round_array_on(static_cast<CpuTarget>(cpu), r, target.data(), source.data(), kCount, key, first);
        expect_equal(target.data(), name(static_cast<CpuTarget>(cpu)));
      }
    }
  }
  set_thread_count(threads_before);
}

// --- double rounding
// -----------------------------------------------------------------------------------------------

// Rounding twice is not rounding once: the first rounding lands on a tie of the second and hides the side it
// came from. Results of FP64 must not pass through FP32, nor those of FP32 through BF16, on their way to FP8.
TEST(DoubleRounding, DiffersFromDirectInKnownCases) {
  Oracle oracle;
  const Rounding e4m3{kE4m3}, bf16{kBf16};
  // 1.0625 is the tie between 1 and 1.125; 1 is even.
  const double above_tie = 1.0625 + 0x1p-30;
  EXPECT_EQ(oracle.round(e4m3, above_tie), 1.125f);                // once
  EXPECT_EQ(round_to(e4m3, static_cast<float>(above_tie)), 1.0f);  // by way of FP32
  const float single = 1.0625f + 0x1p-12f;
  EXPECT_EQ(round_to(e4m3, single), 1.125f);                               // once
  EXPECT_EQ(round_to(e4m3, round_to(bf16, single)), 1.0f);                 // by way of BF16
  EXPECT_EQ(round_to(e4m3, round_to({kFp16}, 1.0625f + 0x1p-13f)), 1.0f);  // by way of FP16
  EXPECT_EQ(round_to(e4m3, 1.0625f + 0x1p-13f), 1.125f);
  // The paper's sum: FP32 holds it exactly, so that BF16 is the only rounding.
  const float sum = from_bits(0xc01a0e2eu) + from_bits(0xc0130000u);
  EXPECT_EQ(bits(sum), 0xc0968717u);
  EXPECT_EQ(bits(round_to(bf16, sum)), 0xc0970000u);
}

// --- random numbers
// ------------------------------------------------------------------------------------------------

// kat_vectors of the Random123 distribution, philox4x32 with 10 rounds.
TEST(Philox, KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox({ones, ones, ones, ones}, ones, ones),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, AgreesWithRandom123) {
#if defined(EVENKEEL_HAVE_RANDOM123)
  std::mt19937_64 generator(17);
  for (int i = 0; i < 100000; ++i) {
    const auto word = [&] { return static_cast<uint32_t>(generator()); };
    const std::array<uint32_t, 4> counter = {word(), word(), word(), word()};
    const uint32_t key0 = word(), key1 = word();
    const r123::Philox4x32 theirs;
    const auto expected = theirs({{counter[0], counter[1], counter[2], counter[3]}}, {{key0, key1}});
    const auto found = philox(counter, key0, key1);
    for (size_t w = 0; w < 4; ++w) ASSERT_EQ(found[w], expected[w]);
  }
#else
  GTEST_SKIP() << "no Random123/philox.h at build time";
#endif
}

// The layout of a stream is a promise: records and GPU kernels rely on it.
TEST(Philox, ElementsMapToCountersAndWords) {
  const RandomKey key{0x0123456789abcdefull, 55, 66};
  for (uint64_t element : {uint64_t{0}, uint64_t{15}, uint64_t{16}, uint64_t{63}, uint64_t{64},
                           uint64_t{1000}, (uint64_t{1} << 34) + 17}) {
    const uint64_t counter = 16 * (element / 64) + element % 16;
    const auto words = philox({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 66, 55},
                              0x89abcdefu, 0x01234567u);
    EXPECT_EQ(random_bits(key, element), words[element % 64 / 16]);
    const float unit = random_unit(key, element);
    EXPECT_GT(unit, 0.0f);
    EXPECT_LT(unit, 1.0f);
  }
}

}  // namespace
}  // namespace evenkeel
