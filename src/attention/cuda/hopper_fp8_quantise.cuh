// The pass before Hopper's FP8 kernel: q, k and v from BF16 to tiles of E4M3 (hopper_fp8_tile.h), v transposed. The numbers
// are those of the rounding e4m3*tile (numerics/round_block.h), to the bit. Internal to src/attention.
#pragma once

#include "attention/cuda/hopper_fp8_tile.h"
#include "attention/cuda/sequences.cuh"
#include "gpu/cuda/wgmma_e4m3.cuh"
#include "numerics/format.h"

namespace evenkeel::hopper_fp8 {

using namespace gpu;

struct QuantiseArguments {
  struct Operand {
    const uint16_t* data;  // (B, heads, rows, D), BF16
    int64_t stride[3];     // batch, head, row
    int heads, tiles;      // tiles of the longest sequence
    uint8_t* target;       // (B, heads, tiles), tile_bytes each
  };
  Operand q, k, v;
  Sequences sequences;
  int B, D;
  uint32_t* next_tile;  // the forward kernel's counter: cleared here
};

// One tile a block; a thread rounds 8 features of 4 rows. Reads 2 bytes and writes 1 for each number.
template <int kHead>
struct Quantise {
  static constexpr int kOctets = kHead / 8, kPerThread = 4;
  static constexpr int kThreads = kTileRows / kPerThread * kOctets, kBlocksAtOnce = 4;
  static constexpr size_t kSharedBytes = kThreads / 32 * sizeof(uint32_t);
  static constexpr float kTarget = scale_target(kE4m3);

  EK_DEVICE static void run(const QuantiseArguments& a) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.next_tile = 0;
    int index = blockIdx.x;
    if (index < count(a, a.q)) return round_tile<false>(a, a.q, index, /*is_query=*/true);
    index -= count(a, a.q);
    if (index < count(a, a.k)) return round_tile<false>(a, a.k, index, false);
    round_tile<true>(a, a.v, index - count(a, a.k), false);
  }
  EK_DEVICE static int count(const QuantiseArguments& a, const QuantiseArguments::Operand& x) {
    return a.B * x.heads * x.tiles;
  }

  // q, k: lanes side by side hold octets of one row. The rows of v: 16 lanes side by side hold one octet of all 64 keys.
  // Each has the four keys that make one word of a line.
  template <bool kValue>
  EK_DEVICE static int octet() {
    return kValue ? threadIdx.x / 16 : threadIdx.x % kOctets;
  }
  template <bool kValue>
  EK_DEVICE static int row(int n) {
    if (!kValue) return threadIdx.x / kOctets + n * (kTileRows / kPerThread);
    const int word = threadIdx.x % 16;
    return word / 4 * 16 + word % 4 * 2 + n / 2 * 8 + n % 2;
  }

  template <bool kValue>
  EK_DEVICE static void round_tile(const QuantiseArguments& a, const QuantiseArguments::Operand& x, int index,
                                   bool is_query) {
    const int head = index / x.tiles, tile = index % x.tiles, b = head / x.heads;
    const Sequence s = sequence(a.sequences, b);
    const int first = tile * kTileRows, rows = is_query ? s.rows : s.keys;
    if (first >= rows) return;  // nobody reads it
    const uint16_t* const from =
        x.data + (is_query ? s.query_batch : s.key_batch) * x.stride[0] + head % x.heads * x.stride[1] +
        (static_cast<int64_t>(is_query ? s.first_row : s.first_key) + first) * x.stride[2];
    uint4 loaded[kPerThread];
    const int feature = octet<kValue>() * 8;
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      loaded[n] = uint4{0, 0, 0, 0};
      if (first + row<kValue>(n) < rows && feature < a.D)
        loaded[n] = *reinterpret_cast<const uint4*>(from + row<kValue>(n) * x.stride[2] + feature);
    }
    const float scale = scale_of(largest(loaded));
    uint8_t* const to = x.target + index * tile_bytes(kHead);
    write<kValue>(to, loaded, scale);
    if (threadIdx.x == 0)
      *reinterpret_cast<float4*>(to + image_bytes(kHead)) = float4{scale, scale, scale, scale};
  }

  // ScaleRule::fp32. A tile of zeros keeps its zeros under any scale; 1 makes no NaN of a masked score.
  EK_DEVICE static float scale_of(float largest) { return largest == 0 ? 1.0f : __fdiv_rn(largest, kTarget); }

  // Of the block: the largest finite magnitude.
  EK_DEVICE static float largest(const uint4 (&loaded)[kPerThread]) {
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const uint32_t words[4] = {loaded[n].x, loaded[n].y, loaded[n].z, loaded[n].w};
#pragma unroll
      for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t magnitude = (half ? words[w] >> 16 : words[w]) & 0x7fffu;
          if (magnitude < 0x7f80u && magnitude > most) most = magnitude;
        }
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
      const uint32_t other = __shfl_xor_sync(~0u, most, lane);
      most = other > most ? other : most;
    }
    auto* const of_warp = reinterpret_cast<uint32_t*>(dynamic_shared());
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) most = of_warp[warp] > most ? of_warp[warp] : most;
    return __uint_as_float(most << 16);
  }

  EK_DEVICE static float number(const uint4& loaded, int i) {
    const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    return i % 2 ? high_bf16(words[i / 2]) : low_bf16(words[i / 2]);
  }
  template <bool kValue>
  EK_DEVICE static void write(uint8_t* to, const uint4 (&loaded)[kPerThread], float scale) {
    const auto scaled = [&](int n, int i) { return __fdiv_rn(number(loaded[n], i), scale); };
    if constexpr (kValue) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        *reinterpret_cast<uint32_t*>(
            to + tile_offset(octet<true>() * 8 + i, value_slot(row<true>(0)), line_bytes(true, kHead))) =
            pack_e4m3(scaled(0, i), scaled(1, i), scaled(2, i), scaled(3, i));
    } else {
#pragma unroll
      for (int n = 0; n < kPerThread; ++n)
        *reinterpret_cast<uint2*>(to +
                                  tile_offset(row<false>(n), octet<false>() * 8, line_bytes(false, kHead))) =
            uint2{pack_e4m3(scaled(n, 0), scaled(n, 1), scaled(n, 2), scaled(n, 3)),
                  pack_e4m3(scaled(n, 4), scaled(n, 5), scaled(n, 6), scaled(n, 7))};
    }
  }
};

}  // namespace evenkeel::hopper_fp8
