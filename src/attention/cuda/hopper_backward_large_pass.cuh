// What the two backward kernels of Hopper for head sizes above 128 share: arguments, tensor maps, loads of tiles, the thread of
// a warpgroup. Included by hopper_backward_large_keys.cuh and hopper_backward_large_rows.cuh.
#pragma once

#include "attention/cuda/ampere_passes.h"
#include "attention/cuda/hopper.cuh"
#include "attention/cuda/hopper_backward_scores.cuh"

namespace evenkeel::hopper::backward::large {

inline constexpr int kItems = 2;  // that are worked on or known

// What an instance of the kernels takes.
enum class Instance {
  plain,       // a causal or full mask
  consistent,  // the same with heads that are consistent
  forms,       // that, windows, soft caps, slopes, masks and sinks: what is asked for is read at run time
};

// Arguments of a kernel.
struct Pass : ampere::Problem {
  int section_heads;  // kv heads or heads whose other tensors fit the cache: a section of items
  float below_all;    // -1, for hold: the assembler must not know
};

// What a launch hands to its blocks: boxes of so many rows and keys.
struct Maps {
  CUtensorMap q, k, v, grad_output;
  Maps(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad, int rows, int keys)
      : q(query_map(problem, in.q, rows)),
        k(key_map(problem, in.k, keys)),
        v(value_map(problem, in.v, keys)),
        grad_output(output_map(problem, grad, rows)) {}
};

// kv heads whose Q and dO fit the part of the second-level cache that is theirs.
inline int key_heads_in_cache(const AttentionProblem& problem, int key_heads) {
  AttentionProblem turned = problem;  // rows for keys
  turned.N = problem.T * (problem.H / problem.G);
  turned.H = turned.G;
  return heads_in_cache(turned, key_heads);
}

template <int kBoxes, int kRows>
EK_DEVICE void load_boxes(uint8_t (&tile)[kBoxes][kRows][kRowBytes], const CUtensorMap& map, uint64_t* full,
                          int row, int head, int batch) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) load_box(tile[box], map, full, box * kBoxFeatures, row, head, batch);
}

// A thread of a warpgroup that computes.
struct Worker {
  const int thread, warp, lane;

  EK_DEVICE Worker() : thread(threadIdx.x % kWarpgroup), warp(thread / 32), lane(thread % 32) {}
  EK_DEVICE void arrive(uint64_t* barrier) const {  // of all lanes' accesses so far
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }
};

// sums += left times 16 rows of a tile for each four words of `left`, which are an accumulator's, packed. tile: a descriptor.
template <int kFeatures, bool kFp16, int kWords>
EK_DEVICE void add_product(const uint32_t (&left)[kWords], uint64_t tile, float (&sums)[kFeatures / 2]) {
  constexpr uint32_t kNext16Rows = 16 * kRowBytes;
  products_begin();
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i)
    Wgmma<kFeatures, kFp16>::template rs<true>(sums, left[4 * i], left[4 * i + 1], left[4 * i + 2],
                                               left[4 * i + 3], advance(tile, i * kNext16Rows), true);
  products_commit();
}

// Scores of a tile as softmax sees them, but for the band: with a soft cap (they are then tanh), slopes, and without what a mask
// of its own hides. place(i): the row and key of a thread's score i, from the tile's first. kAtOnce: elements of a mask that are
// on their way at once, as registers allow.
struct Place {
  int row, key;
};
template <int kAtOnce, int kScores, class PlaceOf>
EK_DEVICE void shape_scores(const Pass& p, const Band& band, int b, int h, int first_row, int first_key,
                            float (&scores)[kScores], PlaceOf place) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) f(scores[i], place(i).row, place(i).key);
  };
  if (p.softcap > 0) {
    const float factor = p.scale / p.softcap;
    each([&](float& x, int, int) { x = tanh_of(x * factor); });
  }
  if (p.slopes) {
    const float slope = slope_of(p, h);
    const int distance = first_row + band.offset - first_key;
    each([&](float& x, int row, int key) {
      x = fmaf(-slope, fabsf(static_cast<float>(distance + row - key)), x);
    });
  }
  if (!p.visible) return;
  // As bits first. Which of the rows and keys behind the end are hidden does not matter.
  const Visible visible(p, b, h);
  static_assert(kScores <= 32);
  uint32_t hidden = 0;
#pragma unroll kAtOnce
  for (int i = 0; i < kScores; ++i) {
    const int row = min(first_row + place(i).row, band.s.rows - 1),
              key = min(first_key + place(i).key, band.s.keys - 1);
    hidden |= static_cast<uint32_t>(!visible(row, key)) << i;
  }
#pragma unroll
  for (int i = 0; i < kScores; ++i)
    if (hidden >> i & 1) scores[i] = -INFINITY;
}

// Nothing that follows starts before all of `numbers` are known: products that run beside their arithmetic are not waited for
// before it.
template <int n>
EK_DEVICE void hold_all(const float (&numbers)[n], float below_all) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) bits |= __float_as_uint(numbers[i]);
  hold(__uint_as_float(bits & 0x7fffffffu), below_all);
}

}  // namespace evenkeel::hopper::backward::large
