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

TEST(Format, every_code_agrees_with_the_value_formula) {
  int64_t codes_seen = 0;
  for (Format f : formats()) {
    if (code_bits(f) > 16 || is_whole(f) || f.tapered) continue;  // those have tests of their own
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
      const bool special = exponent == top && (f.has_infinity || (f.has_nan && fraction == (1u << m) - 1));
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

TEST(Format, ocp_tables) {
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
  // MX 1.0: every code is a number.
  const float fp4[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (uint32_t code = 0; code < 8; ++code) {
    EXPECT_EQ(decode(kE2m1, code), fp4[code]);
    EXPECT_EQ(decode(kE2m1, code + 8), -fp4[code]);
  }
  EXPECT_EQ(decode(kE2m3, 0x1f), 7.5f);
  EXPECT_EQ(decode(kE2m3, 0x01), 0.125f);
  EXPECT_EQ(decode(kE3m2, 0x1f), 28.0f);
  EXPECT_EQ(decode(kE3m2, 0x01), 0.0625f);
}

TEST(Format, every_whole_number_is_its_twos_complement) {
  for (Format f : {kInt8, kInt4})
    for (int value = -static_cast<int>(max_finite(f)) - 1; value <= static_cast<int>(max_finite(f));
         ++value) {
      const uint32_t code = static_cast<uint32_t>(value) & ((1u << code_bits(f)) - 1);
      EXPECT_EQ(decode(f, code), static_cast<float>(value));
      EXPECT_EQ(encode(f, static_cast<float>(value)), code);
      // The most negative code is never made: roundings are symmetric.
      for (RoundingMode mode : kAllModes)
        EXPECT_EQ(round_to({f, mode}, static_cast<float>(value)),
                  std::max(static_cast<float>(value), -max_finite(f)));
    }
  EXPECT_EQ(round_to({kInt8}, 126.5f), 126.0f);
  EXPECT_EQ(round_to({kInt8}, -127.5f), -127.0f);
  EXPECT_EQ(round_to({kInt8}, kInf), 127.0f);
  EXPECT_EQ(round_to({kInt4, RoundingMode::nearest_away}, 0.5f), 1.0f);
  EXPECT_EQ(round_to({kInt4}, 1e30f), 7.0f);
}

// Table 1 of arXiv 2409.16626, read as strings of bits.
float hif8_value(uint32_t code) {
  std::string digits;
  for (int i = 6; i >= 0; --i) digits += (code >> i & 1) != 0 ? '1' : '0';
  const double sign = code & 0x80 ? -1 : 1;
  const std::pair<std::string, int> dots[] = {{"11", 4}, {"10", 3}, {"01", 2}, {"001", 1}, {"0001", 0}};
  for (const auto& [dot, width] : dots) {
    if (digits.compare(0, dot.size(), dot) != 0) continue;
    const std::string exponent = digits.substr(dot.size(), static_cast<size_t>(width));
    const std::string fraction = digits.substr(dot.size() + static_cast<size_t>(width));
    double e = 0;
    if (width > 0) e = std::stoi("1" + exponent.substr(1), nullptr, 2) * (exponent[0] == '1' ? -1.0 : 1.0);
    if (e == 15 && fraction == "1") return static_cast<float>(sign) * kInf;
    const double significand = 1 + std::stoi(fraction, nullptr, 2) / std::pow(2.0, fraction.size());
    return static_cast<float>(sign * significand * std::pow(2.0, e));
  }
  const int last = std::stoi(digits.substr(4), nullptr, 2);
  if (last == 0) return sign < 0 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  return static_cast<float>(sign * std::pow(2.0, last - 23));
}

TEST(Format, every_code_of_hifloat8) {
  std::vector<float> numbers;
  int infinities = 0, nans = 0;
  for (uint32_t code = 0; code < 256; ++code) {
    const float expected = hif8_value(code), value = decode(kHif8, code);
    nans += std::isnan(value);
    infinities += std::isinf(value);
    ASSERT_TRUE(std::isnan(expected) ? std::isnan(value) : value == expected) << code << " " << value;
    ASSERT_EQ(encode(kHif8, value), code);
    if (!std::isfinite(value)) continue;
    numbers.push_back(value);
    for (RoundingMode mode : kAllModes) ASSERT_EQ(round_to({kHif8, mode}, value), value) << code;
  }
  EXPECT_EQ(nans, 1);
  EXPECT_EQ(infinities, 2);
  std::sort(numbers.begin(), numbers.end());
  EXPECT_EQ(std::unique(numbers.begin(), numbers.end()) - numbers.begin(), 253);
  EXPECT_EQ(numbers.back(), max_finite(kHif8));
  // Between neighbours of the table there is nothing. Each middle goes to one of the two: away from zero by the paper's
  // rounding, to the even one (the significand's last bit) by the other.
  const Rounding away{kHif8, RoundingMode::nearest_away}, down{kHif8, RoundingMode::toward_zero};
  for (size_t n = 0; n + 1 < numbers.size(); ++n) {
    const float low = numbers[n], high = numbers[n + 1], middle = (low + high) / 2;
    EXPECT_EQ(round_to(away, middle), middle < 0 ? low : high) << middle;
    EXPECT_EQ(round_to(down, middle), middle < 0 ? high : low) << middle;
    EXPECT_EQ(round_to({kHif8}, std::nextafter(middle, low)), low) << middle;
    EXPECT_EQ(round_to({kHif8}, std::nextafter(middle, high)), high) << middle;
    EXPECT_EQ(ulp_distance(kHif8, low, high), 1);
  }
  EXPECT_EQ(round_to(away, 40960.0f), kInf);  // 1.25 * 2^15: the middle to the code of Inf
  EXPECT_EQ(round_to(away, std::nextafter(40960.0f, 0.0f)), 32768.0f);
  EXPECT_EQ(round_to({kHif8, RoundingMode::nearest_away, true}, 1e30f), 32768.0f);
}

TEST(Format, ulp_and_its_distance) {
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

TEST(Names, formats_go_there_and_back) {
  for (const NamedFormat& row : kNamedFormats) {
    EXPECT_EQ(parse_format(row.name), row.format);
    EXPECT_EQ(to_string(row.format), row.name);
  }
  for (int e = 2; e <= 8; ++e)
    for (int m = 1; m <= 23; ++m) {
      if (parse_format(to_string(Format{e, m})) != Format{e, m}) {  // the name is an OCP row's
        EXPECT_TRUE((e == 4 && m == 3) || (e == 2 && (m == 1 || m == 3)) || (e == 3 && m == 2));
        continue;
      }
      EXPECT_EQ(parse_format(to_string(Format{e, m})), (Format{e, m}));
    }
  EXPECT_EQ(to_string(parse_format("e8m7")), "bf16");
  EXPECT_FALSE(parse_format("e4m3").has_infinity);
}

TEST(Names, bad_formats_say_what_is_known) {
  for (const char* text : {"", "bf", "BF16", "e9m2", "e1m2", "e5m0", "e5m24", "e5", "em", "e5m2x", "e-5m2",
                           "e5m-2", "e04m3", "e4m03", "e+5m2", "e5m2 ", " bf16", "e99999999999m2"}) {
    const std::string message = message_of([&] { parse_format(text); });
    EXPECT_NE(message.find(fmt::format("unknown format '{}'", text)), std::string::npos) << message;
    EXPECT_NE(message.find("fp32, tf32, bf16, fp16, e4m3, e5m2"), std::string::npos) << message;
    EXPECT_NE(message.find("2..8"), std::string::npos) << message;
  }
}

TEST(Names, roundings_go_there_and_back) {
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
  for (const char* text :
       {"e4m3*block32", "e4m3*block32@e8m0", "e2m1*block16@e4m3*tensor", "int8*tile", "int8*row/stochastic",
        "int4*head", "hif8*tensor/nearest_away", "e3m2*block128@e8m0_up", "e2m1*block16@e4m3*row",
        "int4*column", "e4m3*column32@e8m0/stochastic", "e2m1*column16@e4m3*tensor",
        "e2m1*column64@e4m3*column", "int8*column@e4m3*head"}) {
    const Rounding r = parse_rounding(text);
    EXPECT_EQ(to_string(r), text);
    EXPECT_TRUE(r.saturate && !is_identity(r));
  }
  EXPECT_EQ(parse_rounding("e4m3*row@fp32"), parse_rounding("e4m3*row"));
  for (RoundingMode mode : kAllModes)
    EXPECT_EQ(parse_rounding_mode(kRoundingModeNames[static_cast<size_t>(mode)]), mode);
}

TEST(Names, bad_roundings_say_what_was_expected) {
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
      {"e4m3*",
       "unknown group '' of a shared scale: expected block16, block32, block64, block128, row, column16"},
      {"e4m3*block33", "unknown group 'block33'"},
      {"e4m3*block32@e5m2", "unknown scale 'e5m2': expected fp32, e4m3, e8m0 or e8m0_up"},
      {"e4m3*block32*tensor",
       "a second scale goes with scales in e4m3 of blocks, rows or columns and holds whole ones"},
      {"e2m1*tile@e4m3*tensor", "of blocks, rows or columns"},
      {"e2m1*block16@e4m3*column", "holds whole ones"},
      {"e2m1*column16@e4m3*row", "holds whole ones"},
      {"e2m1*column@e4m3*tile", "holds whole ones"},
      {"e4m3*column128", "unknown group 'column128'"},
      {"e4m3*column_block", "unknown group 'column_block'"},
      {"e2m1*row@e4m3*block16", "as in block16@e4m3*tensor"},
      {"bf16*block32", "a shared scale goes with a format of less range than FP32 and without ^SHIFT"},
      {"e4m3^8*block32", "without ^SHIFT"},
      {"e4m3*block32/saturate", "unknown rounding mode 'saturate'"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string message = message_of([&, &t = text] { parse_rounding(t); });
    EXPECT_NE(message.find(expected), std::string::npos) << "'" << text << "': " << message;
  }
}

}  // namespace
}  // namespace evenkeel
