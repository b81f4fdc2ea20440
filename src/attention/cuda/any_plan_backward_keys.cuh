// The any-plan kernel that owns keys: dK and dV. Scores are transposed here, keys in the rows of the fragments: P^T and
// dS^T come out as the left operands of dV and dK.
#pragma once

#include "attention/cuda/any_plan_backward.cuh"

namespace evenkeel::any_plan {

// The work of one warp, step by step: 16 keys of a block's kOwnedRows, with the block's other warps at every load.
template <int kD, Variant kVariant>
struct BackwardKeys {
  using Shape = BackwardShape<kD, kVariant>;
  static constexpr bool kAny = Shape::kAny;
  using Loader = TileLoader<kD, Shape::kThreads, kAny>;
  using Scores = float[kStepFragments][4];  // of the warp's keys and a step's rows

  // One query head of the group, and what its plan asks for.
  struct Head {
    const int head, h;
    const DevicePlan& plan;
    const int q_parts, k_parts, v_parts, grad_parts;
    const BackwardSites<kVariant> sites;
    const int probs_parts, dscores_parts;
    const Loader row_loader, grad_loader;

    EK_DEVICE Head(const Problem& p, const Sight& sight, int b, int h_)
        : head(b * p.H + h_),
          h(h_),
          plan(plan_of(p, h)),
          q_parts(kAny ? plan.parts_q : 1),
          k_parts(kAny ? plan.parts_k : 1),
          v_parts(kAny ? plan.parts_v : 1),
          grad_parts(kAny ? plan.parts_grad : 1),
          sites(plan),
          probs_parts(kAny ? plan.parts_probs_bwd : 1),
          dscores_parts(kAny ? plan.parts_dscores : 1),
          row_loader(p.q, p.D, b, h, sight.rows, q_parts),
          grad_loader(p.grad, p.D, b, h, sight.rows, grad_parts) {}
  };

  const Problem& p;
  const int kv_head, block_key, b, g, heads;
  const DevicePlan& first_plan;
  const uint8_t* const shared;
  const uint32_t k_tile, v_tile, q_tile, grad_tile, value_tile;
  const int warp, lane, group, quad, warp_key;
  const int key[2];
  const Sight sight;
  const uint64_t pitch;
  const KeysSight warp_sight, block_sight;
  const int begin, end;  // loads of rows that see some of these keys
  float dk[kD / 8][4] = {}, dv[kD / 8][4] = {};

  EK_DEVICE BackwardKeys(const Problem& problem, int kv_head_, int block_key_, const DevicePlan& plan,
                         const uint8_t* shared_)
      : p(problem),
        kv_head(kv_head_),
        block_key(block_key_),
        b(kv_head / p.G),
        g(kv_head % p.G),
        heads(p.H / p.G),
        first_plan(plan),
        shared(shared_),
        k_tile(shared_address(shared)),
        v_tile(k_tile + Shape::kOwnedBytes * (kAny ? p.most_k : 1)),
        q_tile(v_tile + Shape::kOwnedBytes * (kAny ? p.most_v : 1)),
        grad_tile(q_tile + Shape::kLoadBytes * Shape::kStages * (kAny ? p.most_q : 1)),
        value_tile(grad_tile + Shape::kLoadBytes * Shape::kStages * (kAny ? p.most_grad : 1)),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        group(lane / 4),
        quad(lane % 4),
        warp_key(block_key + warp * kWarpRows),
        key{warp_key + group, warp_key + group + 8},
        sight(p, b),
        pitch(row_pitch(p)),
        warp_sight(sight, warp_key, kWarpRows),
        block_sight(sight, block_key, kOwnedRows),
        begin(block_sight.first / Shape::kLoad),
        end(max(begin, (block_sight.last + Shape::kLoad - 1) / Shape::kLoad)) {}

  EK_DEVICE void run() {
    for (int h = g * heads; h < (g + 1) * heads; ++h) {
      const Head head(p, sight, b, h);
      load_keys(head);
      for (int step = begin; step < end; ++step) {
        const int stage = Shape::kStages > 1 ? (step - begin) & 1 : 0;
        await_load(head, step, stage);
#pragma unroll 1
        for (int start = 0; start < Shape::kLoad; start += kBackwardStep) {
          const int row = step * Shape::kLoad + start;
          if (!warp_sight.any(row, kBackwardStep)) continue;
          take_step(head, row, stage, start);
        }
      }
    }
    finish();
  }

