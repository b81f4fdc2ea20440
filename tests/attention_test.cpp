// CPU attention under any precision plan: the sign of its errors, the residual, inputs that are not numbers, outputs. Three
// kinds of judgement, each shown to fail on a planted fault:
//   size   |error| against a bound derived from the plan's formats (attention_bounds_test.cpp),
//   sign   the mean error of a row, over many rows, within 4 standard errors of zero (here),
//   place  the observer's values before and after every site (attention_sites_test.cpp).
// What never changes a bit is in attention_bits_test.cpp, rows that are not like others in attention_rows_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>

#include "attention/attention.h"
#include "attention_bounds.h"
#include "attention_cases.h"
#include "attention_runs.h"
#include "numerics/error_stats.h"
#include "site_recorder.h"

namespace evenkeel {
namespace {

using attention_bounds::kTiny;
using attention_bounds::kUnit;
using namespace attention_runs;
using cases::find_case;
using cases::kCases;

// --- Signed error --------------------------------------------------------------------------------

// The signed error of O, a row at a time.
ErrorStats output_error(const PrecisionPlan& plan, const Problem& p) {
  const AttentionBuffers got = run(p.with(plan), p);
  const AttentionReference exact = attention_reference(p.with(plan), p.in);
  ErrorStats stats;
  for (int64_t b = 0; b < p.shape.B; ++b)
    for (int64_t h = 0; h < p.shape.H; ++h)
      for (int64_t i = 0; i < p.shape.T; ++i) {
        RowError row;
        for (int64_t d = 0; d < p.shape.D; ++d)
          row.add(*got.o.view().at(b, h, i, d) - *exact.o.view().at(b, h, i, d));
        stats.add(row);
      }
  return stats;
}

TEST(Attention, output_is_unbiased_on_inputs_without_a_sign) {
  const Problem p = make_problem({{1, 64, 64, kSanitized ? 16 : 64, 64, 32}, {.tile_keys = 16}, ""});
  for (const char* plan : {"fp32", "flash2", "bf16_all", "fp8", "flash2,row_sum=bf16"}) {
    const ErrorStats stats = output_error(parse_plan(plan), p);
    EXPECT_EQ(stats.nonfinite_rows(), 0);
    EXPECT_LT(std::fabs(stats.z()), 4) << plan;
    EXPECT_LT(std::fabs(stats.sign_z()), 4) << plan;
    EXPECT_GT(stats.rms(), 0) << plan;
  }
}

TEST(Attention, output_is_biased_where_the_paper_says_and_stochastic_rounding_is_not) {
  const Problem p = many_rows(Fill::pairs_tail);
  EXPECT_GT(output_error(plan_of("flash2", Stabiliser::none), p).z(), 4);
  EXPECT_LT(std::fabs(output_error(plan_of("fp32,output=bf16", Stabiliser::stochastic_output), p).z()), 4);
}

TEST(Attention, the_sign_finds_halves_rounded_away) {
  const Problem p = many_rows(Fill::pairs);  // O half-way between two bf16 numbers half of the time
  const auto z = [&](const char* text) { return std::fabs(output_error(parse_plan(text), p).z()); };
  EXPECT_LT(z("fp32,output=bf16"), 4);
  EXPECT_GT(z("fp32,output=bf16/nearest_away"), 4);
  EXPECT_LT(z("fp32,pv=bf16"), 4);
  EXPECT_GT(z("fp32,pv=bf16/nearest_away"), 4);
}

// --- The residual --------------------------------------------------------------------------------

TEST(AttentionResidual, is_the_sum_of_the_score_gradients_that_are_used) {
  for (const char* case_name : {"plain", "grouped", "masked_ragged", "ties_tail", "scale", "negative_scale"})
    for (const char* text :
         {"flash2", "bf16_all", "fp32", "bf16_all,dscores=e5m2", "flash2,stabiliser=zero_sum"}) {
      SCOPED_TRACE(std::string(case_name) + " " + text);
      const Problem p = make_problem(find_case(case_name));
      const AttentionProblem config = p.with(parse_plan(text));
      const double a = problem_of(config, p.in).scale;
      Recorder recorder(p);
      const AttentionBuffers got = run(config, p, &recorder);
      for (int64_t b = 0; b < p.shape.B; ++b)
        for (int64_t h = 0; h < p.shape.H; ++h)
          for (int64_t i = 0; i < p.shape.T; ++i) {
            double sum = 0, size = 0, squares = 0;
            for (int64_t j = 0; j < p.shape.N; ++j) {
              if (!cases::sees(p, b, h, i, j)) continue;
              const float dS = recorder.field(Site::dscores, b, h).after(i, j);
              sum += dS;
              size += std::fabs(dS);
              const double gap = ulp(config.plans[0].at(Site::dscores).format, dS);
              if (recorder.field(Site::probs_bwd, b, h).before(i, j) != 0) squares += gap * gap;
            }
            EXPECT_NEAR(*got.residual.view().at(b, h, i), sum / a, 1e-12 * size / std::fabs(a));
            EXPECT_NEAR(*got.residual_floor.view().at(b, h, i), std::sqrt(squares / 12) / std::fabs(a),
                        1e-12 * std::sqrt(squares) / std::fabs(a));
          }
    }
}

// zero_sum keeps the sum whatever is rounded before dS: what is left is FP32's noise in delta and dS
// themselves, at most (2 n + 8) u sum P (|dP| + |delta|). Keel's own part is taken out.
double residual_over_noise(const PrecisionPlan& plan, const Problem& p) {
  Recorder recorder(p);
  const AttentionProblem config = p.with(plan);
  const AttentionBuffers got = run(config, p, &recorder);
  double worst = 0;
  for (int64_t b = 0; b < p.shape.B; ++b)
    for (int64_t h = 0; h < p.shape.H; ++h)
      for (int64_t i = 0; i < p.shape.T; ++i) {
        double size = kTiny / kUnit, n = 0;
        for (int64_t j = 0; j < p.shape.N; ++j) {
          if (!cases::sees(p, b, h, i, j)) continue;
          ++n;
          const double keel = plan.keel == 0 ? 0 : 2 * plan.keel * std::fabs(*got.lse.view().at(b, h, i));
          size += double{recorder.field(Site::probs_bwd, b, h).before(i, j)} *
                  (std::fabs(recorder.field(Site::dprobs, b, h).after(i, j)) +
                   std::fabs(*got.delta.view().at(b, h, i)) + keel);
        }
        const double residual = std::fabs(*got.residual.view().at(b, h, i));
        worst = std::max(worst, residual == 0 ? 0 : residual / ((2 * n + 8) * kUnit * size));
      }
  return worst;
}

TEST(AttentionResidual, of_zero_sum_is_fp32_noise_whatever_else_is_rounded) {
  for (const char* case_name : {"plain", "odd_129", "masked_ragged", "ties_tail", "sink", "one_signed",
                                "offset", "hundred", "softcap", "softcap_flat", "scale"})
    for (const char* text : {"fp32", "flash2,dscores=fp32", "bf16_all,dscores=fp32",
                             "bf16_all,dscores=fp32,row_sum=e5m2,pv=e5m2", "bf16_all,dscores=fp32,keel=0.125",
                             "fp32,row_sum=e5m2/stochastic,pv=e5m2/stochastic"}) {
      SCOPED_TRACE(std::string(case_name) + " " + text);
      const Problem p = make_problem(find_case(case_name));
      EXPECT_LT(residual_over_noise(plan_of(text, Stabiliser::zero_sum), p), 1);
      const bool coarse = std::string_view(text).find("row_sum=e5m2,") != std::string_view::npos;
      EXPECT_TRUE(!coarse || residual_over_noise(plan_of(text, Stabiliser::none), p) > 100);  // it can fail
    }
}

ErrorStats residual_stats(const PrecisionPlan& plan, const Problem& p) {
  const AttentionBuffers got = run(p.with(plan), p);
  ErrorStats stats;
  for (double rho : got.residual.values()) stats.add(rho);
  return stats;
}

TEST(AttentionResidual, of_flash2_is_biased_by_ties_a_tail_and_one_sign_and_zero_sum_and_consistent_are_not) {
  const Problem p = many_rows(Fill::pairs_tail, 32);
  const ErrorStats flash2 = residual_stats(parse_plan("flash2"), p);
  EXPECT_GE(flash2.rows(), kSanitized ? 2000 : 20000);
  EXPECT_GT(std::fabs(flash2.z()), 4);
  for (Stabiliser stabiliser : {Stabiliser::zero_sum, Stabiliser::consistent}) {
    const ErrorStats kept = residual_stats(plan_of("flash2", stabiliser), p);
    EXPECT_LT(std::fabs(kept.z()), 4) << name(stabiliser) << " mean " << kept.mean();
    EXPECT_LT(std::fabs(kept.mean()), 0.05 * std::fabs(flash2.mean())) << name(stabiliser);
  }
}

// --- Inputs that are not numbers, outputs that are not there -------------------------------------

TEST(AttentionInputsThatAreNotNumbers, are_an_error_that_says_where) {
  for (float value : {kNan, kInfinity, -kInfinity}) {
    Problem p = make_problem({{2, 4, 2, 5, 7, 3}, {}, ""});
    const AttentionProblem config = p.with(PrecisionPlan{});
    const struct {
      const char* name;
      float* at;
      const char* place;
    } places[] = {{"q", p.q().at(1, 3, 2, 1), "(batch 1, head 3, row 2, feature 1)"},
                  {"k", p.k().at(0, 1, 6, 0), "(batch 0, head 1, row 6, feature 0)"},
                  {"v", p.v().at(1, 0, 3, 2), "(batch 1, head 0, row 3, feature 2)"},
                  {"grad_output", p.grad().at(0, 2, 4, 2), "(batch 0, head 2, row 4, feature 2)"}};
    for (const auto& place : places) {
      AttentionBuffers saved(p.in, true);
      attention_forward(config, p.in, saved.forward());
      const float before = std::exchange(*place.at, value);
      const std::string message = message_of([&] { run(config, p); });
      EXPECT_NE(message.find(std::string("[attention] expected finite values in ") + place.name + ","),
                std::string::npos)
          << message;
      EXPECT_NE(message.find(place.place), std::string::npos) << message;
      // The backward pass looks for itself.
      EXPECT_EQ(message_of([&] {
                  attention_backward(config, p.in, p.grad_output, saved.forward(), saved.backward());
                }),
                message);
      *place.at = before;
    }
  }
}

TEST(AttentionInputsThatAreNotNumbers, poison_their_own_row_alone_where_allowed) {
  for (const char* text : {"fp32", "flash2", "bf16_all"})
    for (Stabiliser stabiliser : kStabilisers) {
      SCOPED_TRACE(std::string(text) + " " + std::string(name(stabiliser)));
      Problem p = make_problem({{2, 2, 2, 40, 40, 16}, {.causal = true, .tile_keys = 16}, ""});
      AttentionProblem config = p.with(plan_of(text, stabiliser));
      config.allow_nonfinite = true;
      const AttentionBuffers clean = run(config, p);
      *p.q().at(1, 0, 21, 3) = kNan;
      const AttentionBuffers got = run(config, p);
      for (int64_t b = 0; b < 2; ++b)
        for (int64_t h = 0; h < 2; ++h)
          for (int64_t i = 0; i < 40; ++i)
            for (int64_t d = 0; d < 16; ++d) {
              const bool poisoned = b == 1 && h == 0 && i == 21;
              for (const auto& [x, y] : {std::pair{&got.o, &clean.o}, {&got.dq, &clean.dq}}) {
                const float value = *x->view().at(b, h, i, d);
                EXPECT_TRUE(poisoned ? std::isnan(value) : value == *y->view().at(b, h, i, d)) << value;
              }
              if (b == 1 && h == 0) continue;  // the row's own keys are lost with it
              EXPECT_EQ(*got.dk.view().at(b, h, i, d), *clean.dk.view().at(b, h, i, d));
              EXPECT_EQ(*got.dv.view().at(b, h, i, d), *clean.dv.view().at(b, h, i, d));
            }
    }
}

TEST(AttentionOutputs, are_all_written) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    const Problem p = make_problem(c);
    const AttentionBuffers got = run(p.with(parse_plan("bf16_all")), p);
    for (const auto& [tensor, values] : tensors_of(got))
      for (float x : values->values()) ASSERT_FALSE(std::isnan(x)) << tensor;
    for (int32_t x : got.ties.values()) ASSERT_GE(x, 0);
    for (const auto* t : {&got.residual, &got.residual_floor})
      for (double x : t->values()) ASSERT_TRUE(std::isfinite(x));
  }
}

