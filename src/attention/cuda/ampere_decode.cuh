// The forward pass for few query rows and many keys (decoding). It is bound by reading K and V once, so:
// - the rows of all query heads that share a key head are one tile: 16 rows, of which row n is row n % T of head n / T;
// - the keys are split over blocks, and a tile's keys over the block's warps: each has a softmax of its own over its keys;
// - a block adds its warps' parts up and leaves one part (O unnormalised, shift, sum); a kernel behind it adds up the blocks'.
// Both add in a fixed order, so that the bits are the same every time, and do not depend on the GPU. Shifts are exact
// (ampere_softmax.cuh) from the start, since the arithmetic hides behind memory: no second launch.
#pragma once

#include "attention/cuda/ampere_softmax.cuh"
#include "base/sizes.h"

namespace evenkeel::ampere {

// Adds up parts of a row in their order, under the largest of their shifts: add(n, factor) takes part n's O. Returns the whole
// without its O. The part that the largest score is in has a factor of exactly one. No branch: loads of several parts are on
// their way at once.
template <class PartOf, class Add>
EK_DEVICE RowPart add_up(int count, PartOf part_of, Add add) {
  RowPart all = {-kInfinity, 0, 0, 0};
#pragma unroll 4
  for (int n = 0; n < count; ++n) {
    const RowPart part = part_of(n);
    all.residue = part.shift > all.shift ? part.residue : all.residue;
    all.shift = fmaxf(all.shift, part.shift);
  }
#pragma unroll 4
  for (int n = 0; n < count; ++n) {
    const RowPart part = part_of(n);
    const float exponent = part.shift - all.shift + (part.residue - all.residue);
    const float factor = part.shift == -kInfinity ? 0.0f : exp2_approx(exponent);  // no key: O and sum are 0
    all.sum = fmaf(factor, part.sum, all.sum);
    add(n, factor);
  }
  return all;
}

// A warp has 16 keys of a tile. Four slots of 8 to 16 KB: three tiles are on their way, which is 24 to 48 KB a block, and two
// blocks or more run on a multiprocessor. An H200 has to have some 25 KB on its way on each (4.8 TB/s, 0.7 us).
template <int kHead>
struct DecodeTiles {
  static constexpr int kWarps = kChunked<kHead> ? 2 : 4, kKeys = kWarps * 16, kSlots = 4;
  static constexpr int kBlocksAtOnce = kChunked<kHead> ? 3 : 2;  // by registers: O of 256 features takes 128
};

// How the keys of a problem are split. From its sizes alone.
struct KeySplits {
  static constexpr int kRows = 16;  // of a tile
  // Some 1024 blocks: four or five rounds on any GPU, so that the last one, which does not fill it, matters little. A part is
  // written and read in FP32, 8 bytes a feature of each row, where a key takes 4 with its value: with 256 keys for 16 rows that is
  // an eighth, most of it in the cache. At most 128 parts a row: then each of the eight groups of AddUpParts (128 features) has 16.
  static constexpr int64_t kBlocks = 1024, kLeastKeys = 256, kMost = 128;
  int64_t row_tiles, splits, split_tiles;  // split_tiles: key tiles of a split

