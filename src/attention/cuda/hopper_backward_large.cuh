// Hopper's backward pass for head sizes above 128: one kernel owns keys and makes dK and dV
// (hopper_backward_large_keys.cuh), then another one owns rows and makes dQ (hopper_backward_large_rows.cuh). Both find the
// scores for themselves: seven products a tile where one kernel would need five, and nothing is added in memory. They take
// the arguments of the Ampere class, whose kernels find the rows' facts for them (ampere_passes.h). The emulator of the tests
// runs them, too.
#pragma once

#include "attention/cuda/hopper_backward_large_keys.cuh"
#include "attention/cuda/hopper_backward_large_rows.cuh"

namespace evenkeel::hopper::backward::large {

// launch.operator()<Block>(maps, pass) for both kernels, with the instances that the problem needs.
template <class Pairs, bool kForms, class Launch>
void for_both_kernels(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                      const ampere::Problem& facts, Launch launch) {
  const auto run = [&]<class Block>(int section_heads) {
    launch.template operator()<Block>(Maps(problem, in, grad_output, Block::T::kRows, Block::T::kKeys),
                                      Pass{facts, section_heads, -1.0f});
  };
  const auto with_instance = [&]<int kHeadSize, int kValueSize, Instance kInstance>() {
    run.template operator()<KeyBlock<Pairs, KeyTiles<kHeadSize, kValueSize>, kInstance>>(
        key_heads_in_cache(problem, facts.B * facts.G));
    run.template operator()<RowBlock<Pairs, RowTiles<kHeadSize, kValueSize>, kInstance>>(
        heads_in_cache(problem, facts.B * facts.H));
  };
  with_large_sizes<kForms>(problem, [&]<int kHeadSize, int kValueSize>() {
    if constexpr (kForms)
      with_instance.template operator()<kHeadSize, kValueSize, Instance::forms>();
    else if (any_head(problem, [](const HeadRules& rules) { return rules.consistent; }))
      with_instance.template operator()<kHeadSize, kValueSize, Instance::consistent>();
    else
      with_instance.template operator()<kHeadSize, kValueSize, Instance::plain>();
  });
}

}  // namespace evenkeel::hopper::backward::large
