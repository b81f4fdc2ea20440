// The backward kernel of Hopper: dQ, dK and dV with five products a tile (S, dP, dV, dK, dQ). Included by its launch.
//
// A block owns 128 keys of one kv head: K and V stay in shared memory, dK and dV in registers, and the queries that
// see these keys stream by. Scores are held transposed, [key][query], so that P^T and dS^T are operands from
// registers as they come. For dQ, dS^T also goes through shared memory. The parts of dQ from different key tiles are
// added in device memory in FP32, in one order: the last key tile first. A block starts with the first query tile that
// sees its keys, and block n + 1 is taken up before block n. So the turn has usually come when a part is ready. The sum
// is deterministic and hardly ever waits.
#pragma once

#include "attention/cuda/hopper_backward_consumer.cuh"
#include "attention/cuda/hopper_backward_wide_consumer.cuh"

namespace evenkeel::hopper::backward {

// The thread that loads everything, and its steps.
template <int D, Consistent kConsistent>
struct Loader {
  static constexpr int kRows = kTileRows<D>, kBoxes = D / kBoxFeatures;
  static constexpr bool kHasInverse = kConsistent != Consistent::no_head;
  SharedMemory<D>& sm;
  const Backward& p;
  const CUtensorMap &q_map, &k_map, &v_map, &grad_output_map;
  Ring<kStages> rows = {}, queue = {};
  uint32_t parity = 0;  // of k and v

  // The next item, for all threads.
  EK_DEVICE Item take_item() {
    // Not before the consumers are at their last tile: who takes an item early and starts it late makes others wait.
    barrier_wait(&sm.q_empty[rows.stage], rows.parity ^ 1);
    const Item item = Item::at(p, atomicAdd(p.next_item, 1), kRows);
    barrier_wait(&sm.item_empty[queue.stage], queue.parity ^ 1);
    sm.item[queue.stage] = item;
    barrier_arrive(&sm.item_full[queue.stage]);
    queue.next();
    return item;
  }
  EK_DEVICE void load_keys(const Item& item, typename SharedMemory<D>::KeyTile& tile, const CUtensorMap& map,
                           uint64_t* full, uint64_t* empty) {
    barrier_wait(empty, parity ^ 1);
    barrier_expect_bytes(full, sizeof(tile));
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      load_box(tile[box], map, full, box * kBoxFeatures, item.first_key + item.key_tile * kTileKeys, item.g,
               item.key_batch);
  }
  EK_DEVICE void load_rows(const Item& item, int h, int tile) {
    const int row = item.first_row + tile * kRows, stage = rows.stage;
    const int64_t fact = static_cast<int64_t>(item.b * p.H + h) * p.padded_rows + tile * kRows;
    constexpr uint32_t kFactBytes = kRows * sizeof(float);
    barrier_wait(&sm.q_empty[stage], rows.parity ^ 1);
    if (kConsistent == Consistent::by_head) sm.consistent[stage] = p.rules_of(h).consistent;
    barrier_expect_bytes(&sm.q_full[stage], sizeof(sm.q[0]) + kFactBytes * (kHasInverse ? 2 : 1));
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      load_box(sm.q[stage][box], q_map, &sm.q_full[stage], box * kBoxFeatures, row, h, item.query_batch);
    load_bytes(sm.shift[stage], p.facts.shift + fact, kFactBytes, &sm.q_full[stage]);
    if (kHasInverse) load_bytes(sm.inverse[stage], p.facts.inverse + fact, kFactBytes, &sm.q_full[stage]);
    barrier_wait(&sm.grad_output_empty[stage], rows.parity ^ 1);
    barrier_expect_bytes(&sm.grad_output_full[stage], sizeof(sm.grad_output[0]) + kFactBytes);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      load_box(sm.grad_output[stage][box], grad_output_map, &sm.grad_output_full[stage], box * kBoxFeatures,
               row, h, item.query_batch);
    load_bytes(sm.delta[stage], p.facts.delta + fact, kFactBytes, &sm.grad_output_full[stage]);
  }

