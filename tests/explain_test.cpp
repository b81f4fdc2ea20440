// Explanations: the paper's example in data, text and JSON; random operations against the hardware; the hard
// cases.
#include "numerics/explain.h"
#include "base/json_text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

namespace evenkeel {
namespace {

using Json = nlohmann::json;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr char kPaper[] = "-2.4071154594421387 + -2.296875";

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

Explanation explain_text(std::string_view text, const char* to = nullptr, const char* in = "fp32") {
  ExplainOptions options;
  options.in = parse_rounding(in);
  if (to) options.to = parse_rounding(to);
  return explain(parse_expression(text), options);
}

Literal literal(float x) { return {shortest(x), x, x, false}; }

// What digits such as "10.01011" say, exactly (at most 53 of them count).
double value_of(const std::string& digits, int exponent) {
  double value = 0;
  const size_t point = std::min(digits.find('.'), digits.size());
  int weight = exponent + static_cast<int>(point) - 1;
  for (const char digit : digits)
    if (digit != '.') value += digit == '1' ? std::ldexp(1.0, weight--) : (--weight, 0.0);
  return value;
}

// ----------------------------------------------------------------------------------- the paper's example

TEST(Explain, the_papers_example_in_data) {
  const Explanation e = explain_text(kPaper, "bf16");
  EXPECT_EQ(e.operation, Operation::add);
  EXPECT_EQ(e.expression, kPaper);
  ASSERT_EQ(e.operands.size(), 2u);
  EXPECT_EQ(e.operands[0].code, 0xC01A0E2Eu);
  EXPECT_EQ(e.operands[0].exponent_field, "10000000");
  EXPECT_EQ(e.operands[0].exponent, 1);
  EXPECT_EQ(e.operands[0].significand, "1.00110100000111000101110");
  EXPECT_TRUE(e.operands[0].negative);
  EXPECT_EQ(e.operands[1].code, 0xC0130000u);
  EXPECT_EQ(e.operands[1].significand, "1.00100110000000000000000");
  EXPECT_FALSE(e.literals[0].rounded || e.literals[1].rounded);

  ASSERT_EQ(e.aligned.size(), 2u);
  EXPECT_EQ(e.aligned[0].shift, 0);
  EXPECT_EQ(e.aligned[1].shift, 0);
  EXPECT_EQ(e.exact_digits, "10.01011010000111000101110");
  EXPECT_EQ(e.exponent, 1);
  EXPECT_TRUE(e.exact_negative && e.carry_out && e.exact_in_double);
  EXPECT_EQ(e.normalise, 1);
  EXPECT_EQ(e.exact, -4.703990459442139);

  ASSERT_EQ(e.roundings.size(), 2u);
  const RoundingStep &fp32 = e.roundings[0], &bf16 = e.roundings[1];
  EXPECT_EQ(fp32.after.code, 0xC0968717u);
  EXPECT_EQ(fp32.direction, Direction::exact);
  EXPECT_EQ(fp32.kept, "1.00101101000011100010111");
  EXPECT_EQ(fp32.error, 0);
  EXPECT_EQ(bf16.kept, "1.0010110");
  EXPECT_EQ(bf16.cut, "1000011100010111");
  EXPECT_EQ(bf16.exponent, 2);
  EXPECT_TRUE(bf16.round_bit && bf16.sticky_bit && !bf16.tie && !bf16.carried && !bf16.overflow);
  EXPECT_EQ(bf16.direction, Direction::up);
  EXPECT_EQ(bf16.toward_zero, -4.6875);
  EXPECT_EQ(bf16.away, -4.71875);
  EXPECT_EQ(bf16.after.code, 0xC097u);
  EXPECT_EQ(bf16.after.significand, "1.0010111");

  EXPECT_EQ(e.result.code, 0xC097u);
  EXPECT_EQ(e.value, -4.71875f);
  EXPECT_EQ(e.error, -0.014759540557861328);
  EXPECT_EQ(shortest(e.exact), "-4.703990459442139");
  EXPECT_EQ(shortest(e.error), "-0.014759540557861328");
  EXPECT_FALSE(e.rounded_twice);
}

constexpr char kPaperText[] = R"(explain     -2.4071154594421387 + -2.296875

operands       value                fp32 word   sign  exponent       significand
            a  -2.4071154594421387  0xC01A0E2E  1 -   10000000: 2^1  1.00110100000111000101110
            b  -2.296875            0xC0130000  1 -   10000000: 2^1  1.00100110000000000000000

align       the exponents are equal: nothing to shift
            a     -1.00110100000111000101110
            b     -1.00100110000000000000000
add         signs agree: magnitudes add
            sum  -10.01011010000111000101110  x 2^1
            = -4.703990459442139, exactly
normalise   a carry out: 2 places before the point, which moves 1 place left
            The format keeps as many bits as before, so one more bit falls off its end.
                  -1.001011010000111000101110  x 2^2

to fp32     23 bits after the point, to nearest, ties to even
              -1.00101101000011100010111 | 0 | 0  x 2^2
                                    kept round sticky
            No 1 is cut off: nothing is lost.
            stored: 0xC0968717 = -1.00101101000011100010111 x 2^2 = -4.703990459442139

to bf16     7 bits after the point, to nearest, ties to even
              -1.0010110 | 1 | 000011100010111  x 2^2
                    kept round sticky
            It lies between two numbers of bf16: -4.6875 and -4.71875.
            round bit 1:  what is cut off is half a step or more;
            sticky bit 1: at least one of the 15 bits after it is 1, so it is more than half.
            The nearer one is that away from zero: 1 is added to the last kept bit.
            stored: 0xC097 = -1.0010111 x 2^2 = -4.71875

error       stored - exact = -0.014759540557861328
            = -0.4723 steps; a step of bf16 is 0.03125 here
            Away from zero means down for a negative number: the error is negative.
)";

TEST(Explain, the_papers_example_in_text) {
  EXPECT_EQ(to_text(explain_text(kPaper, "bf16"), false), kPaperText);
  // As words, as one quoted word, as FP32 words: the same.
  EXPECT_EQ(to_text(explain_text("-2.4071154594421387+-2.296875", "bf16"), false), kPaperText);
  const std::string words = to_text(explain_text("0xC01A0E2E + 0xC0130000", "bf16"), false);
  EXPECT_EQ(words.substr(words.find("operands")),
            std::string(kPaperText).substr(std::string(kPaperText).find("operands")));
}

TEST(Explain, colour_marks_kept_round_and_sticky) {
  const std::string text = to_text(explain_text(kPaper, "bf16"), true);
  EXPECT_NE(text.find("\x1b[32m-1.0010110\x1b[0m | \x1b[1;33m1\x1b[0m | \x1b[35m000011100010111\x1b[0m"),
            std::string::npos);
  // Colour adds escape sequences and nothing else.
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\x1b')
      i = text.find('m', i);
    else
      plain += text[i];
  EXPECT_EQ(plain, kPaperText);
}

TEST(Explain, the_papers_example_in_json) {
  const Json json = parse_json(to_json(explain_text(kPaper, "bf16")));
  EXPECT_EQ(json["operation"], "add");
  EXPECT_EQ(json["operands"][0]["fp32"]["code"], "0xC01A0E2E");
  EXPECT_EQ(json["operands"][0]["rounded_to_fp32"], false);
  EXPECT_EQ(json["exact"], -4.703990459442139);
  EXPECT_EQ(json["carry_out"], true);
  EXPECT_EQ(json["normalise"], 1);
  EXPECT_EQ(json["roundings"][0]["after"]["code"], "0xC0968717");
  EXPECT_EQ(json["roundings"][0]["direction"], "exact");
  const Json& bf16 = json["roundings"][1];
  EXPECT_EQ(bf16["rounding"], "bf16");
  EXPECT_EQ(bf16["round_bit"], 1);
  EXPECT_EQ(bf16["sticky_bit"], 1);
  EXPECT_EQ(bf16["direction"], "up");
  EXPECT_EQ(bf16["kept"], "1.0010110");
  EXPECT_EQ(bf16["after"]["code"], "0xC097");
  EXPECT_EQ(json["result"]["value"], -4.71875);
  EXPECT_EQ(json["error"], -0.014759540557861328);
}

// ------------------------------------------------------------------------------------- random operations

class Floats {
 public:
  float any() {
    for (;;) {
      const auto x = std::bit_cast<float>(static_cast<uint32_t>(random_()));
      if (std::isfinite(x)) return x;
    }
  }
  // Exponents close together: alignment, carries and cancellation happen; few bits: so do ties.
  float near() {
    const uint32_t mask = random_() % 2 ? 0x807fffffu : 0x807f0000u;
    const auto significand = std::bit_cast<float>((static_cast<uint32_t>(random_()) & mask) | 0x3f800000u);
    return std::ldexp(significand, static_cast<int>(random_() % 12));
  }
  float pick() { return random_() % 4 ? near() : any(); }

