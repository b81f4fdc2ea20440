// CPU attention under any precision plan is within the bounds of attention_bounds.h of the FP64 definition. The bounds
// themselves are tight for FP32, exceeded by every planted fault, and known to be wrong where they are made wrong.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "attention/attention.h"
#include "attention_bounds.h"
#include "attention_cases.h"
#include "attention_runs.h"

namespace evenkeel {
namespace {

using namespace attention_bounds;
using namespace attention_runs;
using cases::find_case;
using cases::kCases;

// The definition on one problem. Of a plan it depends on keel alone, so that one serves many plans.
class Definition {
 public:
  explicit Definition(const Problem& p) : p_(p) {}
  const AttentionReference& of(const AttentionProblem& config) {
    const auto [found, is_new] = by_keel_.try_emplace(config.plans.at(0).keel);
    if (is_new) found->second.emplace(attention_reference(config, p_.in, p_.grad_output));
    return *found->second;
  }

 private:
  const Problem& p_;
  std::map<float, std::optional<AttentionReference>> by_keel_;
};

void expect_within_bounds(const AttentionProblem& config, const Problem& p, Definition& exact) {
  const AttentionBuffers got = run(config, p);
  const Ratios r = ratios_of(config, p, error_bounds(config, p), got, exact.of(config));
  EXPECT_LE(r.o, 1) << "o";
  EXPECT_LE(r.lse, 1) << "lse";
  EXPECT_LE(r.delta, 1) << "delta";
  EXPECT_LE(r.dq, 1) << "dq";
  EXPECT_LE(r.dk, 1) << "dk";
  EXPECT_LE(r.dv, 1) << "dv";
}

class EachCase : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Attention, EachCase, testing::ValuesIn(kCases),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(EachCase, fp32_is_within_fp32s_bound_under_every_stabiliser) {
  const Problem p = make_problem(GetParam());
  Definition exact(p);
  for (Stabiliser stabiliser : kStabilisers)
    for (float keel : {0.0f, 0.01f}) {
      if (!fits(p.shape, stabiliser) || (kSanitized && keel == 0)) continue;
      SCOPED_TRACE(std::string(name(stabiliser)) + (keel > 0 ? ", keel" : ""));
      PrecisionPlan plan = plan_of("fp32", stabiliser);
      plan.keel = keel;
      expect_within_bounds(p.with(plan), p, exact);
    }
}

TEST_P(EachCase, rounded_plans_are_within_their_formats_bound) {
  const Problem p = make_problem(GetParam());
  Definition exact(p);
  for (const char* plan : {"flash2", "bf16_all", "flash2,row_sum=bf16,keel=0.01", "bf16_all,shifted=fp32"})
    for (Stabiliser stabiliser : kStabilisers) {
      if (!fits(p.shape, stabiliser) || (kSanitized && plan != std::string_view("bf16_all"))) continue;
      SCOPED_TRACE(std::string(plan) + ", " + std::string(name(stabiliser)));
      expect_within_bounds(p.with(plan_of(plan, stabiliser)), p, exact);
    }
}

TEST(AttentionBounds, tensor_core_products_are_within_their_bound) {
  for (const char* case_name : {"plain", "odd_65", "grouped", "ties_tail", "masked_ragged"}) {
    SCOPED_TRACE(case_name);
    const Problem p = make_problem(find_case(case_name));
    Definition exact(p);
    for (const char* plan : {"fp32", "flash2", "bf16_all"})
      expect_within_bounds(p.with(parse_plan(std::string(plan) + ",accumulate=tensor_core")), p, exact);
  }
}

TEST(AttentionBounds, fp8_is_within_its_formats_bound) {
  for (const char* case_name : {"plain", "odd_129", "masked_rows", "one_signed", "ties_tail"}) {
    SCOPED_TRACE(case_name);
    Problem p = make_problem(find_case(case_name));
    // Queries and keys that are e4m3 numbers already: the scores do not move, and the rest can be bounded.
    const Rounding e4m3{kE4m3, RoundingMode::nearest_even, true};
    for (auto* memory : {&p.q_memory, &p.k_memory})
      for (float& x : *memory) x = round_to(e4m3, x);
    Definition exact(p);
    for (Stabiliser stabiliser : {Stabiliser::none, Stabiliser::wide_output, Stabiliser::consistent,
                                  Stabiliser::zero_sum, Stabiliser::paper_capped})
      expect_within_bounds(p.with(plan_of("fp8", stabiliser)), p, exact);
  }
}

// Is the bound worth something? For FP32 it must be a small part of what it bounds.
bool is_tight(const Bounds& bounds, const AttentionReference& exact, const Case& c) {
  const auto rms = [](const Tensor<double>& t) {
    double sum = 0;
    for (double x : t.values()) sum += x * x;
    return std::sqrt(sum / static_cast<double>(t.values().size()));
  };
  if (!(rms(bounds.o) < 5e-3 * rms(exact.o) && rms(bounds.dv) < 5e-3 * rms(exact.dv))) return false;
  if (c.N == 1 || c.fill == Fill::subnormal || c.window_right == 0)
    return true;  // dq and dk are zero or tiny
  return rms(bounds.dq) < 2e-2 * rms(exact.dq) && rms(bounds.dk) < 2e-2 * rms(exact.dk);
}

TEST(AttentionBounds, are_tight_for_fp32) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    const Problem p = make_problem(c);
    const AttentionProblem config = p.with(PrecisionPlan{});
    EXPECT_TRUE(is_tight(error_bounds(config, p), attention_reference(config, p.in, p.grad_output), c));
  }
}

