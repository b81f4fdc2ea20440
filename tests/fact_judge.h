// How facts of rows that Hopper's kernels find are judged, in the emulator and on a GPU: the leak by the very dQ of the kernel
// that trains, ties by the CPU's count.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention_cases.h"
#include "attention_runs.h"

namespace evenkeel::fact_judge {

// What the pass wrote, (B, H, T) each; kPoison before.
inline constexpr uint32_t kPoison = ~0u;
struct Found {
  std::vector<uint32_t> residual;  // as bits
  std::vector<int32_t> ties;
};

// Scores are small multiples of the scale, which every kernel finds exactly: many tie. And one feature is 1 in every key and 0
// in every query: along it dQ is the scale times what the row of dS adds up to, as the kernel that trains has it. Rows and keys
// behind a sequence's end are NaN.
inline cases::Problem make_problem(const cases::Case& c) {
  cases::Problem p = cases::make_problem(c);
  cases::Draw draw(1, 7);
  const auto whole = [&] { return static_cast<float>(draw.below(3) - 1); };
  cases::fill_view(p.q(), [&](int64_t, int64_t, int64_t, int64_t d) { return d == 0 ? 0.0f : whole(); });
  cases::fill_view(p.k(), [&](int64_t, int64_t, int64_t, int64_t d) { return d == 0 ? 1.0f : whole(); });
  const auto clear = [](const View<float>& x, const std::vector<int32_t>& lengths) {
    cases::fill_view(x, [&](int64_t b, int64_t h, int64_t i, int64_t d) {
      return i < lengths[static_cast<size_t>(b)] ? *x.at(b, h, i, d) : attention_runs::kNan;
    });
  };
  if (c.ragged) {
    for (const View<float>& x : {p.q(), p.grad()}) clear(x, p.query_lengths);
    for (const View<float>& x : {p.k(), p.v()}) clear(x, p.key_lengths);
  }
  return p;
}

// Of a row: sum |dS| and sum P, in FP64.
struct RowSizes {
  double dscores = 0, probs = 0;
};
inline RowSizes row_sizes(const cases::Problem& p, const AttentionBuffers& got, int64_t b, int64_t h,
                          int64_t i) {
  RowSizes sizes;
  const int64_t g = h / (p.shape.H / p.shape.G);
  for (int64_t j = 0; j < p.shape.N; ++j) {
    if (!cases::sees(p, b, h, i, j)) continue;
    double score = 0, dprob = 0;
    for (int64_t d = 0; d < p.shape.D; ++d) {
      score += double{*p.in.q.at(b, h, i, d)} * double{*p.in.k.at(b, g, j, d)};
      dprob += double{*p.grad_output.at(b, h, i, d)} * double{*p.in.v.at(b, g, j, d)};
    }
    const double prob = std::exp(score * double{p.shape.scale} - double{*got.lse.view().at(b, h, i)});
    sizes.probs += prob;
    sizes.dscores += prob * std::fabs(dprob - double{*got.delta.view().at(b, h, i)});
  }
  return sizes;
}

// got: lse, delta and dq are what the kernels read and wrote; ties and residual the CPU's. unit: the relative error of a step
// of a sum (tensor cores of a chip truncate). The bound is less than what one dS of usual size, rounded the other way, adds.
// same_delta: the CPU had the same delta, so that its leaks are these but for a few such roundings.
inline void judge(const AttentionProblem& config, const cases::Problem& p, const AttentionBuffers& got,
                  const Found& found, double unit, bool same_delta) {
  const cases::Case& c = p.shape;
  const double keel = double{config.plans[0].keel}, scale = double{c.scale};
  const int64_t sequences = config.fact_sequences > 0 ? config.fact_sequences : c.B;
  double product = 0, size = 0, cpu_size = 0;
  int64_t rows = 0, tied = 0;
  size_t at = 0;
  for (int64_t b = 0; b < c.B; ++b)
    for (int64_t h = 0; h < c.H; ++h)
      for (int64_t i = 0; i < c.T; ++i, ++at) {
        SCOPED_TRACE(testing::Message() << c.name << ", sequence " << b << ", head " << h << ", row " << i);
        if (b >= sequences) {
          ASSERT_EQ(found.residual[at], kPoison);
          ASSERT_EQ(static_cast<uint32_t>(found.ties[at]), kPoison);
          continue;
        }
        const double lse = double{*got.lse.view().at(b, h, i)},
                     residual = double{std::bit_cast<float>(found.residual[at])};
        ASSERT_EQ(found.ties[at], std::isinf(lse) ? 0 : *got.ties.view().at(b, h, i));
        if (std::isinf(lse)) {
          ASSERT_EQ(residual, 0);
          continue;
        }
        const RowSizes sizes = row_sizes(p, got, b, h, i);
        const double leak = double{*got.dq.view().at(b, h, i, 0)} / scale, pull = 2 * keel * lse;
        // Half an ulp of dQ. Sums in FP32, here of 16 numbers of a thread and tile, the tiles and four threads, there of 8
        // products a tile of keys and the tiles. keel's part has exponentials with errors of 2^-22, too.
        const double steps = 32 + double(c.N) / 32;
        ASSERT_NEAR(residual, leak - pull * sizes.probs,
                    0x1p-8 * std::fabs(leak) + steps * unit * sizes.dscores +
                        (steps * unit + 0x1p-20) * std::fabs(pull));
        const double of_cpu = *got.residual.view().at(b, h, i);
        product += residual * of_cpu;
        size += residual * residual, cpu_size += of_cpu * of_cpu;
        ++rows, tied += found.ties[at] > 1;
      }
  EXPECT_GT(tied, rows / 10) << c.name;
  if (!same_delta) return;
  EXPECT_GT(product, 0.95 * std::sqrt(size * cpu_size)) << c.name;
  EXPECT_NEAR(size, cpu_size, 0.1 * cpu_size) << c.name;
}

}  // namespace evenkeel::fact_judge