 private:
  std::mt19937 random_{42};
};

// What must hold of every explanation of one operation.
void check_consistency(const Explanation& e) {
  if (e.special) return;
  // The digits of the grid say what the operands are, and add up to the exact result.
  if (e.exact_digits.size() <= 54) {
    double sum = 0;
    for (const AlignedTerm& term : e.aligned)
      sum += (term.negative ? -1 : 1) * value_of(term.digits, e.exponent);
    ASSERT_EQ(sum, e.exact) << e.expression;
    ASSERT_EQ((e.exact_negative ? -1 : 1) * value_of(e.exact_digits, e.exponent), e.exact) << e.expression;
  }
  ASSERT_EQ(e.carry_out, e.normalise > 0);
  for (const RoundingStep& s : e.roundings) {
    if (s.special) continue;
    ASSERT_EQ(s.cut.empty() ? false : s.cut[0] == '1', s.round_bit) << e.expression;
    ASSERT_EQ(s.cut.size() > 1 && s.cut.find('1', 1) != std::string::npos, s.sticky_bit) << e.expression;
    ASSERT_EQ(std::fabs(s.toward_zero), value_of(s.kept, s.exponent)) << e.expression;
    ASSERT_EQ(s.direction == Direction::exact, !s.round_bit && !s.sticky_bit) << e.expression;
    ASSERT_EQ(s.tie, s.round_bit && !s.sticky_bit) << e.expression;
    if (!s.overflow) {
      ASSERT_EQ(s.value, s.direction == Direction::up ? s.away : s.toward_zero) << e.expression;
    }
    ASSERT_LE(std::fabs(s.toward_zero), std::fabs(s.before));
    ASSERT_GE(std::fabs(s.away), std::fabs(s.before));
    ASSERT_EQ(encode(s.after.format, s.after.value), s.after.code) << e.expression;
  }
}

TEST(Explain, random_operations_agree_with_the_hardware) {
  Floats floats;
  for (int i = 0; i < 20000; ++i) {
    const float a = floats.pick(), b = floats.pick(), c = floats.pick();
    volatile float x = a, y = b, z = c;
    volatile float added = x + y, multiplied = x * y, fused = std::fma(x, y, z);
    const struct {
      std::vector<ExpressionTerm> terms;
      Operation operation;
      float expected;
    } cases[] = {{{{literal(a), {}}, {literal(b), {}}}, Operation::add, added},
                 {{{literal(a), literal(b)}}, Operation::multiply, multiplied},
                 {{{literal(a), literal(b)}, {literal(c), {}}}, Operation::fused_multiply_add, fused},
                 {{{literal(c), {}}, {literal(a), literal(b)}}, Operation::fused_multiply_add, fused}};
    for (const auto& [terms, operation, expected] : cases) {
      ExplainOptions options;
      options.to = Rounding{kBf16};
      const Explanation e = explain(terms, options);
      ASSERT_EQ(e.operation, operation);
      ASSERT_EQ(e.roundings[0].after.code, bits(expected)) << e.expression;
      ASSERT_EQ(bits(e.value), bits(round_to({kBf16}, expected))) << e.expression;
      ASSERT_EQ(e.result.code, encode(kBf16, e.value)) << e.expression;
      check_consistency(e);
    }
  }
}

TEST(Explain, one_rounding_to_bf16_agrees_with_double) {
  // Operands near each other have an exact double sum; scaled so that a step is 1, nearbyint rounds it to
  // even.
  Floats floats;
  for (int i = 0; i < 20000; ++i) {
    const float a = floats.near(), b = floats.near();
    const double exact = static_cast<double>(a) + static_cast<double>(b);
    if (exact == 0) continue;
    const int step = std::ilogb(exact) - kBf16.significand_bits;
    const double expected = std::ldexp(std::nearbyint(std::ldexp(exact, -step)), step);
    const Explanation e =
        explain({{literal(a), {}}, {literal(b), {}}}, {.in = {kBf16}, .to = {}, .tensor_core = nullptr});
    ASSERT_EQ(e.roundings.size(), 1u);
    ASSERT_EQ(e.value, expected) << e.expression;
    ASSERT_EQ(e.exact, exact) << e.expression;
    ASSERT_EQ(e.error, expected - exact) << e.expression;
    check_consistency(e);
  }
}

// -------------------------------------------------------------------------------------------- hard cases

TEST(Explain, alignment) {
  const Explanation e = explain_text("1.5 + 0.1");
  EXPECT_EQ(e.aligned[0].shift, 0);
  EXPECT_EQ(e.aligned[1].shift, 4);
  EXPECT_EQ(e.aligned[1].digits, "0.000110011001100110011001101");
  EXPECT_FALSE(e.carry_out);
  EXPECT_EQ(e.normalise, 0);
  EXPECT_TRUE(e.literals[1].rounded);
  EXPECT_NE(to_text(e, false).find("0.1, as typed, is no number of fp32: b is the nearest one"),
            std::string::npos);
}

TEST(Explain, far_apart_only_the_sticky_bit_notices) {
  const Explanation e = explain_text("1 + 0x1p-149");
  EXPECT_EQ(e.aligned[1].shift, 126);  // a subnormal: its exponent is -126
  EXPECT_EQ(e.value, 1.0f);
  EXPECT_FALSE(e.exact_in_double);
  EXPECT_EQ(e.exact, 1.0);
  EXPECT_EQ(e.error, -0x1p-149);
  EXPECT_TRUE(!e.roundings[0].round_bit && e.roundings[0].sticky_bit);
  EXPECT_EQ(e.roundings[0].direction, Direction::down);
  EXPECT_EQ(explain_text("1 + 0x1p-149", nullptr, "fp32/up").value, 0x1.000002p0f);
}

TEST(Explain, cancellation_and_opposite_signs) {
  const Explanation e = explain_text("1.0000001192092896 - 1");
  EXPECT_EQ(e.expression, "1.0000001192092896 + -1");
  EXPECT_EQ(e.normalise, -23);
  EXPECT_FALSE(e.carry_out);
  EXPECT_EQ(e.value, 0x1p-23f);
  EXPECT_EQ(e.roundings[0].direction, Direction::exact);
  const Explanation zero = explain_text("5 - 5", "bf16");
  EXPECT_EQ(bits(zero.value), 0u);
  EXPECT_TRUE(zero.roundings[0].special);
  EXPECT_EQ(bits(explain_text("5 - 5", nullptr, "fp32/down").value), 0x80000000u);
  EXPECT_EQ(bits(explain_text("-0 + -0").value), 0x80000000u);
  EXPECT_EQ(bits(explain_text("-0 + 0").value), 0u);
  EXPECT_EQ(explain_text("3 + 0").value, 3.0f);
  EXPECT_EQ(bits(explain_text("-0 x 3").value), 0x80000000u);
}

TEST(Explain, ties_go_to_even) {
  const Explanation down = explain_text("1 + 0x1p-8", "bf16"),
                    up = explain_text("1.0078125 + 0x1p-8", "bf16");
  EXPECT_TRUE(down.roundings[1].tie && up.roundings[1].tie);
  EXPECT_EQ(down.roundings[1].direction, Direction::down);
  EXPECT_EQ(up.roundings[1].direction, Direction::up);
  EXPECT_EQ(down.value, 1.0f);
  EXPECT_EQ(up.value, 1.015625f);
  EXPECT_EQ(explain_text("1 + 0x1p-8", "bf16/nearest_away").value, 1.0078125f);
  EXPECT_NE(to_text(down, false).find("A tie."), std::string::npos);
}

TEST(Explain, rounding_twice_is_not_rounding_once) {
  // The bit that decides lies below FP32's last place: FP32 makes a tie of what is more than half.
  const Explanation e = explain_text("1.00390625 + 0x1p-30", "bf16");
  EXPECT_EQ(e.value, 1.0f);
  EXPECT_TRUE(e.rounded_twice);
  EXPECT_EQ(e.rounded_once, 1.0078125f);
  EXPECT_NE(to_text(e, false).find("rounding twice is not rounding once"), std::string::npos);
  EXPECT_EQ(parse_json(to_json(e))["rounded_once"], 1.0078125);
  EXPECT_EQ(explain_text("1.00390625 + 0x1p-30", nullptr, "bf16").value, 1.0078125f);
}

TEST(Explain, subnormals) {
  const Explanation e = explain_text("0x1p-100 x 0x1.8p-45", "bf16");
  EXPECT_EQ(e.roundings[0].after.kind, NumberKind::subnormal);
  EXPECT_EQ(e.roundings[0].value, 0x1.8p-145f);
  EXPECT_EQ(e.roundings[0].kept, "0.00000000000000000011000");
  EXPECT_EQ(e.roundings[0].exponent, -126);
  EXPECT_EQ(e.value, 0.0f);
  EXPECT_EQ(e.error, -0x1.8p-145);
  const Explanation parts = explain_text("0x00000001");
  EXPECT_EQ(parts.operands[0].kind, NumberKind::subnormal);
  EXPECT_EQ(parts.operands[0].significand, "0.00000000000000000000001");
  EXPECT_EQ(explain_text("0x1p-126 - 0x1p-149").value, 0x1.fffffcp-127f);
}

TEST(Explain, carry_in_the_rounding_and_overflow) {
  const Explanation e = explain_text("1.9999998807907104", "bf16");
  EXPECT_EQ(e.operation, Operation::value);
  ASSERT_EQ(e.roundings.size(), 1u);
  EXPECT_TRUE(e.roundings[0].carried);
  EXPECT_EQ(e.value, 2.0f);
  const Explanation overflow = explain_text("3e38 + 2e38", "bf16");
  EXPECT_TRUE(overflow.roundings[0].overflow);
  EXPECT_EQ(overflow.value, kInfinity);
  EXPECT_EQ(overflow.error, kInfinity);
  EXPECT_EQ(parse_json(to_json(overflow))["value"], "inf");
  EXPECT_EQ(explain_text("448 + 100", "e4m3/saturate").value, 448.0f);
  const Explanation no_infinity = explain_text("448 + 100", "e4m3");
  EXPECT_TRUE(std::isnan(no_infinity.value));
  EXPECT_EQ(no_infinity.result.code, 0x7Fu);
  EXPECT_EQ(explain_text("3e38 + 2e38", nullptr, "fp32/toward_zero").value, 0x1.fffffep127f);
}

TEST(Explain, infinity_and_nan) {
  const auto text = [](const char* expression, const char* to) {
    return to_text(explain_text(expression, to), false);
  };
  EXPECT_TRUE(std::isnan(explain_text("inf - inf", "bf16").value));
  EXPECT_NE(text("inf - inf", "bf16").find("infinity minus infinity has no value"), std::string::npos);
  EXPECT_NE(text("0 x inf", "bf16").find("infinity times zero has no value"), std::string::npos);
  EXPECT_NE(text("inf x 2 - inf", "bf16").find("infinity minus infinity has no value"), std::string::npos);
  EXPECT_NE(text("nan + 1", "bf16").find("NaN among the operands"), std::string::npos);
  EXPECT_EQ(explain_text("-inf + 3", "bf16").value, -kInfinity);
  EXPECT_EQ(explain_text("-inf + 3", "bf16").result.code, 0xFF80u);
  EXPECT_TRUE(std::isnan(explain_text("inf", "e4m3").value));
  EXPECT_EQ(explain_text("inf", "e4m3/saturate").value, 448.0f);
  EXPECT_EQ(parse_json(to_json(explain_text("nan", "bf16")))["exact"], "nan");
}

TEST(Explain, scale_and_stochastic_rounding) {
  const Explanation scaled = explain_text("0.3", "e4m3^8");
  EXPECT_EQ(scaled.value, 0.3125f);
  EXPECT_EQ(scaled.result.code, 0x6Au);  // of 80
  EXPECT_EQ(scaled.error_steps, scaled.error / 0x1p-5);
  // The same seed, the same result; over seeds, both neighbours, in proportion.
  int up = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    ExplainOptions options{
        .in = {}, .to = parse_rounding("bf16/stochastic"), .seed = seed, .tensor_core = nullptr};
    const auto terms = parse_expression("1 + 0x1p-9");  // a quarter of a step
    const Explanation e = explain(terms, options);
    ASSERT_EQ(e.value, explain(terms, options).value);
    ASSERT_TRUE(e.value == 1.0f || e.value == 1.0078125f);
    up += e.value > 1;
  }
  EXPECT_NEAR(up, 1000, 110);  // four standard deviations
  EXPECT_NE(
      to_text(explain_text("1 + 0x1p-9", "bf16/stochastic"), false).find("What is cut off is 0.25 of a step"),
      std::string::npos);
}

