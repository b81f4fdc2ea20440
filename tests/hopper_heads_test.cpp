// Hopper's forward kernel on the CPU, by the CUDA emulator, and the Ampere class's backward pass behind it, as heads above 128
// have them: within the error bounds of FlashAttention-2's arithmetic, and the same bits in any order of warps and blocks.
#include <gtest/gtest.h>

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

// Forward on Hopper, backward by the Ampere class.
struct Passes : emulated::AmperePasses {
  int multiprocessors = 3;

  void forward(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out,
               void* workspace) const {
    if (p.type == TensorType::fp16)
      forward_of<Fp16Pairs>(p, in, out, workspace);
    else
      forward_of<Bf16Pairs>(p, in, out, workspace);
  }

 private:
  template <class Pairs>
  void forward_of(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out,
                  void* workspace) const {
    using namespace hopper::forward;
    for_head_groups(p, out, [&](ForwardArguments a) {
      if (has_large_heads(p))
        with_block_of<Pairs, true, false, false>(
            p, a.rules, [&]<class Block>() { launch<Block>(p, in, out, a, workspace); });
      else
        with_block_of<Pairs, false, false, false>(
            p, a.rules, [&]<class Block>() { launch<Block>(p, in, out, a, workspace); });
    });
  }
  template <class Block>
  void launch(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out,
              hopper::forward::ForwardArguments a, void* workspace) const {
    using T = typename Block::T;
    const hopper::forward::BlockMaps<T> maps(p, in, out);
    a.tiles_per_head = static_cast<int>(divide_up(p.T, T::kRows));
    const int tiles = a.tiles_per_head * a.heads, blocks = std::min(multiprocessors, tiles);
    if (tiles > blocks) {
      a.next_tile = static_cast<uint32_t*>(workspace);
      *a.next_tile = 0;
    }
    cuda_emulator::run(
        {.blocks = blocks, .threads = T::kThreads, .shared_bytes = T::kSharedBytes, .order = how.order},
        [&] { Block::run(maps.q, maps.k, maps.v, maps.o, a); });
  }
};

AttentionBuffers run_on_hopper(const AttentionProblem& config, const Problem& p, const How& how = {},
                               int multiprocessors = 3) {
  return run_passes(config, p, how, Passes{{how}, multiprocessors});
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
    kRagged160{{3, 2, 1, 140, 140, 160}, {.causal = true, .ragged = true, .scale = 0.125f}, "ragged_160"},
    kRagged256{{5, 2, 1, 140, 190, 256}, {.causal = true, .ragged = true, .scale = 0.125f}, "ragged_256"};

TEST(HopperHeads, larger_heads) {
  for (const Case* c : {&kCausal256, &kFull192, &kRagged160})
    for (const char* stabiliser : {"wide_output", "consistent", "zero_sum", "paper_capped"}) {
      const Problem p = make_problem(*c);
      PrecisionPlan plan = plan_of(stabiliser);
      plan.keel = 1e-2f;
      expect_in_bounds(p.with(plan), p, std::string(c->name) + ", " + stabiliser);
    }
}

}  // namespace
}  // namespace evenkeel
