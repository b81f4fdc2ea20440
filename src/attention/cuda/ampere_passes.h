// What both passes of the Ampere class do on the host: resolve plans, lay out memory, and launch kernels in order. They get
// `launch`, which starts a kernel on a stream of the device (ampere.cu) or in the emulator of the tests. Internal to
// src/attention.
#pragma once

#include <algorithm>

#include "attention/attention_call.h"
#include "attention/cuda/ampere_backward.cuh"
#include "attention/cuda/ampere_decode.cuh"
#include "attention/cuda/ampere_forward.cuh"
#include "attention/cuda/ampere_rows.cuh"
#include "attention/kernel_families.h"
#include "base/sizes.h"
#include "gpu/device_memory.h"

namespace evenkeel::ampere {

inline Strided strided(const DeviceTensor& tensor) {
  return {static_cast<uint16_t*>(tensor.data), {tensor.stride[0], tensor.stride[1], tensor.stride[2]}};
}

// What forward leaves for backward, one behind the other. Nothing lies between the pieces: Dv is a multiple of 8.
inline size_t lay_out_saved(const AttentionProblem& problem, void* saved, Problem& p) {
  const auto rows = static_cast<size_t>(problem.B * problem.H * problem.T);
  size_t used = 0;
  const auto take = [&](size_t bytes) -> void* {  // null: counts alone
    void* const piece = saved ? static_cast<uint8_t*>(saved) + used : nullptr;
    used += bytes;
    return piece;
  };
  if (any_head(problem, [](const HeadRules& r) { return r.wide; }))
    p.residue = static_cast<int8_t*>(take(rows * static_cast<size_t>(problem.Dv)));
  if (any_head(problem, [](const HeadRules& r) { return r.consistent; })) {
    p.row_max = static_cast<float*>(take(rows * sizeof(float)));
    p.row_sum = static_cast<float*>(take(rows * sizeof(float)));
  }
  return used;
}

// Does the kernel after the rows' facts add parts of dQ in memory?
enum class Parts { added, none };

template <int kHead, bool kSmall>
size_t lay_out_work(const AttentionProblem& problem, void* workspace, Problem& p, HeadRules*& table,
                    Parts of_dq) {
  using Tiles = BackwardTiles<kHead, kSmall>;
  const int64_t heads = problem.B * problem.H;
  p.row_tiles = static_cast<int>(divide_up(problem.T, Tiles::kRows));
  p.key_tiles = static_cast<int>(divide_up(problem.N, Tiles::kKeys));
  p.padded_rows = p.row_tiles * Tiles::kRows;
  Carver parts(workspace);
  table = problem.plans.size() > 1 ? parts.take<HeadRules>(problem.H) : nullptr;
  p.next_item = parts.take<int>(kMostKernels);
  p.turn = of_dq == Parts::added ? parts.take<int>(heads * p.row_tiles) : nullptr;
  using Queries = ForwardTiles<kHead, kSmall && kChunked<kHead>>;
  if (has_few_rows(problem)) {
    const KeySplits keys(problem, DecodeTiles<kHead>::kKeys);
    p.row_tiles_of_group = static_cast<int>(keys.row_tiles);
    p.splits = static_cast<int>(keys.splits);
    p.split_tiles = static_cast<int>(keys.split_tiles);
    p.parts = parts.take<RowPart>(heads * problem.T * keys.splits);
    p.part_outputs = parts.take<float>(heads * problem.T * keys.splits * problem.Dv);
  }
  p.far_rows = any_head(problem, has_second_launch)
                   ? parts.take<uint8_t>(heads * divide_up(problem.T, Queries::kRows) * Queries::kWarps)
                   : nullptr;
  p.shift = parts.take<float>(heads * p.padded_rows);
  p.delta = parts.take<float>(heads * p.padded_rows);
  const auto where = [&](bool needed, int64_t count) { return needed ? parts.take<float>(count) : nullptr; };
  p.inverse =
      where(any_head(problem, [](const HeadRules& r) { return r.consistent; }), heads * p.padded_rows);
  p.exact_delta =
      where(any_head(problem, [](const HeadRules& r) { return r.exact_delta; }), heads * problem.T);
  p.dq_sum = where(of_dq == Parts::added, heads * p.padded_rows * kHead);
  return parts.used();
}

// f.operator()<Pairs, kHead, kSmall>() with what the problem needs. `small`: on multiprocessors with less shared memory than
// the larger tiles need (needs_small).
template <class F>
void with_kernels_of(const AttentionProblem& problem, bool small, F f) {
  const auto with_head = [&]<class Pairs>() {
    const auto with_size = [&]<int kHead>() {
      if (small)
        f.template operator()<Pairs, kHead, true>();
      else
        f.template operator()<Pairs, kHead, false>();
    };
    if (problem.D > 128 || problem.Dv != problem.D)
      with_size.template operator()<256>();
    else if (problem.D > 64)
      with_size.template operator()<128>();
    else
      f.template operator()<Pairs, 64, false>();
  };
  if (problem.type == TensorType::fp16)
    with_head.template operator()<Fp16Pairs>();
  else
    with_head.template operator()<Bf16Pairs>();
}

// Does a multiprocessor of so much shared memory for a block need the smaller tiles?
inline bool needs_small(const AttentionProblem& problem, size_t shared_bytes) {
  bool needs = false;
  with_kernels_of(problem, /*small=*/false, [&]<class Pairs, int kHead, bool kSmall>() {
    needs = shared_bytes < Backward<Pairs, kHead, kSmall, Instance::all>::kSharedBytes;
  });
  return needs;
}

// f.operator()<Instance>() with the one that the problem needs.
template <int kHead, class F>
void with_instance_of(const AttentionProblem& problem, F f) {
  const auto any = [&](auto rule) { return any_head(problem, rule); };
  const bool consistent = any([](const HeadRules&r) { return r.consistent; }),
             other = any([](const HeadRules&r) { return !r.consistent; }),
             moved = any([](const HeadRules&r) { return r.dither || r.paper_capped; });
  if (score_forms(problem).shaped || moved || (consistent && other) || (consistent && kChunked<kHead>))
    f.template operator()<Instance::all>();
  else if (!consistent)
    f.template operator()<Instance::plain>();
  else if constexpr (!kChunked<kHead>)
    f.template operator()<Instance::consistent>();
}

inline PassSizes pass_sizes(const AttentionProblem& problem, bool small) {
  PassSizes sizes;
  Problem p{};
  HeadRules* table = nullptr;
  sizes.saved = lay_out_saved(problem, nullptr, p);
  with_kernels_of(problem, small, [&]<class Pairs, int kHead, bool kSmall>() {
    sizes.workspace = lay_out_work<kHead, kSmall>(problem, nullptr, p, table, Parts::added);
  });
  return sizes;
}

// For Hopper's kernels of large heads, which come after this class's kernels of rows' facts.
inline PassSizes large_pass_sizes(const AttentionProblem& problem) {
  PassSizes sizes;
  Problem p{};
  HeadRules* table = nullptr;
  sizes.saved = lay_out_saved(problem, nullptr, p);
  sizes.workspace = lay_out_work<256, false>(problem, nullptr, p, table, Parts::none);
  return sizes;
}

// The arguments of a pass but for its outputs; fills the table of rules where heads differ.
template <int kHead, bool kSmall, class Launch>
Problem arguments(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& forward,
                  void* workspace, Launch& launch, Parts of_dq = Parts::added) {
  Problem p{};
  HeadRules* table = nullptr;
  lay_out_saved(problem, forward.saved, p);
  lay_out_work<kHead, kSmall>(problem, workspace, p, table, of_dq);
  static_cast<ScoreForms&>(p) = score_forms(problem);
  p.B = static_cast<int>(problem.B);
  p.H = static_cast<int>(problem.H);
  p.G = static_cast<int>(problem.G);
  p.D = static_cast<int>(problem.D);
  p.Dv = static_cast<int>(problem.Dv);
  p.rules = head_rules(problem.plans[0]);
  p.step = problem.step;
  p.layer = problem.layer;
  p.device_step = problem.device_step;
  p.q = strided(in.q);
  p.k = strided(in.k);
  p.v = strided(in.v);
  p.o = strided(forward.o);
  p.lse = forward.lse;
  if (table) {
    p.table = table;
    fill_table(problem, table, [&](const TableRows& rows) { launch.template run<FillTable>(1, rows); });
  }
  return p;
}

// Launch: launch.run<Kernel>(blocks, arguments), of a Kernel with kThreads, kSharedBytes, kBlocksAtOnce and run(arguments).
template <class Pairs, int kHead, bool kSmall, class Launch>
void forward_pass(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                  void* workspace, Launch& launch) {
  Problem p = arguments<kHead, kSmall>(problem, in, out, workspace, launch);
  if (has_few_rows(problem)) {
    p.exact = has_second_launch(p.rules);
    launch.template run<Decode<Pairs, kHead>>(problem.B * problem.G * p.splits * p.row_tiles_of_group, p);
    launch.template run<AddUpParts<Pairs>>(AddUpParts<Pairs>::blocks(p), p);
    return;
  }
  constexpr bool kSmaller = kSmall && kChunked<kHead>;  // the others need at most 80 KB
  const int64_t tiles = problem.B * problem.H * divide_up(problem.T, ForwardTiles<kHead, kSmaller>::kRows);
  with_instance_of<kHead>(problem, [&]<Instance kInstance>() {
    launch.template run<Forward<Pairs, kHead, kSmaller, kInstance>>(tiles, p);
  });
  if (!p.far_rows) return;
  p.exact = true;
  using Second = FarTiles<Pairs, kHead, kSmaller>;
  launch.template run<Second>(Second::blocks(tiles), p);
}

// What comes before the kernels of dQ, dK and dV: the facts of all rows, and the sinks' gradients. Returns those kernels'
// arguments.
template <class Pairs, int kHead, bool kSmall, class Launch>
Problem find_row_facts(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                       const ForwardPass& saved, const BackwardPass& out, void* workspace, Launch& launch,
                       Parts of_dq = Parts::added) {
  Problem p = arguments<kHead, kSmall>(problem, in, saved, workspace, launch, of_dq);
  p.grad_output = strided(grad_output);
  p.dq = strided(out.dq);
  p.dk = strided(out.dk);
  p.dv = strided(out.dv);
  p.delta_out = out.delta;
  p.grad_lse = out.grad_lse;
  p.dsinks = out.dsinks;
  if (p.exact_delta) launch.template run<ExactDelta<Pairs, kHead>>(ExactDelta<Pairs, kHead>::blocks(p), p);
  using Facts = RowFacts<Pairs, kHead, BackwardTiles<kHead, kSmall>>;
  launch.template run<Facts>(Facts::blocks(p), p);
  if (p.dsinks) launch.template run<SinkGradient>(p.H, p);
  return p;
}

template <class Pairs, int kHead, bool kSmall, class Launch>
void backward_pass(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                   const ForwardPass& saved, const BackwardPass& out, void* workspace, Launch& launch) {
  const Problem p =
      find_row_facts<Pairs, kHead, kSmall>(problem, in, grad_output, saved, out, workspace, launch);
  with_instance_of<kHead>(problem, [&]<Instance kInstance>() {
    using Kernel = Backward<Pairs, kHead, kSmall, kInstance>;
    launch.template run<Kernel>(Kernel::blocks(p), p);
  });
}

}  // namespace evenkeel::ampere
