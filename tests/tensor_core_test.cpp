// The tensor-core model against 5,000 real H200 results per format, against planted wrong models, and against
// its own second implementation, the trace.
#include "numerics/tensor_core.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>

#include "base/mma_files.h"
#include "numerics/exact.h"
#include "numerics/rounding.h"

namespace evenkeel {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
float dot(const TensorCoreModel& model, const std::vector<float>& a, const std::vector<float>& b,
          float c = 0) {
  return tensor_core_dot(model, a.data(), b.data(), a.size(), c);
}

// ------------------------------------------------------------------------------------------ real results

struct Vectors {
  MmaOperands a, b;
  std::vector<float> c, d;
};

std::filesystem::path vectors_folder(const char* format) {
  return std::filesystem::path(EVENKEEL_SOURCE_DIR) / "../shared/vectors/h200" / format;
}

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Vectors read_vectors(const char* folder, Format format, bool with_c) {
  const std::filesystem::path at = vectors_folder(folder);
  Vectors v;
  v.a = parse_mma_operands(text_of(at / "a.txt"), "a.txt", format);
  v.b = parse_mma_operands(text_of(at / "b.txt"), "b.txt", format);
  v.c = parse_mma_words(text_of(at / "c.txt"), "c.txt");
  v.d = parse_mma_words(text_of(at / "d.txt"), "d.txt");
  check_mma_shapes(v.a, "a.txt", v.b, "b.txt", &v.c, "c.txt");
  if (!with_c) std::fill(v.c.begin(), v.c.end(), 0.0f);
  return v;
}

// Rows on which compute(a, b, count, c) gives the real result, bit for bit.
template <class Compute>
int matches(const Vectors& v, Compute compute) {
  int count = 0;
  for (size_t i = 0; i < v.a.rows; ++i)
    count += bits(compute(v.a.row(i), v.b.row(i), v.a.columns, v.c[i])) == bits(v.d[i]);
  return count;
}
int matches(const Vectors& v, const TensorCoreModel& model) {
  return matches(v, [&](const float* a, const float* b, size_t count, float c) {
    return tensor_core_dot(model, a, b, count, c);
  });
}

#define SKIP_WITHOUT_VECTORS(folder)                              \
  if (!std::filesystem::exists(vectors_folder(folder) / "d.txt")) \
  GTEST_SKIP() << "real results are not here; looked in " << vectors_folder(folder)

TEST(TensorCore, matches_the_h200_on_bf16) {
  SKIP_WITHOUT_VECTORS("bf16");
  const Vectors v = read_vectors("bf16", kBf16, true);
  const TensorCoreModel& model = find_tensor_core_model(kBf16);
  ASSERT_EQ(v.d.size(), 5000u);
  EXPECT_EQ(matches(v, model), 5000);
  // Planted: every neighbouring model, and what people think that the chip does, must fail.
  for (const int bits : {model.alignment_bits - 1, model.alignment_bits + 1}) {
    TensorCoreModel planted = model;
    planted.alignment_bits = bits;
    EXPECT_LT(matches(v, planted), 4900) << bits;
  }
  TensorCoreModel planted = model;
  planted.output_bits = 22;
  EXPECT_LT(matches(v, planted), 3500);
  planted = model;
  planted.block_terms = 8;
  EXPECT_LT(matches(v, planted), 4500);
  EXPECT_LT(matches(v,
                    [](const float* a, const float* b, size_t count, float c) {
                      for (size_t i = 0; i < count; ++i) c = std::fma(a[i], b[i], c);
                      return c;
                    }),
            2500);
  EXPECT_LT(matches(v,
                    [](const float* a, const float* b, size_t count, float c) {
                      ExactSum sum;
                      sum.add(c);
                      for (size_t i = 0; i < count; ++i) sum.add_product(a[i], b[i]);
                      return sum.round({}).value;
                    }),
            3500);
}

TEST(TensorCore, matches_the_h200_on_e4m3) {
  SKIP_WITHOUT_VECTORS("E4M3");
  const Vectors v = read_vectors("E4M3", kE4m3, false);  // made with addend 0
  const TensorCoreModel& model = find_tensor_core_model(kE4m3);
  ASSERT_EQ(v.d.size(), 5000u);
  EXPECT_EQ(matches(v, model), 5000);
  for (const int bits : {model.alignment_bits + 1, model.alignment_bits + 2}) {
    TensorCoreModel planted = model;
    planted.alignment_bits = bits;
    EXPECT_LT(matches(v, planted), 4500) << bits;
  }
  TensorCoreModel planted = model;
  planted.alignment_bits = planted.output_bits = 12;
  EXPECT_LT(matches(v, planted), 3500);
  planted = model;
  planted.block_terms = 16;
  EXPECT_LT(matches(v, planted), 4500);
  // mma.sync adds FP8 otherwise.
  EXPECT_LT(matches(v, find_tensor_core_model(kE4m3, "h200_mma")), 2500);
  EXPECT_LT(matches(v,
                    [](const float* a, const float* b, size_t count, float c) {
                      for (size_t i = 0; i < count; ++i) c = std::fma(a[i], b[i], c);
                      return c;
                    }),
            2500);
}

// The bias that the model has because the chip has it: every block's error points toward zero.
TEST(TensorCore, real_results_are_biased_toward_zero) {
  SKIP_WITHOUT_VECTORS("bf16");
  const Vectors v = read_vectors("bf16", kBf16, true);
  int toward = 0, away = 0;
  for (size_t i = 0; i < v.a.rows; ++i) {
    ExactSum exact;
    exact.add(v.c[i]);
    for (size_t k = 0; k < v.a.columns; ++k) exact.add_product(v.a.row(i)[k], v.b.row(i)[k]);
    ExactSum error;
    error.add(v.d[i]);
    error.subtract(exact);
    toward += error.sign() * exact.sign() < 0;
    away += error.sign() * exact.sign() > 0;
  }
  EXPECT_GT(toward, 2 * away);
}

// ---------------------------------------------------------------------------------------------- the rows

class Numbers {
 public:
  explicit Numbers(Format format) : format_(format) {}

