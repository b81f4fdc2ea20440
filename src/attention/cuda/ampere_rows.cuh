// Before the backward kernel of the Ampere class: delta and the other facts of each row. Internal to src/attention.
#pragma once

#include "attention/cuda/ampere_backward.cuh"
#include "attention/cuda/row_facts.cuh"

namespace evenkeel::ampere {

// kHead / 8 threads a row, and kRounds rows a thread, so that what is the same for all rows is found once, and more of memory is
// on its way.
template <class Pairs, int kHead, class Tiles>
struct RowFacts {
  static constexpr int kThreads = 256, kBlocksAtOnce = 4;
  static constexpr size_t kSharedBytes = 0;
  static constexpr int kLanes = kHead / 8, kAtOnce = kThreads / kLanes;  // a row's threads; rows of a round
  static constexpr int kRounds = 4, kRows = kRounds * kAtOnce;

  static int64_t blocks(const Problem& p) {
    return static_cast<int64_t>(p.B) * p.H * ((p.padded_rows + kRows - 1) / kRows);
  }

  EK_DEVICE static void run(const Problem& p) {
    const int blocks_a_head = (p.padded_rows + kRows - 1) / kRows, index = static_cast<int>(blockIdx.x),
              thread = static_cast<int>(threadIdx.x);
    const int head = index / blocks_a_head, b = head / p.H, h = head - b * p.H;
    const int first = (index - head * blocks_a_head) * kRows, feature = thread % kLanes * 8;
    const HeadRules rules = p.rules_of(h);
    const Band band(p, b);
    if (index == 0 && thread < kMostKernels) p.next_item[thread] = 0;
    if (first == 0 && p.turn)
      for (int n = thread; n < p.row_tiles; n += kThreads)
        p.turn[static_cast<int64_t>(head) * p.row_tiles + n] = 0;

    float delta[kRounds] = {};
    const int size = p.template size<kHead>(Side::values);
    if (!rules.exact_delta && feature < size && first < band.s.rows) {
      Eight eights[kRounds];  // all are on their way before the first is used
      const auto row_of = [&](int n) { return min(first + n * kAtOnce + thread / kLanes, band.s.rows - 1); };
#pragma unroll
      for (int n = 0; n < kRounds; ++n) {
        const int at = band.s.first_row + row_of(n);
        eights[n].grad =
            *reinterpret_cast<const uint4*>(p.grad_output.at(band.s.query_batch, h, at) + feature);
        eights[n].o = *reinterpret_cast<const uint4*>(p.o.at(band.s.query_batch, h, at) + feature);
        eights[n].residue = {0, 0};
      }
      if (rules.wide) {  // of other heads nobody may have written one (Hopper's forward pass does not)
#pragma unroll
        for (int n = 0; n < kRounds; ++n)
          eights[n].residue = *reinterpret_cast<const uint2*>(
              p.residue + (static_cast<int64_t>(head) * p.sequences.T + row_of(n)) * size + feature);
      }
#pragma unroll
      for (int n = 0; n < kRounds; ++n) delta[n] = dot(eights[n]);
    }
    const int round = sum_rounds(delta);
    const int row = first + round * kAtOnce + thread / kLanes;
    if (thread % (kLanes / kRounds) == 0 && row < p.padded_rows)
      write(p, rules, band, head, h, row, delta[0]);
  }

  // Sums over the lanes of a row, as a tree. Of two rounds that are still together, a lane's bit chooses which it keeps:
  // one shuffle for both. Returns the round whose sum is in delta[0].
  EK_DEVICE static int sum_rounds(float (&delta)[kRounds]) {
    static_assert(kRounds == 4 && kLanes >= kRounds);
    const int lane = static_cast<int>(threadIdx.x);
    const bool upper = lane & (kLanes / 2), odd = lane & (kLanes / 4);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float received = __shfl_xor_sync(~0u, upper ? delta[n] : delta[n + 2], kLanes / 2);
      delta[n] = (upper ? delta[n + 2] : delta[n]) + received;
    }
    const float received = __shfl_xor_sync(~0u, odd ? delta[0] : delta[1], kLanes / 4);
    delta[0] = (odd ? delta[1] : delta[0]) + received;
#pragma unroll
    for (int step = kLanes / 8; step > 0; step /= 2) delta[0] += __shfl_xor_sync(~0u, delta[0], step);
    return (upper ? 2 : 0) + (odd ? 1 : 0);
  }

  // Eight features of a row of dO and of O'.
  struct Eight {
    uint4 grad, o;
    uint2 residue;
  };
  // Their part of dO . O'.
  EK_DEVICE static float dot(const Eight& eight) {
    return dot_of_eight<Pairs>(eight.grad, eight.o, eight.residue);
  }

