// The FP64 definition of attention against calculus: finite differences, the zero sum, invariance; and the
// problem of given tensors. Nothing here rounds below FP64.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "attention_cases.h"
#include "base/threads.h"

namespace evenkeel {
namespace {

using cases::Case;
using cases::Fill;
using cases::Hide;
using cases::make_problem;
using cases::Problem;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

PrecisionPlan plan_with_keel(float z) {
  PrecisionPlan plan;
  plan.keel = z;
  return plan;
}

// sum(dO * O) + sum over rows of z L^2 and of dL L, rows that see no key left out.
double loss(const AttentionProblem& config, const Problem& p, const View<const float>& grad_lse) {
  const AttentionReference out = attention_reference(config, p.in);
  double sum = 0;
  for (int64_t b = 0; b < p.shape.B; ++b)
    for (int64_t h = 0; h < p.shape.H; ++h)
      for (int64_t i = 0; i < p.shape.T; ++i) {
        const double L = *out.lse.view().at(b, h, i);
        if (L == kMinusInfinity) continue;
        sum += config.plans[config.plans.size() == 1 ? 0 : h].keel * L * L;
        if (grad_lse.present()) sum += double{*grad_lse.at(b, h, i)} * L;
        for (int64_t d = 0; d < p.shape.D; ++d)
          sum += double{*p.grad_output.at(b, h, i, d)} * *out.o.view().at(b, h, i, d);
      }
  return sum;
}

// Every coordinate of every gradient against a central difference, extrapolated once (Richardson): with h =
// 2^-9 the truncation error is about h^4 = 2^-36 of the fifth derivative, and rounding about 2^-53 / h =
// 2^-44.
void expect_gradients_by_differences(const AttentionProblem& config, Problem& p,
                                     const View<const float>& grad_lse = {},
                                     std::vector<float>* sinks = nullptr) {
  const AttentionReference out = attention_reference(config, p.in, p.grad_output, grad_lse);
  const auto check = [&](const char* tensor, View<float> x, const Tensor<double>& gradient) {
    double largest = 0;
    for (double g : gradient.values()) largest = std::max(largest, std::fabs(g));
    const auto central = [&](float& value, float h) {
      const float at = value;
      value = at + h;
      const double up = loss(config, p, grad_lse), high = value;
      value = at - h;
      const double down = loss(config, p, grad_lse), low = value;
      value = at;
      return (up - down) / (high - low);
    };
    for (int64_t b = 0; b < x.shape[0]; ++b)
      for (int64_t h = 0; h < x.shape[1]; ++h)
        for (int64_t row = 0; row < x.shape[2]; ++row)
          for (int64_t d = 0; d < x.shape[3]; ++d) {
            float& value = *x.at(b, h, row, d);
            const double difference = (4 * central(value, 0x1p-9f) - central(value, 0x1p-8f)) / 3;
            EXPECT_NEAR(*gradient.view().at(b, h, row, d), difference, 1e-8 * (1 + largest))
                << tensor << " at (" << b << ", " << h << ", " << row << ", " << d << ")";
          }
  };
  check("dq", p.q(), out.dq);
  check("dk", p.k(), out.dk);
  check("dv", p.v(), out.dv);
  if (sinks)
    check("dsinks", contiguous_view(sinks->data(), {1, static_cast<int64_t>(sinks->size()), 1, 1}),
          out.dsinks);
}

TEST(AttentionReference, gradients_with_slopes_sinks_and_a_gradient_of_l) {
  for (bool causal : {false, true}) {
    Problem p = make_problem({{2, 2, 1, 4, 5, 3}, {.causal = causal}, "forms"});
    std::vector<float> slopes = {0.5f, 0.125f}, sinks = {0.25f, -1};
    Tensor<float> grad_lse({2, 2, 4, 1});
    for (size_t n = 0; n < grad_lse.values().size(); ++n)
      grad_lse.values()[n] = 0.25f * static_cast<float>(n % 5) - 0.5f;
    AttentionProblem config = p.with(plan_with_keel(0.01f));
    config.slopes = slopes;
    expect_gradients_by_differences(config, p);
    config.sinks = sinks;
    expect_gradients_by_differences(config, p, grad_lse.view(), &sinks);
  }
}

// By hand: one row, two keys, no scores from q and k.
TEST(AttentionReference, slopes_and_sinks_by_hand) {
  Problem p = make_problem({{1, 1, 1, 1, 3, 1}, {}, "by_hand"});
  for (int64_t j = 0; j < 3; ++j)
    *p.k().at(0, 0, j, 0) = 0, *p.v().at(0, 0, j, 0) = static_cast<float>(1 << j);
  const std::vector<float> slopes = {2}, sinks = {-1};
  AttentionProblem config = p.with(PrecisionPlan{});
  config.slopes = slopes, config.sinks = sinks;
  const AttentionReference out = attention_reference(config, p.in);
  // The row stands at key 2: scores -4, -2, 0, and the sink's -1.
  const double l = std::exp(-4) + std::exp(-2) + 1 + std::exp(-1);
  EXPECT_NEAR(out.lse.values()[0], std::log(l), 1e-14);
  EXPECT_NEAR(out.o.values()[0], (std::exp(-4) + 2 * std::exp(-2) + 4) / l, 1e-14);
}

TEST(AttentionReference, gradients_are_those_of_finite_differences) {
  const Case small[] = {
      {{1, 1, 1, 4, 5, 3}, {}, "plain"},
      {{1, 2, 1, 5, 7, 3}, {.causal = true}, "grouped, causal"},
      {{1, 4, 2, 3, 4, 2}, {.scale = 1.25f}, "two groups, own scale"},
      {{1, 1, 1, 6, 6, 3}, {.window_left = 1, .window_right = 2}, "window"},
      {{1, 2, 2, 5, 6, 3}, {.hide = Hide::rows}, "mask with hidden rows"},
      {{5, 1, 1, 4, 5, 2}, {.causal = true, .ragged = true}, "lengths"},
      {{1, 2, 1, 4, 5, 3}, {.causal = true, .softcap = 1.5f}, "soft cap"},
      {{2, 2, 1, 3, 4, 2},
       {.hide = Hide::some, .softcap = 0.75f, .layout = cases::Layout::bthd},
       "all at once"},
  };
  for (const Case& c : small)
    for (float z : {0.0f, 0.25f}) {
      SCOPED_TRACE(std::string(c.name) + (z != 0 ? ", keel" : ""));
      Problem p = make_problem(c);
      expect_gradients_by_differences(p.with(plan_with_keel(z)), p);
    }
}

TEST(AttentionReference, each_head_has_the_keel_of_its_own_plan) {
  Problem p = make_problem({{1, 4, 2, 3, 4, 3}, {}, ""});
  expect_gradients_by_differences(
      p.with({plan_with_keel(0), plan_with_keel(0.5f), plan_with_keel(1), plan_with_keel(0)}), p);
}

// With one-hot keys dQ_ij = dS_ij / a: the rows of dS lie open.
TEST(AttentionReference, rows_of_the_score_gradient_sum_to_zero) {
  const Problem p = make_problem(cases::find_case("ties_tail"));
  const AttentionReference out = attention_reference(p.with(PrecisionPlan{}), p.in, p.grad_output);
  for (int64_t h = 0; h < p.shape.H; ++h)
    for (int64_t i = 0; i < p.shape.T; ++i) {
      double sum = 0, size = 0;
      for (int64_t d = 0; d < p.shape.D; ++d) {
        sum += *out.dq.view().at(0, h, i, d);
        size += std::fabs(*out.dq.view().at(0, h, i, d));
      }
      EXPECT_GT(size, 1e-3);
      EXPECT_NEAR(sum, 0, 1e-14 * size);
    }
}

TEST(AttentionReference, keel_is_a_change_of_delta_and_of_nothing_else) {
  const double z = 0.375;
  const Problem p = make_problem(cases::find_case("ties_tail"));
  const AttentionReference without = attention_reference(p.with(PrecisionPlan{}), p.in, p.grad_output);
  const AttentionReference with = attention_reference(p.with(plan_with_keel(z)), p.in, p.grad_output);
  EXPECT_EQ(without.o.values(), with.o.values());
  EXPECT_EQ(without.lse.values(), with.lse.values());
  EXPECT_EQ(without.dv.values(), with.dv.values());
  EXPECT_EQ(without.delta.values(), with.delta.values());
  for (int64_t h = 0; h < p.shape.H; ++h)
    for (int64_t i = 0; i < p.shape.T; ++i) {
      const double L = *with.lse.view().at(0, h, i);
      double sum = 0;
      for (int64_t j = 0; j < p.shape.N; ++j) {
        // P (dP - (delta - 2 z L)) less P (dP - delta); the score is q_ij itself.
        const double P = std::exp(*p.in.q.at(0, h, i, j) - L);
        const double change = *with.dq.view().at(0, h, i, j) - *without.dq.view().at(0, h, i, j);
        EXPECT_NEAR(change, 2 * z * L * P, 1e-12 * (1 + std::fabs(L)));
        sum += change;
      }
      EXPECT_NEAR(sum, 2 * z * L, 1e-12 * (1 + std::fabs(L)));  // its own part of the residual
    }
}

// The same vector added to every key adds the same number to every score of a row: softmax does not see it.
TEST(AttentionReference, does_not_see_a_constant_added_to_a_row_of_scores) {
  Problem p = make_problem({{1, 2, 1, 20, 30, 8}, {.causal = true}, ""});
  const AttentionReference before = attention_reference(p.with(PrecisionPlan{}), p.in, p.grad_output);
  std::vector<double> added(8);
  for (int64_t d = 0; d < 8; ++d) {
    added[d] = 4 * (d % 3) - 3.0;
    for (int64_t j = 0; j < 30; ++j) *p.k().at(0, 0, j, d) += static_cast<float>(added[d]);
  }
  const AttentionReference after = attention_reference(p.with(PrecisionPlan{}), p.in, p.grad_output);
  const auto expect_near = [](const Tensor<double>& x, const Tensor<double>& y) {
    for (size_t n = 0; n < x.values().size(); ++n) EXPECT_NEAR(x.values()[n], y.values()[n], 1e-12);
  };
  expect_near(before.o, after.o);
  expect_near(before.dq, after.dq);
  expect_near(before.dk, after.dk);
  expect_near(before.dv, after.dv);
  expect_near(before.delta, after.delta);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t i = 0; i < 20; ++i) {
      double offset = 0;
      for (int64_t d = 0; d < 8; ++d) offset += *p.in.q.at(0, h, i, d) * added[d] / std::sqrt(8.0);
      // The scale is 1 / sqrt(8) in FP32.
      EXPECT_NEAR(*after.lse.view().at(0, h, i) - *before.lse.view().at(0, h, i), offset, 1e-5);
    }
}

TEST(AttentionReference, probabilities_sum_to_one) {
  // With V all ones O is the sum of the probabilities.
  for (const char* name : {"huge", "hundred", "max_tiny", "masked"}) {
    Problem p = make_problem(cases::find_case(name));
    std::fill(p.v_memory.begin(), p.v_memory.end(), 1.0f);
    const AttentionReference out = attention_reference(p.with(PrecisionPlan{}), p.in);
    for (double o : out.o.values()) EXPECT_NEAR(o, 1, 1e-14) << name;
  }
}

TEST(AttentionReference, rows_that_see_no_key_are_zero_and_touch_nothing) {
  for (const char* name : {"masked_rows", "rows_over_keys", "masked_ragged", "ragged"}) {
    SCOPED_TRACE(name);
    const Problem p = make_problem(cases::find_case(name));
    const AttentionReference out = attention_reference(p.with(plan_with_keel(1)), p.in, p.grad_output);
    int64_t blind = 0, unseen = 0;
    for (int64_t b = 0; b < p.shape.B; ++b) {
      for (int64_t h = 0; h < p.shape.H; ++h)
        for (int64_t i = 0; i < p.shape.T; ++i) {
          bool any = false;
          for (int64_t j = 0; j < p.shape.N; ++j) any |= cases::sees(p, b, h, i, j);
          EXPECT_EQ(*out.lse.view().at(b, h, i) == kMinusInfinity, !any);
          if (any) continue;
          ++blind;
          EXPECT_EQ(*out.delta.view().at(b, h, i), 0);
          for (int64_t d = 0; d < p.shape.D; ++d) {
            EXPECT_EQ(*out.o.view().at(b, h, i, d), 0);
            EXPECT_EQ(*out.dq.view().at(b, h, i, d), 0);
          }
        }
      for (int64_t g = 0; g < p.shape.G; ++g)
        for (int64_t j = 0; j < p.shape.N; ++j) {
          bool any = false;
          for (int64_t h = g * (p.shape.H / p.shape.G); h < (g + 1) * (p.shape.H / p.shape.G); ++h)
            for (int64_t i = 0; i < p.shape.T; ++i) any |= cases::sees(p, b, h, i, j);
          if (any) continue;
          ++unseen;
          for (int64_t d = 0; d < p.shape.D; ++d) {
            EXPECT_EQ(*out.dk.view().at(b, g, j, d), 0);
            EXPECT_EQ(*out.dv.view().at(b, g, j, d), 0);
          }
        }
    }
    EXPECT_GT(blind, 0);
    EXPECT_TRUE(unseen > 0 || !p.shape.ragged);
    for (const auto* t : {&out.o, &out.dq, &out.dk, &out.dv, &out.delta})
      for (double x : t->values()) ASSERT_TRUE(std::isfinite(x));
  }
}

TEST(AttentionReference, groups_share_keys_and_values) {
  // 6 heads on 2 key/value heads: as 6 on 6 with every key head three times over.
  const Problem grouped = make_problem(cases::find_case("grouped"));
  Case spread = cases::find_case("grouped");
  spread.G = 6;
  Problem full = make_problem(spread);
  full.q_memory = grouped.q_memory;
  full.grad_memory = grouped.grad_memory;
  full.in.q.data = full.q_memory.data();
  full.grad_output.data = full.grad_memory.data();
  for (int64_t b = 0; b < full.shape.B; ++b)
    for (int64_t h = 0; h < 6; ++h)
      for (int64_t j = 0; j < full.shape.N; ++j)
        for (int64_t d = 0; d < full.shape.D; ++d) {
          *full.k().at(b, h, j, d) = *grouped.in.k.at(b, h / 3, j, d);
          *full.v().at(b, h, j, d) = *grouped.in.v.at(b, h / 3, j, d);
        }
  const AttentionReference x =
      attention_reference(grouped.with(PrecisionPlan{}), grouped.in, grouped.grad_output);
  const AttentionReference y = attention_reference(full.with(PrecisionPlan{}), full.in, full.grad_output);
  EXPECT_EQ(x.o.values(), y.o.values());
  EXPECT_EQ(x.dq.values(), y.dq.values());
  for (int64_t j = 0; j < full.shape.N; ++j)
    for (int64_t g = 0; g < 2; ++g) {
      double sum = 0;
      for (int64_t h = 3 * g; h < 3 * g + 3; ++h) sum += *y.dk.view().at(1, h, j, 5);
      EXPECT_NEAR(*x.dk.view().at(1, g, j, 5), sum, 1e-13);
    }
}

TEST(AttentionReference, does_not_depend_on_the_thread_count) {
  const Problem p = make_problem(cases::find_case("grouped"));
  const int threads = thread_count();
  set_thread_count(1);
  const AttentionReference one = attention_reference(p.with(PrecisionPlan{}), p.in, p.grad_output);
  set_thread_count(3);
  const AttentionReference three = attention_reference(p.with(PrecisionPlan{}), p.in, p.grad_output);
  set_thread_count(threads);
  EXPECT_EQ(one.dk.values(), three.dk.values());
  EXPECT_EQ(one.dq.values(), three.dq.values());
}

// --- problem_of ----------------------------------------------------------------------------------

TEST(AttentionProblem, fills_in_the_scale) {
  Problem p = make_problem({{1, 1, 1, 1, 1, 64}, {}, ""});
  EXPECT_EQ(problem_of(p.with(PrecisionPlan{}), p.in).scale, 0.125f);
  p.config.scale = -3;
  EXPECT_EQ(problem_of(p.with(PrecisionPlan{}), p.in).scale, -3.0f);
}

TEST(AttentionProblem, key_range_is_its_definition) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Problem p = make_problem({{1, 1, 1, 9, 8, 1}, {}, ""});
  AttentionProblem shape = problem_of(p.with(PrecisionPlan{}), p.in);
  for (int32_t rows = 0; rows <= 9; ++rows)
    for (int32_t keys = 0; keys <= 8; ++keys)
      for (bool causal : {false, true})
        for (int64_t left : {int64_t{-1}, int64_t{0}, int64_t{2}, int64_t{20}, kMost, -kMost})
          for (int64_t right : {int64_t{-1}, int64_t{0}, int64_t{3}, int64_t{20}, kMost, -kMost})
            for (int64_t i = 0; i < rows; ++i) {
              shape.mask = {causal, left, right, {&rows, 1}, {&keys, 1}, {}, {}, 0, 0, {}};
              ASSERT_EQ(shape.rows(0), rows);
              ASSERT_EQ(shape.keys(0), keys);
              const auto [first, last] = shape.key_range(0, i);
              ASSERT_LE(0, first);
              ASSERT_LE(first, last);
              ASSERT_LE(last, std::max<int64_t>(keys, first));
              for (int64_t j = 0; j < 8; ++j) {
                const __int128 position = i + keys - rows;
                const bool seen = j < keys && (!causal || j <= position) &&
                                  (left < 0 || j >= position - left) && (right < 0 || j <= position + right);
                ASSERT_EQ(j >= first && j < last, seen)
                    << "rows " << rows << " keys " << keys << " causal " << causal << " left " << left
                    << " right " << right << " row " << i << " key " << j;
              }
            }
}

