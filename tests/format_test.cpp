// Formats against the formula of their values, and the names of formats and roundings.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "numerics/rounding.h"
#include "rounding_cases.h"

namespace evenkeel {
namespace {

using namespace rounding_cases;

// --- formats

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

}  // namespace
}  // namespace evenkeel
