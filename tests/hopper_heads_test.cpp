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

// Both passes, as the host code of the family has them, on so many multiprocessors.
struct Passes {
  const How& how;
  int multiprocessors = 3;

  PassSizes sizes(const AttentionProblem& p) const { return ampere::large_pass_sizes(p); }

  void forward(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out,
               void* workspace) const {
    using namespace hopper::forward;
    with_pairs(p, [&]<class Pairs>() {
      for_head_groups(p, out, [&](const ForwardArguments& group) {
        auto* const words = static_cast<LaunchWords*>(workspace);
        *words = {};
        with_blocks_of<Pairs, true, false, false>(p, group.rules, [&]<class Block>() {
          using T = typename Block::T;
          const BlockMaps<T> maps(p, in, out);
          int blocks;
          const ForwardArguments a = launch_arguments<Block>(p, group, words, multiprocessors, blocks);
          // Where a warpgroup leaves out key tiles, lane 0 of a warp passes them on without waiting for the other lanes.
          run<T>(blocks, [&] { Block::run(maps.q, maps.k, maps.v, maps.o, a); });
        });
      });
    });
  }

  void backward(const AttentionProblem& p, const PassInputs& in, const DeviceTensor& grad_output,
                const ForwardPass& saved, const BackwardPass& out, void* workspace) const {
    using namespace hopper::backward::large;
    with_pairs(p, [&]<class Pairs>() {
      emulated::Launch launch{how};
      const ampere::Problem facts = ampere::find_row_facts<Pairs, 256, false>(
          p, in, grad_output, saved, out, workspace, launch, ampere::Parts::none);
      for_both_kernels<Pairs>(p, in, grad_output, facts,
                              [&]<class Block>(const Maps& maps, const Pass& pass) {
                                run<typename Block::T>(std::min(multiprocessors, Block::items(pass)),
                                                       [&] { Block::run(maps, pass); });
                              });
    });
  }

 private:
  template <class F>
  static void with_pairs(const AttentionProblem& p, F f) {
    if (p.type == TensorType::fp16)
      f.template operator()<Fp16Pairs>();
    else
      f.template operator()<Bf16Pairs>();
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
  Problem p = make_problem({{1, 4, 2, 70, 130, 136}, {.causal = true, .scale = 0.125f}, "by_head"});
  for (int64_t g = 0; g < p.shape.G; ++g)
    for (int64_t j = 0; j < p.shape.N; ++j) *p.v().at(0, g, j, 3) = 0;
  std::vector<PrecisionPlan> plans;
  for (const char* stabiliser : {"none", "consistent", "wide_output", "zero_sum"})
    plans.push_back(plan_of(stabiliser));
  plans[1].keel = 1e-2f;
  expect_in_bounds(p.with(plans), p, "by head");
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
    if (c.window_left >= 0 || c.hide != cases::Hide::nothing) continue;  // forms
    for (const char* stabiliser : {"wide_output", "consistent"}) {
      const Problem wide = c.wide(), narrow = c.narrow();
      const AttentionProblem config = wide.with(plan_of(stabiliser));
      attention_runs::expect_narrowed(run_on_hopper(config, wide), run_on_hopper(config, narrow), c.name);
    }
  }
}

// Neither the order of warps nor the number of blocks changes a bit.
TEST(HopperHeads, the_same_bits_in_any_order) {
  for (const Case* c : {&kCausal256, &kRagged160}) {
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
