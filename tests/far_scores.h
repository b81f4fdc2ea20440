// Attention problems whose scores lie far from zero, and what must hold there to the bit. For the tests of fast kernels.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "attention_cases.h"

namespace evenkeel::far_scores {

using cases::Case;
using cases::fill_view;
using cases::make_problem;
using cases::Problem;
using cases::to_bf16;

// How the scores of a row, which share an offset, differ: at random, or by their key's place, so that the largest one is in
// the first tile that the kernel meets (rising) or in the last one.
enum class Order { random, rising, falling };
struct Far {
  double offset = 0, spread = 0;
  Order order = Order::random;
};

inline Problem far_problem(const Case& shape, const Far& far) {
  Problem p = make_problem(shape);
  constexpr int64_t kCommon = 16;  // features that carry the offset; the next one carries the order
  const double scale = double{shape.scale}, common = std::sqrt(std::fabs(far.offset) / scale / kCommon),
               others = std::sqrt(far.spread / scale / std::sqrt(double(shape.D - kCommon)));
  for (const bool keys : {false, true}) {
    const View<float> x = keys ? p.k() : p.q();
    fill_view(x, [&](int64_t b, int64_t h, int64_t i, int64_t d) {
      double value = others * double{*x.at(b, h, i, d)};
      if (far.order != Order::random) value = *x.at(b, h, i, d);
      if (d < kCommon) value = keys && far.offset < 0 ? -common : common;
      if (d == kCommon && far.order != Order::random) {
        const double place = double(far.order == Order::rising ? i : shape.N - i);
        // Up to 256 places times a power of two: BF16 keeps them apart.
        value = keys ? place * std::exp2(std::round(std::log2(far.spread / scale / double(shape.N)))) : 1.0;
      }
      return to_bf16(static_cast<float>(value));
    });
  }
  return p;
}

inline std::string name_of(const Case& c, const Far& far) {
  return std::string(c.name) + ", offset " + std::to_string(far.offset) + ", spread " +
         std::to_string(far.spread) + ", order " + std::to_string(static_cast<int>(far.order));
}

// Rows whose softmax sees one key: the score of that key is so far above the others, as FP32 has them, that nothing is left
// for these. Returns how many there are. O is that key's V, to the bit; so delta is its dP, and the row of dS is zero.
inline int expect_values(const Problem& p, const AttentionBuffers& got, const std::string& name) {
  int rows = 0;
  const auto find_key = [&](int64_t b, int64_t h, int64_t i) -> int64_t {
    const int64_t g = h / (p.shape.H / p.shape.G);
    double first = -INFINITY, second = -INFINITY;
    int64_t key = -1;
    for (int64_t j = 0; j < p.shape.N; ++j) {
      if (!cases::sees(p, b, h, i, j)) continue;
      double score = 0;
      for (int64_t d = 0; d < p.shape.D; ++d)
        score += double{*p.in.q.at(b, h, i, d)} * double{*p.in.k.at(b, g, j, d)};
      score *= double{p.shape.scale};
      if (score > first)
        second = first, first = score, key = j;
      else
        second = std::max(second, score);
    }
    return first - second < 60 + 1e-5 * std::fabs(first) ? -1 : key;
  };
  for (int64_t b = 0; b < p.shape.B; ++b)
    for (int64_t h = 0; h < p.shape.H; ++h)
      for (int64_t i = 0; i < p.shape.T; ++i) {
        const int64_t key = find_key(b, h, i), g = h / (p.shape.H / p.shape.G);
        if (key < 0) continue;
        ++rows;
        for (int64_t d = 0; d < p.shape.D; ++d)
          if (const float o = *got.o.view().at(b, h, i, d), v = *p.in.v.at(b, g, key, d); o != v) {
            ADD_FAILURE() << name << ": row " << i << " of head " << h << " sees key " << key
                          << " alone, and O is " << o << " where V is " << v << " (feature " << d << ")";
            return rows;
          }
      }
  return rows;
}

// O and L of scores that share an offset (L is not below zero), with P in BF16.
inline void expect_near_definition(const AttentionBuffers& got, const AttentionReference& exact,
                                   const std::string& name) {
  double worst = 0, largest = 0;
  for (size_t n = 0; n < got.o.values().size(); ++n) {
    worst = std::max(worst, std::fabs(double{got.o.values()[n]} - exact.o.values()[n]));
    largest = std::max(largest, std::fabs(exact.o.values()[n]));
  }
  // Half an ulp, and what FP32's log2(e) times its log(2) lacks of one.
  for (size_t n = 0; n < got.lse.values().size(); ++n)
    EXPECT_LE(std::fabs(double{got.lse.values()[n]} - exact.lse.values()[n]),
              0.25 + 1.2e-8 * exact.lse.values()[n])
        << name << ", row " << n;
  EXPECT_LE(worst, 0x1p-8 * largest) << name;  // half an ulp of BF16 for P, and for O
}

}  // namespace evenkeel::far_scores
