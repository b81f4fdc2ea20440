// q, k and v rounded to E4M3 with scales that are powers of two: e4m3*tile@e8m0_up (q, k) and e4m3*head@e8m0_up (v) of
// numerics/round_block.h, to the bit. Two passes before either kernel. For the forward kernel they write E4M3 tiles
// (hopper_fp8_tile.h), v transposed. For the backward kernel they write the same numbers in BF16, which has them exactly, in rows
// as the given tensors have them. Internal to src/attention.
#pragma once

#include "attention/cuda/hopper_fp8_tile.h"
#include "attention/cuda/sequences.cuh"
#include "gpu/cuda/wgmma_e4m3.cuh"
#include "numerics/format.h"

namespace evenkeel::hopper_fp8 {

using namespace gpu;

enum class Target { tiles, rows };

struct QuantiseArguments {
  struct Operand {
    const uint16_t* data;  // (B, heads, rows, D), BF16
    int64_t stride[3];     // batch, head, row
    int heads, tiles;      // tiles of the longest sequence, whole pairs
    uint8_t* target;       // Target::tiles: (B, heads, tiles)
    uint16_t* rounded;     // Target::rows: as `data`
    int64_t rounded_stride[3];
  };
  Operand q, k, v;
  Sequences sequences;
  int B, D;
  uint32_t* next_item;  // the forward kernel's counter, cleared here; or null
  uint32_t* v_largest;  // (B, heads, tiles): bits of the largest finite magnitude
};

// A power of two by which a tile's numbers, or a head's, are E4M3 numbers. `largest` has the bits of their largest finite
// magnitude in BF16.
static_assert(scale_target(kE4m3) == 1.75f * 256);
struct TileScale {
  float scale, inverse;
  EK_DEVICE explicit TileScale(uint32_t largest) {
    // ScaleRule::e8m0_up: 2^8 times the scale is largest's own power of two, or the next one if largest is above 1.75 of it
    // (the target is 1.75 2^8). Both are in reach: from 2^-127, a subnormal number, which zeros get too, up to 2^120.
    constexpr uint32_t kSignificands = 128, kTop = kSignificands * 3 / 4;
    const uint32_t above = (largest + kSignificands - 1 - kTop) / kSignificands;
    const uint32_t exponent = above > 8 ? above - 8 : 0;
    scale = __uint_as_float(exponent ? exponent << 23 : 1u << 22);
    inverse = __uint_as_float((254 - exponent) << 23);
  }
};

// A tile a block, of which a thread has 8 features of 4 rows.
template <int kHead>
struct QuantiseTile {
  static constexpr int kOctets = kHead / 8, kPerThread = 4;
  static constexpr int kThreads = kTileRows / kPerThread * kOctets;
  static constexpr size_t kSharedBytes = kThreads / 32 * sizeof(uint32_t);
  using Numbers = uint4[kPerThread];

  // Of rows: lanes side by side hold octets of one row. Of columns (v's tiles): 16 lanes side by side hold one octet of all 64
  // keys. Each has the four keys that make one word of a line.
  template <bool kColumns>
  EK_DEVICE static int octet() {
    return kColumns ? threadIdx.x / 16 : threadIdx.x % kOctets;
  }
  template <bool kColumns>
  EK_DEVICE static int row(int n) {
    if (!kColumns) return threadIdx.x / kOctets + n * (kTileRows / kPerThread);
    const int word = threadIdx.x % 16;
    return word / 4 * 16 + word % 4 * 2 + n / 2 * 8 + n % 2;
  }

  // Where tile `index` of an operand lies on the axes of its tensors.
  struct Place {
    int64_t batch, head, row;  // of the tile's first row
    int rows;                  // that exist from there on; may be none
    bool read;                 // does anybody read the tile's pair?

    EK_DEVICE Place(const QuantiseArguments& a, const QuantiseArguments::Operand& x, int index,
                    bool is_query) {
      const int of_all = index / x.tiles, b = of_all / x.heads, first = index % x.tiles * kTileRows;
      const Sequence s = sequence(a.sequences, b);
      batch = is_query ? s.query_batch : s.key_batch;
      head = of_all % x.heads;
      row = static_cast<int64_t>(is_query ? s.first_row : s.first_key) + first;
      rows = (is_query ? s.rows : s.keys) - first;
      read = rows + first > first / kPairRows * kPairRows;
    }
    template <class Number>
    EK_DEVICE Number* of(Number* tensor, const int64_t (&stride)[3]) const {
      return tensor + batch * stride[0] + head * stride[1] + row * stride[2];
    }
  };

