// The Ampere class's forward kernels for few query rows and many keys, on the CPU, by the CUDA emulator: rows of several heads in one
// tile, keys split over blocks and warps. They stay within the error bounds of FlashAttention-2's arithmetic, with errors of both
// signs, and have the same bits in any order of warps and blocks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "attention_bounds.h"
#include "emulated_attention.h"
#include "far_scores.h"

namespace evenkeel {
namespace {

using cases::Case;
using cases::Fill;
using cases::make_problem;
using cases::Problem;
using emulated::How;
using emulated::Order;
using emulated::plan_of;

constexpr const char* kStabilisers[] = {"none", "dither", "wide_output", "consistent", "zero_sum"};

// What may go wrong between the blocks' parts and their sum.
enum class Fault { none, a_split_is_lost, shifts_are_ignored };

// The forward pass alone; of the backward pass, zeros.
struct ForwardLaunch : emulated::Launch {
  Fault fault = Fault::none;
  int decoded = 0;  // launches

  template <class Kernel, class Arguments>
  void run(int64_t blocks, const Arguments& arguments) {
    if constexpr (std::is_same_v<Kernel, ampere::AddUpParts<Bf16Pairs>> ||
                  std::is_same_v<Kernel, ampere::AddUpParts<Fp16Pairs>>) {
      ++decoded;
      const int64_t rows = int64_t{arguments.B} * arguments.H * arguments.sequences.T;
      for (int64_t row = 0; row < rows; ++row) {
        ampere::RowPart* const parts = arguments.parts + row * arguments.splits;
        if (fault == Fault::a_split_is_lost) parts[row % arguments.splits].shift = -INFINITY;
        for (int n = 1; fault == Fault::shifts_are_ignored && n < arguments.splits; ++n)
          parts[n].shift = parts[0].shift;
      }
    }
    emulated::Launch::run<Kernel>(blocks, arguments);
  }
};
struct ForwardAlone {
  const How& how;
  Fault fault;
  PassSizes sizes(const AttentionProblem& p) const { return ampere::pass_sizes(p, how.small); }
  void forward(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out,
               void* workspace) const {
    ForwardLaunch launch{{how}, fault};
    ampere::with_kernels_of(p, how.small, [&]<class Pairs, int kHead, bool kSmall>() {
      ampere::forward_pass<Pairs, kHead, kSmall>(p, in, out, workspace, launch);
    });
    EXPECT_EQ(launch.decoded, has_few_rows(p) ? 1 : 0);
  }
  void backward(const AttentionProblem&, const PassInputs&, const DeviceTensor&, const ForwardPass&,
                const BackwardPass&, void*) const {}
};
AttentionBuffers run_forward(const AttentionProblem& config, const Problem& p, const How& how = {},
                             Fault fault = Fault::none) {
  return run_passes(config, p, how, ForwardAlone{how, fault});
}

// The largest error of O or L, as a part of what the formats allow.
double worst(const AttentionProblem& config, const Problem& p, const AttentionBuffers& got) {
  const attention_bounds::Ratios r = ratios_of(config, p, attention_bounds::error_bounds(config, p), got,
                                               attention_reference(config, p.in, p.grad_output));
  return std::max(r.o, r.lse);
}
void expect_in_bounds(const AttentionProblem& config, const Problem& p, const std::string& name,
                      const How& how = {}) {
  auto& machine = cuda_emulator::machine();
  const int64_t conflicts = machine.matrix_conflicts;
  const AttentionBuffers got = run_forward(config, p, how);
  if (kSanitized) return;
  EXPECT_LE(worst(config, p, got), 1) << name;
  EXPECT_EQ(machine.matrix_conflicts, conflicts) << name;
}

// Sequences with 1, 63, 64, 65 and all keys.
Problem with_lengths(Problem p) {
  p.key_lengths = {1, 63, 64, 65, static_cast<int32_t>(p.shape.N)};
  p.query_lengths.assign(5, static_cast<int32_t>(p.shape.T));
  p.config.mask.key_lengths = p.key_lengths;
  p.config.mask.query_lengths = p.query_lengths;
  return p;
}

TEST(AmpereDecode, splits_follow_from_sizes_alone) {
  const auto splits = [](int64_t B, int64_t H, int64_t G, int64_t T, int64_t N, int64_t window = -1) {
    AttentionProblem p;
    p.B = B, p.H = H, p.G = G, p.T = T, p.N = N, p.D = p.Dv = 128;
    p.mask.window_left = window;
    p.mask.causal = true;
    const ampere::KeySplits keys(p, 64);
    return std::array{keys.row_tiles, keys.splits, keys.split_tiles};
  };
  using Split = std::array<int64_t, 3>;
  EXPECT_EQ(splits(16, 32, 8, 1, 16384), (Split{1, 8, 32}));
  EXPECT_EQ(splits(1, 32, 8, 1, 131072), (Split{1, 128, 16}));
  EXPECT_EQ(splits(1, 32, 1, 1, 131072), (Split{2, 128, 16}));
  EXPECT_EQ(splits(1, 8, 8, 1, 512), (Split{1, 2, 4}));
  EXPECT_EQ(splits(1, 8, 8, 1, 1000), (Split{1, 4, 4}));
  EXPECT_EQ(splits(512, 8, 8, 1, 1000), (Split{1, 1, 16}));
  EXPECT_EQ(splits(1, 8, 8, 1, 131072, 1023), (Split{1, 5, 4}));  // 1024 keys, in up to 17 tiles
}

// Groups of 1, 4 and 8 query heads, one row to sixteen, all sizes of heads.
TEST(AmpereDecode, rows_of_groups_and_sequences_of_any_length) {
  struct Shape {
    int64_t H, G, T, D;
    bool causal;
  };
  for (const Shape& s : {Shape{2, 2, 1, 64, false},
                         {8, 2, 1, 128, true},
                         {8, 1, 3, 64, true},
                         {4, 1, 16, 64, true},
                         {1, 1, 16, 128, true},
                         {8, 1, 1, 256, false},
                         {2, 1, 5, 192, true}}) {
    const Problem p = with_lengths(
        make_problem({{5, s.H, s.G, s.T, 1000, s.D}, {.causal = s.causal, .scale = 0.125f}, "few rows"}));
    for (const char* stabiliser : {"wide_output", "consistent"})
      expect_in_bounds(p.with(plan_of(stabiliser)), p,
                       fmt::format("{},{},{},{} {}", s.H, s.G, s.T, s.D, stabiliser));
  }
}

TEST(AmpereDecode, every_stabiliser_and_form) {
  const Case grouped{{1, 8, 2, 3, 600, 64}, {.causal = true, .scale = 0.125f}, "grouped"},
      window{{1, 4, 1, 4, 900, 64}, {.window_left = 300, .window_right = 5, .scale = 0.125f}, "window"},
      capped{{1, 4, 1, 4, 600, 128}, {.causal = true, .softcap = 3, .scale = 0.125f}, "soft cap"},
      masked{{2, 4, 2, 4, 600, 64}, {.hide = cases::Hide::rows, .scale = 0.125f}, "masked"},
      ragged{{5, 4, 2, 8, 700, 160}, {.causal = true, .ragged = true, .scale = 0.125f}, "ragged"};
  const Problem p = make_problem(grouped);
  for (const char* stabiliser : kStabilisers) expect_in_bounds(p.with(plan_of(stabiliser)), p, stabiliser);
  for (const Case* c : {&window, &capped, &masked, &ragged}) {
    const Problem of_form = make_problem(*c);
    expect_in_bounds(of_form.with(plan_of("wide_output")), of_form, c->name);
  }
  const Problem packed = make_problem(ragged);
  expect_in_bounds(packed.with(plan_of("consistent")), packed, "packed", {.sequences = true});
  Problem halves = make_problem(grouped);
  for (View<float> x : {halves.q(), halves.k(), halves.v()})
    cases::fill_view(x, [&](int64_t b, int64_t h, int64_t i, int64_t d) {
      return gpu::fp16_value(gpu::fp16_bits(*x.at(b, h, i, d)));
    });
  expect_in_bounds(halves.with(plan_of("wide_output", TensorType::fp16)), halves, "fp16",
                   {.type = TensorType::fp16});
}

// The root mean square error of O to that of the kernels for many rows, which take over where heads differ; slopes and sinks are
// there, and L and the bytes of O's residue are those of the backward pass.
TEST(AmpereDecode, slopes_and_sinks_as_the_other_kernels_have_them) {
  const Problem p = make_problem({{2, 4, 2, 5, 600, 64}, {.causal = true, .scale = 0.125f}, "forms"});
  const std::vector<float> slopes = {0.25f, 0.03125f, 0.0f, 0.5f}, sinks = {1.5f, -0.5f, 4.0f, 0.0f};
  for (const char* stabiliser : {"wide_output", "consistent", "zero_sum"}) {
    AttentionProblem few = p.with(plan_of(stabiliser));
    few.slopes = slopes, few.sinks = sinks;
    AttentionProblem many = few;
    many.plans.assign(4, few.plans[0]);
    many.plans[1].seed = 5;
    const AttentionReference exact = attention_reference(few, p.in, p.grad_output);
    const AttentionBuffers got = emulated::run(few, p), other = emulated::run(many, p);
    for (const auto& [name, ours, theirs, truth] :
         {std::tuple{"o", &got.o, &other.o, &exact.o}, std::tuple{"lse", &got.lse, &other.lse, &exact.lse},
          std::tuple{"delta", &got.delta, &other.delta, &exact.delta},
          std::tuple{"dq", &got.dq, &other.dq, &exact.dq}, std::tuple{"dv", &got.dv, &other.dv, &exact.dv}}) {
      double own = 0, others = 0, size = 0;
      for (size_t n = 0; n < truth->values().size(); ++n) {
        const double t = truth->values()[n];
        own += (ours->values()[n] - t) * (ours->values()[n] - t);
        others += (theirs->values()[n] - t) * (theirs->values()[n] - t);
        size += t * t;
      }
      EXPECT_LE(own, 1.5 * others + 1e-13 * size) << stabiliser << ", " << name;
      EXPECT_LE(others, 1e-4 * size) << stabiliser << ", " << name;
    }
  }
}

// Behind it the backward pass as it is: every gradient within its bounds.
TEST(AmpereDecode, the_backward_pass_behind_it) {
  const Problem p = make_problem({{1, 4, 2, 6, 600, 64}, {.causal = true, .scale = 0.125f}, "both"});
  for (const char* stabiliser : {"wide_output", "consistent", "zero_sum"}) {
    const AttentionProblem config = p.with(plan_of(stabiliser));
    const AttentionBuffers got = emulated::run(config, p);
    const attention_bounds::Ratios r = ratios_of(config, p, attention_bounds::error_bounds(config, p), got,
                                                 attention_reference(config, p.in, p.grad_output));
    EXPECT_LE(r.largest(), 1) << stabiliser;
  }
}

// O of a row that sees one key is that key's V, to the bit, wherever the key is.
TEST(AmpereDecode, far_scores) {
  for (const char* stabiliser : {"none", "wide_output", "zero_sum", "consistent"})
    for (const double offset : {8e4, -8e4, 0.0}) {
      const Case c{{1, 8, 2, 4, 700, 64}, {.causal = true, .scale = 0.125f}, "far"};
      const far_scores::Far far{offset, 2e4};
      const Problem p = far_problem(c, far);
      const AttentionProblem config = p.with(plan_of(stabiliser));
      const AttentionBuffers got = run_forward(config, p);
      if (kSanitized) continue;
      EXPECT_GT(far_scores::expect_values(p, got, name_of(c, far) + stabiliser), 20);
      EXPECT_LE(worst(config, p, got), 1) << stabiliser << ", " << offset;
    }
}

// Scores that FP32 has exactly, around 4 million, so that their products with log2(e) are rounded by up to a quarter. The splits'
// shifts differ, and parts of O must be worth the same under the largest of them.
TEST(AmpereDecode, far_scores_from_split_to_split) {
  Problem p = make_problem({{1, 8, 2, 2, 1000, 64}, {.scale = 0.125f}, "splits"});
  cases::Draw draw(1, 7);
  cases::fill_view(p.q(), [](int64_t, int64_t, int64_t, int64_t d) {
    return d == 0 ? 0x1p11f : d == 1 ? 1.0f : 0.0f;
  });
  cases::fill_view(p.k(), [&](int64_t, int64_t, int64_t j, int64_t d) {
    // Steps of 4 are 1/2 after the scale.
    if (d == 1) return 4.0f * static_cast<float>(draw.below(4) + j / 256);
    return d == 0 ? 0x1p14f : 0.0f;
  });
  for (const char* stabiliser : {"none", "wide_output"}) {
    const AttentionProblem config = p.with(plan_of(stabiliser));
    const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
    const AttentionBuffers got = run_forward(config, p);
    double error = 0, size = 0;
    for (size_t n = 0; n < got.o.values().size(); ++n) {
      error = std::max(error, std::fabs(double{got.o.values()[n]} - exact.o.values()[n]));
      size = std::max(size, std::fabs(exact.o.values()[n]));
    }
    EXPECT_LE(error, 0x1p-8 * size) << stabiliser;  // half an ulp of BF16 for P, and for O
    // Half an ulp, and what FP32's log2(e) times its log(2) lacks of one.
    for (size_t n = 0; n < got.lse.values().size(); ++n)
      EXPECT_NEAR(got.lse.values()[n], exact.lse.values()[n], 0.25 + 1.2e-8 * exact.lse.values()[n]);
  }
}

// Values of another size than keys: as if both were filled up with zeros.
TEST(AmpereDecode, values_of_another_size) {
  const cases::Narrowed c{{{1, 4, 1, 3, 600, 192}, {.causal = true, .scale = 0.0625f}, "192_128"}, 192, 128};
  const Problem wide = c.wide(), narrow = c.narrow();
  const AttentionProblem config = wide.with(plan_of("wide_output"));
  attention_runs::expect_narrowed(emulated::run(config, wide), emulated::run(config, narrow), c.name);
}

// Errors of O have no sign: V has one, and the mean error is within what chance does.
TEST(AmpereDecode, errors_have_both_signs) {
  const Problem p =
      make_problem({{2, 8, 1, 8, 600, 64}, {.fill = Fill::one_signed, .scale = 0.125f}, "one_signed"});
  for (const char* stabiliser : {"none", "wide_output", "consistent"}) {
    const AttentionProblem config = p.with(plan_of(stabiliser));
    const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
    const AttentionBuffers got = run_forward(config, p);
    double sum = 0, squares = 0;
    for (size_t n = 0; n < exact.o.values().size(); ++n) {
      const double error = double{got.o.values()[n]} - exact.o.values()[n];
      sum += error, squares += error * error;
    }
    EXPECT_GT(squares, 0);
    EXPECT_LT(std::fabs(sum), 5 * std::sqrt(squares)) << stabiliser;
  }
}

TEST(AmpereDecode, the_same_bits_in_any_order) {
  for (const Case& c : {Case{{1, 8, 2, 3, 900, 64}, {.causal = true, .scale = 0.125f}, "64"},
                        Case{{1, 2, 1, 9, 700, 256}, {.scale = 0.125f}, "256"}}) {
    const Problem p = make_problem(c);
    const AttentionProblem config = p.with(plan_of("consistent"));
    const AttentionBuffers first = run_forward(config, p);
    for (How how : emulated::several_orders(3)) {
      how.blocks_at_once = 3;
      const AttentionBuffers again = run_forward(config, p, how);
      EXPECT_TRUE(attention_runs::same_bits(first.o.values(), again.o.values())) << c.name << name_of(how);
      EXPECT_TRUE(attention_runs::same_bits(first.lse.values(), again.lse.values()))
          << c.name << name_of(how);
    }
  }
}

TEST(AmpereDecode, faults_between_the_parts_are_found) {
  const Problem p = make_problem({{1, 8, 2, 3, 900, 64}, {.causal = true, .scale = 0.125f}, "faults"});
  const AttentionProblem config = p.with(plan_of("none"));
  EXPECT_LE(worst(config, p, run_forward(config, p)), 1);
  for (const Fault fault : {Fault::a_split_is_lost, Fault::shifts_are_ignored})
    EXPECT_GT(worst(config, p, run_forward(config, p, {}, fault)), 10);
}

}  // namespace
}  // namespace evenkeel