  KeySplits(const AttentionProblem& problem, int tile_keys) {
    row_tiles = divide_up(problem.T * (problem.H / problem.G), kRows);
    const ScoreForms forms = score_forms(problem);
    // What the rows of a sequence see lies in a band of so many keys, which may begin anywhere in a tile.
    const int64_t band = problem.T + forms.left + forms.right,
                  tiles = std::min(divide_up(band, tile_keys) + 1, divide_up(problem.N, tile_keys));
    const int64_t wanted = std::min(divide_up(kBlocks, problem.B * problem.G * row_tiles), kMost);
    split_tiles = std::max(divide_up(tiles, wanted), kLeastKeys / tile_keys);
    splits = divide_up(tiles, split_tiles);
  }
};

template <class Pairs, int kHead>
struct Decode : WarpTile<Pairs, kHead, 1, 16, Instance::exact> {
  using Tile = WarpTile<Pairs, kHead, 1, 16, Instance::exact>;
  using Tile::exact, Tile::lane, Tile::p, Tile::rules, Tile::size, Tile::state;
  using Tiles = DecodeTiles<kHead>;
  static constexpr int kWarps = Tiles::kWarps, kThreads = kWarps * kWarpThreads, kKeys = Tiles::kKeys,
                       kSlots = Tiles::kSlots, kBlocksAtOnce = Tiles::kBlocksAtOnce, kRows = KeySplits::kRows;
  static constexpr uint32_t kQueryBytes = kRows * kHead * 2, kSlotBytes = kKeys * kHead * 2;
  static constexpr size_t kSharedBytes = kQueryBytes + kSlots * kSlotBytes;
  static_assert(kSharedBytes <= kSmallSharedBytes);
  // The warps' parts take the place of Q and of the slots. Rows of O lie 8 floats further apart, in other banks.
  static constexpr int kPartRow = kHead + 8;
  static_assert(kWarps * kRows * sizeof(RowPart) <= kQueryBytes);
  static_assert(kWarps * kRows * kPartRow * sizeof(float) <= kSlots * kSlotBytes);

  const int thread, warp;
  const int row_tile, split, g, b;
  const Band band;
  const int first_tile, tiles;  // of keys
  const uint32_t q, slots;      // addresses

  // Blocks of one split follow each other: those behind the first find its keys in the cache.
  EK_DEVICE explicit Decode(const Problem& problem)
      : Tile(problem, 0),
        thread(static_cast<int>(threadIdx.x)),
        warp(thread / kWarpThreads),
        row_tile(static_cast<int>(blockIdx.x) % p.row_tiles_of_group),
        split(static_cast<int>(blockIdx.x) / p.row_tiles_of_group % p.splits),
        g(static_cast<int>(blockIdx.x) / p.row_tiles_of_group / p.splits % p.G),
        b(static_cast<int>(blockIdx.x) / p.row_tiles_of_group / p.splits / p.G),
        band(p, b),
        first_tile(band.first_key_tile(0, kKeys) + split * p.split_tiles),
        tiles(min(p.split_tiles, band.end_key_tile(0, p.sequences.T, kKeys) - first_tile)),
        q(shared_address(dynamic_shared())),
        slots(q + kQueryBytes) {}

  EK_DEVICE static void run(const Problem& p) { Decode(p).run(); }

  // Row n of the tile: which head it is of, and which row of the sequence. Behind the last one: that one's.
  EK_DEVICE int rows_of_group() const { return p.H / p.G * p.sequences.T; }
  EK_DEVICE bool is_there(int n) const { return row_tile * kRows + n < rows_of_group(); }
  EK_DEVICE int group_row(int n) const { return min(row_tile * kRows + n, rows_of_group() - 1); }
  EK_DEVICE int head_of(int n) const { return g * (p.H / p.G) + group_row(n) / p.sequences.T; }
  EK_DEVICE int row_of(int n) const { return group_row(n) % p.sequences.T; }
  EK_DEVICE int64_t row_of_all(int n) const {
    return (static_cast<int64_t>(b) * p.H + head_of(n)) * p.sequences.T + row_of(n);
  }

