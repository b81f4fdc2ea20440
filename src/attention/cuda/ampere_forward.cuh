// The forward pass of the Ampere class: O = softmax(a Q K^T) V, tile by tile, never in memory. A block owns 128 query rows of
// one head, a warp 32 of them: each matrix of K and V that it loads then serves two products. K and V tiles go through a
// ring of three slots in the order in which they are used (K, V, K, V, ...). Each is on its way for two steps, with one
// barrier a step. Key tiles run from the last to the first, and a warp leaves out those that none of its rows sees. Exponentials come
// behind V's barrier, with the products that use them: the compiler lets both run at once.
#pragma once

#include "attention/cuda/ampere_softmax.cuh"

namespace evenkeel::ampere {

// Registers of a thread: O takes kBlocks kHead / 2, scores kBlocks kKeys / 2, Q where it is kept kBlocks kHead / 4. kSmall: for
// less shared memory.
template <int kHead, bool kSmall>
struct ForwardTiles {
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = 2;            // of 16 rows, a warp's
  static constexpr int kKeys = 64;             // of a tile
  static constexpr bool kKeepQ = kHead == 64;  // in registers
  static constexpr int kRows = 128;
  static constexpr int kBlocksAtOnce = 2;  // on a multiprocessor, by registers
};
// O alone takes 128 registers with 16 rows a warp.
template <bool kSmall>
struct ForwardTiles<256, kSmall> {
  static constexpr int kWarps = kSmall ? 4 : 8;
  static constexpr int kBlocks = 1;
  static constexpr int kKeys = kSmall ? 32 : 64;
  static constexpr bool kKeepQ = false;
  static constexpr int kRows = kSmall ? 64 : 128;
  static constexpr int kBlocksAtOnce = kSmall ? 2 : 1;
};

template <class Pairs, int kHead, bool kSmall, Instance kInstance, class Tiles = ForwardTiles<kHead, kSmall>>
struct Forward : WarpTile<Pairs, kHead, Tiles::kBlocks, Tiles::kKeys, kInstance> {
  using Tile = WarpTile<Pairs, kHead, Tiles::kBlocks, Tiles::kKeys, kInstance>;
  using Tile::exact, Tile::lane, Tile::p, Tile::row_in_warp, Tile::rules, Tile::size, Tile::state;
  static constexpr bool kAll = Tile::kAll;
  static constexpr int kWarps = Tiles::kWarps, kThreads = kWarps * kWarpThreads, kBlocks = Tiles::kBlocks,
                       kRows = Tiles::kRows, kKeys = Tiles::kKeys, kBlocksAtOnce = Tiles::kBlocksAtOnce;
  static constexpr int kRowCount = 2 * kBlocks;  // a thread's rows
  static constexpr bool kKeepQ = Tiles::kKeepQ;
  static constexpr int kSteps = kHead / 16;  // of the product over features
  static constexpr int kSlots = 3;
  static constexpr uint32_t kQueryBytes = kRows * kHead * 2, kSlotBytes = kKeys * kHead * 2;
  static constexpr size_t kSharedBytes = kQueryBytes + kSlots * kSlotBytes;
  static_assert(!kSmall || kSharedBytes <= kSmallSharedBytes);
  static_assert(kRows == kWarps * kBlocks * 16);

  const int thread, warp;
  int b, h, row;  // row: the block's first
  Band band;
  int first_tile, end_tile;  // of keys
  uint32_t q, slots;         // addresses
  int slot = 0;              // of the tile in use
  const uint16_t *next_key,
      *next_value;           // this thread's first pieces of the tiles to be loaded next
  bool has_queries = false;  // in `kept`

  using Left = uint32_t[kBlocks][4];
  Left kept[kKeepQ ? kSteps : 1];

  EK_DEVICE static int tiles_per_head(const Problem& p) { return (p.sequences.T + kRows - 1) / kRows; }

  // Query tiles of one head follow each other, the longest rows first.
  EK_DEVICE Forward(const Problem& problem, int number)
      : Tile(problem, number / tiles_per_head(problem) % problem.H),
        thread(static_cast<int>(threadIdx.x)),
        warp(thread / kWarpThreads),
        b(number / tiles_per_head(p) / p.H),
        h(number / tiles_per_head(p) % p.H),
        row((tiles_per_head(p) - 1 - number % tiles_per_head(p)) * kRows),
        band(p, b),
        first_tile(band.first_key_tile(row, kKeys)),
        end_tile(band.end_key_tile(row, kRows, kKeys)),
        q(shared_address(dynamic_shared())),
        slots(q + kQueryBytes) {}

  EK_DEVICE static void run(const Problem& p) { Forward(p, static_cast<int>(blockIdx.x)).run(); }

