// q, k and v rounded to E4M3 with scales that are powers of two:
// e4m3*tile@e8m0_up (q, k) and e4m3*head@e8m0_up (v) of numerics/round_block.h,
// to the bit. Two passes before either kernel. For the forward kernel, which
// rounds q itself, they write E4M3 tiles of k and v (hopper_fp8_tile.h), v
// transposed. For the backward kernel they write q, k and v: the same numbers
// in BF16, which has them exactly, in rows as the given tensors have them.
// Internal to src/attention.
#pragma once

#include "attention/cuda/hopper_fp8_rounding.cuh"
#include "attention/cuda/sequences.cuh"

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

  EK_DEVICE static void write_lines(uint8_t* to, const Numbers& loaded, const TileScale& by) {
#pragma unroll
    for (int n = 0; n < kPerThread; ++n)
      write_octet<kHead>(to, row<false>(n), octet<false>() * 8, loaded[n], by);
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

  // The bits of the tile's largest finite magnitude, in all threads.
  EK_DEVICE static uint32_t largest(const Numbers& loaded) {
    bool again = false;
    const auto each = [&](auto body) {
#pragma unroll
      for (int n = 0; n < kPerThread; ++n) body(loaded[n]);
    };
    return largest_finite(each, [&](uint32_t most) {
      if (again) __syncthreads();  // the warps' maxima are read
      again = true;
      return block_largest(most);
    });
  }
  EK_DEVICE static uint32_t block_largest(uint32_t most) {
    most = warp_largest(most);
    auto* const of_warp = reinterpret_cast<uint32_t*>(dynamic_shared());
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kThreads / kWarp; ++warp) most = larger(most, of_warp[warp]);
    return most;
  }
};

// q (Target::rows alone) and k, and the largest magnitudes of v's tiles.
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
    if constexpr (kTarget == Target::rows) {
      if (index < count(a, a.q)) return round_tile(a, a.q, index, /*is_query=*/true);
      index -= count(a, a.q);
    }
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
      most = larger(most, of_head[n]);
    Tile::template write<kTarget, kColumns>(a, a.v, index, place, loaded, Tile::block_largest(most));
  }
};

}  // namespace evenkeel::hopper_fp8