  EK_DEVICE void run() {
    state.start();
    state.draw(p, rules, row_of_all(this->row_in_warp(lane % Tile::kRowCount)));
    if (tiles > 0) {
      load_queries();
#pragma unroll
      for (int step = 0; step < kSlots - 1; ++step) load(step);
      for (int step = 0; step < 2 * tiles; ++step) walk(step);
      __syncthreads();  // nobody reads Q and the slots any more
    }
    leave_part();
    __syncthreads();
    write();
  }
  EK_DEVICE void load_queries() {
    constexpr int kPieces = kHead / 8;
    for (int n = thread; n < kRows * kPieces; n += kThreads) {
      const int i = n / kPieces, piece = n % kPieces;
      const bool present = is_there(i) && row_of(i) < band.s.rows && piece * 8 < p.D;
      const uint16_t* const from =
          present ? p.q.at(band.s.query_batch, head_of(i), band.s.first_row + row_of(i)) + piece * 8
                  : p.q.data;
      copy_16_async(q + tile_offset<kHead>(i, piece), from, present);
    }
  }
  // K and V of a tile take turns: step 2 n is K of tile n of the split, step 2 n + 1 its V.
  EK_DEVICE void load(int step) {
    if (step < 2 * tiles) {
      const Strided& from = step % 2 == 0 ? p.k : p.v;
      const int key = (first_tile + step / 2) * kKeys;
      load_tile<kHead, kKeys, kThreads>(
          slot_of(step),
          own_piece<kHead>(from.at(band.s.key_batch, g, band.s.first_key + key), from.stride[2]),
          from.stride[2], band.s.keys - key, size(step % 2 == 0 ? Side::keys : Side::values));
    }
    commit_copies();
  }
  EK_DEVICE uint32_t slot_of(int step) const {
    return slots + static_cast<uint32_t>(step % kSlots) * kSlotBytes;
  }
  EK_DEVICE void walk(int step) {
    wait_for_copies<kSlots - 2>();
    __syncthreads();
    load(step + kSlots - 1);  // where the step before was
    if (step % 2 != 0) return this->add_values(slot_of(step), warp * 16);
    Tile::find_scores(Piece<kHead>::along(slot_of(step), warp * 16, lane), [&](uint32_t(&left)[1][4], int n) {
      load_matrices(left[0], Piece<kHead>::across(q, 0, lane).at(0, n));
    });
    const int key = (first_tile + step / 2) * kKeys + warp * 16;
    this->mask(
        band, b, key, band.all_seen(0, p.sequences.T, key, 16),
        [&](int r) { return head_of(this->row_in_warp(r)); },
        [&](int r) { return row_of(this->row_in_warp(r)); });
    this->move_shifts();
  }

  // This warp's part, in shared memory.
  EK_DEVICE RowPart& part(int of_warp, int n) const {
    return reinterpret_cast<RowPart*>(dynamic_shared())[of_warp * kRows + n];
  }
  EK_DEVICE float* output(int of_warp, int n) const {
    return reinterpret_cast<float*>(dynamic_shared() + kQueryBytes) + (of_warp * kRows + n) * kPartRow;
  }
  EK_DEVICE void leave_part() {
#pragma unroll
    for (int r = 0; r < Tile::kRowCount; ++r) {
      const float sum = quad_sum(state.sum[r]), residue = exact() ? state.residue(r) : 0.0f;
      if (lane % 4 == 0) part(warp, this->row_in_warp(r)) = {state.shift[r], residue, sum, 0};
    }
    this->each_pair([&](int r, int n, float low, float high) {
      *reinterpret_cast<float2*>(output(warp, this->row_in_warp(r)) + 8 * n + lane % 4 * 2) = {low, high};
    });
  }
  // The block's part, in device memory.
  EK_DEVICE void write() {
    constexpr int kFours = kHead / 4;
    for (int item = thread; item < kRows * kFours; item += kThreads) {
      const int n = item / kFours, feature = item % kFours * 4;
      if (!is_there(n) || feature >= size(Side::values)) continue;
      float4 sums = {0, 0, 0, 0};
      const RowPart all = add_up(
          kWarps, [&](int of_warp) { return part(of_warp, n); },
          [&](int of_warp, float factor) {
            const float4 more = *reinterpret_cast<const float4*>(output(of_warp, n) + feature);
            sums = {fmaf(factor, more.x, sums.x), fmaf(factor, more.y, sums.y), fmaf(factor, more.z, sums.z),
                    fmaf(factor, more.w, sums.w)};
          });
      const int64_t at = row_of_all(n) * p.splits + split;
      if (feature == 0) p.parts[at] = all;
      *reinterpret_cast<float4*>(p.part_outputs + at * size(Side::values) + feature) = sums;
    }
  }
};

// The blocks' parts to O, L and what the backward pass needs. A block has a row, a thread eight features of it; Dv / 8 threads
// have the row once. So there are several such groups: each adds up its share of the parts, and the first one the groups'.
template <class Pairs>
struct AddUpParts {
  static constexpr int kThreads = 128, kBlocksAtOnce = 4;
  struct Shared {
    float o[kThreads][8];
    RowPart part[kThreads];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
  static int64_t blocks(const Problem& p) { return static_cast<int64_t>(p.B) * p.H * p.sequences.T; }