// -------------------------------------------------------------------------------------------------- sums

TEST(Explain, sums_agree_with_the_hardware_and_add_up) {
  Floats floats;
  for (int round = 0; round < 300; ++round) {
    const size_t count = 3 + static_cast<size_t>(round) % 40;
    std::vector<ExpressionTerm> terms;
    ExactSum exact;
    volatile float sum = 0;
    for (size_t i = 0; i < count; ++i) {
      const float a = floats.near() * (i % 2 ? -1 : 1), b = floats.near();
      const bool product = (round % 3 == 0 && i > 0) || round % 3 == 1;
      terms.push_back({literal(a), product ? std::optional(literal(b)) : std::nullopt});
      if (product) {
        exact.add_product(a, b);
        sum = i == 0 ? a * b : std::fma(a, b, sum);
      } else {
        exact.add(a);
        sum = i == 0 ? a : sum + a;
      }
    }
    ExplainOptions options;
    options.to = Rounding{kBf16};
    const Explanation e = explain(terms, options);
    ASSERT_EQ(e.operation, Operation::sum);
    ASSERT_EQ(bits(e.steps.back().value), bits(sum));
    ASSERT_EQ(bits(e.value), bits(round_to({kBf16}, sum)));
    ASSERT_EQ(e.exact, exact.to_double());
    ExactSum error;
    error.add(sum);
    error.subtract(exact);
    ASSERT_EQ(e.accumulated_error, error.to_double());
    ASSERT_EQ(static_cast<size_t>(e.rounded_up + e.rounded_down + e.not_rounded), e.steps.size());
    // The signed errors of the steps add up to that of the sum.
    double total = 0;
    int64_t up = 0;
    for (const Explanation& step : e.steps) {
      check_consistency(step);
      total += step.roundings[0].error;
      up += step.roundings[0].direction == Direction::up;
    }
    ASSERT_NEAR(total, e.accumulated_error, 1e-12 * static_cast<double>(count) * std::fabs(sum) + 1e-15);
    ASSERT_EQ(up, e.rounded_up);
  }
}

