// The backward pass of the Ampere class: one kernel for dQ, dK and dV with five products a tile, after a pass that finds
// delta (ampere_rows.cuh).
//
// A block owns a key tile of one kv head: K and V stay in shared memory, dK and dV in registers. The query rows that see
// these keys stream by, two tiles of Q and dO on their way or in use. Scores are held transposed, [key][row], so that P^T
// and dS^T are left operands as they come. dS^T also goes through shared memory, for dQ = dS K.
//
// A warp owns 32 keys and 64 features of dK and dV (16 keys and 128 features with head size 256). With head sizes 128 and 256
// two warps share their keys. Each finds the scores of half of the rows and uses them itself. It takes the other half's P^T and
// dS^T from shared memory. So no score is found twice, and a matrix of Q or dO that is loaded serves two products (with 256,
// one).
//
// dQ's parts from different key tiles are added in device memory in FP32, in one order, the last key tile first: the same
// bits every time. Items are taken in that order from a counter, so a block only ever waits for blocks that run. A warp's
// part of dQ is 32 rows x 32 features (64 with head size 256); whoever comes last adds its own, scales, rounds and writes.
#pragma once

#include "attention/cuda/ampere_problem.cuh"

namespace evenkeel::ampere {

// Registers of a thread: dK and dV take 128, scores and dP kKeyBlocks kSub. kSmall: for less shared memory.
template <int kHead, bool kSmall>
struct BackwardTiles {
  static_assert(kHead == 64 || kHead == 128);
  static constexpr int kWarps = kHead == 64 || kSmall ? 4 : 8;
  static constexpr int kKeyBlocks = 2;  // of 16 keys, a warp's
  static constexpr int kFeatures = 64;  // a warp's, of dK and dV
  static constexpr int kRows = kHead == 128 && kSmall ? 32 : 64;
  static constexpr int kSub = kHead == 128 && kSmall ? 16 : 32;  // rows of scores that a warp finds at a time
  static constexpr int kBlocksAtOnce = kHead == 64 ? 2 : 1;
  static constexpr int kStages = 2;                 // tiles of rows that are on their way or in use
  static constexpr int kPartFeatures = 32;          // a warp's, of dQ
  static constexpr int kParts = kHead / kFeatures;  // warps that share their keys
  static constexpr int kKeys = kWarps / kParts * kKeyBlocks * 16;
};
// 64 keys x 64 rows in 210 KB, or 32 x 32 in 69 KB: with two stages of rows that would be 1 KB more than there is.
template <bool kSmall>
struct BackwardTiles<256, kSmall> {
  static constexpr int kWarps = kSmall ? 4 : 8;
  static constexpr int kKeyBlocks = 1;
  static constexpr int kFeatures = 128;
  static constexpr int kRows = kSmall ? 32 : 64;
  static constexpr int kSub = kRows / 2;
  static constexpr int kBlocksAtOnce = kSmall ? 2 : 1;
  static constexpr int kStages = kSmall ? 1 : 2;
  static constexpr int kPartFeatures = 64;
  static constexpr int kParts = 256 / kFeatures;
  static constexpr int kKeys = kWarps / kParts * kKeyBlocks * 16;
};

template <class Pairs, int kHead, bool kSmall, Instance kInstance, class Tiles = BackwardTiles<kHead, kSmall>>
struct Backward {
  static constexpr bool kAll = kInstance == Instance::all;
  static constexpr int kWarps = Tiles::kWarps, kThreads = kWarps * kWarpThreads;
  static constexpr int kKeyBlocks = Tiles::kKeyBlocks, kKeys = Tiles::kKeys, kRows = Tiles::kRows,
                       kSub = Tiles::kSub, kFeatures = Tiles::kFeatures, kParts = Tiles::kParts,
                       kBlocksAtOnce = Tiles::kBlocksAtOnce, kStages = Tiles::kStages,
                       kPartFeatures = Tiles::kPartFeatures;
  static constexpr int kWarpKeys = kKeyBlocks * 16, kWarpRows = kRows / kParts;  // of a warp's scores
  static_assert(kWarpRows % kSub == 0 && (kParts == 1 || (kParts == 2 && kSub == kWarpRows)));
  static constexpr int kRowParts = kRows / 32;  // of dQ
  static_assert(kRowParts * (kHead / kPartFeatures) == kWarps);
  static constexpr int kPart = 32 * kPartFeatures;           // numbers of a warp's part of dQ
  static constexpr int kAtOnce = kSmall ? 1 : kAddedAtOnce;  // of them, side by side in memory
  static_assert(kStages == 2 || kParts > 1);
  using Scores = float[kKeyBlocks][kSub / 8][4];
  using Gradient = float[kKeyBlocks][kFeatures / 8][4];
  using Operand = uint32_t[kSub / 16][kKeyBlocks][4];  // Scores, packed: by 16 rows
  using Part = float[2][kPartFeatures / 8][4];