  // The tile's numbers, zeros where it has none.
  template <bool kColumns>
  EK_DEVICE static void load(const QuantiseArguments& a, const QuantiseArguments::Operand& x,
                             const Place& place, Numbers& loaded) {
    const uint16_t* const from = place.of(x.data, x.stride);
    const int feature = octet<kColumns>() * 8;
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      loaded[n] = uint4{0, 0, 0, 0};
      if (row<kColumns>(n) < place.rows && feature < a.D)
        loaded[n] = *reinterpret_cast<const uint4*>(from + row<kColumns>(n) * x.stride[2] + feature);
    }
  }

  // What the tile's threads loaded, rounded, to its place. `largest`: of all that share the scale.
  template <Target kTarget, bool kColumns>
  EK_DEVICE static void write(const QuantiseArguments& a, const QuantiseArguments::Operand& x, int index,
                              const Place& place, const Numbers& loaded, uint32_t largest) {
    const TileScale by(largest);
    if constexpr (kTarget == Target::rows) {
      write_rows(a, x, place, loaded, by);
      return;
    }
    uint8_t* const to = x.target + image_offset(index, kHead);
    if constexpr (kColumns)
      write_columns(to, loaded, by);
    else
      write_lines(to, loaded, by);
    if (threadIdx.x == 0)
      *reinterpret_cast<float4*>(x.target + scale_offset(index, kHead)) =
          float4{by.scale, by.scale, by.scale, by.scale};
  }

  EK_DEVICE static float number(const uint4& loaded, int i) {
    const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    return i % 2 ? high_bf16(words[i / 2]) : low_bf16(words[i / 2]);
  }
  // Four neighbours of an octet in E4M3. What is infinite becomes the largest number, as anything too large.
  EK_DEVICE static uint32_t four(const uint4& loaded, int i, const TileScale& by) {
    return pack_e4m3(number(loaded, i) * by.inverse, number(loaded, i + 1) * by.inverse,
                     number(loaded, i + 2) * by.inverse, number(loaded, i + 3) * by.inverse);
  }
  EK_DEVICE static void write_lines(uint8_t* to, const Numbers& loaded, const TileScale& by) {
#pragma unroll
    for (int n = 0; n < kPerThread; ++n)
      *reinterpret_cast<uint2*>(to +
                                tile_offset(row<false>(n), octet<false>() * 8, line_bytes(false, kHead))) =
          uint2{four(loaded[n], 0, by), four(loaded[n], 4, by)};
  }
  EK_DEVICE static void write_columns(uint8_t* to, const Numbers& loaded, const TileScale& by) {
    const auto scaled = [&](int n, int i) { return number(loaded[n], i) * by.inverse; };
#pragma unroll
    for (int i = 0; i < 8; ++i)
      *reinterpret_cast<uint32_t*>(
          to + tile_offset(octet<true>() * 8 + i, value_slot(row<true>(0)), line_bytes(true, kHead))) =
          pack_e4m3(scaled(0, i), scaled(1, i), scaled(2, i), scaled(3, i));
  }
  EK_DEVICE static void write_rows(const QuantiseArguments& a, const QuantiseArguments::Operand& x,
                                   const Place& place, const Numbers& loaded, const TileScale& by) {
    uint16_t* const to = place.of(x.rounded, x.rounded_stride);
    const int feature = octet<false>() * 8;
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      if (row<false>(n) >= place.rows || feature >= a.D) continue;
      uint32_t words[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[2];  // FP16, which has every number of E4M3
        unpack_e4m3(four(loaded[n], half * 4, by), pairs[0], pairs[1]);
#pragma unroll
        for (int w = 0; w < 2; ++w)
          words[half * 2 + w] = pack_bf16(low_fp16(pairs[w]) * by.scale, high_fp16(pairs[w]) * by.scale);
      }
      *reinterpret_cast<uint4*>(to + row<false>(n) * x.rounded_stride[2] + feature) =
          uint4{words[0], words[1], words[2], words[3]};
    }
  }

  // The bits of the tile's largest finite magnitude.
  EK_DEVICE static uint32_t largest(const Numbers& loaded) {
    constexpr uint32_t kInfinity = 0x7f80u;
    uint32_t pair = 0;  // magnitudes of BF16 numbers are in the order of integers, two in a word
    each_word(loaded, [&](uint32_t first, uint32_t second) {
      pair = __vimax3_u16x2(pair, first & 0x7fff7fffu, second & 0x7fff7fffu);
    });
    const uint32_t most = block_max(larger(pair & 0xffffu, pair >> 16));
    if (most < kInfinity) return most;
    __syncthreads();  // the warps' maxima are read
    uint32_t finite = 0;
    const auto add = [&](uint32_t magnitude) {
      if (magnitude < kInfinity) finite = larger(finite, magnitude);
    };
    each_word(loaded, [&](uint32_t first, uint32_t second) {
      add(first & 0x7fffu), add(first >> 16 & 0x7fffu), add(second & 0x7fffu), add(second >> 16 & 0x7fffu);
    });
    return block_max(finite);
  }
  // body(word, next word), all of them.
  template <class Body>
  EK_DEVICE static void each_word(const Numbers& loaded, Body body) {
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) body(loaded[n].x, loaded[n].y), body(loaded[n].z, loaded[n].w);
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
};

