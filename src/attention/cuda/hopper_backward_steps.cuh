// The steps of a consumer warpgroup of Hopper's backward pass that both head sizes have. In which order, and what is waited for
// in between, is each consumer's own. Included by the files of the consumers alone.
//
// Operands of products are found from numbers that the compiler knows to be the same in all threads of a warp (warp_uniform).
// It then keeps their descriptors in uniform registers. Else up to four moves stand before a product, and the tensor cores wait.
#pragma once

#include "attention/cuda/hopper_backward_scores.cuh"

namespace evenkeel::hopper::backward {

template <class Self, class Pairs, int D, Consistent kConsistent, Form kForm>
struct ConsumerSteps : ScoreWork<Pairs, D, kConsistent, kForm> {
  using Work = ScoreWork<Pairs, D, kConsistent, kForm>;
  using typename Work::Gradient;
  using typename Work::ScoreOperand;
  using typename Work::Scores;
  using Work::consumer, Work::kFp16, Work::kNext16Rows, Work::kRows, Work::lane, Work::p, Work::sm,
      Work::thread;
  // Named barriers. From kDqDone on (head size 64), one a warpgroup: it has finished its dQ, the other one may overwrite dS.
  static constexpr int kScoresShared = 1, kRowsCleared = 2, kDqDone = 3;

  Ring<kStages> queue;
  uint32_t item_parity = 0;

  EK_DEVICE ConsumerSteps(SharedMemory<D>& shared, const Backward& problem, int which)
      : Work(shared, problem, which) {}

  EK_DEVICE void release(uint64_t* empty) const {
    if (lane == 0) barrier_arrive(empty);
  }

  // Every item of the block. Self::walk_rows goes through all row tiles that see its key tile.
  EK_DEVICE void run() {
    Gradient dk, dv;
    while (true) {
      barrier_wait(&sm.item_full[queue.stage], queue.parity);
      const volatile Item& item = sm.item[queue.stage];  // volatile: read again where needed, not kept
      if (item.key_tile < 0) return;
      const int steps = item.steps;
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;
      if (steps > 0) static_cast<Self*>(this)->walk_rows(item, steps, dk, dv);
      settle(dk);
      settle(dv);
      write_gradients(item, dk, dv);
    }
  }

  // ------------------------------------------------------------------------------------------------------ load
  // Waits for the tile's keys and values; those behind the end of a sequence become zeros.
  EK_DEVICE void await_keys(const volatile Item& item) {
    barrier_wait(&sm.k_full, item_parity);
    barrier_wait(&sm.v_full, item_parity);
    item_parity ^= 1;
    const int keys = item.keys - item.key_tile * kTileKeys;  // from the tile's first one on
    if (p.sequences.key_lengths && keys < kTileKeys) {
      zero_rows(sm.k, keys, threadIdx.x - kWarpgroup);
      zero_rows(sm.v, keys, threadIdx.x - kWarpgroup);
      store_fence();
      named_sync(kRowsCleared, kConsumerThreads);
    }
  }
  // The same of the tile's rows, which are in this stage. (Its type is the caller's: a signed index takes other instructions.)
  template <class Stage>
  EK_DEVICE void await_rows(const volatile Item& item, int tile, Stage stage, uint32_t parity) {
    barrier_wait(&sm.q_full[stage], parity);
    if (p.sequences.query_lengths && (tile + 1) * kRows > item.rows) {
      barrier_wait(&sm.grad_output_full[stage], parity);
      zero_rows(sm.q[stage], item.rows - tile * kRows, threadIdx.x - kWarpgroup);
      zero_rows(sm.grad_output[stage], item.rows - tile * kRows, threadIdx.x - kWarpgroup);
      store_fence();
      named_sync(kRowsCleared, kConsumerThreads);
    }
  }