Bounds scaled(Bounds bounds, double factor) {
  for (auto* t : {&bounds.o, &bounds.lse, &bounds.delta, &bounds.dq, &bounds.dk, &bounds.dv})
    for (double& x : t->values()) x *= factor;
  return bounds;
}

// Wrong on purpose: a bound of every output that is too small is exceeded, and one that is too large is not tight. So the
// bounds are known to a factor of 1,000 both ways.
TEST(AttentionBounds, too_small_or_too_large_are_found) {
  const Case& c = find_case("odd_65");
  const Problem p = make_problem(c);
  const AttentionProblem config = p.with(PrecisionPlan{});
  const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
  const Bounds bounds = error_bounds(config, p);
  const Ratios small = ratios_of(config, p, scaled(bounds, 1e-3), run(config, p), exact);
  for (double ratio : {small.o, small.lse, small.delta, small.dq, small.dk, small.dv}) EXPECT_GT(ratio, 1);
  EXPECT_TRUE(is_tight(bounds, exact, c));
  EXPECT_FALSE(is_tight(scaled(bounds, 1e3), exact, c));
}

TEST(AttentionBounds, a_number_that_is_none_is_outside_every_bound) {
  const Problem p = make_problem(find_case("plain"));
  const AttentionProblem config = p.with(PrecisionPlan{});
  const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
  AttentionBuffers got = run(config, p);
  got.dk.values()[3] = kNan;
  EXPECT_EQ(ratios_of(config, p, error_bounds(config, p), got, exact).dk, INFINITY);
}

// How far a run is out of the bounds of what it should have been.
double ratio_of(const AttentionProblem& ran, const AttentionProblem& meant, const Problem& p) {
  return ratios_of(meant, p, error_bounds(meant, p), run(ran, p),
                   attention_reference(meant, p.in, p.grad_output))
      .largest();
}

TEST(AttentionBounds, find_wrong_mathematics) {
  const Problem p =
      make_problem({{1, 4, 2, 40, 40, 32}, {.causal = true, .softcap = 4, .tile_keys = 16}, ""});
  AttentionProblem meant = p.with(parse_plan("fp32,keel=1e-4"));
  EXPECT_LE(ratio_of(meant, meant, p), 1);
  AttentionProblem ran = meant;
  ran.plans[0].keel = -1e-4f;
  EXPECT_GT(ratio_of(ran, meant, p), 1) << "keel's sign";
  ran = meant;
  ran.mask.causal = false;
  ran.mask.window_right = 1;
  EXPECT_GT(ratio_of(ran, meant, p), 1) << "one key too many";
  ran = meant;
  ran.softcap = 4.001f;
  EXPECT_GT(ratio_of(ran, meant, p), 1) << "softcap";
  ran = meant;
  ran.scale = std::nextafter(problem_of(meant, p.in).scale * 1.0001f, 1.0f);
  EXPECT_GT(ratio_of(ran, meant, p), 1) << "scale";
}

TEST(AttentionBounds, find_any_site_of_fp32_rounded_to_tf32_or_less) {
  const Problem p = make_problem({{1, 2, 2, 24, 24, 16}, {.fill = Fill::fp32_normal, .tile_keys = 16}, ""});
  for (int s = 0; s < kSiteCount; ++s) {
    PrecisionPlan plan;
    plan.at(static_cast<Site>(s)) = Rounding{kTf32};
    EXPECT_GT(ratio_of(p.with(plan), p.with(PrecisionPlan{}), p), 1) << name(static_cast<Site>(s));
  }
}

}  // namespace
}  // namespace evenkeel
