// The paper's analyses: on its own example, on planted directions, on odd inputs.
#include "diagnosis/head_analysis.h"

#include <gtest/gtest.h>

#include <cmath>

#include "capture_cases.h"

namespace evenkeel {
namespace {

// The addition of the paper's section 3.3.2 inside of a row: two scores tie for the largest, so two Pb are exactly 1; a
// small term between them sets the sticky bits.
Capture papers_row(const std::string& plan) {
  Capture c = random_capture({1, 1, 1, 3, 2, 4}, plan);
  c.scale = 1;
  const float k[3] = {1, 0, 1}, v[3] = {-2.40625f, -2.5798f, -2.296875f};
  for (int64_t t = 0; t < 3; ++t) {
    *c.q.view().at(0, 0, t, 0) = 8, *c.q.view().at(0, 0, t, 1) = 0;
    *c.k.view().at(0, 0, t, 0) = k[t], *c.k.view().at(0, 0, t, 1) = 0;
    *c.v.view().at(0, 0, t, 0) = v[t], *c.v.view().at(0, 0, t, 1) = 0;
    *c.d_o.view().at(0, 0, t, 0) = -1, *c.d_o.view().at(0, 0, t, 1) = 0;
  }
  return c;
}

TEST(HeadAnalysis, finds_the_papers_addition_and_takes_it_apart) {
  const HeadAnalysis a = analyse_head(papers_row("fp32,pv=bf16"), 0);
  EXPECT_EQ(a.row, 2);
  EXPECT_EQ(a.ties, (std::vector<int32_t>{1, 1, 2}));
  ASSERT_TRUE(a.trace.has_value());
  const SumTrace& t = *a.trace;
  EXPECT_EQ(t.site, Site::pv);
  EXPECT_EQ(t.feature, 0);
  EXPECT_EQ(t.probability[0], 1);
  EXPECT_EQ(t.probability[2], 1);
  EXPECT_EQ(t.error[0], 0);  // -2.40625 is a number of BF16
  EXPECT_NEAR(t.error[1], 0.00086546, 1e-6);
  EXPECT_NEAR(t.error[2], -0.0147595, 1e-5);  // the paper's -0.01475954...
  ASSERT_FALSE(t.guilty.empty());
  EXPECT_EQ(t.guilty[0].key, 2);
  EXPECT_NEAR(t.guilty[0].jump, t.error[2] - t.error[1], 1e-12);
  const Explanation& e = t.guilty[0].explanation;
  EXPECT_EQ(e.operation, Operation::add);  // Pb = 1: a plain addition
  EXPECT_TRUE(e.carry_out);
  EXPECT_EQ(e.value, -4.71875f);
  // dO and the error of O are both negative, so delta is too large (Fig. 5).
  EXPECT_EQ(a.sign_agreement, 1);
  EXPECT_GT(a.delta_error[2], 0);
  EXPECT_NEAR(a.product[0], a.delta_error[2], 1e-6 * a.product[0]);
}

TEST(HeadAnalysis, traces_the_sum_that_the_plan_rounds) {
  const auto site = [](const std::string& plan) { return analyse_head(papers_row(plan), 0).trace->site; };
  EXPECT_EQ(site("fp32,row_sum=e5m2"), Site::row_sum);
  EXPECT_EQ(site("bf16_all"), Site::row_sum);
  EXPECT_EQ(site("bf16_all,row_sum=fp32"), Site::pv);
  EXPECT_EQ(site("flash2"), Site::output_for_delta);
  EXPECT_FALSE(analyse_head(papers_row("fp32"), 0).trace.has_value());
  Look look;
  look.site = Site::pv;
  EXPECT_EQ(analyse_head(papers_row("bf16_all"), 0, look).trace->site, Site::pv);
  EXPECT_FALSE(analyse_head(papers_row("flash2"), 0, look).trace.has_value());  // not rounded there
  look.site = Site::dq;
  EXPECT_THROW(analyse_head(papers_row("flash2"), 0, look), std::invalid_argument);
  // l of two ties and a little: just above 2, which e5m2 stores as 2.
  const SumTrace t = *analyse_head(papers_row("fp32,row_sum=e5m2"), 0, {0, 2}).trace;
  EXPECT_NEAR(t.sum.back(), 2 + std::exp(-8.0), 1e-6);
  EXPECT_NEAR(t.error.back(), -std::exp(-8.0), 1e-6);
  EXPECT_TRUE(t.factor.empty());
  // O of flash2 is rounded once, in the end.
  const SumTrace o = *analyse_head(papers_row("flash2"), 0).trace;
  EXPECT_NEAR(o.probability[0], 0.5, 1e-3);
}

TEST(HeadAnalysis, planted_directions_are_found) {
  Capture c = random_capture({2, 2, 2, 20, 4, 6}, "fp32,row_sum=e5m2");
  for (float& x : c.x.values()) x *= 0.01f;
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t t = 0; t < 20; ++t) {
      *c.x.view().at(b, 0, t, 5) = 3;  // one input feature shared by all tokens
      *c.k.view().at(b, 1, t, 2) = 7;  // and one feature of every key
    }
  const HeadAnalysis a = analyse_head(c, 1);
  EXPECT_GT(a.column_share[5], 0.99);
  for (const std::vector<double>& row : a.similarity)
    for (const double cosine : row) EXPECT_GT(cosine, 0.8);
  ASSERT_EQ(a.tokens.size(), a.similarity.size());
  EXPECT_NE(std::find(a.tokens.begin(), a.tokens.end(), a.row), a.tokens.end());
  EXPECT_TRUE(std::is_sorted(a.tokens.begin(), a.tokens.end()));
  // The same direction at another step; another one elsewhere.
  Capture later = random_capture({2, 2, 2, 20, 4, 6}, "fp32", 9);
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t t = 0; t < 20; ++t) *later.x.view().at(b, 0, t, 5) = 30, *later.k.view().at(b, 1, t, 2) = 70;
  EXPECT_GT(direction_similarity(c, 1, later, 1), 0.99);
  EXPECT_LT(direction_similarity(c, 1, later, 0), 0.9);
}