TEST(AttentionProblem, every_bad_request_is_an_error_that_says_what_was_expected) {
  static const std::vector<int32_t> negative = {-1}, long_rows = {6}, long_keys = {8};
  struct Bad {
    const char* what;
    std::function<void(AttentionProblem&, AttentionInputs&)> change;
    const char* message;
  };
  const Bad bad[] = {
      {"no q", [](auto&, auto& in) { in.q.data = nullptr; }, "expected a tensor q, got none"},
      {"no k", [](auto&, auto& in) { in.k.data = nullptr; }, "expected a tensor k, got none"},
      {"no v", [](auto&, auto& in) { in.v.data = nullptr; }, "expected a tensor v, got none"},
      {"head size", [](auto&, auto& in) { in.q.shape[3] = in.k.shape[3] = in.v.shape[3] = 0; },
       "expected D from 1 to 2^31 - 1, got 0"},
      {"B", [](auto&, auto& in) { in.q.shape[0] = 0; }, "expected B from 1 to 2^31 - 1, got 0"},
      {"H", [](auto&, auto& in) { in.q.shape[1] = 0; }, "expected H from 1 to 2^31 - 1, got 0"},
      {"T", [](auto&, auto& in) { in.q.shape[2] = -1; }, "expected T from 1 to 2^31 - 1, got -1"},
      {"G", [](auto&, auto& in) { in.k.shape[1] = 0; }, "expected G from 1 to 2^31 - 1, got 0"},
      {"N", [](auto&, auto& in) { in.k.shape[2] = 0; }, "expected N from 1 to 2^31 - 1, got 0"},
      {"B of k", [](auto&, auto& in) { in.k.shape[0] = 2; },
       "expected k of shape (B, G, N, D) = (1, 2, 7, 3), got (2, 2, 7, 3)"},
      {"D of k", [](auto&, auto& in) { in.k.shape[3] = 4; },
       "expected k of shape (B, G, N, D) = (1, 2, 7, 3), got (1, 2, 7, 4)"},
      {"v against k", [](auto&, auto& in) { in.v.shape[2] = 6; },
       "expected v of shape (B, G, N, Dv) = (1, 2, 7, 3), got (1, 2, 6, 3)"},
      {"groups", [](auto&, auto& in) { in.k.shape[1] = in.v.shape[1] = 3; },
       "expected query heads in whole groups for 3 key/value heads, got 4 query heads"},
      {"more k heads", [](auto&, auto& in) { in.k.shape[1] = in.v.shape[1] = 8; },
       "expected query heads in whole groups for 8 key/value heads, got 4 query heads"},
      {"negative length", [](auto& c, auto&) { c.mask.query_lengths = negative; },
       "expected query_lengths[0] from 0 to 5, got -1"},
      {"long rows", [](auto& c, auto&) { c.mask.query_lengths = long_rows; },
       "expected query_lengths[0] from 0 to 5, got 6"},
      {"long keys", [](auto& c, auto&) { c.mask.key_lengths = long_keys; },
       "expected key_lengths[0] from 0 to 7, got 8"},
      {"mask",
       [](auto& c, auto&) {
         static const uint8_t seen = 1;
         c.mask.visible = {&seen, {1, 4, 7, 5}, {0, 0, 0, 0}};
       },
       "expected a mask of shape (B, H, T, N) = (1, 4, 5, 7), got (1, 4, 7, 5)"},
  };
  for (const Bad& b : bad) {
    SCOPED_TRACE(b.what);
    const Problem p = make_problem({{1, 4, 2, 5, 7, 3}, {}, ""});
    AttentionProblem config = p.with(PrecisionPlan{});
    AttentionInputs in = p.in;
    EXPECT_NO_THROW(problem_of(config, in));
    b.change(config, in);
    try {
      problem_of(config, in);
      ADD_FAILURE() << "no error";
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(std::string(error.what()), "[attention] " + std::string(b.message));
    }
  }
}