  // Any finite number of the format, subnormals and zeros included.
  float any() {
    for (;;) {
      const float x =
          decode(format_, static_cast<uint32_t>(random_()) & ((1u << (code_bits(format_) - 1)) - 1));
      if (std::isfinite(x)) return random_() % 2 ? x : -x;
    }
  }
  // Of moderate size, so that terms overlap.
  float moderate() {
    return round_to({.format = format_, .saturate = true}, static_cast<float>(normal_(random_)));
  }
  float word() {
    for (;;) {
      const auto x = std::bit_cast<float>(static_cast<uint32_t>(random_()));
      if (std::isfinite(x)) return x;
    }
  }
  std::mt19937& random() { return random_; }

 private:
  Format format_;
  std::mt19937 random_{7};
  std::normal_distribution<double> normal_;
};

std::string row_name(const TensorCoreModel& model) {
  return std::string(model.chip) + " " + to_string(model.operand);
}

TEST(TensorCore, every_row_is_found_by_its_names) {
  for (const TensorCoreModel& model : kTensorCoreModels)
    EXPECT_EQ(&find_tensor_core_model(model.operand, model.chip), &model) << row_name(model);
  EXPECT_EQ(find_tensor_core_model(kBf16).chip, "h200");
  EXPECT_THROW(find_tensor_core_model(kBf16, "h300"), std::invalid_argument);
  EXPECT_THROW(find_tensor_core_model(kE4m3, "a100"), std::invalid_argument);
  EXPECT_THROW(find_tensor_core_model(kFp32), std::invalid_argument);
  try {
    find_tensor_core_model(kE4m3, "a100");
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "no e4m3 tensor cores are known for a100: expected one of bf16, fp16, tf32");
  }
}