  EK_DEVICE static void write(const Problem& p, const HeadRules& rules, const Band& band, int head, int h,
                              int row, float dot) {
    const int T = p.sequences.T;
    const int64_t at = static_cast<int64_t>(head) * T + row;
    const RowFact fact = row < band.s.rows ? row_fact(p, rules, at, dot) : RowFact{};
    if (p.delta_out && row < T) p.delta_out[at] = fact.delta;
    const int64_t slot = static_cast<int64_t>(head) * p.padded_rows + row;
    p.shift[slot] = fact.shift;
    p.delta[slot] = fact.delta;
    if (p.inverse) p.inverse[slot] = fact.inverse;
    clear_unseen_row(p, band, row, Tiles::kRows, Tiles::kKeys,
                     p.dq.at(band.s.query_batch, h, band.s.first_row + row));
  }
};

// zero_sum's delta: sum_j P_ij dP_ij / sum_j P_ij, by a pass over the keys of its own. Both sums are over the probabilities
// that this pass computes, so that P (dP - delta) adds up to zero whatever the forward pass rounded. A block owns query
// rows; K and V go through a ring of three slots, as in the forward pass.
template <class Pairs, int kHead>
struct ExactDelta {
  static constexpr int kWarps = 4, kThreads = kWarps * kWarpThreads, kBlocksAtOnce = 2;
  static constexpr int kBlocks = kHead == 64 ? 2 : 1, kRows = kWarps * kBlocks * 16,
                       kKeys = kChunked<kHead> ? 16 : 64;
  static constexpr int kRowCount = 2 * kBlocks, kWarpRows = kBlocks * 16, kSlots = 3;
  static constexpr uint32_t kQueryBytes = kRows * kHead * 2, kSlotBytes = kKeys * kHead * 2;
  static constexpr size_t kSharedBytes = 2 * kQueryBytes + kSlots * kSlotBytes;
  static_assert(kSharedBytes <= kSmallSharedBytes);
  using Scores = float[kBlocks][kKeys / 8][4];

  static int64_t blocks(const Problem& p) {
    return static_cast<int64_t>(p.B) * p.H * ((p.sequences.T + kRows - 1) / kRows);
  }

  const Problem& p;
  const int warp, lane, tiles, b, h, g, row;
  const Band band;
  const int first_tile, end_tile;
  const uint32_t q, grad, slots;
  int slot = 0;