TEST(AttentionReference, refuses_a_gradient_of_another_shape) {
  const Problem p = make_problem({{1, 4, 2, 5, 7, 3}, {}, ""});
  View<const float> grad = p.grad_output;
  grad.shape[2] = 4;
  EXPECT_THROW(attention_reference(p.with(PrecisionPlan{}), p.in, grad), std::invalid_argument);
}

// --- AttentionBuffers ----------------------------------------------------------------------------

TEST(AttentionBuffers, holds_everything_and_the_facts_on_request) {
  const Problem p = make_problem({{2, 4, 2, 5, 7, 3}, {}, ""});
  using Shape = std::array<int64_t, 4>;
  for (bool with_facts : {false, true}) {
    AttentionBuffers buffers(p.in, with_facts);
    const AttentionForward f = buffers.forward();
    const AttentionBackward g = buffers.backward();
    for (const auto& view : {f.o, f.o_for_delta, g.dq}) EXPECT_EQ(view.shape, (Shape{2, 4, 5, 3}));
    for (const auto& view : {f.lse, f.row_max, f.row_sum}) EXPECT_EQ(view.shape, (Shape{2, 4, 5, 1}));
    for (const auto& view : {g.dk, g.dv}) EXPECT_EQ(view.shape, (Shape{2, 2, 7, 3}));
    EXPECT_EQ(f.ties.present(), with_facts);
    EXPECT_EQ(g.delta.present(), with_facts);
    EXPECT_EQ(g.residual.present(), with_facts);
    EXPECT_EQ(g.residual_floor.present(), with_facts);
    EXPECT_EQ(g.residual.shape, (with_facts ? Shape{2, 4, 5, 1} : Shape{}));
    EXPECT_EQ(f.o.data, buffers.o.values().data());
  }
}

}  // namespace
}  // namespace evenkeel
