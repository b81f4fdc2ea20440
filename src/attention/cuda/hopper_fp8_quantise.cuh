// q, k and v rounded to E4M3 with scales that are powers of two: e4m3*tile@e8m0_up (q, k) and e4m3*head@e8m0_up (v) of
// numerics/round_block.h, to the bit. One kernel, before that of either pass. For the forward kernel, which rounds q itself, it
// writes E4M3 tiles of k and v (hopper_fp8_tile.h), v transposed. For the backward kernel it writes q, k and v: the same numbers in
// BF16, which has them exactly, in rows as the given tensors have them. Internal to src/attention.
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
  int query_tiles,
      pieces;  // tiles of q to round, none for Target::tiles; they, and three pieces of work for each of k's
  Counters counters;  // zeros at the start
};

// A tile a block, of which a thread has 8 features of 4 rows.
template <int kHead>
struct QuantiseTile {
  static constexpr int kOctets = kHead / 8, kPerThread = 4;
  static constexpr int kThreads = kTileRows / kPerThread * kOctets;
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
    int tiles;                 // of the head, that have rows
    bool read;                 // does anybody read the tile's pair?

    EK_DEVICE Place(const QuantiseArguments& a, const QuantiseArguments::Operand& x, int index,
                    bool is_query) {
      const int of_all = index / x.tiles, b = of_all / x.heads, first = index % x.tiles * kTileRows;
      const Sequence s = sequence(a.sequences, b);
      batch = is_query ? s.query_batch : s.key_batch;
      head = of_all % x.heads;
      row = static_cast<int64_t>(is_query ? s.first_row : s.first_key) + first;
      rows = (is_query ? s.rows : s.keys) - first;
      tiles = (rows + first + kTileRows - 1) / kTileRows;
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

  // The bits of the tile's largest finite magnitude, in all threads. of_warps: shared memory, a word a warp.
  EK_DEVICE static uint32_t largest(const Numbers& loaded, uint32_t* of_warps) {
    bool again = false;
    const auto each = [&](auto body) {
#pragma unroll
      for (int n = 0; n < kPerThread; ++n) body(loaded[n]);
    };
    return largest_finite(each, [&](uint32_t most) {
      most = warp_largest(most);
      if (again) __syncthreads();  // the warps' maxima are read
      again = true;
      if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = most;
      __syncthreads();
#pragma unroll
      for (int warp = 0; warp < kThreads / kWarp; ++warp) most = larger(most, of_warps[warp]);
      return most;
    });
  }
};

// Before Quantise.
struct ClearCounters {
  static constexpr int kThreads = 256, kBlocksAtOnce = 1;
  static constexpr size_t kSharedBytes = 0;
  EK_DEVICE static void run(const Counters& counters) {
    const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (n < counters.count) counters.all[n] = 0;
  }
};

// Work on a tile of k or v, by its number among all such pieces. Some heads at a time: the largest magnitudes of v's tiles, then k,
// and then v, which is so read a second time when the cache still has it.
struct KeyPiece {
  enum Kind { find_largest, round_keys, round_values } kind;
  int tile;  // of all heads
  // So many tiles, or a head, lie between a largest magnitude and its use. About as many are at work at once. Of so many the cache
  // has k and v and what is written.
  static constexpr int kTiles = 512;

  EK_DEVICE KeyPiece(int number, int tiles, int heads) {
    const int most_heads = max(1, kTiles / tiles), section = number / (3 * most_heads * tiles);
    const int first = section * most_heads * tiles, in_section = number - 3 * first;
    const int count = min(most_heads, heads - section * most_heads) * tiles;
    kind = static_cast<Kind>(in_section / count);
    tile = first + in_section % count;
    // The last first: of heads that are longer than the cache it has those.
    if (kind == round_values) tile = first + count - 1 - in_section % count;
  }
};

// Blocks draw pieces of work from a counter: tiles of q, then those of k and v. v's scale waits for the largest of its head.
// Nobody can wait for ever, however few of the blocks run at once. A piece waits for smaller numbers alone. The smallest number that
// is not done belongs to a block that has started, and that is not kept by another piece: what a block does before it has a
// smaller number. So that block goes on, and all others in their turn.
template <int kHead, Target kTarget>
struct Quantise : QuantiseTile<kHead> {
  using Tile = QuantiseTile<kHead>;
  using typename Tile::Numbers, typename Tile::Place;
  using Operand = QuantiseArguments::Operand;
  static constexpr int kBlocksAtOnce = 6;
  static constexpr bool kColumns = kTarget == Target::tiles;  // of v
  struct Shared {
    int piece;
    uint32_t most, of_warps[Tile::kThreads / kWarp];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);

  EK_DEVICE static void run(const QuantiseArguments& a) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    const auto draw = [&] {
      return threadIdx.x == 0 ? static_cast<int>(atomicAdd(a.counters.next_piece(), 1u)) : 0;
    };
    for (int next = draw();;) {
      __syncthreads();  // the piece before it is done with `shared`
      if (threadIdx.x == 0) shared.piece = next;
      __syncthreads();
      const int piece = shared.piece;
      if (piece >= a.pieces) return;
      next = draw();  // it arrives while the piece at hand is done
      if (piece < a.query_tiles)
        round_tile(a, shared, a.q, piece, /*is_query=*/true);
      else
        of_keys(a, shared, KeyPiece(piece - a.query_tiles, a.k.tiles, a.B * a.k.heads));
    }
  }
  EK_DEVICE static void of_keys(const QuantiseArguments& a, Shared& shared, const KeyPiece& piece) {
    if (piece.kind == KeyPiece::find_largest)
      find_largest(a, shared, piece.tile);
    else if (piece.kind == KeyPiece::round_keys)
      round_tile(a, shared, a.k, piece.tile, /*is_query=*/false);
    else
      round_values(a, shared, piece.tile);
  }
  EK_DEVICE static void round_tile(const QuantiseArguments& a, Shared& shared, const Operand& x, int index,
                                   bool is_query) {
    const Place place(a, x, index, is_query);
    if (!place.read) return;
    Numbers loaded;
    Tile::template load<false>(a, x, place, loaded);
    const uint32_t most = Tile::largest(loaded, shared.of_warps);
    Tile::template write<kTarget, false>(a, x, index, place, loaded, most);
  }
  EK_DEVICE static void find_largest(const QuantiseArguments& a, Shared& shared, int index) {
    const Place place(a, a.v, index, false);
    if (place.rows <= 0) return;
    Numbers loaded;
    Tile::template load<false>(a, a.v, place, loaded);
    const uint32_t most = Tile::largest(loaded, shared.of_warps);
    if (threadIdx.x != 0) return;
    const Counters::Head head = a.counters.head(index / a.v.tiles);
    atomicMax(head.largest, static_cast<int>(most));
    add_release(head.tiles, 1);
  }
  EK_DEVICE static void round_values(const QuantiseArguments& a, Shared& shared, int index) {
    const Place place(a, a.v, index, false);
    if (!place.read) return;
    Numbers loaded;
    Tile::template load<kColumns>(a, a.v, place, loaded);
    if (threadIdx.x == 0) {
      const Counters::Head head = a.counters.head(index / a.v.tiles);
      while (load_acquire(head.tiles) < place.tiles) let_others_run();
      shared.most = static_cast<uint32_t>(load_relaxed(head.largest));
    }
    __syncthreads();
    Tile::template write<kTarget, kColumns>(a, a.v, index, place, loaded, shared.most);
  }
};

}  // namespace evenkeel::hopper_fp8