TEST(Explain, sums_in_text_and_json) {
  const Explanation e = explain_text("0.1 + 0.1 + 0.1 + 0.1 x 3", "bf16");
  const std::string text = to_text(e, false);
  EXPECT_NE(text.find("one after another, from 0.1, each rounded to fp32"), std::string::npos) << text;
  EXPECT_NE(text.find("roundings   "), std::string::npos);
  EXPECT_EQ(text.find("0.1, as typed"), text.rfind("0.1, as typed"));  // noted once
  const Json json = parse_json(to_json(e));
  EXPECT_EQ(json["steps"].size(), 3u);
  EXPECT_EQ(json["steps"][2]["operation"], "fused_multiply_add");
  EXPECT_EQ(json["rounded_up"].get<int>() + json["rounded_down"].get<int>() + json["not_rounded"].get<int>(),
            3);
  EXPECT_EQ(explain_text("1 x 2 + 3 x 4").steps.size(), 2u);
  EXPECT_EQ(explain_text("1 + 2 + 0.1", nullptr, "bf16").result.format, kBf16);
}

TEST(Explain, tensor_core_sums) {
  ExplainOptions options;
  options.tensor_core = &find_tensor_core_model(kBf16);
  options.to = Rounding{kBf16};
  const Explanation e = explain(parse_expression("-2.4071154594421387 + -2.296875 + 3 x 0x1p-26"), options);
  ASSERT_TRUE(e.tensor_core);
  EXPECT_EQ(e.tensor_core->addend, -2.4071154594421387f);  // the first number is the accumulator
  EXPECT_EQ(e.tensor_core->blocks[0].max_exponent, 1);
  EXPECT_EQ(e.tensor_core->blocks[0].terms[1].shift, 26);
  EXPECT_EQ(e.tensor_core->blocks[0].terms[1].lost, 3 * 0x1p-26);
  EXPECT_EQ(e.value, -4.71875f);
  EXPECT_NE(to_text(e, false).find("aligned to 2^1, cut after the place 2^-24"), std::string::npos);
  EXPECT_EQ(parse_json(to_json(e))["tensor_core"]["blocks"].size(), 1u);
  EXPECT_THROW(explain(parse_expression("1 + 0.1"), options), std::invalid_argument);
  EXPECT_EQ(explain(parse_expression("1"), options).value, 1.0f);
}