TEST(AttentionOutputs, not_asked_for_are_not_needed) {
  const Problem p = make_problem(find_case("grouped"));
  const AttentionProblem config = p.with(parse_plan("bf16_all,stabiliser=zero_sum"));
  const AttentionBuffers full = run(config, p);
  AttentionBuffers bare = poisoned_buffers(p.in, /*with_facts=*/false);
  attention_forward(config, p.in, bare.forward());
  attention_backward(config, p.in, p.grad_output, bare.forward(), bare.backward());
  EXPECT_TRUE(same_bits(full.o.values(), bare.o.values()));
  EXPECT_TRUE(same_bits(full.dq.values(), bare.dq.values()));
  EXPECT_TRUE(same_bits(full.dk.values(), bare.dk.values()));
}

TEST(AttentionOutputs, of_another_shape_are_an_error) {
  const Problem p = make_problem({{2, 4, 2, 5, 7, 3}, {}, ""});
  const AttentionProblem config = p.with(PrecisionPlan{});
  AttentionBuffers buffers(p.in, true);
  const auto forward_with = [&](auto change) {
    AttentionForward out = buffers.forward();
    change(out);
    return message_of([&] { attention_forward(config, p.in, out); });
  };
  const auto backward_with = [&](auto change) {
    AttentionForward saved = buffers.forward();
    AttentionBackward out = buffers.backward();
    View<const float> grad = p.grad_output;
    change(saved, out, grad);
    return message_of([&] { attention_backward(config, p.in, grad, saved, out); });
  };
  EXPECT_EQ(forward_with([](auto& out) { out.o.data = nullptr; }),
            "[attention] expected a tensor for o, got none");
  EXPECT_EQ(forward_with([](auto& out) { out.lse.shape[2] = 4; }),
            "[attention] expected shape (2, 4, 5, 1) for lse, got (2, 4, 4, 1)");
  EXPECT_EQ(forward_with([](auto& out) { out.row_max = {}; }),
            "[attention] expected a tensor for row_max, got none");
  EXPECT_EQ(forward_with([](auto& out) { out.ties.shape[3] = 2; }),
            "[attention] expected shape (2, 4, 5, 1) for ties, got (2, 4, 5, 2)");
  EXPECT_EQ(backward_with([](auto&, auto& out, auto&) { out.dk.shape[1] = 4; }),
            "[attention] expected shape (2, 2, 7, 3) for dk, got (2, 4, 7, 3)");
  EXPECT_EQ(backward_with([](auto&, auto&, auto& grad) { grad.shape[3] = 2; }),
            "[attention] expected shape (2, 4, 5, 3) for grad_output, got (2, 4, 5, 2)");
  EXPECT_EQ(backward_with([](auto& saved, auto&, auto&) { saved.row_sum = {}; }),
            "[attention] expected a tensor for row_sum, got none");
  EXPECT_EQ(backward_with([](auto&, auto& out, auto&) { out.dv = {}; }),
            "[attention] expected a tensor for dv, got none");
}

TEST(AttentionOutputs, centred_keys_do_not_go_with_a_soft_cap) {
  const Problem p = make_problem(find_case("softcap"));
  EXPECT_NE(message_of([&] { run(p.with(plan_of("fp32", Stabiliser::centre_keys)), p); }).find("centre_keys"),
            std::string::npos);
}

}  // namespace
}  // namespace evenkeel
