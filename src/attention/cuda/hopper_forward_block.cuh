// A block of Hopper's forward pass, and which instance a problem needs: all of it but for the launch. The emulator of the
// tests runs it, too.
//
// A block stays on its multiprocessor and takes query tiles from a counter, the longest first. One thread of
// the last warpgroup drives the copy engine. Each of the others owns 64 rows and works alone on them. It issues
// the scores of the next key tile (across the border of query tiles too, where Q has two places) before the product
// P V of this one. So the softmax of one is computed while the tensor cores do the other. Key tiles run from the last to
// the first: the masked ones come first, and a warpgroup leaves out those that none of its rows sees.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/cuda/hopper_forward_tiles.cuh"
#include "attention/cuda/hopper_forward_worker.cuh"
#include "base/sizes.h"

namespace evenkeel::hopper::forward {

template <class Pairs_, class Tiles_, Shift kShift, bool kForms, bool kFacts>
struct Block {
  using Pairs = Pairs_;
  using T = Tiles_;
  static constexpr bool kIsSecond = kShift == Shift::exact;  // behind the launch with plain shifts

  EK_DEVICE static void run(const CUtensorMap& q_map, const CUtensorMap& k_map, const CUtensorMap& v_map,
                            const CUtensorMap& o_map, const ForwardArguments& a) {
    if (kIsSecond && *a.far_rows == 0) return;
    auto& shared = *reinterpret_cast<typename T::Shared*>(dynamic_shared());
    if (threadIdx.x == 0) {
      constexpr int kWarps = T::kWorkers / 32;
      for (int i = 0; i < T::kQueryStages; ++i)
        for (int part = 0; part < T::kQueryParts; ++part) {
          barrier_init(&shared.q_full[i][part], 1);
          barrier_init(&shared.q_empty[i][part], kWarps / T::kQueryParts);
        }
      for (int i = 0; i < T::kStages; ++i) {
        barrier_init(&shared.k_full[i], 1), barrier_init(&shared.k_empty[i], kWarps);
        barrier_init(&shared.v_full[i], 1), barrier_init(&shared.v_empty[i], kWarps);
      }
      barrier_init_fence();
      prefetch_map(q_map), prefetch_map(k_map), prefetch_map(v_map), prefetch_map(o_map);
    }
    for (size_t at = threadIdx.x * 4; at < sizeof(shared.ones); at += T::kThreads * 4)
      *reinterpret_cast<uint32_t*>(shared.ones + at) = Pairs::kOnes;
    store_fence();
    __syncthreads();
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (group == T::kWarpgroups) {
      give_registers<T::kCopyRegisters>();
      if (threadIdx.x == T::kWorkers) Copier<kForms, T>(shared, q_map, k_map, v_map, a).run();
    } else {
      take_registers<T::kWorkRegisters>();
      Worker<Pairs, T, kShift, kForms, kFacts>(shared, a, o_map, group).run();
    }
  }
};

// f.operator()<Tiles>() with those for the problem's head sizes.
template <bool kLarge, bool kForms, class F>
void with_tiles_of(const AttentionProblem& problem, F f) {
  const auto with_sizes = [&]<int kHeadSize, int kValueSize>() {
    f.template operator()<Tiles<kHeadSize, kValueSize>>();
  };
  if constexpr (kLarge)
    with_large_sizes<kForms>(problem, with_sizes);
  else if (problem.D <= 64)
    with_sizes.template operator()<64, 64>();
  else
    with_sizes.template operator()<128, 128>();
}

// f.operator()<Block>() with the one for the heads' shift, then with that of the second launch, if there is one.
template <class Pairs, class T, bool kForms, bool kFacts, class F>
void with_blocks_of(const HeadRules& rules, F f) {
  if (rules.consistent)
    f.template operator()<Block<Pairs, T, Shift::consistent, kForms, kFacts>>();
  else if (rules.paper_capped)
    f.template operator()<Block<Pairs, T, Shift::paper_capped, kForms, kFacts>>();
  else
    f.template operator()<Block<Pairs, T, Shift::plain, kForms, kFacts>>();
  if (has_second_launch(rules)) f.template operator()<Block<Pairs, T, Shift::exact, kForms, kFacts>>();
}

// The arguments of a launch on so many blocks; words: of its group.
template <class Block>
ForwardArguments launch_arguments(const AttentionProblem& problem, const ForwardArguments& group,
                                  LaunchWords* words, int multiprocessors, int& blocks) {
  ForwardArguments a = group;
  a.tiles_per_head = static_cast<int>(divide_up(problem.T, Block::T::kRows));
  const int tiles = a.tiles_per_head * a.heads;
  blocks = std::min(multiprocessors, tiles);
  a.next_tile = tiles > blocks ? &words->next_tile[Block::kIsSecond ? 1 : 0] : nullptr;
  a.far_rows = has_second_launch(a.rules) ? &words->far_rows : nullptr;
  return a;
}

// What a launch hands to its blocks.
template <class T>
struct BlockMaps {
  CUtensorMap q, k, v, o;
  BlockMaps(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out)
      : q(query_map(problem, in.q, T::kPartRows)),
        k(key_map(problem, in.k, T::kKeys)),
        v(value_map(problem, in.v, T::kKeys)),
        o(output_map(problem, out.o, kWarpgroupRows / 4)) {}
};

// All heads, in as few groups as their plans allow: each is computed as if all heads had its plan.
inline std::vector<ForwardArguments> forward_groups(const AttentionProblem& problem, const ForwardPass& out) {
  ForwardArguments a{};
  static_cast<ScoreForms&>(a) = score_forms(problem);
  a.o = static_cast<uint16_t*>(out.o.data);
  for (size_t axis = 0; axis < 3; ++axis) a.o_stride[axis] = out.o.stride[axis];
  a.lse = out.lse;
  a.H = static_cast<int>(problem.H);
  a.heads_per_group = static_cast<int>(problem.H / problem.G);
  a.Dv = static_cast<int>(problem.Dv);
  a.device_step = problem.device_step;
  a.below_all = -1;
  a.largest_score = out.largest_score;
  a.largest_row_mean = out.largest_row_mean;
  const Saved saved = saved_layout(problem, out.saved);
  std::vector<ForwardArguments> groups;
  for (const HeadGroup& group : head_groups(problem, computed_alike)) {
    a.rules = group.rules;
    a.list = group.list;
    a.random = {group.rules.seed, problem.step, problem.layer * 64 + 63};
    a.saved = saved;
    if (!group.rules.wide) a.saved.residue = nullptr;
    a.heads = static_cast<int>(problem.B) * group.list.count;
    a.section_heads = heads_in_cache(problem, a.heads);
    groups.push_back(a);
  }
  return groups;
}

// launch.operator()<Block>(maps, arguments, blocks) for each launch of all groups, in order. words: one for each group, zeros.
template <class Pairs, bool kLarge, bool kForms, bool kFacts, class Launch>
void for_each_launch(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
                     const std::vector<ForwardArguments>& groups, LaunchWords* words, int multiprocessors,
                     Launch launch) {
  with_tiles_of<kLarge, kForms>(problem, [&]<class T>() {
    const BlockMaps<T> maps(problem, in, out);
    for (size_t n = 0; n < groups.size(); ++n)
      with_blocks_of<Pairs, T, kForms, kFacts>(groups[n].rules, [&]<class Block>() {
        int blocks;
        const ForwardArguments a =
            launch_arguments<Block>(problem, groups[n], words + n, multiprocessors, blocks);
        launch.template operator()<Block>(maps, a, blocks);
      });
  });
}

}  // namespace evenkeel::hopper::forward