  // The work of this block; in shared memory, as registers are short.
  struct Item {
    int b, g, key;  // key: the tile's first
    int first_row_tile, end_row_tile;
    Band band;
  };
  struct Facts {  // of a tile's rows
    float shift[kRows], delta[kRows], inverse[kRows];
  };
  struct Shared {
    uint16_t k[kKeys * kHead], v[kKeys * kHead];
    uint16_t q[kStages][kRows * kHead], grad_output[kStages][kRows * kHead];
    uint16_t dscores[kKeys * kRows];                  // dS^T
    uint16_t probs[kParts == 1 ? 8 : kKeys * kRows];  // P^T, for the warp that shares the keys
    Facts facts[kStages];
    Item item;
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
  static_assert(!kSmall || kSharedBytes <= kSmallSharedBytes);

  static int64_t blocks(const Problem& p) { return static_cast<int64_t>(p.B) * p.G * p.key_tiles; }

  const Problem& p;
  Shared& shared;
  const Item& item;
  const int thread, warp, lane;
  int* due = nullptr;  // the turn of a row tile, to be passed on

  EK_DEVICE explicit Backward(const Problem& problem)
      : p(problem),
        shared(*reinterpret_cast<Shared*>(dynamic_shared())),
        item(shared.item),
        thread(static_cast<int>(threadIdx.x)),
        warp(thread / kWarpThreads),
        lane(thread % kWarpThreads) {
    if (thread == 0) take_item();
    __syncthreads();
  }

  EK_DEVICE static void run(const Problem& p) { Backward(p).run(); }

  EK_DEVICE void take_item() {
    const int number = atomicAdd(p.next_item, 1);
    Item taken;
    taken.b = number / p.key_tiles / p.G;
    taken.g = number / p.key_tiles % p.G;
    taken.key = (p.key_tiles - 1 - number % p.key_tiles) * kKeys;
    taken.band = Band(p, taken.b);
    taken.first_row_tile = taken.band.first_row_tile(taken.key, kRows);
    taken.end_row_tile = taken.band.end_row_tile(taken.key, kKeys, kRows);
    shared.item = taken;
  }

  EK_DEVICE void run() {
    Gradient dk = {}, dv = {};
    const int heads = p.H / p.G, tiles = item.end_row_tile - item.first_row_tile;
    if (tiles > 0) {
      load_keys(shared_address(shared.k), p.k, Side::keys);
      load_keys(shared_address(shared.v), p.v, Side::values);
      RowTile rows{item.g * heads, item.first_row_tile, 0, true};
      load_rows(rows);
      for (int step = 1; step <= heads * tiles; ++step) {
        const RowTile next = next_rows(rows, step < heads * tiles);
        wait_for_copies<0>();
        __syncthreads();  // these rows are there; everybody is done with the last ones
        if constexpr (kStages == 2) {
          if (next.present) load_rows(next);
          walk(rows, dk, dv, [] {});
        } else {
          walk(rows, dk, dv, [&] {
            if (next.present) load_rows(next);
          });
        }
        rows = next;
      }
      __syncthreads();
      pass_turn();
    }
    write_gradient(p.dk, dk, p.scale, Side::keys);
    write_gradient(p.dv, dv, 1.0f, Side::values);
  }

