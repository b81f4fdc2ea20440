// The Ampere-class kernels on the CPU, by the CUDA emulator, with every form and stabiliser that they take. They stay within the
// error bounds of FlashAttention-2's arithmetic, with errors of both signs, and have the same bits in any order of warps and
// blocks.
#include <gtest/gtest.h>

#include "attention_bounds.h"
#include "diagnosis/conform.h"
#include "emulated_attention.h"
#include "far_scores.h"

namespace evenkeel {
namespace {

using attention_bounds::Ratios;
using cases::Case;
using cases::Fill;
using cases::find_case;
using cases::make_problem;
using cases::Problem;
using emulated::How;
using emulated::Order;
using emulated::plan_of;
using far_scores::expect_values;
using far_scores::Far;
using far_scores::far_problem;

constexpr const char* kStabilisers[] = {"none",        "paper_capped", "dither",
                                        "wide_output", "consistent",   "zero_sum"};

// Inputs as FP16 has them.
Problem in_fp16(Problem p) {
  for (View<float> x : {p.q(), p.k(), p.v(), p.grad()})
    for (int64_t b = 0; b < x.shape[0]; ++b)
      for (int64_t h = 0; h < x.shape[1]; ++h)
        for (int64_t i = 0; i < x.shape[2]; ++i)
          for (int64_t d = 0; d < x.shape[3]; ++d) {
            float& value = *x.at(b, h, i, d);
            value = gpu::fp16_value(gpu::fp16_bits(value));
          }
  return p;
}

// Every error at most what the formats allow; and no two rows of a matrix met in a bank of shared memory.
void expect_in_bounds(const AttentionProblem& config, const Problem& p, const std::string& name,
                      const How& how = {}) {
  auto& machine = cuda_emulator::machine();
  const int64_t conflicts = machine.matrix_conflicts, loads = machine.matrix_loads;
  const AttentionBuffers got = emulated::run(config, p, how);
  const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
  const Ratios r = ratios_of(config, p, attention_bounds::error_bounds(config, p), got, exact);
  EXPECT_LE(r.largest(), 1) << name << ": o " << r.o << ", lse " << r.lse << ", delta " << r.delta << ", dq "
                            << r.dq << ", dk " << r.dk << ", dv " << r.dv;
  EXPECT_GT(machine.matrix_loads, loads) << name << ": nothing was computed";
  EXPECT_EQ(machine.matrix_conflicts, conflicts) << name;
}

// What the kernels take of the common cases: features in eights, BF16 inputs, a positive scale.
bool is_taken(const Case& c) {
  return c.D % 8 == 0 && c.fill != Fill::fp32_normal && c.fill != Fill::subnormal && c.scale >= 0;
}

TEST(Ampere, every_common_case) {
  int count = 0;
  for (const Case& c : cases::kCases) {
    if (!is_taken(c)) continue;
    ++count;
    const Problem p = make_problem(c);
    expect_in_bounds(p.with(plan_of("wide_output")), p, c.name);
  }
  EXPECT_GT(count, 30);
}

// Several tiles of rows and keys. Scales are powers of two: the kernels round dS before it is scaled.
const Case kCausal64{{1, 2, 1, 150, 150, 64}, {.causal = true}, "causal_64"},
    kCausal128{{1, 1, 1, 130, 200, 128}, {.causal = true, .scale = 0.125f}, "causal_128"},
    kFull96{{1, 2, 1, 70, 200, 96}, {.scale = 0.125f}, "full_96"},
    kWindow{{1, 1, 1, 130, 280, 40}, {.window_left = 30, .window_right = 10, .scale = 0.25f}, "window"},
    kWindowCausal{
        {1, 1, 1, 200, 200, 128}, {.causal = true, .window_left = 40, .scale = 0.125f}, "window_causal"},
    kRagged{{5, 2, 1, 90, 140, 64}, {.causal = true, .ragged = true}, "ragged"},
    kSoftcap{{1, 2, 1, 100, 150, 64}, {.causal = true, .softcap = 3}, "softcap"};

TEST(Ampere, many_tiles_with_the_stabilisers_that_change_the_kernels) {
  for (const Case* c : {&kCausal64, &kCausal128, &kWindow})
    for (const char* stabiliser : {"wide_output", "consistent", "zero_sum"}) {
      const Problem p = make_problem(*c);
      PrecisionPlan plan = plan_of(stabiliser);
      plan.keel = 1e-2f;
      expect_in_bounds(p.with(plan), p, std::string(c->name) + ", " + stabiliser);
    }
}

// Four tiles of keys: those between the first and the last add their parts of dQ in memory.
TEST(Ampere, parts_of_dq_from_many_key_tiles) {
  const Case cases[] = {{{1, 1, 1, 70, 400, 64}, {}, "four_tiles_64"},
                        {{1, 1, 1, 70, 400, 128}, {.scale = 0.125f}, "four_tiles_128"},
                        {{1, 1, 1, 70, 230, 256}, {.scale = 0.0625f}, "four_tiles_256"}};
  for (const Case& c : cases)
    for (bool small : {false, true}) {
      const Problem p = make_problem(c);
      const AttentionProblem config = p.with(plan_of("wide_output"));
      expect_in_bounds(config, p, c.name, {.small = small});
      const AttentionBuffers first = emulated::run(config, p, {.small = small});
      for (uint32_t seed : {1, 2}) {
        const How how{.order = Order::random, .blocks_at_once = 3, .small = small, .seed = seed};
        EXPECT_EQ(first.dq.values(), emulated::run(config, p, how).dq.values())
            << c.name << ", " << name_of(how);
      }
    }
}

TEST(Ampere, every_stabiliser_on_ties) {
  for (const char* name : {"ties_causal", "offset"})
    for (const char* stabiliser : kStabilisers) {
      const Problem p = make_problem(find_case(name));
      expect_in_bounds(p.with(plan_of(stabiliser)), p, std::string(name) + ", " + stabiliser);
    }
}

TEST(Ampere, fp16) {
  for (const Case* c : {&kCausal64, &kFull96, &kSoftcap})
    for (const char* stabiliser : {"wide_output", "consistent"}) {
      const Problem p = in_fp16(make_problem(*c));
      expect_in_bounds(p.with(plan_of(stabiliser, TensorType::fp16)), p,
                       std::string(c->name) + ", " + stabiliser, {.type = TensorType::fp16});
    }
}

TEST(Ampere, less_shared_memory) {
  for (const Case* c : {&kCausal128, &kFull96, &kWindowCausal}) {
    const Problem p = make_problem(*c);
    expect_in_bounds(p.with(plan_of("consistent")), p, c->name, {.small = true});
  }
}

// Tiles of 256 features, whose products end with the head: both sizes of tiles, every instance.
const Case kCausal256{{1, 2, 1, 70, 100, 256}, {.causal = true, .scale = 0.0625f}, "causal_256"},
    kFull192{{1, 1, 1, 70, 90, 192}, {.scale = 0.0625f}, "full_192"},
    kWindow136{
        {1, 1, 1, 70, 130, 136}, {.window_left = 30, .window_right = 10, .scale = 0.125f}, "window_136"},
    kSoftcap200{{1, 1, 1, 40, 70, 200}, {.causal = true, .softcap = 3, .scale = 0.125f}, "softcap_200"},
    kRagged160{{3, 2, 1, 70, 70, 160}, {.causal = true, .ragged = true, .scale = 0.125f}, "ragged_160"};

TEST(Ampere, heads_above_128) {
  for (const Case* c : {&kCausal256, &kFull192, &kWindow136, &kSoftcap200})
    for (bool small : {false, true})
      for (const char* stabiliser : {"wide_output", "consistent", "zero_sum"}) {
        const Problem p = make_problem(*c);
        PrecisionPlan plan = plan_of(stabiliser);
        plan.keel = 1e-2f;
        expect_in_bounds(p.with(plan), p, std::string(c->name) + ", " + stabiliser + (small ? ", small" : ""),
                         {.small = small});
      }
}

TEST(Ampere, heads_above_128_with_the_other_stabilisers_in_fp16_and_packed) {
  const Problem ragged = make_problem(kRagged160), halves = in_fp16(make_problem(kSoftcap200));
  for (bool small : {true, false}) {
    for (const char* stabiliser : {"paper_capped", "none", "dither"}) {
      expect_in_bounds(ragged.with(plan_of(stabiliser)), ragged, stabiliser,
                       {.sequences = true, .small = small});
    }
    expect_in_bounds(halves.with(plan_of("wide_output", TensorType::fp16)), halves, "fp16",
                     {.type = TensorType::fp16, .small = small});
  }
}

TEST(Ampere, values_of_another_size) {
  for (const cases::Narrowed& c : cases::kNarrowed)
    for (const char* stabiliser : {"wide_output", "zero_sum"})
      for (bool small : {false, true}) {
        const Problem wide = c.wide(), narrow = c.narrow();
        const AttentionProblem config = wide.with(plan_of(stabiliser));
        attention_runs::expect_narrowed(emulated::run(config, wide, {.small = small}),
                                        emulated::run(config, narrow, {.small = small}), c.name);
      }
  const Problem packed = cases::kNarrowed[3].narrow();
  const AttentionProblem config = packed.with(plan_of("wide_output"));
  attention_runs::expect_narrowed(emulated::run(config, packed),
                                  emulated::run(config, packed, {.sequences = true}), "packed");
}

TEST(Ampere, sequences_without_padding) {
  for (const char* stabiliser : {"wide_output", "zero_sum"}) {
    const Problem p = make_problem(kRagged);
    expect_in_bounds(p.with(plan_of(stabiliser)), p, stabiliser, {.sequences = true});
    expect_in_bounds(p.with(plan_of(stabiliser)), p, stabiliser);
  }
}

TEST(Ampere, plans_that_differ_by_head) {
  const Problem p = make_problem({{1, 6, 3, 70, 80, 64}, {.causal = true}, "by_head"});
  std::vector<PrecisionPlan> plans;
  for (const char* stabiliser : kStabilisers) plans.push_back(plan_of(stabiliser));
  plans[1].keel = 1e-2f;
  plans[4].seed = 9;
  expect_in_bounds(p.with(plans), p, "by head");
  // Each head has the bits that it has alone.
  const AttentionBuffers all = emulated::run(p.with(plans), p);
  for (size_t h = 0; h < plans.size(); ++h) {
    const AttentionBuffers alone = emulated::run(p.with(plans[h]), p);
    for (int64_t i = 0; i < p.shape.T; ++i)
      for (int64_t d = 0; d < p.shape.D; ++d) {
        ASSERT_EQ(*all.o.view().at(0, static_cast<int64_t>(h), i, d),
                  *alone.o.view().at(0, static_cast<int64_t>(h), i, d));
        ASSERT_EQ(*all.dq.view().at(0, static_cast<int64_t>(h), i, d),
                  *alone.dq.view().at(0, static_cast<int64_t>(h), i, d));
      }
  }
}

TEST(Ampere, slopes_sinks_and_the_gradient_of_the_log_sum) {
  const Problem p = make_problem({{2, 2, 1, 90, 100, 64}, {.causal = true}, "forms"});
  for (const char* stabiliser : {"wide_output", "consistent", "zero_sum"})
    emulated::expect_as_near_as_the_cpu(
        p, plan_of(stabiliser), stabiliser,
        [&](const AttentionProblem& config, const How& how) { return emulated::run(config, p, how); });
}

// Warps in either order or in random ones, blocks one by one or many at once and waiting for each other.
TEST(Ampere, the_same_bits_in_any_order) {
  const auto expect_same_bits = [](const Case& c, bool small, const Far& far = {}) {
    const Problem p = far.offset == 0 ? make_problem(c) : far_problem(c, far);
    const AttentionProblem config = p.with(plan_of("zero_sum"));
    const AttentionBuffers first = emulated::run(config, p, {.small = small});
    for (const How& how : {How{.order = Order::descending, .small = small},
                           How{.order = Order::descending, .blocks_at_once = 7, .small = small},
                           How{.order = Order::random, .blocks_at_once = 4, .small = small, .seed = 1},
                           How{.order = Order::random, .blocks_at_once = 7, .small = small, .seed = 2}}) {
      const AttentionBuffers again = emulated::run(config, p, how);
      for (auto member : {&AttentionBuffers::o, &AttentionBuffers::lse, &AttentionBuffers::delta,
                          &AttentionBuffers::dq, &AttentionBuffers::dk, &AttentionBuffers::dv})
        EXPECT_EQ((first.*member).values(), (again.*member).values()) << c.name;
    }
  };
  expect_same_bits(kFull96, false);
  for (const Case* c : {&kCausal64, &kWindowCausal, &kCausal256}) expect_same_bits(*c, false);
  expect_same_bits(kCausal256, true);
  expect_same_bits(kFull96, false, {.offset = 8e4, .spread = 5e3});  // both launches
}

// The mean error of delta over rows, as a part of delta.
double delta_bias(const Problem& p, const PrecisionPlan& plan) {
  const AttentionProblem config = p.with(plan);
  double sum = 0, size = 0;
  const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
  const AttentionBuffers got = emulated::run(config, p);
  for (size_t n = 0; n < exact.delta.values().size(); ++n) {
    sum += double{got.delta.values()[n]} - exact.delta.values()[n];
    size += std::fabs(exact.delta.values()[n]);
  }
  return sum / size;
}

// Two ties and a tail put O just above the middle of two BF16 numbers, and delta gets a bias of a quarter of an ulp. With a
// remedy nothing of it is left but FP32's own errors and noise.
TEST(Ampere, the_errors_of_delta_have_a_sign_and_with_a_remedy_none) {
  const Problem p = make_problem({{1, 2, 2, 128, 16, 64}, {.fill = Fill::pairs_tail}, "pairs"});
  const double bias = std::fabs(delta_bias(p, plan_of("none")));
  EXPECT_GT(bias, 0x1p-11);
  for (const char* stabiliser : {"wide_output", "zero_sum"})
    EXPECT_LT(std::fabs(delta_bias(p, plan_of(stabiliser))), bias / 500) << stabiliser;
}

// Rows of dS sum to zero: with equal keys dQ is the sum times one key.
TEST(Ampere, rows_of_dscores_sum_to_zero_with_zero_sum) {
  Problem p = make_problem({{1, 1, 1, 64, 64, 64}, {.fill = Fill::one_signed}, "equal_keys"});
  for (int64_t j = 0; j < 64; ++j)
    for (int64_t d = 0; d < 64; ++d) *p.k().at(0, 0, j, d) = 1;
  const auto mean_dq = [&](const char* stabiliser) {
    const AttentionBuffers got = emulated::run(p.with(plan_of(stabiliser)), p);
    double sum = 0;
    for (int64_t i = 0; i < 64; ++i) sum += *got.dq.view().at(0, 0, i, 0);
    return std::fabs(sum / 64);
  };
  EXPECT_LT(mean_dq("zero_sum"), 0.05 * mean_dq("none"));
}

// --- Far rows

// The second launch left out, as before there was one.
struct FirstLaunch : emulated::Launch {
  template <class Kernel, class Arguments>
  void run(int64_t blocks, const Arguments& arguments) {
    if constexpr (requires { arguments.exact; })
      if (arguments.exact) return;
    emulated::Launch::run<Kernel>(blocks, arguments);
  }
};
AttentionBuffers run_first(const AttentionProblem& config, const Problem& p, const How& how = {}) {
  return run_passes(config, p, how, emulated::AmperePasses<FirstLaunch>{how});
}

constexpr const char* kSecondLaunches[] = {"none", "wide_output", "zero_sum"};

// O of a row that sees one key is that key's V, to the bit. Its delta is that key's dP, so its dS and its dQ are zero, but
// for FP32's errors. All of it within the bounds.
void expect_sound(const Case& c, const Far& far, const std::string& stabiliser, const How& how = {}) {
  const bool halves = how.type == TensorType::fp16;
  const Problem p = halves ? in_fp16(far_problem(c, far)) : far_problem(c, far);
  const AttentionProblem config = p.with(plan_of(stabiliser, how.type));
  const AttentionBuffers got = emulated::run(config, p, how);
  if (kSanitized) return;
  const std::string name = far_scores::name_of(c, far) + ", " + stabiliser;
  if (far.spread >= 1000) {
    EXPECT_GT(expect_values(p, got, name), p.shape.T / 3) << name;
  }
  const Ratios r = ratios_of(config, p, attention_bounds::error_bounds(config, p), got,
                             attention_reference(config, p.in, p.grad_output));
  EXPECT_LE(r.largest(), 1) << name << ": o " << r.o << ", lse " << r.lse << ", delta " << r.delta << ", dq "
                            << r.dq << ", dk " << r.dk << ", dv " << r.dv;
}

const Case kFar64{{1, 2, 1, 150, 150, 64}, {.causal = true, .scale = 0.125f}, "far_64"},
    kFar128{{1, 1, 1, 140, 200, 128}, {.causal = true, .scale = 0.125f}, "far_128"},
    kFar256{{1, 1, 1, 70, 90, 192}, {.causal = true, .scale = 0.125f}, "far_192"},
    kFarMasked{{1, 1, 1, 70, 90, 64}, {.hide = cases::Hide::some, .scale = 0.125f}, "far_masked"};

TEST(Ampere, far_scores) {
  for (const char* stabiliser : kSecondLaunches) {
    for (const double offset : {8e4, -8e4, 1e3})
      for (const double spread : {1.0, 5e3}) expect_sound(kFar64, {offset, spread}, stabiliser);
    for (const auto order : {far_scores::Order::rising, far_scores::Order::falling})
      expect_sound(kFar64, {8e4, 2e4, order}, stabiliser);
  }
  for (const Case* c : {&kFar128, &kFar256, &kFarMasked}) expect_sound(*c, {8e4, 5e3}, "wide_output");
  expect_sound(kFar256, {-8e4, 5e3}, "none", {.small = true});
  expect_sound(kFar64, {2e4, 5e3}, "wide_output", {.type = TensorType::fp16});
}

// From one tile to the next, shifts that have a residue follow ones that have none, and the other way round.
TEST(Ampere, shifts_that_become_far_or_near) {
  for (const double offset : {600.0, -800.0})
    for (const auto order : {far_scores::Order::rising, far_scores::Order::falling})
      expect_sound(kFar64, {offset, 250, order}, "none");
}

// Scores that FP32 has exactly, around 4 and 7 million. Their products with log2(e) are rounded by up to a quarter and a half, and
// parts of O that were added up under one shift must be worth the same under the next.
TEST(Ampere, far_scores_from_tile_to_tile) {
  for (const double base : {0x1p14, 0x1.cp14}) {
    Problem p = make_problem(kFar64);
    cases::Draw draw(1, 7);
    cases::fill_view(p.q(), [](int64_t, int64_t, int64_t, int64_t d) {
      return d == 0 ? 0x1p11f : d == 1 ? 1.0f : 0.0f;
    });
    cases::fill_view(p.k(), [&](int64_t, int64_t, int64_t j, int64_t d) {
      // Steps of 4 are 1/2 after the scale. The kernel meets the last keys first.
      if (d == 1) return 4.0f * static_cast<float>(draw.below(4) + (j < 64 ? 3 : j < 128 ? 1 : 0));
      return d == 0 ? static_cast<float>(base) : 0.0f;
    });
    const AttentionProblem config = p.with(plan_of("none"));
    const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
    const AttentionBuffers got = emulated::run(config, p);
    far_scores::expect_near_definition(got, exact, "keys of " + std::to_string(base));
  }
}

// Far and near rows in one tile, and heads of every stabiliser: the second launch changes far rows of those that take one, and
// nothing else.
TEST(Ampere, the_second_launch_leaves_near_rows_and_other_heads_alone) {
  Problem p =
      far_problem({{1, 6, 3, 150, 150, 64}, {.causal = true, .scale = 0.125f}, "by head"}, {8e4, 5e3});
  const auto is_near = [](int64_t i) { return i % 3 == 0; };
  cases::fill_view(p.q(), [&](int64_t, int64_t h, int64_t i, int64_t d) {
    return *p.q().at(0, h, i, d) * (is_near(i) ? 0x1p-10f : 1.0f);
  });
  std::vector<PrecisionPlan> plans;
  for (const char* stabiliser : kStabilisers) plans.push_back(plan_of(stabiliser));
  const AttentionProblem config = p.with(plans);
  const AttentionBuffers both = emulated::run(config, p), first = run_first(config, p);
  for (int64_t h = 0; h < 6; ++h) {
    const std::string name = kStabilisers[h];
    const bool has_second = has_second_launch(head_rules(plans[static_cast<size_t>(h)]));
    EXPECT_EQ(has_second, name == "none" || name == "wide_output" || name == "zero_sum");
    int64_t changed = 0;
    for (int64_t i = 0; i < 150; ++i) {
      bool same = *both.lse.view().at(0, h, i, 0) == *first.lse.view().at(0, h, i, 0);
      for (int64_t d = 0; d < 64; ++d)
        same &= *both.o.view().at(0, h, i, d) == *first.o.view().at(0, h, i, d);
      changed += !same;
      if (!has_second || is_near(i)) {
        EXPECT_TRUE(same) << name << ", row " << i;
      }
    }
    if (has_second) {
      EXPECT_GT(changed, 10) << name;  // of 100 far rows: the others are rounded to the same bits
    }
    const AttentionBuffers alone = emulated::run(p.with(plans[static_cast<size_t>(h)]), p);
    for (int64_t i = 0; i < 150; ++i)
      for (int64_t d = 0; d < 64; ++d)
        ASSERT_EQ(*both.o.view().at(0, h, i, d), *alone.o.view().at(0, h, i, d)) << name << ", row " << i;
  }
}

// The second launch with two blocks.
struct TwoBlocks : emulated::Launch {
  template <class Kernel, class Arguments>
  void run(int64_t blocks, const Arguments& arguments) {
    if constexpr (requires { arguments.exact; })
      if (arguments.exact) blocks = 2;
    emulated::Launch::run<Kernel>(blocks, arguments);
  }
};

// 70 query tiles, far ones between near ones. Two blocks have more than the 32 each that a block looks at at once; with a block
// a tile the bits are the same.
TEST(Ampere, few_blocks_find_all_far_tiles) {
  Problem p =
      far_problem({{7, 10, 5, 20, 30, 64}, {.causal = true, .scale = 0.125f}, "70 tiles"}, {8e4, 5e3});
  cases::fill_view(p.q(), [&](int64_t b, int64_t h, int64_t i, int64_t d) {
    const int64_t tile = b * 10 + h;
    const bool is_far = tile % 3 == 0 || tile / 8 % 2 == 0 || tile == 69;
    return *p.q().at(b, h, i, d) * (is_far ? 1.0f : 0x1p-10f);
  });
  const AttentionProblem config = p.with(plan_of("wide_output"));
  const AttentionBuffers expected = emulated::run(config, p);
  EXPECT_NE(expected.o.values(), run_first(config, p).o.values());
  for (const How& how : emulated::several_orders(2)) {
    const AttentionBuffers got = run_passes(config, p, how, emulated::AmperePasses<TwoBlocks>{how});
    EXPECT_EQ(expected.o.values(), got.o.values()) << name_of(how);
    EXPECT_EQ(expected.lse.values(), got.lse.values()) << name_of(how);
    EXPECT_EQ(expected.dq.values(), got.dq.values()) << name_of(how);
  }
}

// Forms, far away: a sink and slopes beside far scores, soft caps of 100,000, packed sequences.
TEST(Ampere, far_scores_with_forms) {
  const Problem p =
      far_problem({{1, 2, 1, 90, 100, 64}, {.causal = true, .scale = 0.125f}, "forms"}, {8e4, 5e3});
  const std::vector<float> slopes = {0.25f, 0.03125f}, sinks = {8e4f, -1e9f};
  for (const char* stabiliser : kSecondLaunches)
    for (const bool capped : {false, true}) {
      AttentionProblem config = p.with(plan_of(stabiliser));
      if (capped)
        config.softcap = 1e5f;
      else
        config.slopes = slopes;
      config.sinks = sinks;
      const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
      const AttentionBuffers got = emulated::run(config, p);
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t i = 0; i < 90; ++i) {
          const double lse = *exact.lse.view().at(0, h, i, 0);
          // tanh is good to 2^-23 of its cap.
          ASSERT_NEAR(*got.lse.view().at(0, h, i, 0), lse, 3e-7 * std::fabs(lse) + (capped ? 0.03 : 0));
          // Where the next score, be it the sink's, is far below, O is a row of V.
          for (int64_t d = 0; d < 64; ++d) {
            const double o = *exact.o.view().at(0, h, i, d),
                         v = round_to(Rounding{kBf16}, static_cast<float>(o));
            if (o != 0 && std::fabs(o - v) < 1e-12 * std::fabs(o)) {
              ASSERT_EQ(*got.o.view().at(0, h, i, d), static_cast<float>(v)) << stabiliser << ", row " << i;
            }
          }
        }
    }
  const Case ragged{{5, 2, 1, 90, 140, 64}, {.causal = true, .ragged = true, .scale = 0.125f}, "far_ragged"};
  for (const bool sequences : {true, false})
    expect_sound(ragged, {8e4, 5e3}, "wide_output", {.sequences = sequences});
}

// The judge's families of scores far from zero: O, dQ, dK, dV and the leak in rows that see one key.
TEST(Ampere, the_judge_passes_far_rows_and_finds_them_without_the_second_launch) {
  std::vector<ConformCase> families;
  for (const ConformCase& c : conform_cases())
    if (c.one_key > 0) families.push_back(c);
  ASSERT_EQ(families.size(), 2u);
  const auto judge = [&](const char* stabiliser, bool with_second) {
    std::vector<ConformPlan> plans = {{stabiliser, plan_of(stabiliser), {}}};
    const auto kernel = [&](const AttentionProblem& config, const AttentionInputs& in,
                            View<const float> grad_output, AttentionBuffers& out) {
      Problem p;
      p.in = in, p.grad_output = grad_output;
      AttentionBuffers got = with_second ? emulated::run(config, p) : run_first(config, p);
      for (auto member : {&AttentionBuffers::o, &AttentionBuffers::lse, &AttentionBuffers::dq,
                          &AttentionBuffers::dk, &AttentionBuffers::dv})
        (out.*member).values() = (got.*member).values();
    };
    conform(
        plans, families, 64, 1, kernel, [] {}, /*constant_feature=*/true);
    return plans[0].results;
  };
  for (const char* stabiliser : kSecondLaunches) {
    for (const ConformResult& r : judge(stabiliser, true))
      EXPECT_TRUE(r.passes()) << stabiliser << ", " << r.case_name << ": " << r.verdict();
    for (const ConformResult& r : judge(stabiliser, false))
      EXPECT_TRUE(r.wrong()) << stabiliser << ", " << r.case_name << ": " << r.verdict();
  }
  for (const ConformResult& r : judge("consistent", true)) EXPECT_TRUE(r.passes()) << r.case_name;
}

}  // namespace
}  // namespace evenkeel
