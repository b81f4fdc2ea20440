// What the warpgroups of Hopper's kernels share: a thread's place in them, and the order in which blocks take query tiles.
// Internal to src/attention.
#pragma once

#include "gpu/cuda/barriers.cuh"
#include "gpu/cuda/warp.cuh"

namespace evenkeel::hopper {

using namespace gpu;

// A thread of a warpgroup that works on 64 rows of accumulators.
struct WarpgroupThread {
  const int group;   // which warpgroup of the working ones
  const int thread;  // in it
  const int lane_row,
      lane_column;  // of the accumulator's first element, in the warpgroup's 64 rows and a tile's keys

  EK_DEVICE explicit WarpgroupThread(int group_)
      : group(group_),
        thread(threadIdx.x % kWarpgroup),
        lane_row(thread / 32 * 16 + thread % 32 / 4),
        lane_column(thread % 4 * 2) {}

  EK_DEVICE void release(uint64_t* empty) const {
    if (thread % 32 == 0) barrier_arrive(empty);
  }
};

// The query tile at `index`: sections of heads whose keys fit the cache; in each, last tiles (the longest with a causal mask)
// first.
struct TilePlace {
  int tile, head;
  EK_DEVICE TilePlace(int index, int tiles_per_head, int heads, int heads_per_section) {
    const int section = index / (heads_per_section * tiles_per_head);
    const int in_section = index - section * heads_per_section * tiles_per_head;
    const int section_heads = min(heads_per_section, heads - section * heads_per_section);
    tile = tiles_per_head - 1 - in_section / section_heads;
    head = section * heads_per_section + in_section % section_heads;
  }
};

}  // namespace evenkeel::hopper