  EK_DEVICE static void run(const Problem& p) {
    auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    const int thread = static_cast<int>(threadIdx.x), lanes = p.Dv / 8, groups = kThreads / lanes,
              group = thread / lanes, feature = thread % lanes * 8;
    const int T = p.sequences.T, head = static_cast<int>(blockIdx.x) / T,
              row = static_cast<int>(blockIdx.x) % T;
    const int64_t at = blockIdx.x;
    const Sequence s = sequence(p.sequences, head / p.H);
    const bool exists = row < s.rows;

    const int first = p.splits * group / groups, end = p.splits * (group + 1) / groups;
    float o[8] = {};
    const RowPart own = add_up(
        exists && group < groups ? end - first : 0, [&](int n) { return p.parts[at * p.splits + first + n]; },
        [&](int n, float factor) {
          const float* const more = p.part_outputs + (at * p.splits + first + n) * p.Dv + feature;
          add_eight(o, factor, *reinterpret_cast<const float4*>(more),
                    *reinterpret_cast<const float4*>(more + 4));
        });
#pragma unroll
    for (int i = 0; i < 8; ++i) shared.o[thread][i] = o[i];
    if (feature == 0) shared.part[group] = own;
    __syncthreads();
    if (group != 0) return;

#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] = 0;
    const RowPart all = add_up(
        groups, [&](int n) { return shared.part[n]; },
        [&](int n, float factor) {
          const float* const more = shared.o[n * lanes + thread];
          add_eight(o, factor, *reinterpret_cast<const float4*>(more),
                    *reinterpret_cast<const float4*>(more + 4));
        });
    write(p, s, head % p.H, row, at, feature, exists, all, o);
  }
  EK_DEVICE static void add_eight(float (&o)[8], float factor, const float4& low, const float4& high) {
    const float more[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] = fmaf(factor, more[i], o[i]);
  }

  EK_DEVICE static void write(const Problem& p, const Sequence& s, int h, int row, int64_t at, int feature,
                              bool exists, const RowPart& all, float (&o)[8]) {
    const RowEnd end(p, h, all.shift, all.residue, all.sum);
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] *= end.factor;
    if (feature == 0) end.write(p, at, exists);
    if (exists || !p.sequences.query_offsets)
      *reinterpret_cast<uint4*>(p.o.at(s.query_batch, h, s.first_row + row) + feature) = uint4{
          Pairs::pack(o[0], o[1]), Pairs::pack(o[2], o[3]), Pairs::pack(o[4], o[5]), Pairs::pack(o[6], o[7])};
    if (p.residue) write_residue(p, p.rules_of(h), at, feature, exists, o);
  }
  // What O lost: a byte for each number.
  EK_DEVICE static void write_residue(const Problem& p, const HeadRules& rules, int64_t at, int feature,
                                      bool exists, const float (&o)[8]) {
    uint32_t bytes[4] = {};
    if (exists && rules.wide) {
      const uint32_t noise = row_noise(p.random(rules), static_cast<uint32_t>(at));
#pragma unroll
      for (int pair = 0; pair < 4; ++pair)
        bytes[pair] = residues_of<Pairs>(noise, feature / 8, pair, o[2 * pair], o[2 * pair + 1]);
    }
    *reinterpret_cast<uint2*>(p.residue + at * p.Dv + feature) =
        uint2{__byte_perm(bytes[0], bytes[1], 0x5410), __byte_perm(bytes[2], bytes[3], 0x5410)};
  }
};

}  // namespace evenkeel::ampere