  EK_DEVICE int size(Side side) const { return p.template size<kHead>(side); }
  EK_DEVICE void load_keys(uint32_t to, const Strided& from, Side side) {
    const Sequence& s = item.band.s;
    load_tile<kHead, kKeys, kThreads>(
        to, own_piece<kHead>(from.at(s.key_batch, item.g, s.first_key + item.key), from.stride[2]),
        from.stride[2], s.keys - item.key, size(side));
  }
  // A tile of rows of a query head, and the stage that it takes. Not `present`: there is none.
  struct RowTile {
    int h, tile, stage;
    bool present;
  };
  EK_DEVICE RowTile next_rows(const RowTile& rows, bool present) const {
    return rows.tile + 1 < item.end_row_tile
               ? RowTile{rows.h, rows.tile + 1, kStages - 1 - rows.stage, present}
               : RowTile{rows.h + 1, item.first_row_tile, kStages - 1 - rows.stage, present};
  }
  EK_DEVICE void load_rows(const RowTile& rows) {
    const Sequence& s = item.band.s;
    const int row = rows.tile * kRows;
    const auto load = [&](uint32_t to, const Strided& from, Side side) {
      load_tile<kHead, kRows, kThreads>(
          to, own_piece<kHead>(from.at(s.query_batch, rows.h, s.first_row + row), from.stride[2]),
          from.stride[2], s.rows - row, size(side));
    };
    load(shared_address(shared.q[rows.stage]), p.q, Side::keys);
    load(shared_address(shared.grad_output[rows.stage]), p.grad_output, Side::values);
    // Each thread copies four numbers of one fact.
    constexpr int kPieces = kRows / 4;
    const bool with_inverse = kInstance != Instance::plain && p.inverse;
    const float* const from = thread < kPieces ? p.shift : thread < 2 * kPieces ? p.delta : p.inverse;
    const int64_t at = static_cast<int64_t>(item.b * p.H + rows.h) * p.padded_rows + row;
    if (thread < (with_inverse ? 3 : 2) * kPieces)
      copy_16_async(shared_address(&shared.facts[rows.stage]) + static_cast<uint32_t>(thread * 16),
                    from + at + thread % kPieces * 4, true);
    commit_copies();
  }

  EK_DEVICE int key_group() const { return warp / kParts; }
  EK_DEVICE int part() const { return kParts == 1 ? 0 : warp % kParts; }
  EK_DEVICE int warp_key() const { return key_group() * kWarpKeys; }  // the first, in the tile

  // One tile of rows. load_next(): with one stage, called as soon as nobody needs these rows.
  template <class LoadNext>
  EK_DEVICE void walk(const RowTile& row_tile, Gradient& dk, Gradient& dv, LoadNext load_next) {
    const int h = row_tile.h, tile = row_tile.tile;
    const uint32_t q = shared_address(shared.q[row_tile.stage]),
                   grad_output = shared_address(shared.grad_output[row_tile.stage]);
    if (!kAll && item.band.all_seen(tile * kRows, kRows, item.key, kKeys))
      walk_rows<false>(row_tile, q, grad_output, dk, dv);
    else
      walk_rows<true>(row_tile, q, grad_output, dk, dv);
    const int64_t index = static_cast<int64_t>(item.b * p.H + h) * p.row_tiles + tile;
    const int reached = load_relaxed(p.turn + index);  // early: it takes as long as the products
    __syncthreads();                                   // all of dS is there
    if constexpr (kParts > 1) {
      const int others = (1 - part()) * kWarpRows;
      if (item.band.some_seen(tile * kRows + others, kWarpRows, item.key + warp_key(), kWarpKeys)) {
        accumulate_shared(dv, shared_address(shared.probs), grad_output, others, Side::values);
        accumulate_shared(dk, shared_address(shared.dscores), q, others, Side::keys);
      }
    }
    if constexpr (kStages == 1) {
      __syncthreads();
      load_next();
    }
    if (kChunked<kHead> && part_feature() >= p.D) return;
    Part part = {};
    multiply_dq(part);
    pass_turn();
    add_dq(h, tile, index, reached, part);
  }

  // This warp's scores of a tile, and what they give dV and dK. kMasked: some rows may not see some keys.
  template <bool kMasked>
  EK_DEVICE void walk_rows(const RowTile& rows, uint32_t q, uint32_t grad_output, Gradient& dk,
                           Gradient& dv) {
    const Facts& facts = shared.facts[rows.stage];
#pragma unroll
    for (int n = 0; n < kWarpRows; n += kSub) {
      const int sub = part() * kWarpRows + n, row = rows.tile * kRows + sub;
      Operand left;
      if (kMasked && !item.band.some_seen(row, kSub, item.key + warp_key(), kWarpKeys)) {
        clear(left);
        share(shared.dscores, left, sub);
        continue;
      }
      Scores probs, dprobs;
      multiply(probs, shared_address(shared.k), q, sub, Side::keys);
      multiply(dprobs, shared_address(shared.v), grad_output, sub, Side::values);
      if constexpr (kMasked) mask(rows.h, row, probs);
      if constexpr (kAll)
        find_probs_of(p.rules_of(rows.h).consistent, facts, sub, probs, left);
      else
        find_probs<kInstance == Instance::consistent, false>(facts, sub, probs, left);
      if constexpr (kParts > 1) share(shared.probs, left, sub);
      accumulate(dv, left, grad_output, sub, Side::values);
      find_dscores(facts, sub, probs, dprobs, left);
      share(shared.dscores, left, sub);
      accumulate(dk, left, q, sub, Side::keys);
    }
  }