// q and k, and the largest magnitudes of v's tiles.
template <int kHead, Target kTarget>
struct Quantise : QuantiseTile<kHead> {
  using Tile = QuantiseTile<kHead>;
  static constexpr int kBlocksAtOnce = 6;
  EK_DEVICE static int count(const QuantiseArguments& a, const QuantiseArguments::Operand& x) {
    return a.B * x.heads * x.tiles;
  }
  EK_DEVICE static void run(const QuantiseArguments& a) {
    if (a.next_item && blockIdx.x == 0 && threadIdx.x == 0) *a.next_item = 0;
    int index = blockIdx.x;
    if (index < count(a, a.q)) return round_tile(a, a.q, index, /*is_query=*/true);
    index -= count(a, a.q);
    if (index < count(a, a.k)) return round_tile(a, a.k, index, false);
    index -= count(a, a.k);
    const typename Tile::Place place(a, a.v, index, false);
    if (!place.read) return;
    typename Tile::Numbers loaded;
    Tile::template load<false>(a, a.v, place, loaded);
    const uint32_t largest = Tile::largest(loaded);
    if (threadIdx.x == 0) a.v_largest[index] = largest;
  }
  EK_DEVICE static void round_tile(const QuantiseArguments& a, const QuantiseArguments::Operand& x, int index,
                                   bool is_query) {
    const typename Tile::Place place(a, x, index, is_query);
    if (!place.read) return;
    typename Tile::Numbers loaded;
    Tile::template load<false>(a, x, place, loaded);
    Tile::template write<kTarget, false>(a, x, index, place, loaded, Tile::largest(loaded));
  }
};

// v, after Quantise. Last tiles first: those are still in the cache.
template <int kHead, Target kTarget>
struct QuantiseValues : QuantiseTile<kHead> {
  using Tile = QuantiseTile<kHead>;
  static constexpr int kBlocksAtOnce = 6;
  static constexpr bool kColumns = kTarget == Target::tiles;
  EK_DEVICE static void run(const QuantiseArguments& a) {
    const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    const typename Tile::Place place(a, a.v, index, false);
    if (!place.read) return;
    typename Tile::Numbers loaded;
    Tile::template load<kColumns>(a, a.v, place, loaded);
    const int head = index / a.v.tiles,
              tiles = (sequence(a.sequences, head / a.v.heads).keys + kTileRows - 1) / kTileRows;
    const uint32_t* const of_head = a.v_largest + static_cast<int64_t>(head) * a.v.tiles;
    uint32_t most = 0;
    for (int n = static_cast<int>(threadIdx.x); n < tiles; n += Tile::kThreads)
      most = Tile::larger(most, of_head[n]);
    Tile::template write<kTarget, kColumns>(a, a.v, index, place, loaded, Tile::block_max(most));
  }
};

}  // namespace evenkeel::hopper_fp8
