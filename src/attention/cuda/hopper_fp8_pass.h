// What Hopper's FP8 forward pass does on the host: it launches three kernels through the given `launch`. That is a
// stream of the device (hopper_fp8.cu) or the emulator of the tests. Internal to src/attention.
#pragma once

#include <algorithm>

#include "attention/attention_call.h"
#include "attention/cuda/hopper_fp8_forward.cuh"
#include "attention/cuda/hopper_fp8_quantise.cuh"
#include "attention/head_plan.h"
#include "base/sizes.h"

namespace evenkeel::hopper_fp8 {

inline QuantiseArguments quantise_arguments(const AttentionProblem& p, const PassInputs& in,
                                            const Layout& layout) {
  const auto operand = [&](const DeviceTensor& x, int64_t heads, int64_t rows, uint8_t* target) {
    return QuantiseArguments::Operand{static_cast<const uint16_t*>(x.data),
                                      {x.stride[0], x.stride[1], x.stride[2]},
                                      static_cast<int>(heads),
                                      static_cast<int>(divide_up(rows, kPairRows) * kPairTiles),
                                      target};
  };
  return {operand(in.q, p.H, p.T, layout.q),
          operand(in.k, p.G, p.N, layout.k),
          operand(in.v, p.G, p.N, layout.v),
          sequences(p),
          static_cast<int>(p.B),
          static_cast<int>(p.D),
          layout.next_item,
          layout.v_largest};
}

inline ForwardArguments forward_arguments(const AttentionProblem& p, const ForwardPass& out,
                                          const Layout& layout, int rows_of_item) {
  ForwardArguments a{};
  a.sequences = sequences(p);
  a.q = layout.q, a.k = layout.k, a.v = layout.v;
  a.o = static_cast<uint16_t*>(out.o.data);
  for (size_t axis = 0; axis < 3; ++axis) a.o_stride[axis] = out.o.stride[axis];
  a.lse = out.lse;
  a.H = static_cast<int>(p.H);
  a.heads_per_group = static_cast<int>(p.H / p.G);
  a.D = static_cast<int>(p.D);
  a.row_pairs = static_cast<int>(divide_up(p.T, kPairRows));
  a.key_pairs = static_cast<int>(divide_up(p.N, kPairRows));
  a.causal = p.mask.causal;
  a.scale_log2 = p.scale * kLog2E;
  a.items_per_head = static_cast<int>(divide_up(p.T, rows_of_item));
  a.heads = static_cast<int>(p.B * p.H);
  constexpr int64_t kCacheBytes = 32 << 20;  // of the second-level cache, for keys and values
  const int64_t key_bytes = p.N * p.D * 2;   // K and V of one head
  a.section_heads = static_cast<int>(
      std::clamp<int64_t>(kCacheBytes / std::max<int64_t>(1, key_bytes) * a.heads_per_group, 1, a.heads));
  a.next_item = layout.next_item;
  return a;
}

template <int kHead, bool kConsistent, class Launch>
void run_kernels(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out,
                 const Layout& layout, int multiprocessors, Launch& launch) {
  using Kernel = Forward<kHead, kConsistent>;
  const QuantiseArguments quantise = quantise_arguments(p, in, layout);
  launch.template run<Quantise<kHead>>(
      p.B * (p.H * int64_t{quantise.q.tiles} + p.G * 2 * int64_t{quantise.k.tiles}), quantise);
  launch.template run<QuantiseValues<kHead>>(p.B * p.G * int64_t{quantise.v.tiles}, quantise);
  const ForwardArguments a = forward_arguments(p, out, layout, Kernel::kRows);
  launch.template run<Kernel>(std::min(multiprocessors, a.items_per_head * a.heads), a);
}

// REQUIRES: a problem that the family takes; the sum of a row is of rounded or of exact probabilities.
template <class Launch>
void forward_pass(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out, void* workspace,
                  int multiprocessors, Launch& launch) {
  const Layout layout = lay_out(p, workspace);
  const bool consistent = rules_of(p.plans[0].stabiliser).sum == SumRule::rounded_probs;
  if (kernel_head(p.D) == 64)
    (consistent ? run_kernels<64, true, Launch> : run_kernels<64, false, Launch>)(p, in, out, layout,
                                                                                  multiprocessors, launch);
  else
    (consistent ? run_kernels<128, true, Launch> : run_kernels<128, false, Launch>)(p, in, out, layout,
                                                                                    multiprocessors, launch);
}

}  // namespace evenkeel::hopper_fp8