  // c = rows of a key tile (this warp's) times rows [sub, sub + kSub) of a row tile, transposed.
  EK_DEVICE void multiply(Scores& c, uint32_t keys, uint32_t rows, int sub, Side side) {
    clear(c);
    const auto own = Piece<kHead>::across(keys, warp_key(), lane);
    const auto others = Piece<kHead>::along(rows, sub, lane);
    each_chunk<kHead>(size(side), [&](int first_step) {
#pragma unroll
      for (int m = 0; m < kChunk<kHead> / 16; ++m) {
        const int step = first_step + m;
        uint32_t left[kKeyBlocks][4];
#pragma unroll
        for (int i = 0; i < kKeyBlocks; ++i) load_matrices(left[i], own.at(i, step));
        multiply_step<Pairs, kSub / 16>(
            c, left, [&](uint32_t(&right)[4], int n) { load_matrices(right, others.at(n, step)); });
      }
    });
  }

  // Soft-capped scores become tanh first; what is masked, -inf. `row`: of the first column. Rows behind the end have P = 0 by
  // their shift.
  EK_DEVICE void mask(int h, int row, Scores& scores) {
    if (kAll && p.softcap > 0) {
      const float factor = p.scale / p.softcap;
      each(scores, [&](float& x, int, int) { x = tanh_of(x * factor); });
    }
    const int first = item.key + warp_key();
    if (kAll && p.slopes) {
      const float slope = slope_of(p, h);
      each(scores, [&](float& x, int n, int column) {
        x = fmaf(-slope, fabsf(static_cast<float>(row + column + item.band.offset - first - n)), x);
      });
    }
    const Band& band = item.band;
    if (!band.all_seen(row, kSub, first, kWarpKeys)) {
      // Columns whose rows see a key: [from, to].
#pragma unroll
      for (int i = 0; i < kKeyBlocks; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int own = first + i * 16 + r * 8 + lane / 4;
          const int from = own >= band.s.keys ? kSub : own - band.right - band.offset - row,
                    to = own + band.left - band.offset - row;
#pragma unroll
          for (int n = 0; n < kSub / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int column = 8 * n + lane % 4 * 2 + e;
              if (column < from || column > to) scores[i][n][2 * r + e] = -kInfinity;
            }
        }
    }
    if (kAll && p.visible) {
      const Visible visible(p, item.b, h);
      each(scores, [&](float& x, int n, int column) {
        if (first + n < band.s.keys && row + column < band.s.rows && !visible(row + column, first + n))
          x = -kInfinity;
      });
    }
  }
  // f(score, key from the warp's first, row from the first) over a thread's scores.
  template <class F>
  EK_DEVICE void each(Scores& scores, F f) {
    each_score(scores, lane, [&](float& x, int which, int column) { f(x, 8 * which + lane / 4, column); });
  }

