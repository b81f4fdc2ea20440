// The two passes before Hopper's FP8 kernel: q, k and v from BF16 to tiles of E4M3 (hopper_fp8_tile.h), v transposed. The
// numbers are those of the roundings e4m3*tile (q, k) and e4m3*head (v) of numerics/round_block.h, to the bit. Internal to
// src/attention.
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
    int heads, tiles;      // tiles of the longest sequence, whole pairs
    uint8_t* target;       // (B, heads, tiles)
  };
  Operand q, k, v;
  Sequences sequences;
  int B, D;
  uint32_t* next_tile;  // the forward kernel's counter: cleared here
  uint32_t*
      v_largest;  // (B, heads, tiles): the largest finite magnitude's bits, and kInfinite where one is not finite
};

// A tile a block, of which a thread has 8 features of 4 rows.
template <int kHead>
struct QuantiseTile {
  static constexpr int kOctets = kHead / 8, kPerThread = 4;
  static constexpr int kThreads = kTileRows / kPerThread * kOctets;
  static constexpr size_t kSharedBytes = kThreads / 32 * sizeof(uint32_t);
  static constexpr float kTarget = scale_target(kE4m3);
  static constexpr uint32_t kInfinite = 0x80000000u;

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

  // The numbers of tile `index` of x, zeros where it has none. False: nobody reads its pair.
  template <bool kValue>
  EK_DEVICE static bool load(const QuantiseArguments& a, const QuantiseArguments::Operand& x, int index,
                             bool is_query, uint4 (&loaded)[kPerThread]) {
    const int head = index / x.tiles, tile = index % x.tiles, b = head / x.heads;
    const Sequence s = sequence(a.sequences, b);
    const int first = tile * kTileRows, rows = is_query ? s.rows : s.keys;
    if (first / kPairRows * kPairRows >= rows) return false;
    const uint16_t* const from =
        x.data + (is_query ? s.query_batch : s.key_batch) * x.stride[0] + head % x.heads * x.stride[1] +
        (static_cast<int64_t>(is_query ? s.first_row : s.first_key) + first) * x.stride[2];
    const int feature = octet<kValue>() * 8;
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      loaded[n] = uint4{0, 0, 0, 0};
      if (first + row<kValue>(n) < rows && feature < a.D)
        loaded[n] = *reinterpret_cast<const uint4*>(from + row<kValue>(n) * x.stride[2] + feature);
    }
    return true;
  }
  // `finite`: all numbers of the tile are. `most`: the largest magnitude that shares the scale.
  template <bool kValue>
  EK_DEVICE static void round(const QuantiseArguments::Operand& x, int index,
                              const uint4 (&loaded)[kPerThread], float most, bool finite) {
    const float scale = scale_of(most);
    uint8_t* const to = x.target + image_offset(index, kHead);
    if (finite && most >= kLeastQuick) {
      const float inverse = __fdiv_rn(1.0f, scale);
      write<kValue>(to, loaded, [=](float number) { return quotient(number, scale, inverse); });
    } else {
      write<kValue>(to, loaded, [=](float number) { return __fdiv_rn(number, scale); });
    }
    if (threadIdx.x == 0)
      *reinterpret_cast<float4*>(x.target + scale_offset(index, kHead)) = float4{scale, scale, scale, scale};
  }

  // ScaleRule::fp32. A tile of zeros keeps its zeros under any scale; 1 makes no NaN of a masked score.
  EK_DEVICE static float scale_of(float largest) { return largest == 0 ? 1.0f : __fdiv_rn(largest, kTarget); }

  // number / scale to the bit wherever E4M3 can tell it from zero, by four instructions instead of two dozen (Markstein's
  // correction; inverse is 1 / scale, rounded). REQUIRES: a finite BF16 number, the scale of a largest one >= kLeastQuick: then
  // no remainder is subnormal.
  static constexpr float kLeastQuick = 0x1p-80f;
  EK_DEVICE static float quotient(float number, float scale, float inverse) {
    const float near = number * inverse;
    return fmaf(-fmaf(near, scale, -number), inverse, near);  // this way round -0 stays -0
  }

  // The bits of the tile's largest finite magnitude, and kInfinite where not all numbers are finite.
  EK_DEVICE static uint32_t largest(const uint4 (&loaded)[kPerThread]) {
    constexpr uint32_t kInfinity = 0x7f80u;
    const uint32_t most = block_max(most_of(loaded, [](uint32_t magnitude) { return magnitude; }));
    if (most < kInfinity) return most;
    __syncthreads();  // the warps' maxima are read
    return kInfinite | block_max(most_of(loaded, [](uint32_t magnitude) {
             return magnitude < kInfinity ? magnitude : 0u;
           }));
  }
  EK_DEVICE static float magnitude(uint32_t largest) { return __uint_as_float(largest << 16); }
  EK_DEVICE static bool finite(uint32_t largest) { return !(largest & kInfinite); }
  template <class Magnitude>
  EK_DEVICE static uint32_t most_of(const uint4 (&loaded)[kPerThread], Magnitude counted) {
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const uint32_t words[4] = {loaded[n].x, loaded[n].y, loaded[n].z, loaded[n].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        most = larger(most, counted(words[w] & 0x7fffu));
        most = larger(most, counted(words[w] >> 16 & 0x7fffu));
      }
    }
    return most;
  }
  EK_DEVICE static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
  EK_DEVICE static uint32_t block_max(uint32_t most) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) most = larger(most, __shfl_xor_sync(~0u, most, lane));
    auto* const of_warp = reinterpret_cast<uint32_t*>(dynamic_shared());
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) most = larger(most, of_warp[warp]);
    return most;
  }

  EK_DEVICE static float number(const uint4& loaded, int i) {
    const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    return i % 2 ? high_bf16(words[i / 2]) : low_bf16(words[i / 2]);
  }
  template <bool kValue, class Divide>
  EK_DEVICE static void write(uint8_t* to, const uint4 (&loaded)[kPerThread], Divide divide) {
    const auto scaled = [&](int n, int i) { return divide(number(loaded[n], i)); };
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

// q and k to tiles, and the largest magnitudes of v's. Reads 2 bytes a number and writes 1 (v: none).
template <int kHead>
struct Quantise : QuantiseTile<kHead> {
  using Tile = QuantiseTile<kHead>;
  static constexpr int kBlocksAtOnce = 5;  // as many as registers allow
  EK_DEVICE static int count(const QuantiseArguments& a, const QuantiseArguments::Operand& x) {
    return a.B * x.heads * x.tiles;
  }
  EK_DEVICE static void run(const QuantiseArguments& a) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.next_tile = 0;
    int index = blockIdx.x;
    if (index < count(a, a.q)) return round_tile(a, a.q, index, /*is_query=*/true);
    index -= count(a, a.q);
    if (index < count(a, a.k)) return round_tile(a, a.k, index, false);
    index -= count(a, a.k);
    uint4 loaded[Tile::kPerThread];
    if (!Tile::template load<false>(a, a.v, index, false, loaded)) return;
    const uint32_t largest = Tile::largest(loaded);
    if (threadIdx.x == 0) a.v_largest[index] = largest;
  }
  EK_DEVICE static void round_tile(const QuantiseArguments& a, const QuantiseArguments::Operand& x, int index,
                                   bool is_query) {
    uint4 loaded[Tile::kPerThread];
    if (!Tile::template load<false>(a, x, index, is_query, loaded)) return;
    const uint32_t largest = Tile::largest(loaded);
    Tile::template round<false>(x, index, loaded, Tile::magnitude(largest), Tile::finite(largest));
  }
};

// v to tiles, after Quantise. Last tiles first: those are still in the cache.
template <int kHead>
struct QuantiseValues : QuantiseTile<kHead> {
  using Tile = QuantiseTile<kHead>;
  static constexpr int kBlocksAtOnce = 6;
  EK_DEVICE static void run(const QuantiseArguments& a) {
    const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    uint4 loaded[Tile::kPerThread];
    if (!Tile::template load<true>(a, a.v, index, false, loaded)) return;
    const int head = index / a.v.tiles,
              tiles = (sequence(a.sequences, head / a.v.heads).keys + kTileRows - 1) / kTileRows;
    const uint32_t* const of_head = a.v_largest + static_cast<int64_t>(head) * a.v.tiles;
    uint32_t most = 0;
    for (int n = static_cast<int>(threadIdx.x); n < tiles; n += Tile::kThreads)
      most = Tile::larger(most, of_head[n] & ~Tile::kInfinite);
    Tile::template round<true>(a.v, index, loaded, Tile::magnitude(Tile::block_max(most)),
                               Tile::finite(a.v_largest[index]));
  }
};

}  // namespace evenkeel::hopper_fp8
