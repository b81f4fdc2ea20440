// What Hopper's FP8 passes do on the host: they launch the quantiser, and forward the kernel, through the given `launch`. That is
// a stream of the device (hopper_fp8.cu) or the emulator of the tests. Internal to src/attention.
#pragma once

#include <algorithm>

#include "attention/cuda/hopper_fp8_forward.cuh"
#include "attention/cuda/hopper_fp8_quantise.cuh"
#include "base/sizes.h"

namespace evenkeel::hopper_fp8 {

// Without a target yet.
inline QuantiseArguments quantise_arguments(const AttentionProblem& p, const PassInputs& in,
                                            const Counters& counters) {
  const auto operand = [&](const DeviceTensor& x, int64_t heads, int64_t rows) {
    QuantiseArguments::Operand made{};
    made.data = static_cast<const uint16_t*>(x.data);
    std::copy_n(x.stride.begin(), 3, made.stride);
    made.heads = static_cast<int>(heads);
    made.tiles = static_cast<int>(divide_up(rows, kPairRows) * kPairTiles);
    return made;
  };
  QuantiseArguments a{};
  a.q = operand(in.q, p.H, p.T), a.k = operand(in.k, p.G, p.N), a.v = operand(in.v, p.G, p.N);
  a.sequences = sequences(p);
  a.B = static_cast<int>(p.B);
  a.D = static_cast<int>(p.D);
  a.counters = counters;
  return a;
}

template <Target kTarget, class Launch>
void quantise(QuantiseArguments a, int multiprocessors, Launch& launch) {
  a.query_tiles = kTarget == Target::rows ? a.B * a.q.heads * a.q.tiles : 0;
  a.pieces = a.query_tiles + 3 * a.B * a.k.heads * a.k.tiles;
  launch.template run<ClearCounters>(divide_up(a.counters.count, ClearCounters::kThreads), a.counters);
  const auto with_head = [&]<int kHead>() {
    using Kernel = Quantise<kHead, kTarget>;
    launch.template run<Kernel>(std::min(multiprocessors * Kernel::kBlocksAtOnce, a.pieces), a);
  };
  if (kernel_head(a.D) == 64)
    with_head.template operator()<64>();
  else
    with_head.template operator()<128>();
}

// E4M3 tiles of k and v for the forward kernel, and its counter at zero.
template <class Launch>
void quantise_tiles(const AttentionProblem& p, const PassInputs& in, const Layout& layout,
                    int multiprocessors, Launch& launch) {
  QuantiseArguments a = quantise_arguments(p, in, layout.counters);
  a.k.target = layout.k, a.v.target = layout.v;
  quantise<Target::tiles>(a, multiprocessors, launch);
}

// The same numbers in BF16, to layout.rounded. Rows that do not exist are not written.
template <class Launch>
void quantise_rows(const AttentionProblem& p, const PassInputs& in, const BackwardLayout& layout,
                   int multiprocessors, Launch& launch) {
  QuantiseArguments a = quantise_arguments(p, in, layout.counters);
  const auto to = [](QuantiseArguments::Operand& x, const DeviceTensor& rounded) {
    x.rounded = static_cast<uint16_t*>(rounded.data);
    std::copy_n(rounded.stride.begin(), 3, x.rounded_stride);
  };
  to(a.q, layout.rounded.q), to(a.k, layout.rounded.k), to(a.v, layout.rounded.v);
  quantise<Target::rows>(a, multiprocessors, launch);
}

inline ForwardArguments forward_arguments(const AttentionProblem& p, const PassInputs& in,
                                          const ForwardPass& out, const Layout& layout, int rows_of_item) {
  ForwardArguments a{};
  a.sequences = sequences(p);
  a.q = static_cast<const uint16_t*>(in.q.data);
  std::copy_n(in.q.stride.begin(), 3, a.q_stride);
  a.k = layout.k, a.v = layout.v;
  a.o = static_cast<uint16_t*>(out.o.data);
  std::copy_n(out.o.stride.begin(), 3, a.o_stride);
  a.lse = out.lse;
  a.H = static_cast<int>(p.H);
  a.heads_per_group = static_cast<int>(p.H / p.G);
  a.D = static_cast<int>(p.D);
  a.key_pairs = static_cast<int>(divide_up(p.N, kPairRows));
  a.causal = p.mask.causal;
  a.scale_log2 = p.scale * kLog2E;
  a.items_per_head = static_cast<int>(divide_up(p.T, rows_of_item));
  a.heads = static_cast<int>(p.B * p.H);
  constexpr int64_t kCacheBytes = 32 << 20;  // of the second-level cache, for keys and values
  const int64_t key_bytes = p.N * p.D * 2;   // K and V of one head
  a.section_heads = static_cast<int>(
      std::clamp<int64_t>(kCacheBytes / std::max<int64_t>(1, key_bytes) * a.heads_per_group, 1, a.heads));
  a.next_item = layout.counters.next_item();
  return a;
}

// REQUIRES: a problem that the family takes.
template <class Launch>
void forward_pass(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out, void* workspace,
                  int multiprocessors, Launch& launch) {
  const Layout layout = lay_out(p, workspace);
  quantise_tiles(p, in, layout, multiprocessors, launch);
  const auto with_head = [&]<int kHead>() {
    using Kernel = Forward<kHead>;
    const ForwardArguments a = forward_arguments(p, in, out, layout, Kernel::kRows);
    launch.template run<Kernel>(std::min(multiprocessors, a.items_per_head * a.heads), a);
  };
  if (kernel_head(p.D) == 64)
    with_head.template operator()<64>();
  else
    with_head.template operator()<128>();
}

}  // namespace evenkeel::hopper_fp8
