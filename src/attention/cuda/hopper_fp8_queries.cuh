// A tile of q, rounded by one warp of the forward kernel: from rows in BF16 to shared memory, as the tensor cores read it.
// Internal to src/attention.
#pragma once

#include "attention/cuda/hopper_fp8_rounding.cuh"
#include "gpu/cuda/copy_engine.cuh"

namespace evenkeel::hopper_fp8 {

// The largest magnitude must be known before the first number is written, and a lane's part of the tile does not fit in its
// registers. So a lane waits for its numbers in shared memory, all at once, where nobody else touches them.
template <int kHead>
struct QueryTile {
  static constexpr int kOctets = kHead / 8, kRowsAtOnce = kWarp / kOctets, kSteps = kTileRows / kRowsAtOnce;
  using Waiting = uint4[kSteps][kWarp];

  // The tile whose first row is at `first`; `rows` of it exist (may be more), and D features. The others are zeros.
  EK_DEVICE static void round(const uint16_t* first, int64_t stride, int rows, int D, Waiting& waiting,
                              uint8_t* image, float* scale) {
    const int lane = threadIdx.x % kWarp, row = lane / kOctets, feature = lane % kOctets * 8;
    const int exist = feature < D ? rows - row : 0;
    const uint16_t* from = first + row * stride + feature;
#pragma unroll 4
    for (int n = 0; n < kSteps; ++n) {
      const bool exists = n * kRowsAtOnce < exist;
      copy_16_async(shared_address(&waiting[n][lane]), exists ? from : first, exists);
      from += stride * kRowsAtOnce;
    }
    commit_copies();
    wait_for_copies();
    const auto each = [&](auto body) {
#pragma unroll 4
      for (int n = 0; n < kSteps; ++n) body(waiting[n][lane]);
    };
    const TileScale by(largest_finite(each, warp_largest));
#pragma unroll 4
    for (int n = 0; n < kSteps; ++n)
      write_octet<kHead>(image, row + n * kRowsAtOnce, feature, waiting[n][lane], by);
    if (lane == 0) *scale = by.scale;
  }
};

}  // namespace evenkeel::hopper_fp8