// --------------------------------------------------------------------------------------- reading numbers

TEST(Explain, reads_numbers_of_every_kind) {
  const auto value = [](std::string_view text) {
    const auto terms = parse_expression(text);
    EXPECT_EQ(terms.size(), 1u);
    return terms[0].a;
  };
  EXPECT_EQ(value("0x1.8p3").value, 12.0f);
  EXPECT_EQ(value("-0x1.8p-3").value, -0.1875f);
  EXPECT_EQ(value("0xC01A0E2E").value, -2.4071154594421387f);
  EXPECT_EQ(bits(value("0x7fc00000").value), 0x7fc00000u);
  EXPECT_EQ(value(" -1e-3 ").read, -1e-3);
  EXPECT_EQ(value("+5").value, 5.0f);
  EXPECT_EQ(value(".5").value, 0.5f);
  EXPECT_EQ(value("5.").value, 5.0f);
  EXPECT_EQ(bits(value("-0").value), 0x80000000u);
  EXPECT_EQ(value("-inf").value, -kInfinity);
  EXPECT_EQ(value("Infinity").value, kInfinity);
  EXPECT_TRUE(std::isnan(value("NaN").value));
  // Rounded from the text, not through double: 1 + 2^-24 + 2^-60 lies above the tie, its double on it.
  EXPECT_EQ(value("1.00000005960464477625798739").value, 0x1.000002p0f);
  EXPECT_EQ(value("1e39").value, kInfinity);
  EXPECT_TRUE(value("1e39").rounded);
  EXPECT_EQ(value("1e-50").value, 0.0f);
  EXPECT_TRUE(value("1e-50").rounded);
  EXPECT_TRUE(value("0.1").rounded);
  EXPECT_FALSE(value("-2.4071154594421387").rounded);
}