  EK_DEVICE void find_probs_of(bool consistent, const Facts& facts, int sub, Scores& scores, Operand& left) {
    if (consistent && p.softcap > 0)
      find_probs<true, true>(facts, sub, scores, left);
    else if (consistent)
      find_probs<true, false>(facts, sub, scores, left);
    else if (p.softcap > 0)
      find_probs<false, true>(facts, sub, scores, left);
    else
      find_probs<false, false>(facts, sub, scores, left);
  }
  // S^T to P^T, packed for dV; left in `scores` is what dP - delta is multiplied by: P, or with a soft cap P (1 - tanh^2).
  template <bool kConsistent, bool kCapped>
  EK_DEVICE void find_probs(const Facts& facts, int sub, Scores& scores, Operand& left) {
#pragma unroll
    for (int n = 0; n < kSub / 8; ++n) {
      const int column = sub + 8 * n + lane % 4 * 2;
      const float2 shift = *reinterpret_cast<const float2*>(facts.shift + column);
      float2 inverse = {0, 0};
      if (kConsistent) inverse = *reinterpret_cast<const float2*>(facts.inverse + column);
#pragma unroll
      for (int i = 0; i < kKeyBlocks; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& x = scores[i][n][2 * r];
          float& y = scores[i][n][2 * r + 1];
          const float slope_x = 1 - x * x, slope_y = 1 - y * y;  // with a soft cap
          x = exp2_approx(fmaf(x, p.score_log2, -shift.x));
          y = exp2_approx(fmaf(y, p.score_log2, -shift.y));
          uint32_t& packed = left[n / 2][i][n % 2 * 2 + r];
          if (kConsistent) {  // the forward's rounded probabilities, over their sum
            packed = Pairs::pack(x, y);
            x = Pairs::low(packed) * inverse.x;
            y = Pairs::high(packed) * inverse.y;
          }
          packed = Pairs::pack(x, y);
          if (kCapped) {  // a masked score is -inf: its P is 0, its slope is not a number
            x = x == 0 ? 0.0f : x * slope_x;
            y = y == 0 ? 0.0f : y * slope_y;
          }
        }
    }
  }
  // dS^T = P^T (dP^T - delta), packed.
  EK_DEVICE void find_dscores(const Facts& facts, int sub, const Scores& probs, const Scores& dprobs,
                              Operand& left) {
#pragma unroll
    for (int n = 0; n < kSub / 8; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(facts.delta + sub + 8 * n + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < kKeyBlocks; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          left[n / 2][i][n % 2 * 2 + r] =
              Pairs::pack(probs[i][n][2 * r] * (dprobs[i][n][2 * r] - delta.x),
                          probs[i][n][2 * r + 1] * (dprobs[i][n][2 * r + 1] - delta.y));
    }
  }
  // P^T or dS^T into shared memory, for other warps.
  EK_DEVICE void share(uint16_t* tile, const Operand& left, int sub) {
    uint8_t* const to = reinterpret_cast<uint8_t*>(tile);
#pragma unroll
    for (int i = 0; i < kKeyBlocks; ++i)
#pragma unroll
      for (int n = 0; n < kSub / 8; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int own = warp_key() + i * 16 + 8 * r + lane / 4;
          *reinterpret_cast<uint32_t*>(to + tile_offset<kRows>(own, sub / 8 + n) + lane % 4 * 4) =
              left[n / 2][i][n % 2 * 2 + r];
        }
  }
  // This warp's features of rows [row, ...) of a row tile, as the right operand.
  EK_DEVICE Piece<kHead> own_features(uint32_t rows, int row) const {
    return Piece<kHead>::across(rows + static_cast<uint32_t>(part() * kFeatures * 2), row, lane);
  }
  // sum += left (keys x rows [sub, sub + kSub)) times those rows of a row tile.
  EK_DEVICE void accumulate(Gradient& sum, const Operand& left, uint32_t rows, int sub, Side side) {
    if constexpr (kChunked<kHead>) {
      if (is_behind(side)) return;
    }
    const auto others = own_features(rows, sub);
#pragma unroll
    for (int step = 0; step < kSub / 16; ++step) accumulate_step(sum, left[step], others, step);
  }
  EK_DEVICE void accumulate_step(Gradient& sum, const uint32_t (&left)[kKeyBlocks][4],
                                 const Piece<kHead>& others, int step) {
    multiply_step<Pairs, kFeatures / 16>(
        sum, left, [&](uint32_t(&right)[4], int n) { load_matrices_transposed(right, others.at(step, n)); });
  }
  // Do this warp's features lie behind the head's end?
  EK_DEVICE bool is_behind(Side side) const { return part() * kFeatures >= size(side); }
  // The same with rows [row, row + kWarpRows) that another warp shared.
  EK_DEVICE void accumulate_shared(Gradient& sum, uint32_t shared_left, uint32_t rows, int row, Side side) {
    if constexpr (kChunked<kHead>) {
      if (is_behind(side)) return;
    }
    const auto keys = Piece<kRows>::across(shared_left, warp_key(), lane);
    const auto others = own_features(rows, row);
#pragma unroll
    for (int step = 0; step < kWarpRows / 16; ++step) {
      uint32_t left[kKeyBlocks][4];
#pragma unroll
      for (int i = 0; i < kKeyBlocks; ++i) load_matrices(left[i], keys.at(i, row / 16 + step));
      accumulate_step(sum, left, others, step);
    }
  }

  // ------------------------------------------------------------------------------------------------------- dQ
  EK_DEVICE int part_row() const { return warp % kRowParts * 32; }
  EK_DEVICE int part_feature() const { return warp / kRowParts * kPartFeatures; }
  // This warp's 32 rows x kPartFeatures of dS K.
  EK_DEVICE void multiply_dq(Part& part) {
    // dS^T has the keys as rows: read transposed.
    const Piece<kRows> dscores{
        shared_address(shared.dscores) +
        tile_offset<kRows>((lane >> 4) * 8 + (lane & 7), part_row() / 8 + (lane >> 3 & 1))};
    const Piece<kHead> keys{shared_address(shared.k) +
                            tile_offset<kHead>(lane & 15, part_feature() / 8 + (lane >> 4))};
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t left[2][4], right[kPartFeatures / 16][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) load_matrices_transposed(left[m], dscores.at(step, m));
#pragma unroll
      for (int n = 0; n < kPartFeatures / 16; ++n) load_matrices_transposed(right[n], keys.at(step, n));
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < kPartFeatures / 8; ++n)
          Pairs::multiply_add(part[m][n], left[m], right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
    }
  }
  // f(kAtOnce numbers, where their sums are). `sum`: of the first numbers. Consecutive lanes' sums lie side by side.
  template <class F>
  EK_DEVICE void each_of(Part& part, float* sum, F f) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < kPartFeatures / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; e += kAtOnce, sum += kWarpThreads * kAtOnce)
          f(reinterpret_cast<float(&)[kAtOnce]>(part[m][n][e]), sum);
  }
  // In its turn: after the parts of all later key tiles that see these rows. `index`: of the row tile; `reached`: its turn some
  // time ago, read without an order. Nothing below is started before that number is known to be high enough. Sums are added
  // and read in the memory that all blocks share, never in a cache of this multiprocessor. So the order holds.
  EK_DEVICE void add_dq(int h, int tile, int64_t index, int reached, Part& part) {
    const int row = tile * kRows, own = item.key / kKeys;
    const int first = item.band.first_key_tile(row, kKeys),
              last = item.band.end_key_tile(row, kRows, kKeys) - 1;
    float* const sums = p.dq_sum + (index * kWarps + warp) * kPart + lane * kAtOnce;
    if (own < last) {
      if (reached < last - own)
        while (load_acquire(p.turn + index) < last - own) let_others_run();
      __syncwarp();
    }
    if (own == first) {
      if (own < last)
        each_of(part, sums, [](float(&x)[kAtOnce], const float* sum) {
          float before[kAtOnce];
          load_past_cache(before, sum);
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) x[n] += before[n];
        });
      write_dq(h, row, part);
      return;
    }
    if (own == last)
      each_of(part, sums, [](float(&x)[kAtOnce], float* sum) { store(sum, x); });
    else
      each_of(part, sums, [](float(&x)[kAtOnce], float* sum) { add_in_memory(sum, x); });
    due = p.turn + index;
  }
  // After a barrier of the block: one thread's release is for the sums of all warps, and it waits until they have arrived. A step
  // later they have; right behind them, that thread would keep the block waiting at its next barrier. It comes before the block
  // waits for another turn: a block that waits has passed all its earlier turns on.
  EK_DEVICE void pass_turn() {
    if (thread == 0 && due) add_release(due, 1);
    due = nullptr;
  }
  EK_DEVICE void write_dq(int h, int tile_row, const Part& part) {
    const int written = p.sequences.query_offsets ? item.band.s.rows : p.sequences.T;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = tile_row + part_row() + 16 * m + lane / 4 + 8 * r;
#pragma unroll
        for (int n = 0; n < kPartFeatures / 8; n += 4) {
          const int feature = part_feature() + lane % 4 * 8 + 8 * n;
          write_blocks<Pairs>(part[m] + n, r, p.scale,
                              p.dq.at(item.band.s.query_batch, h, item.band.s.first_row + i) + feature,
                              i < written && feature < p.D, i < item.band.s.rows);
        }
      }
  }

  EK_DEVICE void write_gradient(const Strided& to, const Gradient& sum, float scale, Side side) {
    const int written = p.sequences.key_offsets ? item.band.s.keys : p.sequences.N;
#pragma unroll
    for (int i = 0; i < kKeyBlocks; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int own = item.key + warp_key() + i * 16 + lane / 4 + 8 * r;
        uint16_t* const row = to.at(item.band.s.key_batch, item.g, item.band.s.first_key + own);
#pragma unroll
        for (int n = 0; n < kFeatures / 8; n += 4) {
          const int feature = part() * kFeatures + 8 * (n + lane % 4);
          write_blocks<Pairs>(sum[i] + n, r, scale, row + feature, own < written && feature < size(side),
                              own < item.band.s.keys);
        }
      }
  }
};

}  // namespace evenkeel::ampere