  // --- Load
  EK_DEVICE void load_step(const Head& head, int step, int stage) {
    head.row_loader.template load<Shape::kLoad>(q_tile + stage * Shape::kLoadBytes, step * Shape::kLoad);
    head.grad_loader.template load<Shape::kLoad>(grad_tile + stage * Shape::kLoadBytes, step * Shape::kLoad);
    if (threadIdx.x < Shape::kLoad) {
      // Rows behind the last read its values: they are masked.
      const int64_t at = static_cast<int64_t>(head.head) * p.T +
                         min(step * Shape::kLoad + static_cast<int>(threadIdx.x), p.T - 1);
      const uint32_t target = value_tile + stage * Shape::kValueBytes + threadIdx.x * 4;
      copy_4_async(target, &p.row_values[at].x);
      copy_4_async(target + Shape::kLoad * 4, p.used_delta + at);
      if constexpr (kVariant != Variant::quick) copy_4_async(target + Shape::kLoad * 8, &p.row_values[at].y);
    }
    commit_copies();
  }
  EK_DEVICE void load_keys(const Head& head) {
    __syncthreads();  // the head before is done with its tiles
    Loader(p.k, p.D, b, head.h, sight.keys, head.k_parts).template load<kOwnedRows>(k_tile, block_key);
    Loader(p.v, p.D, b, head.h, sight.keys, head.v_parts).template load<kOwnedRows>(v_tile, block_key);
    commit_copies();
    if (Shape::kStages > 1 && begin < end) load_step(head, begin, 0);
  }
  // This load's rows, and with two stages the next one's on their way.
  EK_DEVICE void await_load(const Head& head, int step, int stage) {
    if constexpr (Shape::kStages > 1) {
      wait_for_copies();
      __syncthreads();
      if (step + 1 < end) load_step(head, step + 1, stage ^ 1);
    } else {
      __syncthreads();
      load_step(head, step, 0);
      wait_for_copies();
      __syncthreads();
    }
  }
  // The values of the rows that are columns here.
  EK_DEVICE void take_row_values(RowValues (&of_column)[kStepFragments][2], int stage, int start) {
    const float* const values =
        reinterpret_cast<const float*>(shared + (value_tile - k_tile) + stage * Shape::kValueBytes) + start +
        2 * quad;
#pragma unroll
    for (int n = 0; n < kStepFragments; ++n) {
      const float2 shift = *reinterpret_cast<const float2*>(values + 8 * n);
      const float2 delta = *reinterpret_cast<const float2*>(values + Shape::kLoad + 8 * n);
      float2 sum{1.0f, 1.0f};
      if constexpr (kVariant != Variant::quick)
        sum = *reinterpret_cast<const float2*>(values + 2 * Shape::kLoad + 8 * n);
      of_column[n][0] = {shift.x, sum.x, delta.x};
      of_column[n][1] = {shift.y, sum.y, delta.y};
    }
  }