TEST(Explain, reads_expressions) {
  const auto terms = parse_expression("1 x 2 - 3*4 +5\u00d76 - -7");
  ASSERT_EQ(terms.size(), 4u);
  EXPECT_EQ(terms[1].a.value, -3.0f);
  EXPECT_EQ(terms[1].b->value, 4.0f);
  EXPECT_EQ(terms[2].b->value, 6.0f);
  EXPECT_EQ(terms[3].a.value, 7.0f);
  EXPECT_EQ(terms[3].a.text, "7");
  EXPECT_EQ(parse_expression("2x3")[0].b->value, 3.0f);
  EXPECT_EQ(parse_expression("1e-5-3").size(), 2u);
}

TEST(Explain, refuses_what_is_no_expression) {
  const struct {
    const char *text, *message;
  } cases[] = {
      {"", "expected a number, found the end at character 1 of ''"},
      {"1 +", "expected a number, found the end at character 4 of '1 +'"},
      {"1 + + 2", "expected a number, found '+' at character 5 of '1 + + 2'"},
      {"one", "expected a number, found 'one' at character 1 of 'one'"},
      {"1 2", "expected +, -, * or x, found '2' at character 3 of '1 2'"},
      {"1 x 2 x 3", "expected + or -, found 'x' at character 7 of '1 x 2 x 3'"},
      {"1 / 2", "expected +, -, * or x, found '/' at character 3 of '1 / 2'"},
      {"-0xC01A0E2E",
       "expected an FP32 word without a sign (it has its own), found '-0xC01A0E2E' at character 1 of "
       "'-0xC01A0E2E'"},
      {"1e999", "expected a number within the range of double, found '1e999' at character 1 of '1e999'"},
  };
  for (const auto& [text, message] : cases) try {
      parse_expression(text);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_STREQ(error.what(), message);
    }
  for (const char* text : {".", "-", "+", "x", "0x", "0x1", "0x123456789", "0x1.8", "0x1.8p", "0xp1", "1e",
                           "infinite", "1 x", "- 1", "1 ++ 2", "1,5", "\xff", "1 \xc3", "--1"})
    EXPECT_THROW(parse_expression(text), std::invalid_argument) << text;
}

