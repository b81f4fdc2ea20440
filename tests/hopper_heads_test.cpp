// Hopper's kernels for head sizes above 128 on the CPU, by the CUDA emulator: within the error bounds of FlashAttention-2's
// arithmetic, and the same bits in any order of warps and blocks.
#include <gtest/gtest.h>

#include "attention/cuda/hopper_backward_large.cuh"
#include "attention/cuda/hopper_forward_block.cuh"
#include "attention_bounds.h"
#include "emulated_attention.h"

namespace evenkeel {
namespace {

using attention_bounds::Ratios;
using cases::Case;
using cases::Fill;
using cases::make_problem;
using cases::Problem;
using emulated::How;
using emulated::Order;
using emulated::plan_of;

// Both passes, as the host code of the family has them, on so many multiprocessors.
struct Passes {
  const How& how;
  int multiprocessors = 3;

  PassSizes sizes(const AttentionProblem& p) const { return ampere::large_pass_sizes(p); }

  void forward(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out,
               void* workspace) const {
    using namespace hopper::forward;
    with_instance(p, [&]<class Pairs, bool kForms>() {
      const std::vector<ForwardArguments> groups = forward_groups(p, out);
      auto* const words = static_cast<LaunchWords*>(workspace);  // between guards
      std::fill_n(words, groups.size(), LaunchWords{});
      for_each_launch<Pairs, true, kForms, false>(
          p, in, out, groups, words, multiprocessors,
          [&]<class Block>(const BlockMaps<typename Block::T>& maps, const ForwardArguments& a, int blocks) {
            // Where a warpgroup leaves out key tiles, lane 0 of a warp passes them on without waiting for the other lanes.
            run<typename Block::T>(blocks, [&] { Block::run(maps.q, maps.k, maps.v, maps.o, a); });
          });
    });
  }

  void backward(const AttentionProblem& p, const PassInputs& in, const DeviceTensor& grad_output,
                const ForwardPass& saved, const BackwardPass& out, void* workspace) const {
    using namespace hopper::backward::large;
    with_instance(p, [&]<class Pairs, bool kForms>() {
      emulated::Launch launch{how};
      const ampere::Problem facts = ampere::find_row_facts<Pairs, 256, false>(
          p, in, grad_output, saved, out, workspace, launch, ampere::Parts::none);
      for_both_kernels<Pairs, kForms>(p, in, grad_output, facts,
                                      [&]<class Block>(const Maps& maps, const Pass& pass) {
                                        run<typename Block::T>(std::min(multiprocessors, Block::items(pass)),
                                                               [&] { Block::run(maps, pass); });
                                      });
    });
  }