  // --- One step of rows
  EK_DEVICE void take_step(const Head& head, int row, int stage, int start) {
    const uint32_t part = stage * Shape::kLoadBytes + start * kTileRowBytes<kD>, rows = q_tile + part,
                   grads = grad_tile + part;
    Scores s = {}, dp = {};
    float slope[kAny ? kStepFragments : 1][4];
    multiply_rows<kD, kStepFragments, kAny>(s, k_tile, kOwnedRows, warp * kWarpRows, head.k_parts, rows,
                                            kBackwardStep, 0, head.q_parts, lane);
    multiply_rows<kD, kStepFragments, kAny>(dp, v_tile, kOwnedRows, warp * kWarpRows, head.v_parts, grads,
                                            kBackwardStep, 0, head.grad_parts, lane);
    const Elements elements{(static_cast<uint64_t>(head.head) * p.N + key[0]) * pitch + row + 2 * quad, pitch,
                            1};
    RowValues of_column[kStepFragments][2];
    take_row_values(of_column, stage, start);
    const auto values_of = [&](int n, int e) { return of_column[n][e % 2]; };
    const auto masked = [&](int n, int e) {
      const int i = row + 8 * n + 2 * quad + e % 2, j = key[e / 2];
      return !sight.sees(i, j) || (kAny && p.visible && visible_at(p, b, head.h, i, j) == 0);
    };
    const bool whole = warp_sight.whole(row, kBackwardStep) && !(kAny && p.visible);
    recompute<kVariant, kAny>(s, dp, slope, p, head.plan, head.sites, elements, whole, masked, values_of);
    add_to_dv(head, s, grads, elements);
    score_gradients(s, dp, p.scale, values_of);
    if constexpr (kAny) {
      if (p.softcap > 0) {
#pragma unroll
        for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) dp[n][e] = __fmul_rn(dp[n][e], slope[n][e]);
      }
    }
    if (is_rounded_apart<kVariant>(head.sites.dscores))
      round_operand<kVariant>(dp, head.sites.dscores, stream_key(p, head.plan, Site::dscores), elements);
    multiply_columns<kD, kStepFragments, kAny>(dk, dp, head.dscores_parts, rows, kBackwardStep, 0,
                                               head.q_parts, lane);
  }
  // P as operand of dV is rounded apart from the P that dS uses.
  EK_DEVICE void add_to_dv(const Head& head, const Scores& s, uint32_t grads, const Elements& elements) {
    Scores operand;
#pragma unroll
    for (int n = 0; n < kStepFragments; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) operand[n][e] = s[n][e];
    if (is_rounded_apart<kVariant>(head.sites.probs_bwd))
      round_operand<kVariant>(operand, head.sites.probs_bwd, stream_key(p, head.plan, Site::probs_bwd),
                              elements);
    multiply_columns<kD, kStepFragments, kAny>(dv, operand, head.probs_parts, grads, kBackwardStep, 0,
                                               head.grad_parts, lane);
  }

  // --- Finish
  // Heads of a group share dK and dV: their first head's plan rounds them.
  EK_DEVICE void finish() {
    const SiteRounding dk_site = first_plan.at(Site::dk), dv_site = first_plan.at(Site::dv);
    const StreamKey dk_key = stream_key(p, first_plan, Site::dk),
                    dv_key = stream_key(p, first_plan, Site::dv);
    const RowWriter dk_writer(p, p.dk, b, g, key, sight.keys, p.N),
        dv_writer(p, p.dv, b, g, key, sight.keys, p.N);
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      const Elements elements{(static_cast<uint64_t>(kv_head) * p.N + key[0]) * p.D + 8 * n + 2 * quad,
                              static_cast<uint64_t>(p.D), 1};
      const auto write = [&](const float(&sums)[4], const SiteRounding& site, const StreamKey& stream,
                             const RowWriter& to) {
        float x[1][4];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[0][e] = key[e / 2] < sight.keys ? sums[e] : 0.0f;
        round_fragments<RoundKind::any>(x, site, stream, elements);
        to.write(8 * n + 2 * quad, x[0]);
      };
      write(dk[n], dk_site, dk_key, dk_writer);
      write(dv[n], dv_site, dv_key, dv_writer);
    }
  }
};

template <int kD, Variant kVariant>
__global__ void __launch_bounds__(BackwardShape<kD, kVariant>::kThreads, BackwardShape<kD, kVariant>::kBlocks)
    backward_keys_kernel(const __grid_constant__ Problem p) {
  const int key_tiles = (p.N + kOwnedRows - 1) / kOwnedRows;
  const int kv_head = blockIdx.x / key_tiles, block_key = blockIdx.x % key_tiles * kOwnedRows;
  const DevicePlan& plan = plan_of(p, kv_head % p.G * (p.H / p.G));
  if (plan.backward != kVariant) return;
  extern __shared__ __align__(128) uint8_t shared[];
  BackwardKeys<kD, kVariant>(p, kv_head, block_key, plan, shared).run();
}

}  // namespace evenkeel::any_plan