// Two implementations of the rule agree on all rows of the table, for lengths that do and do not fill a block, with
// wide and with narrow exponents. Every part that the trace reports adds up.
TEST(TensorCore, the_trace_is_the_same_sum) {
  for (const TensorCoreModel& model : kTensorCoreModels) {
    Numbers numbers(model.operand);
    for (int i = 0; i < 600; ++i) {
      const size_t count = numbers.random()() % 70;
      std::vector<float> a(count), b(count);
      const bool wide = i % 2;
      for (size_t k = 0; k < count; ++k) {
        a[k] = wide ? numbers.any() : numbers.moderate();
        b[k] = wide ? numbers.any() : numbers.moderate();
      }
      const float c = i % 3 == 0 ? 0.0f : wide ? numbers.word() : 4 * numbers.moderate();
      const TensorCoreTrace trace = tensor_core_trace(model, a, b, c);
      ASSERT_EQ(bits(dot(model, a, b, c)), bits(trace.result)) << row_name(model) << ", case " << i;
      for (const TensorCoreBlock& block : trace.blocks) {
        if (block.special) continue;
        double sum = 0;
        for (const TensorCoreTerm& term : block.terms) {
          if (term.takes_part) {
            EXPECT_EQ(term.aligned + term.lost, term.value);
          }
          EXPECT_LE(std::fabs(term.aligned), std::fabs(term.value));
          EXPECT_LT(std::fabs(term.lost), std::ldexp(1.0, block.max_exponent - model.alignment_bits));
          EXPECT_GE(term.shift, 0);
          sum += term.aligned;
        }
        EXPECT_EQ(sum, block.sum);
        if (std::isfinite(block.result)) {
          EXPECT_EQ(block.result + block.lost, block.sum);
        }
      }
    }
  }
}

TEST(TensorCore, strides_change_nothing) {
  for (const TensorCoreModel& model : kTensorCoreModels) {
    Numbers numbers(model.operand);
    std::vector<float> a(50), b(50), spread(50 * 3), reversed(50);
    for (size_t i = 0; i < a.size(); ++i) {
      a[i] = spread[3 * i] = numbers.moderate();
      b[i] = reversed[49 - i] = numbers.moderate();
    }
    EXPECT_EQ(bits(tensor_core_dot(model, spread.data(), 3, reversed.data() + 49, -1, 50, 0.5f)),
              bits(dot(model, a, b, 0.5f)))
        << row_name(model);
  }
}

TEST(TensorCore, order_inside_a_block_does_not_matter) {
  for (const TensorCoreModel& model : kTensorCoreModels) {
    Numbers numbers(model.operand);
    const auto count = static_cast<size_t>(model.block_terms);
    std::vector<size_t> order(count);
    for (size_t i = 0; i < count; ++i) order[i] = i;
    for (int round = 0; round < 50; ++round) {
      std::vector<float> a(count), b(count), shuffled_a(count), shuffled_b(count);
      std::shuffle(order.begin(), order.end(), numbers.random());
      for (size_t i = 0; i < count; ++i) a[i] = numbers.moderate(), b[i] = numbers.moderate();
      for (size_t i = 0; i < count; ++i) shuffled_a[i] = a[order[i]], shuffled_b[i] = b[order[i]];
      if (model.passes == 1) {
        ASSERT_EQ(bits(dot(model, a, b, 1.0f)), bits(dot(model, shuffled_a, shuffled_b, 1.0f)))
            << row_name(model);
      }
    }
  }
}

TEST(TensorCore, long_rows_are_chains_of_blocks) {
  for (const TensorCoreModel& model : kTensorCoreModels) {
    Numbers numbers(model.operand);
    const size_t block = static_cast<size_t>(model.block_terms * model.passes), count = 5 * block + block / 2;
    std::vector<float> a(count), b(count);
    for (size_t i = 0; i < count; ++i) a[i] = numbers.moderate(), b[i] = numbers.moderate();
    float chained = 0.25f;
    for (size_t i = 0; i < count; i += block)
      chained = tensor_core_dot(model, &a[i], &b[i], std::min(block, count - i), chained);
    EXPECT_EQ(bits(dot(model, a, b, 0.25f)), bits(chained)) << row_name(model);
    // Zeros that fill the last block change nothing.
    a.resize(6 * block);
    b.resize(6 * block);
    EXPECT_EQ(bits(dot(model, a, b, 0.25f)), bits(chained)) << row_name(model);
  }
  EXPECT_EQ(dot(find_tensor_core_model(kBf16), {}, {}, 3.0f), 3.0f);
}

// ------------------------------------------------------------------------- what the rule says, by hand

