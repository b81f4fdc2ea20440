// Scales that a block shares: the rule against MPFR, the fast version against the definition, what a block becomes.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpfr.h>

#include <cmath>
#include <string>
#include <vector>

#include "numerics/round_array.h"
#include "numerics/round_block.h"
#include "rounding_cases.h"

namespace evenkeel {
namespace {
using namespace rounding_cases;

constexpr const char* kFormats[] = {"e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "int8", "int4", "hif8", "fp16"};

// --- the rule

// largest / max_finite and its powers of two, exactly or correctly rounded, by MPFR.
class ScaleOracle {
 public:
  ScaleOracle() { mpfr_inits2(200, x_, y_, nullptr); }
  ~ScaleOracle() { mpfr_clears(x_, y_, nullptr); }
  ScaleOracle(const ScaleOracle&) = delete;

  float quotient(float largest, float divisor) {
    mpfr_set_flt(x_, largest, MPFR_RNDN);
    mpfr_set_prec(y_, 24);
    mpfr_set_emin(-148);  // FP32's range: [1/2, 1) 2^e
    mpfr_set_emax(128);
    mpfr_t d;
    mpfr_init2(d, 24);
    mpfr_set_flt(d, divisor, MPFR_RNDN);
    const int inexact = mpfr_div(y_, x_, d, MPFR_RNDN);
    mpfr_subnormalize(y_, inexact, MPFR_RNDN);
    const float result = mpfr_get_flt(y_, MPFR_RNDN);
    mpfr_set_emin(mpfr_get_emin_min());
    mpfr_set_emax(mpfr_get_emax_max());
    mpfr_clear(d);
    return result;
  }
  // floor(log2(largest)), and the smallest e with 2^e >= largest / divisor, both exact.
  int floor_log2(float largest) {
    mpfr_set_flt(x_, largest, MPFR_RNDN);
    return static_cast<int>(mpfr_get_exp(x_)) - 1;
  }
  int least_power(float largest, float divisor) {
    int e = -400;
    for (;; ++e) {
      mpfr_set_flt(y_ /* 24 bits or more */, divisor, MPFR_RNDN);
      mpfr_mul_2si(y_, y_, e, MPFR_RNDN);
      mpfr_set_flt(x_, largest, MPFR_RNDN);
      if (mpfr_cmp(y_, x_) >= 0) return e;
    }
  }

 private:
  mpfr_t x_, y_;
};

std::vector<float> magnitudes() {
  std::vector<float> list;
  for (int e = -149; e <= 127; ++e)
    for (uint32_t pattern : {0u, 1u, 0x400000u, 0x600000u, 0x600001u, 0x5fffffu, 0x7fffffu})
      list.push_back(e < -126 ? power_of_two(e) : from_bits(static_cast<uint32_t>(e + 127) << 23 | pattern));
  for (uint64_t i = 0; i < 400; ++i) list.push_back(from_bits(random_bits({9}, i) % 0x7f800000u));
  return list;
}

TEST(BlockScale, every_rule_is_mpfrs) {
  ScaleOracle oracle;
  int64_t cases = 0;
  for (const char* format : kFormats)
    for (const char* rule : {"fp32", "e4m3", "e8m0", "e8m0_up"}) {
      const Rounding r = parse_rounding(fmt::format("{}*row@{}", format, rule));
      // HiFloat8 has three bits up to 15; the others go to their largest number.
      const float top = r.format.tapered ? 15.0f : max_finite(r.format);
      for (float largest : magnitudes()) {
        if (largest == 0) continue;
        float expected = 0;
        switch (r.shared.rule) {
          case ScaleRule::fp32:
            expected = oracle.quotient(largest, top);
            break;
          case ScaleRule::e4m3:
            expected = round_to(parse_rounding("e4m3/saturate"), oracle.quotient(largest, top));
            break;
          case ScaleRule::e8m0:
            expected =
                std::ldexp(1.0f, std::clamp(oracle.floor_log2(largest) - oracle.floor_log2(top), -127, 127));
            break;
          case ScaleRule::e8m0_up:
            expected = std::ldexp(1.0f, std::clamp(oracle.least_power(largest, top), -127, 127));
            break;
        }
        ASSERT_EQ(bits(block_scale(r, largest)), bits(expected)) << to_string(r) << " of " << largest;
        ++cases;
      }
    }
  EXPECT_GT(cases, 50000);
}

// NVFP4: the largest block has a scale of E4M3's largest number times the outer scale, so the largest value is 6 codes.
TEST(BlockScale, two_levels_use_the_whole_range_of_both) {
  const Rounding r = parse_rounding("e2m1*block16@e4m3*tensor");
  for (float largest : {1.0f, 3.0f, 1e-6f, 12345.0f}) {
    const float outer = outer_scale(r, largest), scale = block_scale(r, largest, outer);
    EXPECT_EQ(outer, largest / 2688.0f);
    EXPECT_EQ(scale, 448.0f * outer);
    EXPECT_NEAR(largest / scale, 6.0f, 1e-6);
    // A block 1000 times smaller keeps a scale of its own.
    EXPECT_NEAR(block_scale(r, largest / 1000, outer) / scale, 1e-3, 1e-3 / 16);
  }
  EXPECT_EQ(outer_scale(r, 0), 1.0f);
}

// --- blocks

std::vector<float> block_of(int64_t count, uint64_t seed) {
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = (random_unit({seed}, i) - 0.5f) *
           std::ldexp(1.0f, static_cast<int>(random_bits({seed + 1}, i) % 24) - 12);
  return x;
}

const char* const kScales[] = {"block16",
                               "block32@e8m0",
                               "row",
                               "tile",
                               "head@e8m0_up",
                               "tensor",
                               "block16@e4m3*tensor",
                               "block32@e4m3*row",
                               "block16@e4m3",
                               "block128",
                               "column",
                               "column16",
                               "column32@e8m0",
                               "column16@e4m3*tensor",
                               "column16@e4m3*column"};

// Both layouts, rows that are no multiple of the blocks, zeros, specials, every mode.
TEST(RoundBlock, fast_version_is_the_definition) {
  int64_t cases = 0, changed = 0;
  for (const char* format : kFormats)
    for (const char* scale : kScales)
      for (RoundingMode mode : kAllModes) {
        Rounding r = parse_rounding(fmt::format("{}*{}", format, scale));
        r.mode = mode;
        for (bool lanes : {false, true}) {
          const int64_t rows = 19, columns = 50, pitch = lanes ? 24 : 56;
          std::vector<float> x = block_of((lanes ? columns : rows) * pitch, 77);
          const int64_t row_stride = lanes ? 1 : pitch, column_stride = lanes ? pitch : 1;
          for (int64_t j = 0; j < 16; ++j) x[static_cast<size_t>(2 * row_stride + j * column_stride)] = -0.0f;
          x[static_cast<size_t>(3 * row_stride + 20 * column_stride)] = kInf;
          x[static_cast<size_t>(3 * row_stride + 21 * column_stride)] = std::nanf("");
          std::vector<float> slow = x, fast = x;
          const RandomKey key{5};
          round_block(r, {slow.data(), rows, columns, row_stride, column_stride}, -1, key, 64);
          const ScaledMatrix m{fast.data(), rows, columns, row_stride, column_stride};
          const std::vector<float> scales = find_scales(r, m);
          divide_by_scales(r.shared, m, scales);
          for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) {
              float* value = &fast[static_cast<size_t>(i * row_stride + j * column_stride)];
              round_array(element_rounding(r), value, value, 1, key,
                          static_cast<uint64_t>(64 + i * columns + j));
            }
          multiply_by_scales(r.shared, m, scales);
          for (size_t n = 0; n < x.size(); ++n) {
            ASSERT_TRUE(bits(slow[n]) == bits(fast[n]) || (std::isnan(slow[n]) && std::isnan(fast[n])))
                << to_string(r) << " at " << n << ": " << x[n] << " gives " << slow[n] << " and " << fast[n];
            ++cases;
            changed += slow[n] != x[n];
          }
        }
      }
  EXPECT_GT(changed, cases / 4);
}

// The definition by hand: one row of 32 with a scale by each rule.
TEST(RoundBlock, a_block_by_hand) {
  const auto rounded = [](const char* text, std::vector<float> x) {
    round_block(parse_rounding(text), {x.data(), 1, static_cast<int64_t>(x.size()), 0, 1});
    return x;
  };
  // INT8, largest 254: scale 2.
  EXPECT_EQ(rounded("int8*row", {254, 3, -5, 0.9f, 0}), (std::vector<float>{254, 4, -4, 0, 0}));
  // OCP: floor(log2 500) - 8 = 0: 500 saturates at 448; rounded up the scale is 2.
  EXPECT_EQ(rounded("e4m3*row@e8m0", {500, 17}), (std::vector<float>{448, 16}));
  EXPECT_EQ(rounded("e4m3*row@e8m0_up", {500, 17}), (std::vector<float>{512, 16}));
  // Blocks do not see each other; the row does.
  std::vector<float> two(32, 0.01f);
  two[0] = 6;
  std::vector<float> blocks = rounded("e2m1*block16", two), row = rounded("e2m1*row", two);
  EXPECT_EQ(row[31], 0);
  EXPECT_FLOAT_EQ(blocks[31], 0.01f);
  EXPECT_EQ(blocks[1], 0);
  // Every value is within half a step of its own scale.
  for (const char* format : kFormats) {
    const Rounding r = parse_rounding(std::string(format) + "*block32");
    std::vector<float> x = block_of(128, 3), y = x;
    const ScaledMatrix m{y.data(), 1, 128, 0, 1};
    const std::vector<float> scales = find_scales(r, m);
    round_block(r, m);
    for (size_t i = 0; i < x.size(); ++i) {
      const double step = static_cast<double>(ulp(r.format, x[i] / scales[i / 32])) * scales[i / 32];
      EXPECT_LE(std::fabs(static_cast<double>(y[i]) - x[i]), step * 0.5001) << format << " " << x[i];
    }
  }
}

// A scale down the column is a scale along the row of the transposed matrix.
TEST(RoundBlock, columns_are_the_rows_of_the_transposed_matrix) {
  const std::pair<const char*, const char*> pairs[] = {{"column", "row"},
                                                       {"column@e8m0_up", "row@e8m0_up"},
                                                       {"column16", "block16"},
                                                       {"column32@e8m0", "block32@e8m0"},
                                                       {"column64", "block64"},
                                                       {"column16@e4m3*column", "block16@e4m3*row"},
                                                       {"column32@e4m3*tensor", "block32@e4m3*tensor"},
                                                       {"column@e4m3*head", "row@e4m3*head"}};
  for (const char* format : kFormats)
    for (const auto& [column, row] : pairs) {
      constexpr int64_t kRows = 70, kColumns = 20;
      std::vector<float> down = block_of(kRows * kColumns, 21), along = down, plain = down;
      round_block(parse_rounding(fmt::format("{}*{}", format, column)),
                  {down.data(), kRows, kColumns, kColumns, 1});
      round_block(parse_rounding(fmt::format("{}*{}", format, row)),
                  {along.data(), kColumns, kRows, 1, kColumns});
      EXPECT_EQ(down, along) << format << "*" << column;
      round_block(parse_rounding(fmt::format("{}*{}", format, row)),
                  {plain.data(), kRows, kColumns, kColumns, 1});
      // The check can fail, but for formats of so wide a range that a power of two changes nothing.
      if (parse_format(format).exponent_bits == 0) EXPECT_NE(down, plain) << format << "*" << column;
    }
}

// A part of a column, with the largest of the whole column given, is rounded as the column is.
TEST(RoundBlock, a_part_of_a_column_has_the_columns_scale) {
  for (const char* text : {"int8*column", "e2m1*column16@e4m3*column", "e4m3*column32@e4m3*head"}) {
    const Rounding r = parse_rounding(text);
    constexpr int64_t kRows = 100, kColumns = 8, kFirst = 64;
    std::vector<float> whole = block_of(kRows * kColumns, 5), part = whole, of_columns(kColumns);
    for (int64_t j = 0; j < kColumns; ++j)
      of_columns[static_cast<size_t>(j)] = largest_finite({whole.data() + j, kRows, 1, kColumns, 1});
    const float of_all = largest_finite({whole.data(), kRows, kColumns, kColumns, 1});
    round_block(r, {whole.data(), kRows, kColumns, kColumns, 1});
    round_block(r, {part.data() + kFirst * kColumns, kRows - kFirst, kColumns, kColumns, 1},
                {of_all, of_columns.data()});
    for (size_t n = kFirst * kColumns; n < whole.size(); ++n) ASSERT_EQ(whole[n], part[n]) << text;
  }
}

// Rounding a second time changes nothing where the scale is a power of two. (A scale of FP32 is found anew, and may be a
// step off.)
TEST(RoundBlock, a_power_of_two_is_idempotent) {
  for (const char* format : kFormats)
    for (const char* scale : {"block32@e8m0", "row@e8m0_up"}) {
      const Rounding r = parse_rounding(fmt::format("{}*{}", format, scale));
      std::vector<float> once = block_of(96, 4);
      round_block(r, {once.data(), 1, 96, 0, 1});
      std::vector<float> twice = once;
      round_block(r, {twice.data(), 1, 96, 0, 1});
      for (size_t i = 0; i < once.size(); ++i) ASSERT_EQ(once[i], twice[i]) << to_string(r);
    }
}

TEST(RoundBlock, nothing_and_zeros_stay) {
  for (const char* scale : kScales) {
    const Rounding r = parse_rounding(std::string("int8*") + scale);
    round_block(r, {nullptr, 0, 0, 0, 1});
    float zeros[3] = {0.0f, -0.0f, 0.0f};
    round_block(r, {zeros, 1, 3, 0, 1});
    EXPECT_EQ(bits(zeros[0]), 0u);
    EXPECT_EQ(bits(zeros[1]), 0x80000000u);
    float tiny[2] = {0x1p-149f, -0x1p-140f};
    round_block(r, {tiny, 1, 2, 0, 1});
    EXPECT_TRUE(std::isfinite(tiny[0]) && std::isfinite(tiny[1]));
  }
}

}  // namespace
}  // namespace evenkeel