TEST(Explain, shortest_decimals) {
  EXPECT_EQ(shortest(0.1), "0.1");
  EXPECT_EQ(shortest(-0.0), "-0");
  EXPECT_EQ(shortest(kInfinity), "inf");
  EXPECT_EQ(shortest(-kInfinity), "-inf");
  EXPECT_EQ(shortest(std::nan("")), "nan");
}

// No finite pair of operands, format or mode may break the renderings; JSON must parse.
TEST(Explain, every_explanation_can_be_written) {
  Floats floats;
  const char* formats[] = {"fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2", "e2m1", "e4m3^8/saturate"};
  for (int i = 0; i < 2000; ++i) {
    const std::vector<ExpressionTerm> terms = {{literal(floats.any()), literal(floats.any())},
                                               {literal(floats.any()), {}}};
    ExplainOptions options;
    options.to = parse_rounding(formats[i % 8]);
    options.to->mode = static_cast<RoundingMode>(i / 8 % 6);
    const Explanation e = explain(terms, options);
    const std::string text = to_text(e, i % 2);
    ASSERT_TRUE(text.ends_with("\n") && !text.ends_with("\n\n"));
    const Json json = try_parse_json(to_json(e));
    ASSERT_FALSE(json.is_discarded());
    ASSERT_EQ(json["expression"], e.expression);
  }
}

}  // namespace
}  // namespace evenkeel