  // ----------------------------------------------------------------------------------------------------- score
  // This warpgroup's 64 keys of a tile; the rows of a stage.
  EK_DEVICE uint64_t keys_of(const typename SharedMemory<D>::KeyTile& tile) const {
    return advance(operand(tile[0][0]), warp_uniform(consumer) * 64 * kRowBytes);
  }
  using RowTiles = typename SharedMemory<D>::RowTile[kStages];
  EK_DEVICE static uint64_t rows_of(const RowTiles& tiles, uint32_t stage, uint32_t box_bytes = 16) {
    return advance(operand(tiles[0][0], box_bytes), stage * sizeof(tiles[0]));
  }
  // dS^T = P^T (dP^T - delta) of 16 rows.
  EK_DEVICE void find_dscores(int i, const Scores& scores, const Scores& dprobs, const float4& delta,
                              ScoreOperand& dscores) const {
    const float deltas[4] = {delta.x, delta.y, delta.z, delta.w};
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      float ds[2];
#pragma unroll
      for (int c = 0; c < 2; ++c)
        ds[c] = scores[8 * i + e + c] * (dprobs[8 * i + e + c] - deltas[e / 4 * 2 + c]);
      dscores[4 * i + e / 2] = Pairs::pack(ds[0], ds[1]);
    }
  }

  // ------------------------------------------------------------------------------------------------ accumulate
  // sums += P^T or dS^T (keys x query rows) times the query rows of a tile.
  EK_DEVICE static void add_product(const ScoreOperand& left, uint64_t query_rows, Gradient& sums) {
    products_begin();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      Wgmma<D, kFp16>::template rs<true>(sums, left[4 * i], left[4 * i + 1], left[4 * i + 2], left[4 * i + 3],
                                         advance(query_rows, i * kNext16Rows), true);
    products_commit();
  }
  // The row tile's first key tile comes last: it finds the sum of all others' parts in shared memory. Other parts go to the
  // thread that adds them up.
  EK_DEVICE void pass_on_dq(const volatile Item& item, int step, int tile, uint32_t stage, uint32_t parity,
                            float (&dq)[32]) const {
    auto& part = sm.dq[stage][consumer];  // as the threads hold it
    if (item.key_tile > first_key_tile<D, kForm>(p, item.offset, tile)) {
      barrier_wait(&sm.dq_empty[stage], parity ^ 1);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        *reinterpret_cast<float4*>(part[i][thread]) =
            float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
      store_fence();
      __syncwarp();
      release(&sm.dq_full[stage]);
    } else {
      barrier_wait(&sm.dq_full[stage], parity);
      if (last_key_tile<D>(p, item, tile) > item.key_tile) {
#pragma unroll
        for (int i = 0; i < 8; ++i) add_four(dq, i, *reinterpret_cast<const float4*>(part[i][thread]));
      }
      __syncwarp();
      release(&sm.dq_empty[stage]);
      const int mine = consumer * 64;  // rows of this warpgroup's dQ, or features, from this one on
      write_dq(item, this->head_of(item, step), tile * kRows + (D == 64 ? mine : 0), D == 64 ? 0 : mine, dq);
    }
  }

  // ---------------------------------------------------------------------------------------------------- finish
  // dQ of 64 rows from this one of the sequence on, and 64 features; scaled, rounded.
  EK_DEVICE void write_dq(const volatile Item& item, int head, int row, int feature,
                          const float (&dq)[32]) const {
    const int exist = min(64, item.rows - row);
    const int all = p.sequences.query_offsets ? exist : min(64, p.sequences.T - row);
    write_rows<Pairs>(dq, p.scale,
                      p.dq + item.query_batch * p.dq_stride[0] + head * p.dq_stride[1] +
                          (item.first_row + row) * p.dq_stride[2] + feature,
                      p.dq_stride[2], exist, all, p.D - feature);
  }
  // Gives the item back before dK and dV are written.
  EK_DEVICE void write_gradients(const volatile Item& item, const Gradient& dk, const Gradient& dv) {
    const int key = item.key_tile * kTileKeys + consumer * 64;
    const int exist = min(64, item.keys - key);
    const int all = p.sequences.key_offsets ? exist : min(64, p.sequences.N - key);
    const int64_t row = item.first_key + key, batch = item.key_batch, head = item.g;
    __syncwarp();
    release(&sm.item_empty[queue.stage]);
    queue.next();
    write_rows<Pairs>(dk, p.scale,
                      p.dk + batch * p.dk_stride[0] + head * p.dk_stride[1] + row * p.dk_stride[2],
                      p.dk_stride[2], exist, all, p.D);
    write_rows<Pairs>(dv, 1.0f, p.dv + batch * p.dv_stride[0] + head * p.dv_stride[1] + row * p.dv_stride[2],
                      p.dv_stride[2], exist, all, p.D);
  }
};

}  // namespace evenkeel::hopper::backward
