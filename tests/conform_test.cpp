// The conformance suite finds what it must find, and is quiet where it must be.
#include "diagnosis/conform.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "attention_cases.h"
#include "diagnosis/attention_truth.h"
#include "diagnosis/conform_bounds.h"
#include "sanitized.h"

namespace evenkeel {
namespace {

// Both in FP64: sums of a few hundred terms in another order. Zeros and infinities are the same ones.
void expect_near(const Tensor<double>& found, const Tensor<double>& exact, const Tensor<double>* scale,
                 const std::string& what) {
  ASSERT_EQ(found.values().size(), exact.values().size()) << what;
  for (size_t n = 0; n < exact.values().size(); ++n) {
    const double truth = exact.values()[n], size = scale ? scale->values()[n] : std::fabs(truth);
    if (found.values()[n] != truth) {
      ASSERT_NEAR(found.values()[n], truth, 1e-12 * std::max(size, std::fabs(truth))) << what << " at " << n;
    }
  }
}

TEST(AttentionTruth, is_the_definition) {
  for (const cases::Case& c : cases::kCases) {
    const cases::Problem p = cases::make_problem(c);
    const AttentionProblem config = p.with(PrecisionPlan{});
    const AttentionTruth truth = attention_truth(config, p.in, p.grad_output);
    const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
    const std::string name = c.name;
    expect_near(truth.o, exact.o, &truth.scales.o, name + " o");
    expect_near(truth.lse, exact.lse, nullptr, name + " lse");
    expect_near(truth.dv, exact.dv, &truth.scales.dv, name + " dv");
    expect_near(truth.dq, exact.dq, &truth.scales.dq[1], name + " dq");
    expect_near(truth.dk, exact.dk, &truth.scales.dk[1], name + " dk");
  }
}

// What the definition does not have, by what it has. A sink is a key of that score whose value is 0. Narrow values are
// wide ones without the last features. The gradient of L = log sum exp is keel's, 2 z L.
TEST(AttentionTruth, takes_sinks_narrow_values_and_the_gradient_of_the_log_sum_exp) {
  const cases::Case narrow = cases::find_case("plain_fp32");
  cases::Problem p = cases::make_problem(narrow);
  const int64_t H = narrow.H, N = narrow.N, D = narrow.D, T = narrow.T;
  // Key 0 is 0 in every feature, so that its score is 0, and so is its value; the last 12 features of V and dO are 0.
  for (int64_t h = 0; h < H; ++h) {
    for (int64_t d = 0; d < D; ++d) *p.k().at(0, h, 0, d) = *p.v().at(0, h, 0, d) = 0;
    for (int64_t d = D - 12; d < D; ++d) {
      for (int64_t j = 0; j < N; ++j) *p.v().at(0, h, j, d) = 0;
      for (int64_t i = 0; i < T; ++i) *p.grad().at(0, h, i, d) = 0;
    }
  }
  PrecisionPlan plan;
  plan.keel = 0.125f;
  const AttentionReference exact = attention_reference(p.with(plan), p.in, p.grad_output);

  const auto without_first_key = [](View<const float> x) {
    x.data = x.at(0, 0, 1);
    --x.shape[2];
    return x;
  };
  AttentionInputs in{p.in.q, without_first_key(p.in.k), without_first_key(p.in.v)};
  in.v.shape[3] -= 12;
  View<const float> d_o = p.grad_output;
  d_o.shape[3] -= 12;
  std::vector<float> grad_lse;
  for (double L : exact.lse.values()) grad_lse.push_back(static_cast<float>(2 * 0.125 * L));
  const std::vector<float> sinks(static_cast<size_t>(H), 0.0f);
  TruthOptions options;
  options.sinks = sinks;
  options.grad_lse = contiguous_view<const float>(grad_lse.data(), {1, H, T, 1});
  const AttentionTruth truth = attention_truth(p.with(PrecisionPlan{}), in, d_o, options);
  expect_near(truth.lse, exact.lse, nullptr, "lse");
  for (int64_t h = 0; h < H; ++h) {
    for (int64_t i = 0; i < T; ++i)
      for (int64_t d = 0; d < D; ++d) {
        if (d < D - 12) {
          EXPECT_NEAR(*truth.o.view().at(0, h, i, d), *exact.o.view().at(0, h, i, d), 1e-12);
        }
        // grad_lse is a float: 2^-24 of it.
        EXPECT_NEAR(*truth.dq.view().at(0, h, i, d), *exact.dq.view().at(0, h, i, d), 1e-6);
      }
    for (int64_t j = 1; j < N; ++j)
      for (int64_t d = 0; d < D; ++d) {
        EXPECT_NEAR(*truth.dk.view().at(0, h, j - 1, d), *exact.dk.view().at(0, h, j, d), 1e-6);
      }
    // Key 0 is 0: dS of the sink is found at finite differences alone.
    const auto loss = [&](float sink) {
      std::vector<float> moved = sinks;
      moved[static_cast<size_t>(h)] = sink;
      TruthOptions with = options;
      with.sinks = moved;
      const AttentionTruth at = attention_truth(p.with(PrecisionPlan{}), in, d_o, with);
      double sum = 0;
      for (int64_t i = 0; i < T; ++i) {
        sum += grad_lse[static_cast<size_t>(h * T + i)] * *at.lse.view().at(0, h, i);
        for (int64_t d = 0; d < D - 12; ++d) sum += *d_o.at(0, h, i, d) * *at.o.view().at(0, h, i, d);
      }
      return sum;
    };
    constexpr float kStep = 0x1p-12f;
    EXPECT_NEAR(*truth.grad_sink.view().at(0, h, 0), (loss(kStep) - loss(-kStep)) / (2 * kStep), 1e-5);
  }
}

TEST(AttentionTruth, takes_packed_sequences) {
  const cases::Problem p = cases::make_problem(cases::find_case("plain"));  // (2, 2, 64, 64): 128 rows a head
  // Two sequences of 40 and 24 rows, 30 and 34 keys, in head 0 and 1 of the first batch entry.
  const std::vector<int32_t> rows{40, 24}, keys{30, 34}, row_starts{0, 40}, key_starts{0, 30};
  AttentionProblem packed = p.with(PrecisionPlan{});
  packed.mask.causal = true;
  AttentionInputs in = p.in;
  View<const float> d_o = p.grad_output;
  for (View<const float>* x : {&in.q, &d_o}) x->stride[0] = 0, x->shape[2] = 40;
  for (View<const float>* x : {&in.k, &in.v}) x->stride[0] = 0, x->shape[2] = 34;
  packed.mask.query_lengths = rows, packed.mask.key_lengths = keys;
  packed.mask.query_offsets = row_starts, packed.mask.key_offsets = key_starts;
  packed.mask.query_rows = packed.mask.key_rows = 64;
  const AttentionTruth truth = attention_truth(packed, in, d_o);
  for (size_t b = 0; b < 2; ++b) {
    const auto part = [](View<const float> x, int64_t first, int64_t count) {
      x.data = x.at(0, 0, first);
      x.shape[0] = 1, x.shape[2] = count;
      return x;
    };
    AttentionProblem alone = p.with(PrecisionPlan{});
    alone.mask.causal = true;
    const AttentionReference exact =
        attention_reference(alone,
                            {part(in.q, row_starts[b], rows[b]), part(in.k, key_starts[b], keys[b]),
                             part(in.v, key_starts[b], keys[b])},
                            part(d_o, row_starts[b], rows[b]));
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t d = 0; d < 64; ++d) {
        for (int64_t i = 0; i < rows[b]; ++i) {
          ASSERT_NEAR(*truth.o.view().at(0, h, row_starts[b] + i, d), *exact.o.view().at(0, h, i, d), 1e-12);
          ASSERT_NEAR(*truth.dq.view().at(0, h, row_starts[b] + i, d), *exact.dq.view().at(0, h, i, d),
                      1e-12);
        }
        for (int64_t j = 0; j < keys[b]; ++j) {
          ASSERT_NEAR(*truth.dk.view().at(0, h, key_starts[b] + j, d), *exact.dk.view().at(0, h, j, d),
                      1e-12);
          ASSERT_NEAR(*truth.dv.view().at(0, h, key_starts[b] + j, d), *exact.dv.view().at(0, h, j, d),
                      1e-12);
        }
      }
  }
}

constexpr int64_t kRows =
    kSanitized ? 64 : kBiasRows;  // 64 are too few to judge bias: only that everything runs

std::vector<ConformCase> cases_named(const std::vector<std::string_view>& names) {
  std::vector<ConformCase> cases;
  for (const ConformCase& c : conform_cases())
    for (std::string_view name : names)
      if (c.name == name) cases.push_back(c);
  EXPECT_EQ(cases.size(), names.size());
  return cases;
}

std::vector<ConformPlan> judge(const std::vector<std::string>& texts,
                               const std::vector<std::string_view>& names) {
  std::vector<ConformPlan> plans;
  for (const std::string& text : texts) plans.push_back({text, parse_plan(text), {}});
  conform(plans, cases_named(names), kRows, 7, conform_cpu_kernel, {});
  return plans;
}

TEST(Conform, finds_the_leaks_and_passes_the_remedies) {
  const auto plans = judge({"bf16_all", "flash2,row_sum=bf16", "flash2", "flash2,stabiliser=zero_sum",
                            "flash2,stabiliser=consistent", "bf16_all,stabiliser=zero_sum",
                            "bf16_all,stabiliser=consistent", "fp32"},
                           {"ties_2_tail", "sink"});
  if (kSanitized) GTEST_SKIP() << "too few rows under a sanitizer to judge bias";
  for (const ConformPlan& plan : plans) {
    const bool leaks = plan.plan.stabiliser == Stabiliser::none && plan.name != "fp32";
    EXPECT_EQ(plan.passes(), !leaks) << plan.name;
    for (const ConformResult& r : plan.results) {
      EXPECT_GE(r.rows, kBiasRows);
      EXPECT_EQ(r.nonfinite, 0) << plan.name << " on " << r.case_name;
      EXPECT_EQ(r.biased(), leaks) << plan.name << " on " << r.case_name << ": z " << r.residual.z();
    }
  }
}

// The loss's own curvature makes a residual of one sign of a rounding that has none, without any tie.
TEST(Conform, feedback_through_the_loss_is_biased) {
  const auto plans = judge({"flash2", "flash2,stabiliser=stochastic_output", "flash2,stabiliser=zero_sum",
                            "flash2,stabiliser=consistent"},
                           {"loss_feedback"});
  if (kSanitized) GTEST_SKIP() << "too few rows under a sanitizer to judge bias";
  EXPECT_LT(plans[0].results[0].residual.z(), -kBiasZ);
  EXPECT_LT(plans[1].results[0].residual.z(), -kBiasZ);
  EXPECT_TRUE(plans[2].passes());
  EXPECT_TRUE(plans[3].passes());
}

// Faults planted under the exact remedy, each of a size that no test of the largest error would notice.
TEST(Conform, catches_planted_bias) {
  const auto plans = judge(
      {"flash2,stabiliser=zero_sum,dscores=bf16/up", "flash2,stabiliser=zero_sum,delta=e8m15/toward_zero"},
      {"ties_2_tail"});
  if (kSanitized) GTEST_SKIP() << "too few rows under a sanitizer to judge bias";
  EXPECT_TRUE(plans[0].results[0].biased()) << plans[0].results[0].residual.z();
  EXPECT_GT(plans[0].results[0].residual.mean(), 0);
  EXPECT_TRUE(plans[1].results[0].biased()) << plans[1].results[0].residual.z();
}

TEST(Conform, catches_a_kernel_that_is_not_finite) {
  for (Tensor<float> AttentionBuffers::*output :
       {&AttentionBuffers::o, &AttentionBuffers::dq, &AttentionBuffers::dk, &AttentionBuffers::dv}) {
    std::vector<ConformPlan> plans = {{"fp32", parse_plan("fp32"), {}}};
    const ConformKernel broken = [&](const AttentionProblem& config, const AttentionInputs& in,
                                     View<const float> d_o, AttentionBuffers& buffers) {
      conform_cpu_kernel(config, in, d_o, buffers);
      (buffers.*output).values()[0] = NAN;
    };
    conform(plans, cases_named({"one_row", "far_one_key", "far_padding"}), 64, 1, broken, {});
    for (const ConformResult& r : plans[0].results) {
      EXPECT_GT(r.nonfinite, 0) << r.case_name;
      EXPECT_STREQ(r.verdict(), "NOT FINITE") << r.case_name;
    }
  }
}

// --- Rows that see one key

std::vector<ConformCase> one_key_cases() { return cases_named({"far_one_key", "far_padding"}); }

// The key of the largest score among those that row i of head h sees. gap: how far the next one is below.
int64_t only_key(const ConformInputs& inputs, int64_t h, int64_t i, double* gap = nullptr) {
  double first = -HUGE_VAL, second = -HUGE_VAL;
  int64_t key = -1;
  const AttentionMask mask = inputs.mask();
  for (int64_t j = 0; j < inputs.which->keys; ++j) {
    if (mask.causal && j > i) continue;
    if (mask.visible.present() && *mask.visible.at(0, h, i, j) == 0) continue;
    double score = 0;
    for (int64_t d = 0; d < inputs.which->head_size; ++d)
      score += double{*inputs.q.view().at(0, h, i, d)} * *inputs.k.view().at(0, h, j, d) / 8;
    if (score > first)
      second = first, first = score, key = j;
    else
      second = std::max(second, score);
  }
  if (gap) *gap = first - second;
  return key;
}

TEST(OneKey, rows_see_one_and_their_scores_are_far) {
  for (const ConformCase& c : one_key_cases())
    for (const bool constant_feature : {false, true}) {
      const ConformInputs inputs(c, 3, 11, constant_feature);
      AttentionProblem config;
      config.plans = {PrecisionPlan{}};
      config.mask = inputs.mask();
      const AttentionReference exact = attention_reference(config, inputs.inputs(), inputs.grad_output());
      double nearest = HUGE_VAL, lowest = 0, highest = 0;
      for (int64_t h = 0; h < 3; ++h)
        for (int64_t i = 0; i < c.rows_per_head; ++i) {
          double gap = 0;
          const int64_t key = only_key(inputs, h, i, &gap);
          ASSERT_GE(key, 0) << c.name;
          ASSERT_GE(gap, c.one_key) << c.name;
          for (int64_t d = 0; d < c.head_size; ++d)
            ASSERT_EQ(*exact.o.view().at(0, h, i, d), double{*inputs.v.view().at(0, h, key, d)}) << c.name;
          const double L = *exact.lse.view().at(0, h, i);
          nearest = std::min(nearest, std::fabs(L)), lowest = std::min(lowest, L);
          highest = std::max(highest, L);
        }
      EXPECT_LT(nearest, 2600) << c.name;
      EXPECT_LT(lowest, -60'000) << c.name;
      EXPECT_GT(highest, 60'000) << c.name;
      for (const Tensor<double>* gradient : {&exact.dq, &exact.dk})
        for (double x : gradient->values()) ASSERT_EQ(x, 0) << c.name;
      // FP16 kernels are given these numbers too.
      for (const Tensor<float>* x : {&inputs.q, &inputs.k})
        for (float value : x->values()) ASSERT_LT(std::fabs(value), 65504) << c.name;
    }
}

// What is granted there is zero where the plan rounds nothing but 1 and V.
TEST(OneKey, bounds_grant_roundings_that_round_something) {
  const float v[] = {-1.5f, 0x1.02p0f};  // BF16 numbers, the second none of E4M3
  const auto bound = [&](const char* text) {
    AttentionProblem problem;
    problem.plans = {parse_plan(text)};
    problem.N = 48, problem.D = problem.Dv = 64;
    return one_key_bound(problem, v);
  };
  for (const char* plan :
       {"fp32", "flash2", "flash2,row_sum=bf16", "flash2,pv=bf16", "flash2,stabiliser=paper_capped",
        "flash2,stabiliser=stochastic_output", "flash2,stabiliser=wide_output",
        "bf16_all,stabiliser=wide_output,dprobs=fp32", "flash2,stabiliser=zero_sum"}) {
    EXPECT_EQ(bound(plan).output, 0) << plan;
    EXPECT_EQ(bound(plan).leak, 0) << plan;
  }
  EXPECT_EQ(bound("flash2,stabiliser=consistent").leak, 0);
  EXPECT_EQ(bound("flash2,stabiliser=consistent").output, 0x1p-7);
  EXPECT_EQ(bound("bf16_all").leak, 0x1p-8);  // dP
  EXPECT_GE(bound("flash2,stabiliser=dither").leak, 0x1p-8);
  EXPECT_GE(bound("flash2,v=e4m3").leak, 0x1p-4);
  EXPECT_GE(bound("flash2,output=e8m2").leak, 0x1p-4);
  EXPECT_EQ(bound("flash2,output=e8m2,stabiliser=zero_sum").leak, 0);
  EXPECT_LT(bound("flash2").arithmetic, 1e-4);
}

TEST(OneKey, our_plans_pass) {
  std::vector<ConformPlan> plans;
  for (const std::string& text : default_conform_plans()) plans.push_back({text, parse_plan(text), {}});
  for (const bool constant_feature : {false, true}) {
    conform(plans, one_key_cases(), 6400, 3, conform_cpu_kernel, {}, constant_feature);
    for (const ConformPlan& plan : plans)
      for (const ConformResult& r : plan.results) {
        EXPECT_STREQ(r.verdict(), "ok") << plan.name << " on " << r.case_name << ": " << r.what_to_fix();
        EXPECT_EQ(r.one_key_rows, r.rows) << plan.name;
        if (plan.name != "bf16_all") {
          EXPECT_EQ(r.residual.rms(), 0) << plan.name << " on " << r.case_name;
        }
      }
  }
}

// FlashAttention-2 with P = 2^fma(S, c, -m'), m' = m c rounded, for rows that see one key. Its P is 2^r, r what rounding m c
// leaves. BF16 rounds it for O, the row's sum does not. `wide`: delta reads O before it is rounded to BF16.
ConformKernel fused_exponent(bool wide) {
  return [wide](const AttentionProblem& config, const AttentionInputs& in, View<const float> d_o,
                AttentionBuffers& b) {
    conform_cpu_kernel(config, in, d_o, b);
    constexpr float c = 1.44269504f;
    const Rounding to_bf16{kBf16};
    const AttentionProblem shape = problem_of(config, in);
    std::vector<double> dk(b.dk.values().size());
    for (int64_t h = 0; h < shape.H; ++h)
      for (int64_t i = 0; i < shape.T; ++i) {
        const float m = *b.lse.view().at(0, h, i), rounded = m * c, p = std::exp2(std::fma(m, c, -rounded));
        double leak = 0;
        int64_t key = -1;
        for (int64_t j = 0; j < shape.N && key < 0; ++j)  // O is the V of the key that the row sees
          if (std::equal(in.v.at(0, h, j), in.v.at(0, h, j) + shape.D, b.o.view().at(0, h, i))) key = j;
        ASSERT_GE(key, 0);
        for (int64_t d = 0; d < shape.D; ++d) {
          const float v = *in.v.at(0, h, key, d), wide_o = v * round_to(to_bf16, p) / p,
                      o = round_to(to_bf16, wide_o);
          *b.o.view().at(0, h, i, d) = o;
          leak += double{*d_o.at(0, h, i, d)} * (double{v} - (wide ? wide_o : o));
        }
        *b.residual.view().at(0, h, i) = leak;
        *b.delta.view().at(0, h, i) -= static_cast<float>(leak);
        for (int64_t d = 0; d < shape.D; ++d) {
          *b.dq.view().at(0, h, i, d) =
              round_to(to_bf16, static_cast<float>(double{shape.scale} * leak * *in.k.at(0, h, key, d)));
          dk[static_cast<size_t>((h * shape.N + key) * shape.D + d)] +=
              double{shape.scale} * leak * *in.q.at(0, h, i, d);
        }
      }
    for (size_t n = 0; n < dk.size(); ++n) b.dk.values()[n] = round_to(to_bf16, static_cast<float>(dk[n]));
  };
}

TEST(OneKey, finds_an_exponent_that_is_not_zero_at_the_largest_score) {
  for (const bool wide : {false, true})
    for (const bool constant_feature : {false, true}) {
      const char* const text = wide ? "flash2,stabiliser=wide_output" : "flash2";
      std::vector<ConformPlan> plans = {{text, parse_plan(text), {}}};
      conform(plans, one_key_cases(), 6400, 3, fused_exponent(wide), {}, constant_feature);
      for (const ConformResult& r : plans[0].results) {
        EXPECT_STREQ(r.verdict(), "WRONG, NOISY") << r.case_name;
        EXPECT_NE(r.what_to_fix().find("rows that see one key"), std::string::npos) << r.what_to_fix();
        for (const double over : {r.over_o, r.over_dq, r.over_dk}) EXPECT_GT(over, 3) << r.case_name;
        EXPECT_LE(r.over_dv, 1);
        EXPECT_GT(r.residual.rms(), 100 * r.noise_bound()) << r.case_name;
      }
    }
}

// Kernels that do not compute attention, each on every family. `spoil` has the right outputs to spoil.
std::vector<ConformResult> judge_spoiled(const char* plan,
                                         const std::function<void(AttentionBuffers&)>& spoil,
                                         bool compute = true) {
  std::vector<ConformPlan> plans = {{plan, parse_plan(plan), {}}};
  const ConformKernel kernel = [&](const AttentionProblem& config, const AttentionInputs& in,
                                   View<const float> d_o, AttentionBuffers& buffers) {
    if (compute) conform_cpu_kernel(config, in, d_o, buffers);
    spoil(buffers);
  };
  conform(plans, conform_cases(), 64, 1, kernel, {});
  EXPECT_EQ(plans[0].results.size(), conform_cases().size());
  return plans[0].results;
}

TEST(Conform, no_null_kernel_passes_in_any_family) {
  const auto fill = [](AttentionBuffers& b, float value) {
    for (Tensor<float>* tensor : {&b.o, &b.dq, &b.dk, &b.dv, &b.delta})
      std::fill(tensor->values().begin(), tensor->values().end(), value);
    for (Tensor<double>* tensor : {&b.residual, &b.residual_floor})
      std::fill(tensor->values().begin(), tensor->values().end(), 0.0);
  };
  for (const char* plan : {"fp32", "flash2", "bf16_all"}) {
    for (const ConformResult& r : judge_spoiled(
             plan, [](AttentionBuffers&) {}, false))
      EXPECT_STREQ(r.verdict(), "NOT WRITTEN") << plan << " on " << r.case_name;
    for (const float value : {0.0f, 1e6f})
      for (const ConformResult& r : judge_spoiled(
               plan, [&](AttentionBuffers& b) { fill(b, value); }, false))
        EXPECT_TRUE(r.wrong()) << value << ", " << plan << " on " << r.case_name;
  }
}

// Faults of the kind that kernels have: each is found in some family, whatever the plan grants.
TEST(Conform, finds_outputs_that_are_not_written_or_wrong) {
  struct Fault {
    const char *name, *verdict;
    std::function<void(AttentionBuffers&)> plant;
  };
  const auto scaled = [](Tensor<float>& tensor, float by) {
    for (float& x : tensor.values()) x *= by;
  };
  const auto unwritten = std::bit_cast<float>(kUnwritten);
  const Fault faults[] = {
      {"last row of O", "NOT WRITTEN", [&](AttentionBuffers& b) { b.o.values().back() = unwritten; }},
      {"one of dV", "NOT WRITTEN", [&](AttentionBuffers& b) { b.dv.values()[5] = unwritten; }},
      {"one of L", "NOT WRITTEN", [&](AttentionBuffers& b) { b.lse.values()[5] = unwritten; }},
      {"O by 5 % too large", "WRONG", [&](AttentionBuffers& b) { scaled(b.o, 1.05f); }},
      {"dV of another scale", "WRONG", [&](AttentionBuffers& b) { scaled(b.dv, 0.9f); }},
      {"dK of another scale", "WRONG", [&](AttentionBuffers& b) { scaled(b.dk, 1.2f); }},
      {"dQ of another scale", "WRONG", [&](AttentionBuffers& b) { scaled(b.dq, 1.2f); }},
      {"L of another base", "WRONG", [&](AttentionBuffers& b) { scaled(b.lse, 1.4427f); }},
  };
  for (const Fault& fault : faults) {
    int found = 0;
    for (const ConformResult& r : judge_spoiled("flash2", fault.plant))
      found += std::string_view(r.verdict()).starts_with(fault.verdict);
    EXPECT_GT(found, 0) << fault.name;
  }
}

TEST(Conform, nothing_to_judge_is_an_error_and_no_pass) {
  std::vector<ConformPlan> plans = {{"fp32", parse_plan("fp32"), {}}}, none;
  EXPECT_FALSE(plans[0].passes());
  EXPECT_THROW(conform(plans, {}, 64, 1, conform_cpu_kernel, {}), std::invalid_argument);
  EXPECT_THROW(conform(none, conform_cases(), 64, 1, conform_cpu_kernel, {}), std::invalid_argument);
  EXPECT_THROW(conform(plans, conform_cases(), 0, 1, conform_cpu_kernel, {}), std::invalid_argument);
}

TEST(Conform, every_case_runs_on_every_stabiliser) {
  std::vector<ConformPlan> plans;
  for (std::string_view stabiliser : kStabiliserNames)
    plans.push_back(
        {std::string(stabiliser), parse_plan("bf16_all,stabiliser=" + std::string(stabiliser)), {}});
  int64_t advanced = 0;
  conform(plans, conform_cases(), 64, 3, conform_cpu_kernel, [&] { ++advanced; });
  EXPECT_EQ(advanced, conform_work(plans.size(), conform_cases(), 64));
  for (const ConformPlan& plan : plans)
    for (const ConformResult& r : plan.results) {
      EXPECT_GT(r.rows, 0) << r.case_name;
      // The published shift underflows where scores reach 100: that hole is its own.
      if (plan.plan.stabiliser != Stabiliser::paper) {
        EXPECT_EQ(r.nonfinite, 0) << plan.name << " on " << r.case_name;
        EXPECT_FALSE(r.wrong()) << plan.name << " on " << r.case_name << ": " << r.what_to_fix();
      }
      EXPECT_EQ(r.unwritten, 0) << plan.name << " on " << r.case_name;
    }
}

// Right outputs stay within the bounds of every plan, and the bounds are not idle: rounding comes near them.
TEST(Conform, rounding_stays_within_its_worst_case) {
  std::vector<ConformPlan> plans;
  for (const char* plan :
       {"fp32", "flash2", "flash2,stabiliser=zero_sum", "flash2,accumulate=tensor_core", "bf16_all",
        "bf16_all,stabiliser=consistent", "fp8", "fp32,row_sum=e5m2", "fp32,output=e8m2/stochastic",
        "fp32,pv=e4m3", "fp32,dscores=e5m2", "fp32,scores=bf16,shifted=bf16"})
    plans.push_back({plan, parse_plan(plan), {}});
  conform(plans, conform_cases(), kSanitized ? 128 : 640, 5, conform_cpu_kernel, {});
  double nearest = 0;
  for (const ConformPlan& plan : plans)
    for (const ConformResult& r : plan.results) {
      EXPECT_FALSE(r.wrong()) << plan.name << " on " << r.case_name << ": " << r.what_to_fix();
      EXPECT_FALSE(r.one_key_rows > 0 && r.noisy()) << plan.name << " on " << r.case_name;
      if (plan.name == "flash2") nearest = std::max(nearest, r.over_o);
    }
  EXPECT_GT(nearest, 0.1);
}

// The systems of papers, with and without the sum kept: every output within what their roundings explain.
TEST(Conform, named_plans_stay_within_their_worst_case) {
  std::vector<ConformPlan> plans;
  std::vector<std::string> names(kPlanNames.begin(), kPlanNames.end());
  names.insert(names.end(),
               {"sage_int8,queries=centred", "flash2,k=int4*column,v=e2m1*column16@e4m3*tensor"});
  for (const std::string& name : names)
    for (const char* stabiliser : {"", ",stabiliser=zero_sum", ",stabiliser=consistent"}) {
      const std::string text = name + stabiliser;
      plans.push_back({text, parse_plan(text), {}});
    }
  conform(plans, conform_cases(), 64, 5, conform_cpu_kernel, {});
  for (const ConformPlan& plan : plans) {
    EXPECT_FALSE(plan.results.empty());
    for (const ConformResult& r : plan.results) {
      EXPECT_GT(r.rows, 0);
      EXPECT_EQ(r.unwritten, 0) << plan.name << " on " << r.case_name;
      EXPECT_FALSE(r.wrong()) << plan.name << " on " << r.case_name << ": " << r.what_to_fix();
      EXPECT_FALSE(r.one_key_rows > 0 && r.noisy()) << plan.name << " on " << r.case_name;
    }
  }
}

// Bounds follow a stabiliser's rules, whatever its name: a row of the table with other rules needs nothing else.
TEST(Bounds, read_the_rules_and_not_the_name) {
  const cases::Problem p = cases::make_problem(cases::find_case("plain_fp32"));
  PrecisionPlan plan = parse_plan("flash2");
  const auto bounds_of = [&](const StabiliserRules& rules) {
    const AttentionProblem problem = problem_of(p.with(plan), p.in);
    return output_bounds(problem, attention_truth(p.with(plan), p.in, p.grad_output).scales, 0, rules);
  };
  const auto numbers = [](const OutputBounds& b) {
    return std::vector<double>{b.o.relative,     b.lse.absolute,   b.hull,           b.score,
                               b.dv.relative,    b.dq.relative[0], b.dq.relative[1], b.dq.relative[2],
                               b.dk.relative[2], b.dq.absolute,    b.dk.absolute};
  };
  const OutputBounds plain = bounds_of(rules_of(Stabiliser::none));
  for (const StabiliserRules& row : kStabiliserTable) {
    plan.stabiliser = row.stabiliser;
    const OutputBounds named = output_bounds(problem_of(p.with(plan), p.in),
                                             attention_truth(p.with(plan), p.in, p.grad_output).scales, 0);
    plan.stabiliser = Stabiliser::none;  // the same rules under another name
    EXPECT_EQ(numbers(bounds_of(row)), numbers(named)) << row.name;
    EXPECT_EQ(row.sum == SumRule::rounded_probs,
              named.lse.absolute > plain.lse.absolute && row.keys == KeyRule::given)
        << row.name;
    EXPECT_EQ(row.keys == KeyRule::centred, named.score > 1.5 * plain.score) << row.name;
    if (row.output == OutputRule::stochastic) EXPECT_GT(named.o.relative, plain.o.relative) << row.name;
  }
}

TEST(Conform, inputs_repeat) {
  for (const ConformCase& c : conform_cases()) {
    const ConformInputs first(c, 2, 5), second(c, 2, 5), other(c, 2, 6);
    EXPECT_EQ(first.q.values(), second.q.values()) << c.name;
    EXPECT_NE(first.v.values(), other.v.values()) << c.name;
    for (float x : first.q.values()) ASSERT_EQ(x, round_to(Rounding{kBf16}, x)) << c.name;
  }
}

}  // namespace
}  // namespace evenkeel
