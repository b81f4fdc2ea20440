// The exact accumulator, against the hardware's correctly rounded double and float arithmetic (whose operands
// are exact) and against round_to for single values.
#include "numerics/exact.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <limits>
#include <random>

namespace evenkeel {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kHardValues[] = {0.0f,
                                 -0.0f,
                                 1.0f,
                                 -1.0f,
                                 0x1.fffffep127f,
                                 -0x1.fffffep127f,
                                 0x1p-149f,
                                 -0x1p-149f,
                                 0x1p-126f,
                                 0x1.fffffcp-127f,
                                 1.5f,
                                 0x1.01p0f,
                                 0x1.0080p0f,
                                 0x1.008002p0f,
                                 0x1.7fp3f,
                                 448.0f,
                                 464.0f,
                                 465.0f,
                                 0x1p-9f,
                                 0x1p-10f,
                                 0x1.8p-10f,
                                 65504.0f,
                                 65520.0f,
                                 61440.0f};

// Any finite bit pattern, or exponents close together so that bits overlap.
class Floats {
 public:
  float any() {
    for (;;) {
      const auto x = std::bit_cast<float>(static_cast<uint32_t>(random_()));
      if (std::isfinite(x)) return x;
    }
  }
  float near_one() { return std::ldexp(any_significand(), static_cast<int>(random_() % 40) - 20); }
  float pick() { return random_() % 2 ? any() : near_one(); }
  uint32_t bits() { return static_cast<uint32_t>(random_()); }