TEST(HeadAnalysis, one_token_a_named_row_and_what_is_not_there) {
  const HeadAnalysis one = analyse_head(random_capture({}, "bf16_all"), 0);
  EXPECT_EQ(one.tokens, (std::vector<int64_t>{0}));
  EXPECT_EQ(one.ties, (std::vector<int32_t>{1}));
  Capture c = random_capture({2, 4, 2, 9, 3, 5}, "bf16_all");
  const HeadAnalysis named = analyse_head(c, 3, {1, 4, 3, {}});
  EXPECT_EQ(named.sequence, 1);
  EXPECT_EQ(named.row, 4);
  EXPECT_EQ(named.trace->sum.size(), 5u);
  EXPECT_THROW(analyse_head(c, 4), std::invalid_argument);
  EXPECT_THROW(analyse_head(c, 0, {2}), std::invalid_argument);
  EXPECT_THROW(analyse_head(c, 0, {0, 9}), std::invalid_argument);
  c.causal = false;
  EXPECT_EQ(analyse_head(c, 3, {1, 4}).trace->sum.size(), 9u);
  c.x = Tensor<float>();
  EXPECT_TRUE(analyse_head(c, 3).similarity.empty());
}

TEST(HeadAnalysis, what_is_not_finite_ends_nothing) {
  Capture c = random_capture({1, 1, 1, 5, 3, 4}, "bf16_all");
  std::fill(c.q.values().begin(), c.q.values().end(), std::numeric_limits<float>::quiet_NaN());
  const HeadAnalysis a = analyse_head(c, 0);
  EXPECT_TRUE(std::isnan(a.delta_error[4]));
  EXPECT_FALSE(a.trace.has_value());
  c = random_capture({1, 1, 1, 5, 3, 4}, "bf16_all");
  *c.v.view().at(0, 0, 0, 1) = std::numeric_limits<float>::infinity();
  EXPECT_EQ(analyse_head(c, 0).delta_error.size(), 5u);
}

}  // namespace
}  // namespace evenkeel
