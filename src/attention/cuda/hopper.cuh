// What the Hopper kernels share. sm_90a. Internal to src/attention.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/cuda/head_rules.cuh"
#include "attention/cuda/hopper_host.h"
#include "attention/cuda/pairs.cuh"
#include "attention/cuda/score_forms.cuh"
#include "attention/cuda/warpgroup.cuh"
#include "gpu/cuda/barriers.cuh"
#include "gpu/cuda/copy_engine.cuh"
#include "gpu/cuda/mma.cuh"
#include "gpu/cuda/raise.cuh"
#include "gpu/cuda/warp.cuh"
#include "gpu/cuda/wgmma.cuh"

namespace evenkeel::hopper {

using namespace gpu;

// sums = A B^T over kFeatures features, both in shared memory, their boxes of 64 features kBoxA and kBoxB bytes apart.
template <int kFeatures, int kBoxA, int kBoxB, bool kFp16, int kSums>
EK_DEVICE void begin_product(float (&sums)[kSums], uint64_t a, uint64_t b) {
  constexpr int kNext16 = 32;  // bytes
  products_begin();
#pragma unroll
  for (int step = 0; step < kFeatures / 16; ++step)
    Wgmma<2 * kSums, kFp16>::template ss<false, false>(
        sums, advance(a, step / 4 * kBoxA + step % 4 * kNext16),
        advance(b, step / 4 * kBoxB + step % 4 * kNext16), step > 0);
  products_commit();
}

// The heads of every sequence that a launch computes: kernel arguments carry them.
struct HeadList {
  static constexpr int kMost = 128;
  int count;
  bool all;  // heads 0 ... count - 1
  uint16_t head[kMost];
  EK_DEVICE int head_at(int n) const { return all ? n : head[n]; }
};

// Heads that one launch computes.
struct HeadGroup {
  HeadRules rules;
  HeadList list;
};

// Does the forward pass treat heads with these rules alike?
inline bool computed_alike(const HeadRules& a, const HeadRules& b) {
  return a.consistent == b.consistent && a.paper_capped == b.paper_capped && a.dither == b.dither &&
         a.wide == b.wide && a.slack == b.slack && a.seed == b.seed && a.beta == b.beta && a.cap == b.cap &&
         a.tie_tolerance == b.tie_tolerance;
}

// All heads, in as few groups as `alike` allows; one for all where they have one plan.
template <class Alike>
std::vector<HeadGroup> head_groups(const AttentionProblem& problem, Alike alike) {
  std::vector<HeadGroup> groups;
  if (problem.plans.size() == 1) {
    HeadGroup& only = groups.emplace_back();
    only.rules = head_rules(problem.plans[0]);
    only.list.count = static_cast<int>(problem.H);
    only.list.all = true;
    return groups;
  }
  for (size_t h = 0; h < problem.plans.size(); ++h) {
    const HeadRules rules = head_rules(problem.plans[h]);
    auto found = std::find_if(groups.begin(), groups.end(), [&](const HeadGroup& group) {
      return alike(group.rules, rules) && group.list.count < HeadList::kMost;
    });
    if (found == groups.end()) {
      found = groups.emplace(groups.end());
      found->rules = rules;
      found->list = {};
    }
    found->list.head[found->list.count++] = static_cast<uint16_t>(h);
  }
  return groups;
}

// f.operator()<head size, that of values>() with the tiles that hold the problem's, where one of them is above 128 or they differ.
// With forms all take the largest: each size is seconds of the compiler's time, and few models have the others.
template <bool kForms, class F>
void with_large_sizes(const AttentionProblem& problem, F f) {
  if constexpr (!kForms) {
    if (problem.D <= 192 && problem.Dv <= 128) return f.template operator()<192, 128>();
    if (problem.D <= 192 && problem.Dv <= 192) return f.template operator()<192, 192>();
  }
  f.template operator()<256, 256>();
}

// Heads (of all sequences) whose keys and values fit the part of the second-level cache that is theirs.
inline int heads_in_cache(const AttentionProblem& problem, int heads) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t key_bytes =
      std::max<int64_t>(1, problem.N * (problem.D + problem.Dv) * 2);  // K and V of one head
  return static_cast<int>(std::clamp<int64_t>(kCacheBytes / key_bytes * (problem.H / problem.G), 1, heads));
}

}  // namespace evenkeel::hopper