 private:
  template <class F>
  static void with_instance(const AttentionProblem& p, F f) {
    const auto with_pairs = [&]<bool kForms>() {
      if (p.type == TensorType::fp16)
        f.template operator()<Fp16Pairs, kForms>();
      else
        f.template operator()<Bf16Pairs, kForms>();
    };
    if (has_forms(p))
      with_pairs.template operator()<true>();
    else
      with_pairs.template operator()<false>();
  }
  template <class T>
  void run(int blocks, const std::function<void()>& block) const {
    cuda_emulator::run({.blocks = blocks,
                        .threads = T::kThreads,
                        .shared_bytes = T::kSharedBytes,
                        .order = how.order,
                        .blocks_at_once = how.blocks_at_once,
                        .seed = how.seed},
                       block);
  }
};

AttentionBuffers run_on_hopper(const AttentionProblem& config, const Problem& p, const How& how = {},
                               int multiprocessors = 3) {
  return run_passes(config, p, how, Passes{how, multiprocessors});
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

void expect_in_bounds(const AttentionProblem& config, const Problem& p, const std::string& name,
                      const How& how = {}) {
  const AttentionBuffers got = run_on_hopper(config, p, how);
  const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
  const Ratios r = ratios_of(config, p, attention_bounds::error_bounds(config, p), got, exact);
  EXPECT_LE(r.largest(), 1) << name << ": o " << r.o << ", lse " << r.lse << ", delta " << r.delta << ", dq "
                            << r.dq << ", dk " << r.dk << ", dv " << r.dv;
}

const Case kCausal256{{1, 2, 1, 200, 230, 256}, {.causal = true, .scale = 0.0625f}, "causal_256"},
    kFull192{{1, 1, 1, 140, 250, 192}, {.scale = 0.0625f}, "full_192"},
    kRagged160{{3, 2, 1, 140, 140, 160}, {.causal = true, .ragged = true, .scale = 0.125f}, "ragged_160"};

TEST(HopperHeads, every_size_of_tiles) {
  for (const Case* c : {&kCausal256, &kFull192, &kRagged160})
    for (const char* stabiliser : {"wide_output", "consistent", "zero_sum"}) {
      if (kSanitized && c != &kRagged160) continue;
      const Problem p = make_problem(*c);
      PrecisionPlan plan = plan_of(stabiliser);
      plan.keel = 1e-2f;
      expect_in_bounds(p.with(plan), p, std::string(c->name) + ", " + stabiliser);
    }
}

// The other mask of each size of tiles, more key tiles than places for them, heads that share keys, in the order that is hardest.
TEST(HopperHeads, the_other_masks) {
  const Case cases[] = {
      {{1, 2, 1, 190, 340, 256}, {.scale = 0.0625f}, "full_256"},
      {{1, 2, 1, 340, 270, 192}, {.causal = true, .scale = 0.0625f}, "causal_192"},
      {{2, 2, 1, 150, 190, 256}, {.ragged = true, .scale = 0.0625f}, "ragged_256"},
  };
  for (const Case& c : cases) {
    const Problem p = make_problem(c);
    expect_in_bounds(p.with(plan_of("zero_sum")), p, c.name,
                     {.order = Order::random, .blocks_at_once = 2, .seed = 7});
    if (kSanitized) break;
  }
}

// What lies behind the end of a sequence may be anything: here NaN, in every tensor.
TEST(HopperHeads, nothing_behind_the_end_is_seen) {
  const Case cases[] = {
      {{3, 1, 1, 150, 190, 256}, {.ragged = true, .scale = 0.0625f}, "256"},
      {{3, 1, 1, 130, 150, 160}, {.causal = true, .ragged = true, .scale = 0.0625f}, "160"},
  };
  for (const Case& c : cases) {
    const Problem p = make_problem(c);
    Problem poisoned = make_problem(c);
    const auto poison = [](View<float> x, const std::vector<int32_t>& lengths) {
      for (int64_t b = 0; b < x.shape[0]; ++b)
        for (int64_t h = 0; h < x.shape[1]; ++h)
          for (int64_t i = lengths[static_cast<size_t>(b)]; i < x.shape[2]; ++i)
            for (int64_t d = 0; d < x.shape[3]; ++d) *x.at(b, h, i, d) = attention_runs::kNan;
    };
    poison(poisoned.q(), p.query_lengths), poison(poisoned.grad(), p.query_lengths);
    poison(poisoned.k(), p.key_lengths), poison(poisoned.v(), p.key_lengths);
    for (const char* stabiliser : {"wide_output", "zero_sum"}) {
      const AttentionProblem config = p.with(plan_of(stabiliser));
      attention_runs::expect_narrowed(run_on_hopper(config, p), run_on_hopper(config, poisoned),
                                      c.name + std::string(", ") + stabiliser);
    }
    if (kSanitized) break;
  }
}

// Rows that see one key, far away: O is that key's V to the bit, in every query tile. So the second launch did them all.
TEST(HopperHeads, far_rows) {
  for (const int64_t D : {160, 256}) {
    Problem p = make_problem({{1, 4, 2, 130, 1, D}, {.scale = 0.0625f}, "far"});
    cases::Draw draw(1, 7);
    cases::fill_view(p.q(), [&](int64_t, int64_t, int64_t, int64_t d) {
      return d < 16 ? cases::to_bf16(280 + 20 * draw.unit()) : 0.0f;
    });
    cases::fill_view(p.k(), [](int64_t, int64_t, int64_t, int64_t d) { return d < 16 ? 280.0f : 0.0f; });
    for (const char* stabiliser : {"none", "wide_output", "zero_sum"}) {
      const AttentionBuffers got = run_on_hopper(p.with(plan_of(stabiliser)), p);
      int others = 0;
      for (int64_t h = 0; h < p.shape.H; ++h)
        for (int64_t i = 0; i < p.shape.T; ++i)
          for (int64_t d = 0; d < D; ++d)
            others += *got.o.view().at(0, h, i, d) != *p.in.v.at(0, h / 2, 0, d);
      EXPECT_EQ(others, 0) << D << ", " << stabiliser;
      if (kSanitized) return;
    }
  }
}

// One row, one key, rows that see nothing, more query tiles than multiprocessors, heads that share keys.
TEST(HopperHeads, odd_sizes) {
  const Case odd[] = {
      {{1, 1, 1, 1, 200, 256}, {.causal = true, .scale = 0.0625f}, "one_row"},
      {{1, 1, 1, 140, 1, 192}, {.scale = 0.0625f}, "one_key"},
      {{1, 2, 1, 150, 40, 136}, {.causal = true, .scale = 0.125f}, "rows_without_keys"},
      {{2, 4, 1, 130, 70, 200}, {.causal = true, .scale = 0.125f}, "many_tiles"},
  };
  for (const Case& c : odd) {
    const Problem p = make_problem(c);
    expect_in_bounds(p.with(plan_of("wide_output")), p, c.name);
    if (kSanitized) break;
  }
}

TEST(HopperHeads, the_other_stabilisers_in_fp16_and_packed) {
  const Problem ragged = make_problem(kRagged160), halves = in_fp16(make_problem(kFull192));
  for (const char* stabiliser : {"wide_output", "paper_capped", "none", "dither"}) {
    expect_in_bounds(ragged.with(plan_of(stabiliser)), ragged, stabiliser, {.sequences = true});
    if (kSanitized) return;
  }
  for (const char* stabiliser : {"wide_output", "consistent"})
    expect_in_bounds(halves.with(plan_of(stabiliser, TensorType::fp16)), halves, "fp16",
                     {.type = TensorType::fp16});
}

// One feature of O is zero throughout: beside it the poison of a residue that nobody wrote is NaN.
TEST(HopperHeads, plans_that_differ_by_head) {
  std::vector<PrecisionPlan> plans;
  for (const char* stabiliser : {"none", "consistent", "wide_output", "zero_sum"})
    plans.push_back(plan_of(stabiliser));
  plans[1].keel = 1e-2f;
  for (int64_t window : {-1, 40}) {
    Problem p = make_problem(
        {{1, 4, 2, 70, 130, 136}, {.causal = true, .window_left = window, .scale = 0.125f}, "by_head"});
    for (int64_t g = 0; g < p.shape.G; ++g)
      for (int64_t j = 0; j < p.shape.N; ++j) *p.v().at(0, g, j, 3) = 0;
    expect_in_bounds(p.with(plans), p, "by head, window " + std::to_string(window));
  }
}

TEST(HopperHeads, a_gradient_of_the_log_sum) {
  const Problem p = make_problem(kCausal256);
  Tensor<float> grad_lse({p.shape.B, p.shape.H, p.shape.T, 1});
  for (size_t n = 0; n < grad_lse.values().size(); ++n)
    grad_lse.values()[n] = 0.25f * static_cast<float>(n % 7) - 0.75f;
  const AttentionProblem config = p.with(plan_of("wide_output"));
  const AttentionBuffers with = run_on_hopper(config, p, {.grad_lse = &grad_lse}),
                         without = run_on_hopper(config, p);
  for (size_t n = 0; n < grad_lse.values().size(); ++n)
    EXPECT_EQ(with.delta.values()[n], without.delta.values()[n] - grad_lse.values()[n]) << n;
  EXPECT_NE(with.dq.values(), without.dq.values());
}

TEST(HopperHeads, values_of_another_size) {
  for (const cases::Narrowed& c : cases::kNarrowed) {
    for (const char* stabiliser : {"wide_output", "consistent"}) {
      const Problem wide = c.wide(), narrow = c.narrow();
      const AttentionProblem config = wide.with(plan_of(stabiliser));
      attention_runs::expect_narrowed(run_on_hopper(config, wide), run_on_hopper(config, narrow), c.name);
    }
  }
}

// Forms

// Errors of every tensor have no sign: their sum is that of as many independent ones.
void expect_no_sign(const AttentionBuffers& got, const AttentionReference& exact, const std::string& name) {
  const auto expect = [&](const char* what, const Tensor<float>& x, const Tensor<double>& truth) {
    double sum = 0, squares = 0;
    for (size_t n = 0; n < truth.values().size(); ++n) {
      const double error = x.values()[n] - truth.values()[n];
      sum += error, squares += error * error;
    }
    EXPECT_LE(std::fabs(sum), 6 * std::sqrt(squares)) << name << ", " << what;
    EXPECT_GT(squares, 0) << name << ", " << what;
  };
  expect("o", got.o, exact.o);
  expect("dq", got.dq, exact.dq);
  expect("dk", got.dk, exact.dk);
  expect("dv", got.dv, exact.dv);
}

// What a problem with values of another size gave, as the problem filled up with zeros has it.
AttentionBuffers widened(const AttentionBuffers& narrow, const AttentionInputs& in) {
  AttentionBuffers wide(in, /*with_facts=*/true);
  for (auto member : {&AttentionBuffers::o, &AttentionBuffers::lse, &AttentionBuffers::delta,
                      &AttentionBuffers::dq, &AttentionBuffers::dk, &AttentionBuffers::dv}) {
    const auto& from = (narrow.*member).view();
    cases::fill_view((wide.*member).view(), [&](int64_t b, int64_t h, int64_t i, int64_t d) {
      return d < from.shape[3] ? *from.at(b, h, i, d) : 0.0f;
    });
  }
  return wide;
}

// Of the problem with D keys' features and Dv values', against FP64.
void expect_form(const cases::Narrowed& c, const char* stabiliser, const How& how = {},
                 bool without_sign = true) {
  const std::string name = std::string(c.name) + ", " + stabiliser;
  Problem wide = c.wide(), narrow = c.narrow();
  if (how.type == TensorType::fp16) wide = in_fp16(std::move(wide)), narrow = in_fp16(std::move(narrow));
  PrecisionPlan plan = plan_of(stabiliser, how.type);
  plan.keel = 1e-2f;
  const AttentionProblem config = wide.with(plan);
  const AttentionBuffers got = widened(run_on_hopper(config, narrow, how), wide.in);
  const AttentionReference exact = attention_reference(config, wide.in, wide.grad_output);
  const Ratios r = ratios_of(config, wide, attention_bounds::error_bounds(config, wide), got, exact);
  EXPECT_LE(r.largest(), 1) << name << ": o " << r.o << ", lse " << r.lse << ", delta " << r.delta << ", dq "
                            << r.dq << ", dk " << r.dk << ", dv " << r.dv;
  if (without_sign) expect_no_sign(got, exact, name);
}

// Windows on either side and on both, narrower than a tile and wider, with rows that see nothing; then soft caps and masks.
const cases::Narrowed kForms[] = {
    {{{1, 2, 1, 140, 270, 256}, {.window_left = 75, .window_right = 20, .scale = 0.0625f}, "both"}, 256, 256},
    {{{1, 1, 1, 170, 200, 256}, {.causal = true, .window_left = 5, .scale = 0.0625f}, "narrow"}, 256, 256},
    {{{1, 1, 1, 210, 120, 256}, {.window_left = 30, .window_right = 3, .scale = 0.0625f}, "no_keys"},
     256,
     256},
    {{{1, 1, 1, 150, 190, 256}, {.window_right = 40, .scale = 0.0625f}, "right"}, 256, 256},
    {{{1, 2, 1, 140, 300, 192}, {.causal = true, .window_left = 90, .scale = 0.0625f}, "mixed"}, 192, 128},
    {{{1, 1, 1, 70, 130, 256}, {.causal = true, .softcap = 2, .scale = 0.0625f}, "capped"}, 256, 256},
    {{{1, 2, 1, 70, 100, 192},
      {.window_left = 40, .hide = cases::Hide::rows, .softcap = 3, .scale = 0.0625f},
      "capped_and_hidden"},
     192,
     128},
    {{{3, 2, 1, 140, 150, 256},
      {.causal = true, .window_left = 50, .ragged = true, .scale = 0.0625f},
      "ragged"},
     256,
     256},
};

TEST(HopperHeads, forms) {
  const char* const stabilisers[] = {"wide_output", "consistent", "zero_sum"};
  for (size_t n = 0; n < std::size(kForms); ++n) {
    // The first problem and the first with a soft cap have every stabiliser, the others each another one.
    for (size_t m = 0; m < std::size(stabilisers); ++m)
      if (n == 0 || n == 5 || m == n % std::size(stabilisers))
        expect_form(kForms[n], stabilisers[m],
                    {.order = Order::random, .blocks_at_once = 2, .seed = static_cast<uint32_t>(n)});
    if (kSanitized && n == 1) break;
  }
}

// Boxes of 64 features that the three kernels load of a head: Q, dO, K and V of 256 are four each. A tile of 64 keys is loaded
// for each tile of 128 rows (forward; dQ) of which some row sees some key of it, and so is one of 64 rows for 64 keys.
int64_t boxes_of(const Problem& p) {
  const auto sees = [&](int64_t row, int64_t rows, int64_t key) {
    for (int64_t i = row; i < std::min(row + rows, p.shape.T); ++i)
      for (int64_t j = key; j < std::min(key + 64, p.shape.N); ++j)
        if (cases::sees(p, 0, 0, i, j)) return true;
    return false;
  };
  int64_t boxes = 0;
  for (int64_t row = 0; row < p.shape.T; row += 128) {
    int64_t tiles = 0;
    for (int64_t key = 0; key < p.shape.N; key += 64) tiles += sees(row, 128, key);
    if (tiles > 0) boxes += 2 * 4 + tiles * 8;  // forward: Q in two parts
    if (tiles > 0) boxes += 2 * 8 + tiles * 8;  // dQ: Q and dO in two parts
  }
  for (int64_t key = 0; key < p.shape.N; key += 64) {
    int64_t tiles = 0;
    for (int64_t row = 0; row < p.shape.T; row += 64) tiles += sees(row, 64, key);
    if (tiles > 0) boxes += 8 + tiles * 8;
  }
  return boxes;
}

TEST(HopperHeads, tiles_outside_a_window_are_not_loaded) {
  for (const auto& [T, N, left, right] : std::vector<std::array<int64_t, 4>>{
           {200, 330, 40, 0}, {200, 330, 64, 64}, {330, 130, 20, 5}, {330, 330, -1, 0}}) {
    const Problem p = make_problem(
        {{1, 1, 1, T, N, 256}, {.window_left = left, .window_right = right, .scale = 0.0625f}, "window"});
    const int64_t before = cuda_emulator::machine().boxes_loaded;
    run_on_hopper(p.with(plan_of("wide_output")), p);
    EXPECT_EQ(cuda_emulator::machine().boxes_loaded - before, boxes_of(p)) << T << ", " << N << ", " << left;
    if (kSanitized) return;
  }
}

TEST(HopperHeads, forms_in_fp16_packed_and_of_far_rows) {
  expect_form(kForms[6], "wide_output", {.type = TensorType::fp16});
  expect_form(kForms[7], "paper_capped", {.sequences = true});
  if (kSanitized) return;
  // Scores of 2,500: the forward pass's second launch. (dK is of queries as large, which have a sign.)
  expect_form(
      {{{1, 1, 1, 90, 200, 256}, {.fill = Fill::huge, .window_left = 60, .scale = 0.0625f}, "far"}, 256, 256},
      "wide_output", {}, /*without_sign=*/false);
}

TEST(HopperHeads, slopes_sinks_and_the_gradient_of_the_log_sum) {
  const cases::Narrowed problems[] = {
      {{{2, 2, 1, 70, 100, 256}, {.causal = true, .window_left = 45, .scale = 0.0625f}, "256"}, 256, 256},
      {{{1, 2, 1, 90, 80, 192}, {.causal = true, .scale = 0.0625f}, "192_128"}, 192, 128}};
  for (const cases::Narrowed& c : problems)
    for (const char* stabiliser : {"consistent", "zero_sum"}) {
      const Problem p = c.narrow();
      emulated::expect_as_near_as_the_cpu(
          p, plan_of(stabiliser), c.name + std::string(", ") + stabiliser,
          [&](const AttentionProblem& config, const How& how) { return run_on_hopper(config, p, how); });
      if (kSanitized) return;
    }
}

// Neither the order of warps nor the number of blocks changes a bit.
TEST(HopperHeads, the_same_bits_in_any_order) {
  const Case capped{{1, 2, 1, 140, 200, 256},
                    {.window_left = 70, .window_right = 10, .softcap = 3, .scale = 0.0625f},
                    "capped_256"};
  for (const Case* c : {&kCausal256, &kRagged160, &capped}) {
    const Problem p = make_problem(*c);
    const AttentionProblem config = p.with(plan_of("consistent"));
    const AttentionBuffers first = run_on_hopper(config, p);
    attention_runs::expect_narrowed(first, run_on_hopper(config, p, {}, 1), c->name);
    for (const How& how : emulated::several_orders(3))
      if (how.order != Order::ascending)
        attention_runs::expect_narrowed(first, run_on_hopper(config, p, how),
                                        c->name + std::string(", ") + name_of(how));
    if (kSanitized) break;
  }
}

}  // namespace
}  // namespace evenkeel