// Partial sums from 0, added outside as FP32 adds; without a promotion the chain itself.
TEST(TensorCore, promotion_adds_partial_sums_in_fp32) {
  for (const TensorCoreModel& model : kTensorCoreModels) {
    Numbers numbers(model.operand);
    std::vector<float> a(200), b(200);
    for (size_t i = 0; i < a.size(); ++i) a[i] = numbers.moderate(), b[i] = numbers.moderate();
    const auto promoted = [&](size_t count, float c, size_t blocks) {
      return tensor_core_dot_promoted(model, a.data(), 1, b.data(), 1, count, c, blocks);
    };
    EXPECT_EQ(promoted(200, 3.5f, 0), tensor_core_dot(model, a.data(), b.data(), 200, 3.5f))
        << row_name(model);
    EXPECT_EQ(promoted(0, 3.5f, 2), 3.5f);
    EXPECT_EQ(promoted(200, 3.5f, 1000), 3.5f + tensor_core_dot(model, a.data(), b.data(), 200, 0));
    const auto terms = static_cast<size_t>(2 * model.block_terms * model.passes);
    float sum = 3.5f;
    for (size_t first = 0; first < 200; first += terms)
      sum += tensor_core_dot(model, a.data() + first, b.data() + first, std::min(terms, 200 - first), 0);
    EXPECT_EQ(promoted(200, 3.5f, 2), sum) << row_name(model);
  }
  // What it is for: beside a sum of 4,096, thirteen bits end at 1/2, and every product of 1/8 is cut off.
  const TensorCoreModel& e4m3 = find_tensor_core_model(kE4m3);
  std::vector<float> ones(8192, 1.0f), tail(8192, 1.0f);
  for (size_t i = 4096; i < 8192; ++i) tail[i] = 0x1p-3f;
  EXPECT_EQ(tensor_core_dot(e4m3, ones.data(), tail.data(), 8192, 0), 4096);
  EXPECT_EQ(tensor_core_dot_promoted(e4m3, ones.data(), 1, tail.data(), 1, 8192, 0, 4), 4096 + 512);
}

TEST(TensorCore, truncates_toward_zero_after_the_alignment) {
  const TensorCoreModel& bf16 = find_tensor_core_model(kBf16);
  // 2^-26 is one place too low beside 1: cut off, on either side of zero; 2^-25 survives to be truncated at
  // the end.
  EXPECT_EQ(dot(bf16, {1, 0x1p-13f}, {1, 0x1p-13f}), 1.0f);
  EXPECT_EQ(dot(bf16, {1, 0x1p-13f}, {1, -0x1p-13f}), 1.0f);
  EXPECT_EQ(dot(bf16, {1, 0x1p-12f}, {1, -0x1p-13f}), 0x1.fffffep-1f);
  EXPECT_EQ(dot(bf16, {-1, 0x1p-12f}, {1, 0x1p-13f}), -0x1.fffffep-1f);
  // Sixteen times 2^-25 beside an addend of 1: none is lost in the alignment, so together they count.
  EXPECT_EQ(dot(bf16, std::vector<float>(16, 0x1p-12f), std::vector<float>(16, 0x1p-13f), 1.0f),
            1 + 0x1p-21f);
  // The exponent of 1.5 * 1.5 = 2.25 is 0, that of 2.25 * 1 is 1: products are not normalised before the
  // alignment.
  EXPECT_EQ(dot(bf16, {1.5f, -1.5f, 0x1p-12f}, {1.5f, 1.5f, 0x1p-13f}), 0x1p-25f);
  EXPECT_EQ(dot(bf16, {2.25f, -2.25f, 0x1p-12f}, {1, 1, 0x1p-13f}), 0.0f);
  // FP8: 13 bits, of the addend as well.
  const TensorCoreModel& e4m3 = find_tensor_core_model(kE4m3);
  EXPECT_EQ(dot(e4m3, {0}, {0}, 1 + 0x1p-13f), 1 + 0x1p-13f);
  EXPECT_EQ(dot(e4m3, {0}, {0}, 1 + 0x1p-14f), 1.0f);
  // mma.sync adds it last, and rounds to nearest.
  EXPECT_EQ(dot(find_tensor_core_model(kE4m3, "h200_mma"), {1}, {1}, 0x1.8p-24f), 1 + 0x1p-23f);
  EXPECT_EQ(dot(find_tensor_core_model(kBf16), {1}, {1}, 0x1.8p-24f), 1.0f);
}

