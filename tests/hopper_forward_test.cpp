// Hopper's forward kernel for head sizes up to 128 without a GPU, in the emulator: within the error bounds of FlashAttention-2's
// arithmetic, also where all scores share a large offset. There a fused multiply-add alone would leave the largest score of a
// row a probability beside one, which BF16 rounds and the row's sum does not.
#include <gtest/gtest.h>

#include "attention/cuda/hopper_forward_block.cuh"
#include "attention_bounds.h"
#include "attention_runs.h"
#include "emulated_memory.h"
#include "far_scores.h"

namespace evenkeel {
namespace {

using namespace hopper::forward;
using cases::Case;
using cases::fill_view;
using cases::make_problem;
using cases::Problem;
using cases::to_bf16;
using emulated::How;
using emulated::Operand;
using far_scores::expect_values;
using far_scores::Far;
using far_scores::far_problem;
using far_scores::Order;

struct ScoreFacts {
  std::vector<float> largest_score, largest_row_mean;  // (H)
};

// The CPU's outputs with o and lse of the kernel, on two multiprocessors: a block does several query tiles, one after another.
template <bool kForms = false, bool kFacts = false>
AttentionBuffers run(const AttentionProblem& config, const Problem& host, const How& how = {},
                     ScoreFacts* facts = nullptr) {
  AttentionBuffers out = attention_runs::run(config, host);
  const AttentionProblem p = complete(problem_of(config, host.in));
  const auto operand = [&](int64_t heads, int64_t rows) { return Operand(how, {p.B, heads, rows, p.D}, {}); };
  Operand q = operand(p.H, p.T), o = operand(p.H, p.T), k = operand(p.G, p.N), v = operand(p.G, p.N);
  q.write(host.in.q), k.write(host.in.k), v.write(host.in.v);
  const PassInputs in{q.tensor(), k.tensor(), v.tensor()};
  ScoreFacts own;
  ScoreFacts& found = facts ? *facts : own;
  found.largest_score.assign(static_cast<size_t>(p.H), -INFINITY), found.largest_row_mean.assign(p.H, 0);
  std::vector<char> saved(hopper::saved_layout(p, nullptr).bytes);
  ForwardPass pass{o.tensor(), out.lse.values().data(), saved.data(), nullptr};
  if (kFacts)
    pass.largest_score = found.largest_score.data(), pass.largest_row_mean = found.largest_row_mean.data();
  const std::vector<ForwardArguments> groups = forward_groups(p, pass);
  std::vector<LaunchWords> words(groups.size());
  for_each_launch<Bf16Pairs, false, kForms, kFacts>(
      p, in, pass, groups, words.data(), 2,
      [&]<class Block>(const BlockMaps<typename Block::T>& maps, const ForwardArguments& a, int blocks) {
        cuda_emulator::run({.blocks = blocks,
                            .threads = Block::T::kThreads,
                            .shared_bytes = Block::T::kSharedBytes,
                            .order = how.order,
                            .blocks_at_once = how.blocks_at_once,
                            .seed = how.seed},
                           [&] { Block::run(maps.q, maps.k, maps.v, maps.o, a); });
      });
  o.read(out.o);
  o.expect_guards("o");
  return out;
}

const Case kHeads64{{1, 1, 1, 150, 150, 64}, {.causal = true, .scale = 0.125f}, "head size 64"},
    kHeads128{{1, 1, 1, 140, 200, 128}, {.causal = true, .scale = 0.125f}, "head size 128"},
    kWindow{{1, 1, 1, 150, 150, 64}, {.causal = true, .window_left = 70, .scale = 0.125f}, "window"};

template <bool kForms = false>
void expect_sound(const Case& c, const Far& far, const char* stabiliser = "none") {
  const Problem p = far_problem(c, far);
  const AttentionProblem config = p.with(parse_plan(std::string("flash2,stabiliser=") + stabiliser));
  const AttentionBuffers got = run<kForms>(config, p);
  if (kSanitized) return;
  const std::string name = name_of(c, far) + ", " + stabiliser;
  if (far.spread >= 1000) {
    EXPECT_GT(expect_values(p, got, name), p.shape.T / 3) << name;
  }
  const attention_bounds::Ratios r = ratios_of(config, p, attention_bounds::error_bounds(config, p), got,
                                               attention_reference(config, p.in, p.grad_output));
  EXPECT_LE(std::max(r.o, r.lse), 1) << name << ": o " << r.o << ", lse " << r.lse;
}

// Several query tiles a block, in any order of warps and lanes: the same bits. Of rows that see few keys a warpgroup leaves out
// the key tiles that others see.
TEST(HopperForward, the_same_bits_in_any_order) {
  const Case shapes[] = {
      {{1, 2, 2, 300, 300, 64}, {.causal = true, .scale = 0.125f}, "head size 64"},
      {{1, 2, 2, 260, 260, 128}, {.causal = true, .scale = 0.125f}, "head size 128"},
      {{1, 1, 1, 600, 600, 64}, {.causal = true, .window_left = 70, .scale = 0.125f}, "window"}};
  for (const Case& c : shapes) {
    const Problem p = far_problem(c, {2e3, 300});
    const AttentionProblem config = p.with(parse_plan("flash2"));
    std::optional<AttentionBuffers> first;
    for (const How& how : emulated::several_orders(2)) {
      AttentionBuffers got = c.window_left >= 0 ? run<true>(config, p, how) : run(config, p, how);
      if (!first) {
        first = std::move(got);
        continue;
      }
      EXPECT_TRUE(attention_runs::same_bits(first->o.values(), got.o.values()))
          << c.name << ", O in " << name_of(how);
      EXPECT_TRUE(attention_runs::same_bits(first->lse.values(), got.lse.values()))
          << c.name << ", L in " << name_of(how);
    }
  }
}

// Heads of two plans are two groups of launches, and each group's words count its own tiles and note its own far rows: every head
// has the bits that it has where all heads have its plan.
TEST(HopperForward, groups_have_words_of_their_own) {
  const Problem p =
      far_problem({{3, 4, 4, 70, 70, 64}, {.causal = true, .scale = 0.125f}, "two plans"}, {8e4, 5e3});
  const PrecisionPlan plans[] = {parse_plan("flash2"), parse_plan("flash2,stabiliser=wide_output")};
  const AttentionBuffers both = run(p.with({plans[0], plans[1], plans[0], plans[1]}), p);
  const AttentionBuffers alone[] = {run(p.with(plans[0]), p), run(p.with(plans[1]), p)};
  const size_t rows = static_cast<size_t>(p.shape.T), head = rows * static_cast<size_t>(p.shape.D);
  for (size_t h = 0; h < static_cast<size_t>(p.shape.B * p.shape.H); ++h) {
    const AttentionBuffers& one = alone[h % 2];
    EXPECT_TRUE(std::equal(both.lse.values().begin() + h * rows, both.lse.values().begin() + (h + 1) * rows,
                           one.lse.values().begin() + h * rows))
        << h;
    EXPECT_TRUE(std::equal(both.o.values().begin() + h * head, both.o.values().begin() + (h + 1) * head,
                           one.o.values().begin() + h * head))
        << h;
  }
}

// Scores so large that 2^residue would leave FP32.
TEST(HopperForward, l_of_huge_scores) {
  Problem p = make_problem(kHeads64);
  for (const double sign : {1.0, -1.0}) {
    cases::Draw draw(1, 7);
    fill_view(p.q(),
              [&](int64_t, int64_t, int64_t, int64_t) { return to_bf16(1.9e4f + 1e3f * draw.unit()); });
    fill_view(p.k(), [&](int64_t, int64_t, int64_t, int64_t) {
      return to_bf16(static_cast<float>(sign) * (1.9e4f + 1e3f * draw.unit()));
    });
    const AttentionProblem config = p.with(parse_plan("flash2"));
    const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
    for (const bool forms : {false, true}) {
      const AttentionBuffers got = forms ? run<true>(config, p) : run(config, p);
      for (size_t n = 0; n < got.lse.values().size(); ++n)
        ASSERT_NEAR(got.lse.values()[n], exact.lse.values()[n], 3e-7 * std::fabs(exact.lse.values()[n]))
            << "row " << n << (forms ? ", forms" : "");
    }
  }
}

// A score that leaves FP32 is the largest one, and makes its row's mean infinite.
TEST(HopperForward, facts_of_an_infinite_score) {
  Problem p = make_problem(kHeads64);
  *p.k().at(0, 0, 100, 0) = to_bf16(1e25f);
  fill_view(p.q(), [](int64_t, int64_t, int64_t, int64_t d) { return d == 0 ? to_bf16(1e20f) : 0.5f; });
  ScoreFacts facts;
  run<false, true>(p.with(parse_plan("flash2")), p, {}, &facts);
  EXPECT_EQ(facts.largest_score[0], INFINITY);
  EXPECT_EQ(facts.largest_row_mean[0], INFINITY);
}

TEST(HopperForward, near_scores) {
  for (const Case* c : {&kHeads64, &kHeads128}) expect_sound(*c, {0, 1});
  expect_sound<true>(kWindow, {0, 1});
}

TEST(HopperForward, far_scores) {
  for (const double offset : {8e4, -8e4, 5e5, 1e3, 1e4}) {
    for (const double spread : {1.0, 5e3}) expect_sound(kHeads64, {offset, spread});
    if (kSanitized) break;
  }
  for (const Order order : {Order::rising, Order::falling})
    for (const double offset : {8e4, -8e4}) expect_sound(kHeads64, {offset, 2e4, order});
  expect_sound(kHeads128, {8e4, 5e3});
  expect_sound<true>(kWindow, {8e4, 5e3});
}

// More query tiles than blocks: each launch counts for itself.
TEST(HopperForward, far_scores_of_many_heads) {
  expect_sound({{1, 6, 3, 70, 70, 64}, {.causal = true, .scale = 0.125f}, "six heads"}, {8e4, 5e3});
}

// The same where a shift may lag behind the largest score.
TEST(HopperForward, far_scores_with_a_remedy) {
  for (const char* stabiliser : {"wide_output", "zero_sum"}) {
    for (const double offset : {8e4, -8e4, 1e4})
      for (const double spread : {1.0, 5e3}) expect_sound(kHeads64, {offset, spread}, stabiliser);
    expect_sound(kHeads128, {8e4, 5e3}, stabiliser);
    for (const Order order : {Order::rising, Order::falling})
      expect_sound(kHeads64, {8e4, 2e4, order}, stabiliser);
  }
}

// From one tile to the next, shifts that have a residue follow ones that have none, and the other way round.
TEST(HopperForward, shifts_that_become_far_or_near) {
  for (const double offset : {600.0, -800.0})
    for (const Order order : {Order::rising, Order::falling}) expect_sound(kHeads64, {offset, 250, order});
}

// Scores that FP32 has exactly, around 4 and 7 million. Their products with log2(e) are rounded by up to a quarter and a half,
// and parts of O that were added up under one shift must be worth the same under the next.
TEST(HopperForward, far_scores_from_tile_to_tile) {
  for (const double base : {0x1p14, 0x1.cp14}) {
    Problem p = make_problem(kHeads64);
    cases::Draw draw(1, 7);
    fill_view(p.q(), [](int64_t, int64_t, int64_t, int64_t d) {
      return d == 0 ? 0x1p11f : d == 1 ? 1.0f : 0.0f;
    });
    fill_view(p.k(), [&](int64_t, int64_t, int64_t j, int64_t d) {
      // Steps of 4 are 1/2 after the scale. The kernel meets the last keys first.
      if (d == 1) return 4.0f * static_cast<float>(draw.below(4) + (j < 64 ? 3 : j < 128 ? 1 : 0));
      return d == 0 ? static_cast<float>(base) : 0.0f;
    });
    const AttentionProblem config = p.with(parse_plan("flash2"));
    const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
    const AttentionBuffers got = run(config, p);
    far_scores::expect_near_definition(got, exact, "keys of " + std::to_string(base));
    EXPECT_TRUE(attention_runs::same_bits(got.o.values(), run<false, true>(config, p).o.values()))
        << "other bits beside facts of scores";
  }
}

}  // namespace
}  // namespace evenkeel