  EK_DEVICE void run() {
    state.start();
    if constexpr (kAll)
      state.draw(p, rules, static_cast<int64_t>(b * p.H + h) * p.sequences.T + row_of(lane % kRowCount));
    if (first_tile < end_tile) {
      const Sequence& sequence = band.s;
      load_tile<kHead, kRows, kThreads>(
          q, own_piece<kHead>(p.q.at(sequence.query_batch, h, sequence.first_row + row), p.q.stride[2]),
          p.q.stride[2], sequence.rows - row, p.D);
      const int g = h / (p.H / p.G), key = sequence.first_key + (end_tile - 1) * kKeys;
      next_key = own_piece<kHead>(p.k.at(sequence.key_batch, g, key), p.k.stride[2]);
      next_value = own_piece<kHead>(p.v.at(sequence.key_batch, g, key), p.v.stride[2]);
      load_keys(next_key, p.k.stride[2], end_tile - 1, 0, Side::keys);
      load_keys(next_value, p.v.stride[2], end_tile - 1, 1, Side::values);
      for (int tile = end_tile - 1; tile >= first_tile; --tile) walk(tile);
    }
    write();
  }

  // The row of the block's tile that this thread's row r is, counted from the sequence's first.
  EK_DEVICE int row_of(int r) const { return warp_row() + row_in_warp(r); }
  EK_DEVICE int warp_row() const { return row + warp * kBlocks * 16; }
  EK_DEVICE uint32_t slot_at(int n) const { return slots + n * kSlotBytes; }

  EK_DEVICE void load_keys(const uint16_t*& from, int64_t stride, int tile, int to, Side side) {
    if (tile >= first_tile) {
      load_tile<kHead, kKeys, kThreads>(slot_at(to), from, stride, band.s.keys - tile * kKeys, size(side));
      from -= kKeys * stride;
    }
    commit_copies();
  }

  // One key tile. What arrives next but one takes the slot that was used last.
  EK_DEVICE void walk(int tile) {
    const bool seen = band.some_seen(warp_row(), kBlocks * 16, tile * kKeys, kKeys);
    next_slot(next_key, p.k.stride[2], tile, Side::keys);
    if (seen) {
      find_scores();
      const int key = tile * kKeys;
      this->mask(
          band, b, key, band.all_seen(warp_row(), kBlocks * 16, key, kKeys), [&](int) { return h; },
          [&](int r) { return row_of(r); });
      this->move_shifts();
    }
    slot = slot == kSlots - 1 ? 0 : slot + 1;
    next_slot(next_value, p.v.stride[2], tile, Side::values);
    if (seen) this->add_values(slot_at(slot), 0);
    slot = slot == kSlots - 1 ? 0 : slot + 1;
  }
  EK_DEVICE void next_slot(const uint16_t*& from, int64_t stride, int tile, Side side) {
    wait_for_copies<1>();
    __syncthreads();
    load_keys(from, stride, tile - 1, slot == 0 ? kSlots - 1 : slot - 1, side);
  }