TEST(TensorCore, pairs_are_dealt_out_to_two_passes) {
  // 1 - 1 + 2^-26: the small term is lost beside a 1 in its block, or where the block's addend is 1. It
  // survives in a second block after both ones met in the first.
  const TensorCoreModel& model = find_tensor_core_model(kE5m2, "h200_mma");
  const auto result = [&](size_t plus_one, size_t minus_one, size_t small) {
    std::vector<float> a(32, 0.0f), b(32, 1.0f);
    a[plus_one] = 1;
    a[minus_one] = -1;
    a[small] = b[small] = 0x1p-13f;
    return dot(model, a, b);
  };
  EXPECT_EQ(result(0, 1, 2), 0x1p-26f);
  EXPECT_EQ(result(0, 4, 31), 0x1p-26f);
  EXPECT_EQ(result(0, 1, 16), 0.0f);  // pairs are dealt out in turn: 16 is in the first block
  EXPECT_EQ(result(0, 2, 6), 0.0f);
  EXPECT_EQ(result(2, 3, 0), 0.0f);

  const TensorCoreTrace trace =
      tensor_core_trace(model, std::vector<float>(32, 1.0f), std::vector<float>(32, 1.0f), 0);
  ASSERT_EQ(trace.blocks.size(), 2u);
  EXPECT_EQ(trace.blocks[0].terms[2].index, 4u);
  EXPECT_EQ(trace.blocks[1].terms[0].index, 2u);
  EXPECT_EQ(trace.blocks[1].terms[3].index, 7u);
}

TEST(TensorCore, zeros_take_no_part_in_the_alignment) {
  const TensorCoreModel& bf16 = find_tensor_core_model(kBf16);
  EXPECT_EQ(dot(bf16, {0, 0x1p-60f}, {0x1p127f, 0x1p-60f}), 0x1p-120f);
  EXPECT_EQ(dot(bf16, {-0.0f, 0x1p-60f}, {0x1p127f, 0x1p-60f}, -0.0f), 0x1p-120f);
  // A zero is +0, whatever the signs.
  for (const float c : {0.0f, -0.0f}) {
    EXPECT_EQ(bits(dot(bf16, {-0.0f}, {1}, c)), 0u);
    EXPECT_EQ(bits(dot(bf16, {-3, 3}, {1, 1}, c)), 0u);
    EXPECT_EQ(bits(dot(bf16, {-0x1p-80f}, {0x1p-80f}, c)), 0u);  // underflow
  }
}

TEST(TensorCore, subnormal_operands_and_results) {
  const TensorCoreModel& bf16 = find_tensor_core_model(kBf16);
  EXPECT_EQ(dot(bf16, {0x1p-133f}, {1}), 0x1p-133f);
  EXPECT_EQ(dot(bf16, {0x1p-133f}, {0x1p127f}), 0x1p-6f);
  EXPECT_EQ(dot(bf16, {0x1p-100f}, {0x1p-49f}), 0x1p-149f);
  EXPECT_EQ(dot(bf16, {0x1p-100f}, {0x1p-50f}), 0.0f);
  EXPECT_EQ(dot(bf16, {0x1p-100f, 0x1p-100f}, {0x1p-50f, 0x1p-50f}), 0x1p-149f);
  EXPECT_EQ(dot(bf16, {0}, {0}, 0x1p-149f), 0x1p-149f);
  EXPECT_EQ(dot(bf16, {0}, {0}, -0x1.fffffcp-127f), -0x1.fffffcp-127f);
  // A subnormal operand has its format's least exponent: fp16's 2^-24 counts as 2^-14, so beside it 2^-14 -
  // 25 is the last place, not 2^-24 - 25.
  const TensorCoreModel& fp16 = find_tensor_core_model(kFp16);
  EXPECT_EQ(dot(fp16, {0x1p-24f}, {1}, 0x1p-39f), 0x1p-24f + 0x1p-39f);
  EXPECT_EQ(dot(fp16, {0x1p-24f}, {1}, 0x1p-40f), 0x1p-24f);
  EXPECT_EQ(dot(fp16, {0x1p-14f}, {0x1p-10f}, 0x1p-40f), 0x1p-24f + 0x1p-40f);
  // No alignment below 2^-133: what lies under 2^-158 is cut off however small all terms are.
  const std::vector<float> tiny(16, 0x1p-80f), tinier(16, 0x1p-79f);
  EXPECT_EQ(dot(bf16, tiny, tinier), 0.0f);  // 16 * 2^-159
  EXPECT_EQ(dot(bf16, std::vector<float>(16, 0x1p-77f), std::vector<float>(16, 0x1p-76f)),
            0x1p-149f);                                   // 16 * 2^-153
  std::vector<float> a(16, 0x1.8p-77f), b(16, 0x1p-81f);  // 1.5 * 2^-158 each
  a[0] = 0x1p-75f, b[0] = 0x1p-75f;                       // 2^-150
  EXPECT_EQ(dot(bf16, a, b), 0.0f);
}

