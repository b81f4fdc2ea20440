// A plan with its stabiliser's rules applied, and the shift of a row by each rule.
#include "attention/head_plan.h"

#include <gtest/gtest.h>

#include <set>

namespace evenkeel {
namespace {

HeadPlan head(const std::string& plan) { return HeadPlan(parse_plan(plan)); }

TEST(Stabilisers, no_two_rows_are_the_same) {
  std::set<std::string_view> names;
  for (size_t a = 0; a < kStabiliserTable.size(); ++a) {
    const StabiliserRules& x = kStabiliserTable[a];
    EXPECT_TRUE(names.insert(x.name).second) << x.name;
    EXPECT_EQ(parse_stabiliser(x.name), x.stabiliser);
    for (size_t b = 0; b < a; ++b) {
      const StabiliserRules& y = kStabiliserTable[b];
      EXPECT_FALSE(x.shift == y.shift && x.sum == y.sum && x.output == y.output && x.delta == y.delta &&
                   x.keys == y.keys)
          << x.name << " and " << y.name;
    }
  }
}

TEST(HeadPlan, without_a_stabiliser_the_plan_stays_as_it_is) {
  for (std::string_view text : kPlanNames) {
    const HeadPlan h = head(std::string(text));
    EXPECT_EQ(h.plan, parse_plan(text));
    EXPECT_EQ(h.shift.rule, ShiftRule::row_max);
    EXPECT_FALSE(h.sums_rounded || h.max_first || h.wide_output || h.shadow || h.probs_delta);
    EXPECT_EQ(h.centres_keys, h.plan.keys == KeyRule::centred);
  }
}

TEST(HeadPlan, a_wide_output_is_fp32_or_what_the_plan_says_of_it) {
  EXPECT_EQ(head("flash2,stabiliser=wide_output").plan.at(Site::output_for_delta), Rounding{});
  EXPECT_EQ(head("flash2,stabiliser=wide_output").plan.at(Site::output), Rounding{kBf16});
  EXPECT_EQ(head("flash2,output_for_delta=e8m15,stabiliser=wide_output").plan.at(Site::output_for_delta),
            parse_rounding("e8m15"));
  // A second, unrounded O-bar is needed only where the first one is rounded.
  EXPECT_FALSE(head("flash2,stabiliser=wide_output").shadow);
  EXPECT_TRUE(head("flash2,pv=bf16,stabiliser=wide_output").shadow);
  EXPECT_TRUE(head("flash2,row_sum=bf16,stabiliser=consistent").shadow);
  EXPECT_FALSE(head("bf16_all,stabiliser=zero_sum").shadow);
}

TEST(HeadPlan, rounded_sums_need_powers_of_two_or_the_maximum_first) {
  const HeadPlan plain = head("flash2,dprobs=bf16,stabiliser=consistent"),
                 rounded = head("flash2,shifted=bf16,stabiliser=consistent");
  EXPECT_TRUE(plain.sums_rounded && plain.power_shift() && !plain.max_first);
  EXPECT_EQ(plain.plan.at(Site::dprobs), Rounding{});
  EXPECT_TRUE(rounded.sums_rounded && !rounded.power_shift() && rounded.max_first);
  EXPECT_EQ(rounded.shift.rule, ShiftRule::row_max);
  // Rounding must commute with a row's power of two: not where rows share a scale, nor on a grid without a scale.
  for (const char* probs : {"int8*row", "e2m1*block16@e4m3*row", "e4m3*block32@e8m0", "e4m3^8/saturate"})
    EXPECT_FALSE(head("flash2,stabiliser=consistent,probs=" + std::string(probs)).max_first) << probs;
  for (const char* probs : {"int8*tile", "e2m1*block16@e4m3*tile", "e2m1*block16@e4m3", "int8", "hif8",
                            "int8*column", "e4m3*column32@e8m0"})
    EXPECT_TRUE(head("flash2,stabiliser=consistent,probs=" + std::string(probs)).max_first) << probs;
}

TEST(HeadPlan, each_rule_of_the_others) {
  EXPECT_TRUE(head("flash2,stabiliser=zero_sum").probs_delta);
  EXPECT_TRUE(head("flash2,stabiliser=centre_keys").centres_keys);
  EXPECT_TRUE(head("flash2,keys=centred,stabiliser=zero_sum").centres_keys);
  EXPECT_TRUE(head("flash2,queries=centred").centres_queries);
  EXPECT_FALSE(head("flash2,keys=centred").centres_queries);
  const HeadPlan stochastic = head("flash2,stabiliser=stochastic_output");
  for (Site site : {Site::output, Site::output_for_delta})
    EXPECT_EQ(stochastic.plan.at(site), parse_rounding("bf16/stochastic"));
  const HeadPlan capped = head("flash2,stabiliser=paper_capped,beta=3,cap=5,tie_tolerance=0.25");
  EXPECT_EQ(capped.shift.rule, ShiftRule::paper_capped);
  EXPECT_EQ(capped.shift.beta, 3);
  EXPECT_EQ(capped.shift.cap, 5);
  EXPECT_EQ(capped.shift.tie_tolerance, 0.25f);
}

TEST(HeadPlan, heads_share_operands_where_they_read_them_alike) {
  const HeadPlan plain = head("flash2");
  EXPECT_TRUE(read_keys_alike(plain, head("bf16_all,stabiliser=zero_sum")));
  for (const char* other :
       {"flash2,k=bf16", "flash2,v=bf16", "flash2,seed=1", "flash2,stabiliser=centre_keys",
        "flash2,keys=centred", "flash2,k_bwd=bf16", "flash2,v_bwd=bf16"})
    EXPECT_FALSE(read_keys_alike(plain, head(other))) << other;
}

// --- RowShift: each rule on tiles of which the answer is known.

struct Tile {
  float max;
  int32_t ties;
};
float shift_after(const ShiftParameters& p, std::initializer_list<Tile> tiles, float unit = 0.5f) {
  RowShift shift;
  for (const Tile& tile : tiles) shift.add_tile(p, tile.max, tile.ties, unit);
  return shift.m;
}

TEST(RowShift, without_a_visible_key_there_is_no_shift) {
  for (ShiftRule rule : {ShiftRule::row_max, ShiftRule::lagging_max, ShiftRule::paper,
                         ShiftRule::paper_capped, ShiftRule::dither, ShiftRule::power_of_two})
    EXPECT_EQ(shift_after({rule, 2, 8, 1e-3f}, {{RowShift::kNone, 0}}), RowShift::kNone);
}

TEST(RowShift, each_rule_is_its_formula) {
  const float log2 = static_cast<float>(kLog2);
  for (ShiftRule rule : {ShiftRule::row_max, ShiftRule::lagging_max})
    EXPECT_EQ(shift_after({rule}, {{1.5f, 1}, {-3, 1}, {RowShift::kNone, 0}}), 1.5f);
  EXPECT_EQ(shift_after({ShiftRule::dither}, {{1.5f, 1}, {-3, 1}}, 0.25f), 1.5f + 0.25f * log2);
  EXPECT_EQ(shift_after({ShiftRule::power_of_two}, {{1.5f, 1}}), 3.0f);  // 1.5 / log 2 = 2.16
  // paper: a tie in one tile counts, one across tiles does not; 0 is not moved; a negative maximum goes to 0.
  const ShiftParameters paper{ShiftRule::paper, 2, 8, 1e-3f};
  EXPECT_EQ(shift_after(paper, {{3, 1}, {3, 1}}), 3.0f);
  EXPECT_EQ(shift_after(paper, {{3, 2}}), 6.0f);
  EXPECT_EQ(shift_after(paper, {{0, 2}}), 0.0f);
  EXPECT_EQ(shift_after(paper, {{-3, 2}}), 0.0f);
  // paper_capped: ties across tiles count; the lift is (beta - 1) max or -max within its bounds.
  const ShiftParameters capped{ShiftRule::paper_capped, 2, 8, 1e-3f};
  EXPECT_EQ(shift_after(capped, {{3, 1}}), 3.0f);
  EXPECT_EQ(shift_after(capped, {{3, 1}, {3, 1}}), 6.0f);
  EXPECT_EQ(shift_after(capped, {{3, 1}, {3.5f, 1}}), 3.5f);  // the first no longer ties
  EXPECT_EQ(shift_after(capped, {{100, 2}}), 106.0f);         // at most 8 (0.5 + 0.5 unit)
  EXPECT_EQ(shift_after(capped, {{0, 2}}), log2 * 0.625f);    // at least log 2 (0.25 + 0.75 unit)
  EXPECT_EQ(shift_after(capped, {{-3, 2}}), 0.0f);
}

TEST(RowShift, ties_are_counted_against_the_tile_or_the_row) {
  RowShift shift;
  shift.add_tile({ShiftRule::paper, 2, 8, 0.5f}, 4, 1, 0.5f);
  EXPECT_EQ(shift.tie_threshold({ShiftRule::paper, 2, 8, 0.5f}, 3), 2.5f);
  EXPECT_EQ(shift.tie_threshold({ShiftRule::paper_capped, 2, 8, 0.5f}, 3), 3.5f);
}

}  // namespace
}  // namespace evenkeel