 private:
  float any_significand() { return std::bit_cast<float>((bits() & 0x807fffffu) | 0x3f800000u); }
  std::mt19937 random_{20240611};
};

ExactSum sum_of(std::initializer_list<float> values) {
  ExactSum sum;
  for (const float x : values) sum.add(x);
  return sum;
}

TEST(Exact, sum_of_two_floats_is_correctly_rounded_in_double) {
  Floats floats;
  for (int i = 0; i < 200000; ++i) {
    const float a = floats.pick(), b = floats.pick();
    const double expected = static_cast<double>(a) + static_cast<double>(b);
    ASSERT_EQ(sum_of({a, b}).to_double(), expected) << a << " + " << b;
  }
}

TEST(Exact, product_plus_float_is_correctly_rounded_in_double) {
  Floats floats;
  for (int i = 0; i < 200000; ++i) {
    const float a = floats.pick(), b = floats.pick(), c = floats.pick();
    ExactSum sum;
    sum.add_product(a, b);
    sum.add(c);
    ASSERT_EQ(sum.to_double(), std::fma(double{a}, double{b}, double{c})) << a << " * " << b << " + " << c;
  }
}

TEST(Exact, rounds_to_fp32_as_the_hardware_does_in_every_direction) {
  const struct {
    RoundingMode mode;
    int direction;
  } modes[] = {{RoundingMode::nearest_even, FE_TONEAREST},
               {RoundingMode::toward_zero, FE_TOWARDZERO},
               {RoundingMode::up, FE_UPWARD},
               {RoundingMode::down, FE_DOWNWARD}};
  Floats floats;
  for (int i = 0; i < 100000; ++i) {
    const float a = floats.pick(), b = floats.pick(), c = i % 3 ? floats.pick() : -a * b;
    for (const auto& [mode, direction] : modes) {
      std::fesetround(direction);
      volatile float x = a, y = b, z = c;
      volatile float added = x + y, multiplied = x * y, fused = std::fma(x, y, z);
      std::fesetround(FE_TONEAREST);
      const Rounding rounding{kFp32, mode};
      ExactSum product;
      product.add_product(a, b);
      ASSERT_EQ(std::bit_cast<uint32_t>(sum_of({a, b}).round(rounding).value),
                std::bit_cast<uint32_t>(+added))
          << a << " + " << b << " " << static_cast<int>(mode);
      ASSERT_EQ(std::bit_cast<uint32_t>(product.round(rounding).value), std::bit_cast<uint32_t>(+multiplied))
          << a << " * " << b << " " << static_cast<int>(mode);
      if (!std::isfinite(c)) continue;
      product.add(c);
      ASSERT_EQ(std::bit_cast<uint32_t>(product.round(rounding).value), std::bit_cast<uint32_t>(+fused))
          << a << " * " << b << " + " << c << " " << static_cast<int>(mode);
    }
  }
}

TEST(Exact, one_float_is_rounded_as_round_to_does) {
  const char* texts[] = {"fp32", "tf32",   "bf16",          "fp16",          "e4m3", "e5m2",
                         "e3m1", "e4m3^8", "e5m2/saturate", "e4m3/saturate", "e2m1", "bf16^-20",
                         "e8m1", "int8",   "int4",          "hif8",          "e3m2", "hif8^3"};
  Floats floats;
  for (const char* text : texts)
    for (size_t mode = 0; mode < std::size(kRoundingModeNames); ++mode) {
      Rounding rounding = parse_rounding(text);
      rounding.mode = static_cast<RoundingMode>(mode);
      const auto check = [&](float x, uint32_t random) {
        const float expected = round_to(rounding, x, random),
                    found = sum_of({x}).round(rounding, random).value;
        ASSERT_TRUE(std::isnan(expected)
                        ? std::isnan(found)
                        : std::bit_cast<uint32_t>(expected) == std::bit_cast<uint32_t>(found))
            << to_string(rounding) << " of " << x << ": expected " << expected << ", found " << found;
      };
      for (const float x : kHardValues)
        for (const float y : {x, -x}) check(y, 0x80000000u);
      for (const float x : {kInfinity, -kInfinity, kNan}) check(x, 0);
      for (int i = 0; i < 3000; ++i) check(floats.pick(), floats.bits());
    }
}

TEST(Exact, says_what_was_kept_and_cut_off) {
  // 1.0010110|1|0000111 * 2^2, the paper's sum.
  const ExactSum sum = sum_of({-2.4071154594421387f, -2.296875f});
  const ExactRounding r = sum.round({kBf16});
  EXPECT_EQ(r.value, -4.71875f);
  EXPECT_EQ(r.kept, 0b10010110u);
  EXPECT_EQ(r.step, -5);
  EXPECT_TRUE(r.round_bit && r.sticky_bit && r.up);
  EXPECT_FALSE(r.exact() || r.tie() || r.overflow);
  EXPECT_EQ(sum.sign(), -1);
  EXPECT_EQ(sum.leading(), 2);
  EXPECT_EQ(sum.trailing(), -21);
  EXPECT_EQ(sum.digits(2, -5), "10010110");
  EXPECT_EQ(point_digits(sum, 2, 2, -5), "1.0010110");
  EXPECT_EQ(point_digits(sum, 2, 1, 0), "10.0");
  EXPECT_TRUE(sum.bit(2) && !sum.bit(1) && !sum.bit(3) && !sum.bit(-1000) && !sum.bit(1000));
  EXPECT_TRUE(sum.any_below(-20));
  EXPECT_FALSE(sum.any_below(-21));

  const ExactRounding tie = sum_of({1.0f, 0x1p-8f}).round({kBf16});
  EXPECT_TRUE(tie.tie() && !tie.up);
  EXPECT_TRUE(sum_of({0x1.02p0f, 0x1p-8f}).round({kBf16}).up);  // odd: up to the even neighbour
  EXPECT_TRUE(sum_of({1.0f}).round({kBf16}).exact());
  EXPECT_TRUE(sum_of({0x1.fffffep127f, 0x1.fffffep127f}).round({}).overflow);
  EXPECT_EQ(sum_of({0x1.fffffep127f, 0x1.fffffep127f}).round({kFp32, RoundingMode::toward_zero}).value,
            0x1.fffffep127f);
}

TEST(Exact, nothing_is_lost_between_the_extremes) {
  const float largest = 0x1.fffffep127f, smallest = 0x1p-149f;
  ExactSum sum;
  for (int i = 0; i < 100000; ++i) sum.add_product(largest, largest);
  sum.add_product(smallest, smallest);
  EXPECT_EQ(sum.leading(), 272);  // 100000 is 1.526 * 2^16, and the square just below 2^256
  EXPECT_EQ(sum.trailing(), ExactSum::kLowestExponent);
  for (int i = 0; i < 100000; ++i) sum.add_product(-largest, largest);
  EXPECT_EQ(sum.to_double(), 0x1p-298);
  EXPECT_EQ(sum.leading(), -298);
  sum.add_product(smallest, -smallest);
  EXPECT_TRUE(sum.is_zero());
  EXPECT_EQ(sum.sign(), 0);
}

TEST(Exact, long_sums_agree_with_integers) {
  // Products of significands with one common exponent: 128-bit integers hold their sum.
  Floats floats;
  for (int round = 0; round < 200; ++round) {
    ExactSum sum;
    __int128 integer = 0;
    for (int i = 0; i < 1000; ++i) {
      const auto a = static_cast<int32_t>(floats.bits()) >> 8, b = static_cast<int32_t>(floats.bits()) >> 8;
      sum.add_product(std::ldexp(static_cast<float>(a), -60), std::ldexp(static_cast<float>(b), 20));
      integer += static_cast<__int128>(a) * b;
    }
    ASSERT_EQ(sum.sign(), integer < 0 ? -1 : integer > 0);
    const auto magnitude = static_cast<unsigned __int128>(integer < 0 ? -integer : integer);
    for (int i = 0; i < 100; ++i) ASSERT_EQ(sum.bit(i - 40), static_cast<bool>(magnitude >> i & 1)) << i;
  }
}

TEST(Exact, adds_and_subtracts_whole_sums) {
  ExactSum a = sum_of({1.0f, 0x1p-100f}), b = sum_of({1.0f});
  a.subtract(b);
  EXPECT_EQ(a.to_double(), 0x1p-100);
  b.subtract(a);
  b.subtract(sum_of({2.0f}));
  EXPECT_EQ(b.sign(), -1);
  b.add(a);
  EXPECT_EQ(b.to_double(), -1.0);
}

TEST(Exact, zeros_have_the_sign_of_ieee) {
  const Rounding down{kFp32, RoundingMode::down};
  const auto is_minus = [](const ExactRounding& r) { return r.value == 0 && std::signbit(r.value); };
  EXPECT_FALSE(is_minus(ExactSum().round({})));
  EXPECT_FALSE(is_minus(sum_of({0.0f}).round(down)));
  EXPECT_TRUE(is_minus(sum_of({-0.0f}).round({})));
  EXPECT_TRUE(is_minus(sum_of({-0.0f, -0.0f}).round({})));
  EXPECT_FALSE(is_minus(sum_of({-0.0f, 0.0f}).round({})));
  EXPECT_TRUE(is_minus(sum_of({-0.0f, 0.0f}).round(down)));
  EXPECT_FALSE(is_minus(sum_of({3.0f, -3.0f}).round({})));
  EXPECT_TRUE(is_minus(sum_of({3.0f, -3.0f}).round(down)));
  ExactSum product;
  product.add_product(-0.0f, 5.0f);
  EXPECT_TRUE(is_minus(product.round({})));
  EXPECT_TRUE(is_minus(sum_of({-0x1p-149f}).round({kBf16})));  // underflow keeps the sign
}

TEST(Exact, specials_follow_ieee) {
  EXPECT_FALSE(sum_of({1.0f}).special());
  EXPECT_EQ(sum_of({1.0f, kInfinity}).special(), kInfinity);
  EXPECT_EQ(sum_of({1.0f, -kInfinity}).to_double(), -kInfinity);
  EXPECT_TRUE(std::isnan(*sum_of({kInfinity, -kInfinity}).special()));
  EXPECT_TRUE(std::isnan(*sum_of({kNan}).special()));
  ExactSum product;
  product.add_product(0.0f, kInfinity);
  EXPECT_TRUE(std::isnan(*product.special()));
  ExactSum difference = sum_of({kInfinity});
  difference.subtract(sum_of({kInfinity}));
  EXPECT_TRUE(std::isnan(*difference.special()));
  EXPECT_TRUE(std::isnan(sum_of({kInfinity}).round({kE4m3}).value));
  EXPECT_EQ(sum_of({kInfinity}).round({.format = kE4m3, .saturate = true}).value, 448.0f);
}

}  // namespace
}  // namespace evenkeel