TEST(TensorCore, infinity_and_nan) {
  for (const TensorCoreModel& model : kTensorCoreModels) {
    const auto check = [&](std::vector<float> a, std::vector<float> b, float c, uint32_t expected) {
      EXPECT_EQ(bits(dot(model, a, b, c)), expected) << row_name(model);
      EXPECT_EQ(bits(tensor_core_trace(model, a, b, c).result), expected) << row_name(model);
    };
    const uint32_t plus = bits(kInfinity), minus = bits(-kInfinity);
    check({kNan, 1}, {1, 1}, 0, kTensorCoreNan);
    check({1, -kNan}, {1, 1}, kInfinity, kTensorCoreNan);
    check({1}, {1}, kNan, kTensorCoreNan);
    check({kInfinity}, {0}, 0, kTensorCoreNan);
    check({-0.0f}, {-kInfinity}, 1, kTensorCoreNan);
    check({kInfinity, -kInfinity}, {1, 1}, 0, kTensorCoreNan);
    check({kInfinity}, {1}, -kInfinity, kTensorCoreNan);
    check({1}, {1}, kInfinity, plus);
    check({1}, {1}, -kInfinity, minus);
    check({kInfinity, -1}, {2, 448}, 0, plus);
    check({kInfinity, 1}, {-2, 448}, 0, minus);
    check({-kInfinity}, {-kInfinity}, 5, plus);
    // In a later block, and carried through to one.
    std::vector<float> a(80, 1.0f), b(80, 1.0f);
    a[79] = kInfinity;
    check(a, b, 0, plus);
    a[79] = 1, a[0] = kNan;
    check(a, b, 0, kTensorCoreNan);
  }
}

TEST(TensorCore, overflow_is_infinity) {
  const TensorCoreModel& bf16 = find_tensor_core_model(kBf16);
  EXPECT_EQ(dot(bf16, {0x1p127f}, {2}), kInfinity);
  EXPECT_EQ(dot(bf16, {0x1p127f, 0x1p127f}, {1, 1}), kInfinity);
  EXPECT_EQ(dot(bf16, {-0x1p127f}, {2}), -kInfinity);
  // Truncation does not overflow by itself.
  EXPECT_EQ(dot(bf16, {0x1p103f}, {0x1.fep-1f}, 0x1.fffffep127f), 0x1.fffffep127f);
  // Products beyond the range may cancel.
  EXPECT_EQ(dot(bf16, {0x1p127f, 0x1p127f, 3}, {0x1p127f, -0x1p127f, 1}), 0.0f);
  EXPECT_EQ(dot(bf16, {0x1p127f, 0x1p127f}, {4, -3.5f}, 0.0f), 0x1p126f);
}

// A row of data is all that a chip takes: one that does not exist, with exact sums in reach.
TEST(TensorCore, any_row_of_data_is_a_model) {
  constexpr TensorCoreModel kImaginary{"imaginary", kFp16, 2, 28, 23, -133};
  EXPECT_EQ(dot(kImaginary, {1, 0x1p-14f}, {1, 0x1p-14f}, -1.0f), 0x1p-28f);
  EXPECT_EQ(dot(kImaginary, {1, 0x1p-14f}, {1, 0x1p-15f}, -1.0f), 0.0f);
  // Blocks of two: the third term meets only what the first two left.
  EXPECT_EQ(dot(kImaginary, {1, -1, 0x1p-14f}, {1, 1, 0x1p-15f}), 0x1p-29f);
}

}  // namespace
}  // namespace evenkeel