  EK_DEVICE explicit ExactDelta(const Problem& problem)
      : p(problem),
        warp(static_cast<int>(threadIdx.x) / kWarpThreads),
        lane(static_cast<int>(threadIdx.x) % kWarpThreads),
        tiles((p.sequences.T + kRows - 1) / kRows),
        b(static_cast<int>(blockIdx.x) / tiles / p.H),
        h(static_cast<int>(blockIdx.x) / tiles % p.H),
        g(h / (p.H / p.G)),
        row((tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * kRows),
        band(p, b),
        first_tile(band.first_key_tile(row, kKeys)),
        end_tile(band.end_key_tile(row, kRows, kKeys)),
        q(shared_address(dynamic_shared())),
        grad(q + kQueryBytes),
        slots(grad + kQueryBytes) {}

  EK_DEVICE static void run(const Problem& p) {
    ExactDelta block(p);
    if (p.rules_of(block.h).exact_delta) block.run();
  }

  EK_DEVICE int size(Side side) const { return p.template size<kHead>(side); }
  EK_DEVICE void load_rows(uint32_t to, const Strided& tensor, Side side) {
    const Sequence& s = band.s;
    load_tile<kHead, kRows, kThreads>(
        to, own_piece<kHead>(tensor.at(s.query_batch, h, s.first_row + row), tensor.stride[2]),
        tensor.stride[2], s.rows - row, size(side));
  }
  EK_DEVICE void load_keys(const Strided& tensor, int tile, int to, Side side) {
    if (tile >= first_tile)
      load_tile<kHead, kKeys, kThreads>(
          slots + to * kSlotBytes,
          own_piece<kHead>(tensor.at(band.s.key_batch, g, band.s.first_key + tile * kKeys), tensor.stride[2]),
          tensor.stride[2], band.s.keys - tile * kKeys, size(side));
    commit_copies();
  }
  EK_DEVICE void next_slot(const Strided& tensor, int tile, Side side) {
    wait_for_copies<1>();
    __syncthreads();
    load_keys(tensor, tile - 1, slot == 0 ? kSlots - 1 : slot - 1, side);
  }
  EK_DEVICE void multiply(Scores& s, uint32_t rows, Side side) {
    clear(s);
    const auto keys = Piece<kHead>::along(slots + slot * kSlotBytes, 0, lane);
    if constexpr (kChunked<kHead>) {
      each_chunk<kHead>(size(side), [&](int first_step) {
#pragma unroll
        for (int n = 0; n < kChunk<kHead> / 16; ++n) multiply_features(s, rows, keys, first_step + n);
      });
    } else {
#pragma unroll
      for (int step = 0; step < kHead / 16; ++step) multiply_features(s, rows, keys, step);
    }
  }
  EK_DEVICE void leave_slot() { slot = slot == kSlots - 1 ? 0 : slot + 1; }
  EK_DEVICE void multiply_features(Scores& s, uint32_t rows, const Piece<kHead>& keys, int step) {
    uint32_t left[kBlocks][4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      load_matrices(left[i], Piece<kHead>::across(rows, warp * kBlocks * 16, lane).at(i, step));
    multiply_step<Pairs, kKeys / 16>(
        s, left, [&](uint32_t(&right)[4], int n) { load_matrices(right, keys.at(n, step)); });
  }
  EK_DEVICE int row_of(int r) const { return row + warp * kBlocks * 16 + r / 2 * 16 + lane / 4 + r % 2 * 8; }

  EK_DEVICE void run() {
    const Sequence& sequence = band.s;
    float shift[kRowCount], sum[kRowCount] = {}, weighted[kRowCount] = {};
#pragma unroll
    for (int r = 0; r < kRowCount; ++r)
      shift[r] = row_of(r) < sequence.rows
                     ? p.lse[static_cast<int64_t>(b * p.H + h) * p.sequences.T + row_of(r)] * kLog2E
                     : -kInfinity;
    if (first_tile < end_tile) {
      load_rows(q, p.q, Side::keys);
      load_rows(grad, p.grad_output, Side::values);
      load_keys(p.k, end_tile - 1, 0, Side::keys);
      load_keys(p.v, end_tile - 1, 1, Side::values);
    }
    for (int tile = end_tile - 1; tile >= first_tile; --tile) {
      Scores scores, dprobs;
      const bool seen = band.some_seen(row + warp * kWarpRows, kWarpRows, tile * kKeys, kKeys);
      next_slot(p.k, tile, Side::keys);
      if (seen) multiply(scores, q, Side::keys);
      leave_slot();
      next_slot(p.v, tile, Side::values);
      if (seen) {
        multiply(dprobs, grad, Side::values);
        if (!is_whole(tile)) shape(tile, scores);
        add(scores, dprobs, shift, sum, weighted);
      }
      leave_slot();
    }
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      const float total = quad_sum(weighted[r]);
      const float l =
          quad_sum(sum[r]) + (shift[r] == -kInfinity ? 0.0f : exp2_approx(sink_log2(p, h) - shift[r]));
      if (lane % 4 == 0 && row_of(r) < p.sequences.T)
        p.exact_delta[static_cast<int64_t>(b * p.H + h) * p.sequences.T + row_of(r)] =
            l > 0 ? total / l : 0.0f;
    }
  }

  // The warp's rows are there and see all of the tile, and no form changes their scores.
  EK_DEVICE bool is_whole(int tile) const {
    const int first = row + warp * kWarpRows;
    return !p.shaped && first + kWarpRows <= band.s.rows &&
           band.all_seen(first, kWarpRows, tile * kKeys, kKeys);
  }
  // Soft caps (scores become tanh) and slopes; what a row does not see is -inf.
  EK_DEVICE void shape(int tile, Scores& scores) {
    const int key = tile * kKeys;
    if (p.softcap > 0) {
      const float factor = p.scale / p.softcap;
      each_score(scores, lane, [&](float& x, int, int) { x = tanh_of(x * factor); });
    }
    if (p.slopes) {
      const float slope = slope_of(p, h);
      each_score(scores, lane, [&](float& x, int r, int column) {
        x = fmaf(-slope, fabsf(static_cast<float>(row_of(r) + band.offset - key - column)), x);
      });
    }
    int first[kRowCount], end[kRowCount];
#pragma unroll
    for (int r = 0; r < kRowCount; ++r) {
      first[r] = band.first_key(row_of(r)) - key;
      end[r] = row_of(r) < band.s.rows ? band.end_key(row_of(r)) - key : 0;
    }
    const Visible visible(p, b, h);
    each_score(scores, lane, [&](float& x, int r, int column) {
      if (column < first[r] || column >= end[r] || (p.visible && !visible(row_of(r), key + column)))
        x = -kInfinity;
    });
  }
  EK_DEVICE void add(const Scores& scores, const Scores& dprobs, const float (&shift)[kRowCount],
                     float (&sum)[kRowCount], float (&weighted)[kRowCount]) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = 2 * i + e / 2;
          const float used = shift[r] == -kInfinity ? 0.0f : shift[r];  // all of its scores are -inf
          const float prob = exp2_approx(fmaf(scores[i][n][e], p.score_log2, -used));
          sum[r] += prob;
          weighted[r] = fmaf(prob, dprobs[i][n][e], weighted[r]);
        }
  }
};

struct SinkGradient {
  static constexpr int kThreads = 256, kBlocksAtOnce = 1;
  static constexpr size_t kSharedBytes = kThreads / kWarpThreads * sizeof(float);
  EK_DEVICE static void run(const Problem& p) {
    add_up_sink_gradient<kThreads>(p, reinterpret_cast<float*>(dynamic_shared()), [&](int64_t head, int row) {
      return p.delta[head * p.padded_rows + row];
    });
  }
};

}  // namespace evenkeel::ampere
