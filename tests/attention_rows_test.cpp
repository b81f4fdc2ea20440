// Rows of CPU attention that are not like others: no visible key, ties, large scores, and the shifts of every stabiliser.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention_bounds.h"
#include "attention_cases.h"
#include "attention_runs.h"
#include "base/threads.h"
#include "site_recorder.h"

namespace evenkeel {
namespace {

using namespace attention_runs;
using cases::find_case;
using cases::kCases;

TEST(AttentionRows, that_see_no_key_are_zero_under_every_stabiliser) {
  for (const char* case_name : {"masked_rows", "rows_over_keys", "masked_ragged", "ties_masked"})
    for (const char* text : {"fp32", "flash2", "bf16_all", "fp8"})
      for (Stabiliser stabiliser : kStabilisers) {
        PrecisionPlan plan = plan_of(text, stabiliser);
        plan.keel = 0.5f;
        SCOPED_TRACE(std::string(case_name) + " " + to_string(plan));
        const Problem p = make_problem(find_case(case_name));
        const AttentionBuffers got = run(p.with(plan), p);
        int64_t blind = 0;
        for (int64_t b = 0; b < p.shape.B; ++b)
          for (int64_t h = 0; h < p.shape.H; ++h)
            for (int64_t i = 0; i < p.shape.T; ++i) {
              bool any = false;
              for (int64_t j = 0; j < p.shape.N; ++j) any |= cases::sees(p, b, h, i, j);
              if (any) continue;
              ++blind;
              EXPECT_EQ(*got.lse.view().at(b, h, i), -kInfinity);
              EXPECT_EQ(*got.ties.view().at(b, h, i), 0);
              EXPECT_EQ(*got.delta.view().at(b, h, i), 0);
              EXPECT_EQ(*got.residual.view().at(b, h, i), 0);
              for (int64_t d = 0; d < p.shape.D; ++d) {
                EXPECT_EQ(*got.o.view().at(b, h, i, d), 0);
                EXPECT_EQ(*got.o_for_delta.view().at(b, h, i, d), 0);
                EXPECT_EQ(*got.dq.view().at(b, h, i, d), 0);
              }
            }
        EXPECT_GT(blind, 0);
        for (const auto& [tensor, values] : tensors_of(got))
          for (float x : values->values()) ASSERT_FALSE(std::isnan(x)) << tensor;
        for (double x : got.residual_floor.values()) ASSERT_TRUE(std::isfinite(x));
        // A single hidden problem: nothing is visible at all.
        const uint8_t hidden = 0;
        AttentionProblem config = p.with(plan);
        config.mask.visible = {&hidden, {p.shape.B, p.shape.H, p.shape.T, p.shape.N}, {0, 0, 0, 0}};
        const AttentionBuffers nothing = run(config, p);
        for (const auto* t : {&nothing.o, &nothing.delta, &nothing.dq, &nothing.dk, &nothing.dv})
          for (float x : t->values()) ASSERT_EQ(x, 0);
      }
}

TEST(AttentionRows, count_their_ties_over_all_tiles_and_over_visible_keys_alone) {
  for (const char* case_name :
       {"ties", "ties_tail", "ties_across", "ties_masked", "ties_causal", "max_zero", "max_tiny", "hundred",
        "huge", "offset", "plain", "softcap_hard", "masked_ragged"})
    for (const char* text : {"fp32", "bf16_all", "bf16_all,stabiliser=paper_capped", "fp32,tie_tolerance=0.5",
                             "flash2,stabiliser=consistent"})
      for (int64_t tile_keys : {0, 16}) {
        SCOPED_TRACE(std::string(case_name) + " " + text + ", tile_keys " + std::to_string(tile_keys));
        const Problem p = make_problem(find_case(case_name));
        const PrecisionPlan plan = parse_plan(text);
        AttentionProblem config = p.with(plan);
        config.tile_keys = tile_keys;
        Recorder recorder(p);
        const AttentionBuffers got = run(config, p, &recorder);
        int64_t tied_rows = 0;
        for (int64_t b = 0; b < p.shape.B; ++b)
          for (int64_t h = 0; h < p.shape.H; ++h)
            for (int64_t i = 0; i < p.shape.T; ++i) {
              std::vector<float> S;
              for (int64_t j = 0; j < p.shape.N; ++j)
                if (cases::sees(p, b, h, i, j)) S.push_back(recorder.field(Site::scores, b, h).after(i, j));
              int32_t ties = 0;
              const float most = S.empty() ? 0 : *std::max_element(S.begin(), S.end());
              for (float s : S) ties += s >= most - plan.tie_tolerance;
              EXPECT_EQ(*got.ties.view().at(b, h, i), ties) << "row " << i;
              tied_rows += ties > 1;
            }
        EXPECT_TRUE(tied_rows > p.shape.T / 4 || !cases::sets_scores(p.shape.fill)) << tied_rows;
      }
}

TEST(AttentionRows, with_large_scores_stay_finite_under_every_stabiliser_but_paper) {
  for (const char* case_name : {"hundred", "huge", "offset", "max_zero", "max_tiny", "subnormal"})
    for (const char* text : {"fp32", "flash2", "bf16_all", "fp8,q=fp32,k=fp32"})
      for (Stabiliser stabiliser : kStabilisers)
        for (int64_t tile_keys : {0, 16}) {
          if (stabiliser == Stabiliser::paper) continue;
          const Problem p = make_problem(find_case(case_name));
          AttentionProblem config = p.with(plan_of(text, stabiliser));
          config.tile_keys = tile_keys;
          SCOPED_TRACE(std::string(case_name) + " " + to_string(config.plans[0]));
          const AttentionBuffers got = run(config, p);
          for (const auto& [tensor, values] : tensors_of(got))
            for (float x : values->values()) ASSERT_TRUE(std::isfinite(x)) << tensor;
        }
}

// The holes of the published rule, each visible in `paper` and closed in `paper_capped`.
TEST(AttentionRows, paper_underflows_on_large_scores_and_paper_capped_does_not) {
  Case c = find_case("huge");
  c.tile_keys = 0;
  const Problem p = make_problem(c);
  for (const char* text : {"fp32", "flash2", "bf16_all"}) {
    const AttentionBuffers published = run(p.with(plan_of(text, Stabiliser::paper)), p);
    const AttentionBuffers capped = run(p.with(plan_of(text, Stabiliser::paper_capped)), p);
    for (int64_t h = 0; h < p.shape.H; ++h)
      for (int64_t i = 0; i < p.shape.T; ++i) {
        EXPECT_EQ(*published.row_sum.view().at(0, h, i), 0);
        EXPECT_FALSE(std::isfinite(*published.o.view().at(0, h, i)));
        EXPECT_GT(*capped.row_sum.view().at(0, h, i), 0);
        EXPECT_TRUE(std::isfinite(*capped.o.view().at(0, h, i)));
      }
  }
  // At +-100 what is left are subnormal probabilities: wrong, without a sign that it is.
  Case hundred = find_case("hundred");
  hundred.tile_keys = 0;
  const Problem q = make_problem(hundred);
  for (Stabiliser stabiliser : {Stabiliser::paper, Stabiliser::paper_capped}) {
    const AttentionProblem config = q.with(plan_of("fp32", stabiliser));
    const attention_bounds::Ratios r =
        attention_bounds::ratios_of(config, q, attention_bounds::error_bounds(config, q), run(config, q),
                                    attention_reference(config, q.in, q.grad_output));
    EXPECT_EQ(r.o > 1, stabiliser == Stabiliser::paper);
  }
}

// The largest probability of every row, after its site, in the last tile of keys that the row sees.
struct LargestProbs {
  std::vector<float> whole_row, last_tile;
};
LargestProbs largest_probs(const Problem& p, const AttentionProblem& config, int64_t h,
                           AttentionBuffers* out = nullptr) {
  Recorder recorder(p);
  AttentionBuffers got = run(config, p, &recorder);
  LargestProbs largest{std::vector<float>(size_of(p.shape.T)), std::vector<float>(size_of(p.shape.T))};
  const int64_t step = config.tile_keys == 0 ? p.shape.N : config.tile_keys;
  const int64_t last_tile = (p.shape.N - 1) / step * step;
  for (int64_t i = 0; i < p.shape.T; ++i)
    for (int64_t j = 0; j < p.shape.N; ++j) {
      const float x = recorder.field(Site::probs, 0, h).after(i, j);
      largest.whole_row[size_of(i)] = std::max(largest.whole_row[size_of(i)], x);
      if (j >= last_tile) largest.last_tile[size_of(i)] = std::max(largest.last_tile[size_of(i)], x);
    }
  if (out) *out = std::move(got);
  return largest;
}

TEST(AttentionRows, paper_does_not_see_ties_across_tiles_and_paper_capped_does) {
  Case c = find_case("ties_across");
  c.tile_keys = c.N / 2;  // one of the tied keys in each
  const Problem p = make_problem(c);
  AttentionBuffers published(p.in, true), capped(p.in, true);
  const LargestProbs one = largest_probs(p, p.with(plan_of("flash2", Stabiliser::paper)), 0, &published);
  const LargestProbs less = largest_probs(p, p.with(plan_of("flash2", Stabiliser::paper_capped)), 0, &capped);
  for (int64_t i = 0; i < c.T; ++i) {
    float most = -kInfinity;
    for (int64_t j = 0; j < c.N; ++j) most = std::max(most, *p.in.q.at(0, 0, i, j));
    EXPECT_EQ(*published.row_max.view().at(0, 0, i), most);
    EXPECT_EQ(one.last_tile[size_of(i)], 1);
    EXPECT_GT(*capped.row_max.view().at(0, 0, i), most);
    EXPECT_LT(less.last_tile[size_of(i)], 1);  // from the tile on that completes the tie
  }
}

TEST(AttentionRows, paper_leaves_a_maximum_of_zero_or_nearly_zero_and_paper_capped_does_not) {
  for (const char* case_name : {"max_zero", "max_tiny"}) {
    SCOPED_TRACE(case_name);
    Case c = find_case(case_name);
    c.tile_keys = 0;
    const Problem p = make_problem(c);
    AttentionBuffers facts(p.in, true);
    const LargestProbs one = largest_probs(p, p.with(plan_of("flash2", Stabiliser::paper)), 0, &facts);
    const LargestProbs less = largest_probs(p, p.with(plan_of("flash2", Stabiliser::paper_capped)), 0);
    int64_t tied = 0;
    for (int64_t i = 0; i < c.T; ++i) {
      if (*facts.ties.view().at(0, 0, i) < 2) continue;
      ++tied;
      EXPECT_EQ(one.whole_row[size_of(i)], 1);
      EXPECT_LT(less.whole_row[size_of(i)], 1);
    }
    EXPECT_GT(tied, c.T / 2);
  }
}

TEST(AttentionRows, paper_shifts_ties_within_a_tile) {
  Case c = find_case("ties_tail");
  c.tile_keys = 0;
  const Problem p = make_problem(c);
  for (Stabiliser stabiliser : {Stabiliser::paper, Stabiliser::paper_capped}) {
    AttentionBuffers facts(p.in, true);
    const LargestProbs largest = largest_probs(p, p.with(plan_of("flash2", stabiliser)), 0, &facts);
    std::set<float> shifts;
    for (int64_t i = 0; i < c.T; ++i) {
      float most = -kInfinity;
      for (int64_t j = 0; j < c.N; ++j) most = std::max(most, *p.in.q.at(0, 0, i, j));
      const float m = *facts.row_max.view().at(0, 0, i);
      if (stabiliser == Stabiliser::paper) {
        EXPECT_EQ(m, most > 0 ? 2 * most : 0.0f);
      } else {
        EXPECT_GT(m, most + 0.1f);
        EXPECT_LE(m, most + 8);
        shifts.insert(m - most);
      }
      EXPECT_LT(largest.whole_row[size_of(i)], 1);
    }
    // A common shift would be a fixed offset, with a bias of its own.
    EXPECT_TRUE(stabiliser == Stabiliser::paper || static_cast<int64_t>(shifts.size()) > c.T / 2);
  }
}

// Rows still differ where the rule asks for one shift in all of them: by its lower bound (a maximum of 0) or its upper one
// (large scores). A common shift would be a fixed offset, with a bias of its own.
TEST(AttentionRows, paper_capped_gives_every_row_its_own_shift) {
  for (const char* case_name : {"max_zero", "huge"}) {
    SCOPED_TRACE(case_name);
    const Problem p = make_problem(find_case(case_name));
    const AttentionBuffers got = run(p.with(plan_of("flash2", Stabiliser::paper_capped)), p);
    std::set<float> shifts;
    int64_t tied = 0;
    for (int64_t i = 0; i < p.shape.T; ++i) {
      if (*got.ties.view().at(0, 0, i) < 2) continue;
      float most = -kInfinity;
      for (int64_t j = 0; j < p.shape.N; ++j) most = std::max(most, *p.in.q.at(0, 0, i, j));
      const float shift = *got.row_max.view().at(0, 0, i) - most;
      EXPECT_GT(shift, 0.1f);
      EXPECT_LE(shift, 8.01f);
      shifts.insert(shift);
      ++tied;
    }
    EXPECT_GT(tied, p.shape.T / 4);
    EXPECT_GT(static_cast<int64_t>(shifts.size()), tied * 3 / 4);
  }
}

TEST(AttentionRows, dither_shifts_each_by_its_own_part_of_log2) {
  const Problem p = make_problem(find_case("ties_tail"));
  const AttentionBuffers got = run(p.with(plan_of("flash2", Stabiliser::dither)), p);
  std::set<float> shifts;
  for (int64_t h = 0; h < p.shape.H; ++h)
    for (int64_t i = 0; i < p.shape.T; ++i) {
      float most = -kInfinity;
      for (int64_t j = 0; j < p.shape.N; ++j) most = std::max(most, *p.in.q.at(0, h, i, j));
      const float shift = *got.row_max.view().at(0, h, i) - most;
      EXPECT_GE(shift, 0);
      EXPECT_LE(shift, 0.6932f);
      shifts.insert(shift);
    }
  EXPECT_GT(static_cast<int64_t>(shifts.size()), p.shape.H * p.shape.T * 3 / 4);
  EXPECT_LT(*shifts.begin(), 0.1f);
  EXPECT_GT(*shifts.rbegin(), 0.6f);
}

// Of an O-bar and l that were never rounded; in FP32, or in a format of its own.
TEST(AttentionRows, wide_output_keeps_more_of_o_for_delta) {
  const Problem p = make_problem(find_case("plain"));
  for (Stabiliser stabiliser : {Stabiliser::wide_output, Stabiliser::consistent})
    for (int bits : {23, 15}) {
      SCOPED_TRACE(std::string(name(stabiliser)) + ", bits " + std::to_string(bits));
      PrecisionPlan plan = plan_of("bf16_all,probs=fp32,shifted=fp32", stabiliser);
      if (bits == 15) plan.at(Site::output_for_delta) = Rounding{Format{8, 15}};
      const AttentionBuffers got = run(p.with(plan), p);
      int64_t wrong = 0, finer = 0, as_o = 0;
      for (size_t n = 0; n < got.o.values().size(); ++n) {
        const float x = got.o_for_delta.values()[n];
        wrong += round_to(Rounding{Format{8, bits}}, x) != x;
        finer += round_to(Rounding{Format{8, bits - 1}}, x) != x;
        as_o += cases::to_bf16(x) == got.o.values()[n];
      }
      const auto count = static_cast<int64_t>(got.o.values().size());
      EXPECT_EQ(wrong, 0);
      EXPECT_GT(finer, count / 3);
      EXPECT_LT(as_o, count * 9 / 10);  // O itself has met the roundings in between
    }
}

}  // namespace
}  // namespace evenkeel