  EK_DEVICE void find_scores() {
    if (kKeepQ && !has_queries) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_queries(kept[kKeepQ ? step : 0], step);
      has_queries = true;
    }
    Tile::find_scores(Piece<kHead>::along(slot_at(slot), 0, lane), [&](Left& left, int step) {
      if constexpr (kKeepQ) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
#pragma unroll
          for (int n = 0; n < 4; ++n) left[i][n] = kept[step][i][n];
      } else {
        load_queries(left, step);
      }
    });
  }
  EK_DEVICE void load_queries(Left& left, int step) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      load_matrices(left[i], Piece<kHead>::across(q, warp * kBlocks * 16, lane).at(i, step));
  }

  // O / l, L and what the backward pass needs. Rows behind a sequence's end: zeros in a padded tensor, none in a packed one.
  EK_DEVICE void write() {
    if (p.far_rows && !exact()) note_far_rows();
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      const RowEnd end(p, h, state.shift[r], exact() ? state.residue(r) : 0.0f, quad_sum(state.sum[r]));
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n) {
        float(&numbers)[4] = this->block(r / 2, n);
        numbers[r % 2 * 2] *= end.factor, numbers[r % 2 * 2 + 1] *= end.factor;
      }
      const int i = row_of(r), T = p.sequences.T;
      if (lane % 4 == 0 && i < T) end.write(p, static_cast<int64_t>(b * p.H + h) * T + i, i < band.s.rows);
    }
    write_output();
    if (p.residue) write_residue();
  }

  EK_DEVICE void note_far_rows() const {
    bool far = false;
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) far |= row_of(r) < band.s.rows && is_far(state.shift[r]);
    const bool some = __any_sync(~0u, far) && (!kAll || has_second_launch(p.rules_of(h)));
    if (lane == 0) p.far_rows[static_cast<int64_t>(blockIdx.x) * kWarps + warp] = some;
  }

  // The warp's part of the query tile, which it needs no more, takes its rows before they go to memory as whole pieces.
  static constexpr int kWarpRows = kBlocks * 16,
                       kPieces = kHead / 8,  // pieces of eight features
      kRowsAtOnce = kWarpThreads / kPieces;
  EK_DEVICE uint8_t* staged(int i, int piece) const {
    return dynamic_shared() + tile_offset<kHead>(warp * kWarpRows + i, piece);
  }
  EK_DEVICE void write_output() {
    __syncwarp();
    this->each_pair([&](int r, int n, float low, float high) {
      *reinterpret_cast<uint32_t*>(staged(row_in_warp(r), n) + lane % 4 * 4) = Pairs::pack(low, high);
    });
    __syncwarp();
    const Sequence& sequence = band.s;
    const int written = p.sequences.query_offsets ? sequence.rows : p.sequences.T;
    const int feature = lane % kPieces * 8;
    uint16_t* to =
        p.o.at(sequence.query_batch, h, sequence.first_row + warp_row() + lane / kPieces) + feature;
#pragma unroll
    for (int n = 0; n < kWarpRows; n += kRowsAtOnce) {
      const int i = n + lane / kPieces, own = warp_row() + i;
      if (own < written && feature < size(Side::values))
        *reinterpret_cast<uint4*>(to) = own < sequence.rows
                                            ? *reinterpret_cast<const uint4*>(staged(i, lane % kPieces))
                                            : uint4{0, 0, 0, 0};
      to += kRowsAtOnce * p.o.stride[2];
    }
  }
  // What O lost: a byte for each number.
  EK_DEVICE void write_residue() {
    const HeadRules& of_head = p.rules_of(h);  // read again: registers are short before
    const bool wide = of_head.wide;
    const RandomKey key = p.random(of_head);
    const int64_t first = static_cast<int64_t>(b * p.H + h) * p.sequences.T + warp_row();
    uint32_t noise[kRowCount];
#pragma unroll
    for (int r = 0; r < kRowCount; ++r)
      noise[r] = row_noise(key, static_cast<uint32_t>(first + row_in_warp(r)));
    __syncwarp();
    if (wide)
      this->each_pair([&](int r, int n, float low, float high) {
        *reinterpret_cast<uint16_t*>(staged(row_in_warp(r), n / 2) + n % 2 * 8 + lane % 4 * 2) =
            static_cast<uint16_t>(residues_of<Pairs>(noise[r], n, lane % 4, low, high));
      });
    __syncwarp();
    const int feature = lane % kPieces * 8;
    int8_t* to = p.residue + (first + lane / kPieces) * size(Side::values) + feature;
#pragma unroll
    for (int n = 0; n < kWarpRows; n += kRowsAtOnce) {
      const int i = n + lane / kPieces, own = warp_row() + i;
      if (own < p.sequences.T && feature < size(Side::values))
        *reinterpret_cast<uint2*>(to) =
            wide && own < band.s.rows
                ? *reinterpret_cast<const uint2*>(staged(i, feature / 16) + feature % 16)
                : uint2{0, 0};
      to += kRowsAtOnce * size(Side::values);
    }
  }
};

// The second launch: the query tiles that have far rows again, with exact shifts. There are few blocks, and where nothing is
// far each of them looks once at 32 of its tiles and ends.
template <class Pairs, int kHead, bool kSmall>
struct FarTiles {
  using Tile = Forward<Pairs, kHead, kSmall, Instance::exact>;
  static constexpr int kWarps = Tile::kWarps, kThreads = Tile::kThreads, kBlocksAtOnce = Tile::kBlocksAtOnce;
  static constexpr size_t kSharedBytes = Tile::kSharedBytes;

  // At most two a multiprocessor of a large GPU. An odd number: of a causal problem each block has long tiles and short ones.
  static int64_t blocks(int64_t tiles) { return std::min<int64_t>(tiles, 255); }

  EK_DEVICE static void run(const Problem& p) {
    const int tiles = p.B * p.H * Tile::tiles_per_head(p), step = static_cast<int>(gridDim.x);
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += kWarpThreads * step) {
      const int own = tile + static_cast<int>(threadIdx.x) % kWarpThreads * step;
      uint32_t far = __ballot_sync(~0u, own < tiles && has_far_rows(p, own));
      for (int number = tile; far != 0; number += step, far >>= 1)
        if (far & 1) {
          Tile(p, number).run();
          __syncthreads();  // everybody is done with shared memory
        }
    }
  }
  // The first launch noted a byte for each warp.
  EK_DEVICE static bool has_far_rows(const Problem& p, int tile) {
    using Warps = std::conditional_t<kWarps == 4, uint32_t, uint64_t>;
    static_assert(sizeof(Warps) == kWarps);
    return reinterpret_cast<const Warps*>(p.far_rows)[tile] != 0;
  }
};

}  // namespace evenkeel::ampere