  // An item's first rows, and V, need not wait until the item before is done with K.
  EK_DEVICE void run() {
    const int group = p.H / p.G;
    while (true) {
      const Item item = take_item();
      if (item.key_tile < 0) return;
      if (item.steps == 0) continue;
      int h = item.g * group, tile = item.first_row_tile;
      for (int step = 0; step < item.steps; ++step, rows.next()) {
        load_rows(item, h, tile);
        if (step == 0) {
          load_keys(item, sm.v, v_map, &sm.v_full, &sm.v_empty);
          load_keys(item, sm.k, k_map, &sm.k_full, &sm.k_empty);
          parity ^= 1;
        }
        if (++tile == item.row_tiles) tile = item.first_row_tile, ++h;
      }
    }
  }
};

// The next item, as the threads that add up dQ take it: they keep a copy.
template <int D>
EK_DEVICE Item await_item(SharedMemory<D>& sm, Ring<kStages>& queue) {
  barrier_wait(&sm.item_full[queue.stage], queue.parity);
  const Item item = sm.item[queue.stage];
  barrier_arrive(&sm.item_empty[queue.stage]);
  queue.next();
  return item;
}

// Adds the parts of dQ of every second step to device memory, each in its turn: one thread. A row tile's first key tile comes
// last and is not added here: for that one the sum of all others is brought to shared memory, where the consumers add their
// parts and write dQ.
template <int D, Form kForm>
EK_DEVICE void add_up_dq(SharedMemory<D>& sm, const Backward& p, int mine) {
  constexpr uint32_t kPartBytes = sizeof(sm.dq[0]), kPart = kPartBytes / sizeof(float);
  const int group = p.H / p.G;
  Ring<kStages> queue, parts;
  while (true) {
    const Item item = await_item(sm, queue);
    if (item.key_tile < 0) break;
    for (int h = item.g * group; h < (item.g + 1) * group; ++h)
      for (int tile = item.first_row_tile; tile < item.row_tiles; ++tile, parts.next()) {
        if (parts.stage != mine) continue;
        const int64_t part = static_cast<int64_t>(item.b * p.H + h) * p.row_tiles + tile;
        int* const turn = p.turn + 2 * part;
        float* const sum = p.dq_sum + part * kPart;
        const int before = last_key_tile<D>(p, item, tile) - item.key_tile;
        const auto await_turn = [&] {
          while (load_acquire(turn) < before) let_others_run();
          everywhere_fence();
        };
        if (item.key_tile > first_key_tile<D, kForm>(p, item.offset, tile)) {
          barrier_wait(&sm.dq_full[mine], parts.parity);
          if (before == 0) {
            store_bytes(sum, sm.dq[mine], kPartBytes);
          } else {
            await_turn();
            add_floats(sum, &sm.dq[mine][0][0][0][0], kPartBytes);
          }
          store_commit();
          store_wait_read<0>();
          barrier_arrive(&sm.dq_empty[mine], kConsumerWarps);
          store_wait<0>();
          everywhere_fence();
          add_release(turn, 1);
        } else {
          barrier_wait(&sm.dq_empty[mine], parts.parity ^ 1);
          barrier_arrive(&sm.dq_full[mine], kConsumerWarps - 1);
          if (before == 0) {
            barrier_arrive(&sm.dq_full[mine]);
          } else {
            await_turn();
            barrier_expect_bytes(&sm.dq_full[mine], kPartBytes);
            load_bytes(sm.dq[mine], sum, kPartBytes, &sm.dq_full[mine]);
          }
          // Else the next wait could take the phase before this one for its own: they have the same parity.
          barrier_wait(&sm.dq_full[mine], parts.parity);
        }
      }
  }
}

template <class Pairs, int D, Consistent kConsistent, Form kForm>
__global__ void __launch_bounds__((1 + kConsumers) * kWarpgroup, 1)
    backward_kernel(const __grid_constant__ Backward p, const __grid_constant__ CUtensorMap q_map,
                    const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                    const __grid_constant__ CUtensorMap grad_output_map) {
  auto& sm =
      *reinterpret_cast<SharedMemory<D>*>(dynamic_shared());  // aligned to 1024: the first tile lies there
  if (threadIdx.x == 0) {
    barrier_init(&sm.k_full, 1);
    barrier_init(&sm.v_full, 1);
    barrier_init(&sm.k_empty, kConsumerWarps);
    barrier_init(&sm.v_empty, kConsumerWarps);
    for (int i = 0; i < kStages; ++i) {
      init_row_barriers(sm, i);
      barrier_init(&sm.item_empty[i], kConsumerWarps + kStages);
      barrier_init(&sm.dq_full[i], kConsumerWarps);
      barrier_init(&sm.dq_empty[i], kConsumerWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 0)
      Loader<D, kConsistent>{sm, p, q_map, k_map, v_map, grad_output_map}.run();
    else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= kStages)
      add_up_dq<D, kForm>(sm, p, threadIdx.x / 32 - 1);
  } else {
    take_registers<240>();
    const int consumer = static_cast<int>(warp_uniform(threadIdx.x / kWarpgroup - 1));
    if constexpr (D == 64)
      Consumer<Pairs, kConsistent, kForm>(sm, p, consumer).run();
    else
      WideConsumer<Pairs, kConsistent, kForm>(sm, p, consumer).run();
  }
}

}  // namespace evenkeel::hopper::backward
