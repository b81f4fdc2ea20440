// The Ampere-class kernels on the CPU, by the CUDA emulator, with every form and stabiliser that they take. They stay within the
// error bounds of FlashAttention-2's arithmetic, with errors of both signs, and have the same bits in any order of warps and
// blocks.
#include <gtest/gtest.h>

#include "attention_bounds.h"
#include "emulated_attention.h"

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

constexpr const char* kStabilisers[] = {"none",        "paper_capped", "dither",
                                        "wide_output", "consistent",   "zero_sum"};

// flash2 with this type's formats. The O of delta is kept with 8 bits more than the type has, rounded stochastically, in
// steps of 1 / 254 ulp: nearly e8m15.
PrecisionPlan plan_of(const std::string& stabiliser, TensorType type = TensorType::bf16) {
  std::string text = "flash2,stabiliser=" + stabiliser;
  if (type == TensorType::fp16)
    text += ",probs=fp16,output=fp16,probs_bwd=fp16,dscores=fp16,dq=fp16,dk=fp16,dv=fp16";
  if (stabiliser == "wide_output" || stabiliser == "consistent")
    text += type == TensorType::fp16 ? ",output_for_delta=e5m17/stochastic"
                                     : ",output_for_delta=e8m14/stochastic";
  return parse_plan(text);
}

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
  const auto expect_same_bits = [](const Case& c, bool small) {
    const Problem p = make_problem(c);
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

}  // namespace
}  // namespace evenkeel
