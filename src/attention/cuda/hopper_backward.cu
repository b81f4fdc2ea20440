// The backward pass on Hopper: one kernel for dQ, dK and dV with five products a tile (S, dP, dV, dK, dQ), after a
// pass that finds delta.
//
// A block owns 128 keys of one kv head: K and V stay in shared memory, dK and dV in registers, and the queries that
// see these keys stream by. Scores are held transposed, [key][query], so that P^T and dS^T are operands from
// registers as they come; dS^T also goes through shared memory, for dQ. dQ's parts from different key tiles are
// added in device memory in FP32, in one order: the last key tile first. A block starts with the first query tile that
// sees its keys and block n + 1 is taken up before block n, so the turn has usually come when a part is ready:
// deterministic, and hardly ever waiting.
#include <algorithm>
#include <climits>
#include <cmath>

#include "attention/cuda/hopper.cuh"

namespace evenkeel {
namespace hopper {
namespace {

inline constexpr int kTileKeys = 128;
inline constexpr int kConsumers = 2;  // warpgroups, 64 keys each
inline constexpr int kConsumerThreads = kConsumers * kWarpgroup, kConsumerWarps = kConsumerThreads / 32;
inline constexpr int kStages = 2;  // of Q, dO, and parts of dQ

template <int D>
inline constexpr int kTileRows = D == 64 ? 128 : 64;  // by registers: 240 a thread

// Facts of a row that the main kernel reads, in the order its threads want them: a group of 16 rows is stored so that
// the four that a thread of the accumulator holds are 16 bytes.
EK_DEVICE int row_slot(int row) {
  const int r = row & 15;
  return (row & ~15) + ((r & 7) >> 1) * 4 + (r >> 3) * 2 + (r & 1);
}

struct RowFacts {
  float* shift;    // (B, H, padded T): L log2(e), or for consistent M; +inf where P is 0 throughout
  float* inverse;  // (B, H, padded T): consistent: 1 / l
  float* delta;    // (B, H, padded T)
};

struct Backward {
  int B, H, G, D;
  int padded_rows;  // T up to whole tiles
  int row_tiles, key_tiles;
  float scale, scale_log2;  // a, a log2(e)
  bool causal;
  Sequences sequences;
  RowFacts facts;
  float* dq_sum;  // (B, H, row tiles, 2, 8, 128, 4): accumulators as the threads hold them
  int* turn;      // (B, H, row tiles, 2): parts added so far
  int* next_item;
  const __nv_bfloat16 *grad_output, *o;
  const int8_t* residue;
  const float *lse, *row_max, *row_sum, *exact_delta;
  float keel;
  float* delta_out;  // (B, H, T) or null
  __nv_bfloat16 *dq, *dk, *dv;
  int64_t grad_output_stride[3], o_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];  // batch, head, row
};

// ------------------------------------------------------------------------------------------------ which tiles
// What rows and keys of a sequence have to do with each other: key <= row + offset under a causal mask.
struct Span {
  Sequence s;
  int offset;
  bool causal;
  int key_tiles, row_tiles;  // that exist in this sequence

  // Last key tile that some row of the tile sees; -1: none.
  EK_DEVICE int last_key_tile(int row_tile, int rows) const {
    if (!causal) return key_tiles - 1;
    const int last_row = min((row_tile + 1) * rows, s.rows) - 1;
    return last_row + offset < 0 ? -1 : min(key_tiles - 1, (last_row + offset) / kTileKeys);
  }
  EK_DEVICE int first_row_tile(int key_tile, int rows) const {
    return causal ? max(0, key_tile * kTileKeys - offset) / rows : 0;
  }
};
EK_DEVICE Span span_of(const Backward& p, int b, int rows) {
  Span span;
  span.s = sequence(p.sequences, b);
  span.offset = span.s.keys - span.s.rows;
  span.causal = p.causal;
  span.key_tiles = (span.s.keys + kTileKeys - 1) / kTileKeys;
  span.row_tiles = (span.s.rows + rows - 1) / rows;
  return span;
}

// The work of one block at a time: a key tile of a kv head, and the row tiles of its group's heads that see it.
// It lies in shared memory: registers are short.
struct Item {
  int b, g, key_tile;                                            // key_tile < 0: there is no more work
  int first_row_tile, row_tiles;                                 // of each head: [first, row_tiles)
  int steps;                                                     // row tiles of all heads
  int rows, keys, first_row, first_key, query_batch, key_batch;  // Sequence
  int offset;                                                    // key <= row + offset, if causal

  EK_DEVICE static Item at(const Backward& p, int index, int tile_rows) {
    Item item{};
    item.key_tile = -1;
    if (index >= p.B * p.G * p.key_tiles) return item;
    // Last key tile first: a block only ever waits for items taken before its own.
    item.key_tile = p.key_tiles - 1 - index % p.key_tiles;
    item.b = index / p.key_tiles / p.G;
    item.g = index / p.key_tiles % p.G;
    const Span span = span_of(p, item.b, tile_rows);
    if (item.key_tile < span.key_tiles) {
      item.first_row_tile = span.first_row_tile(item.key_tile, tile_rows);
      item.row_tiles = span.row_tiles;
    }
    item.steps = max(0, item.row_tiles - item.first_row_tile) * (p.H / p.G);
    item.rows = span.s.rows;
    item.keys = span.s.keys;
    item.first_row = span.s.first_row;
    item.first_key = span.s.first_key;
    item.query_batch = span.s.query_batch;
    item.key_batch = span.s.key_batch;
    item.offset = span.offset;
    return item;
  }
};

// ------------------------------------------------------------------------------------------------------ delta
// delta = dO . O' (or the exact one), less 2 z L; and the rest of a row's facts. Eight (sixteen) threads a row.
template <int D>
__global__ void __launch_bounds__(256) row_facts_kernel(const Backward p) {
  constexpr int kThreads = D / 8, kRows = 256 / kThreads;
  const int head = blockIdx.x, b = head / p.H, h = head % p.H;
  const int row = blockIdx.y * kRows + threadIdx.x / kThreads, feature = threadIdx.x % kThreads * 8;
  const Sequence s = sequence(p.sequences, b);
  const int T = p.sequences.T;
  if (blockIdx.y == 0 && head == 0 && threadIdx.x == 0) *p.next_item = 0;
  if (blockIdx.y == 0)
    for (int n = threadIdx.x; n < p.row_tiles * 2; n += 256) p.turn[head * p.row_tiles * 2 + n] = 0;

  float delta = 0;
  const bool exists = row < s.rows;
  if (exists && !p.exact_delta && feature < p.D) {
    const int64_t at = s.first_row + row;
    const uint4 g =
        *reinterpret_cast<const uint4*>(p.grad_output + s.query_batch * p.grad_output_stride[0] +
                                        h * p.grad_output_stride[1] + at * p.grad_output_stride[2] + feature);
    const uint4 o = *reinterpret_cast<const uint4*>(p.o + s.query_batch * p.o_stride[0] + h * p.o_stride[1] +
                                                    at * p.o_stride[2] + feature);
    uint2 residue = {0, 0};
    if (p.residue)
      residue =
          *reinterpret_cast<const uint2*>(p.residue + (static_cast<int64_t>(head) * T + row) * p.D + feature);
    const uint32_t gs[4] = {g.x, g.y, g.z, g.w}, os[4] = {o.x, o.y, o.z, o.w}, rs[2] = {residue.x, residue.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = static_cast<int8_t>(rs[i / 2] >> (16 * (i % 2))),
                high = static_cast<int8_t>(rs[i / 2] >> (16 * (i % 2) + 8));
      delta = fmaf(low_bf16(gs[i]), with_residue(os[i] & 0xffff, low), delta);
      delta = fmaf(high_bf16(gs[i]), with_residue(os[i] >> 16, high), delta);
    }
  }
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
  if (feature != 0 || row >= p.padded_rows) return;

  const int64_t slot = static_cast<int64_t>(head) * p.padded_rows + row_slot(row);
  float shift = INFINITY, inverse = 0;
  if (exists) {
    const int64_t at = static_cast<int64_t>(head) * T + row;
    const float lse = p.lse[at];
    if (p.exact_delta) delta = p.exact_delta[at];
    if (lse == -INFINITY) {
      delta = 0;
    } else {
      delta -= 2 * p.keel * lse;
      shift = p.row_sum ? p.row_max[at] : lse * kLog2E;
      if (p.row_sum) inverse = 1 / p.row_sum[at];
    }
    if (p.delta_out) p.delta_out[at] = delta;
  } else if (p.delta_out && row < T) {
    p.delta_out[static_cast<int64_t>(head) * T + row] = 0;
  }
  // Rows of a tile that sees no key: nobody else writes their dQ.
  const Span span = span_of(p, b, kTileRows<D>);
  const int tile = row / kTileRows<D>;
  if ((tile >= span.row_tiles || span.last_key_tile(tile, kTileRows<D>) < 0) &&
      row < (p.sequences.query_offsets ? s.rows : T)) {
    __nv_bfloat16* const dq =
        p.dq + s.query_batch * p.dq_stride[0] + h * p.dq_stride[1] + (s.first_row + row) * p.dq_stride[2];
    for (int n = 0; n < p.D; n += 8) *reinterpret_cast<uint4*>(dq + n) = uint4{0, 0, 0, 0};
  }
  p.facts.shift[slot] = shift;
  p.facts.delta[slot] = delta;
  if (p.row_sum) p.facts.inverse[slot] = inverse;
}

// ------------------------------------------------------------------------------------------------- main kernel
template <int D>
struct alignas(1024) SharedMemory {
  static constexpr int kRows = kTileRows<D>, kBoxes = D / kBoxFeatures;
  using KeyTile = uint8_t[kBoxes][kTileKeys][kRowBytes];
  using RowTile = uint8_t[kBoxes][kRows][kRowBytes];
  KeyTile k, v;
  RowTile q[kStages], grad_output[kStages];
  uint8_t dscores[kRows / 64][kTileKeys][kRowBytes];  // dS^T: boxes of 64 queries, [key][query]
  float dq[kStages][kConsumers][8][kWarpgroup][4];    // accumulators as the threads hold them
  float shift[kStages][kRows], inverse[kStages][kRows], delta[kStages][kRows];
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t q_full[kStages], q_empty[kStages], grad_output_full[kStages], grad_output_empty[kStages];
  uint64_t dq_full[kStages][kConsumers], dq_empty[kStages][kConsumers];
  uint64_t item_full[kStages], item_empty[kStages];
  Item item[kStages];
};

// Loads everything: one thread.
template <int D, bool kConsistent>
EK_DEVICE void produce(SharedMemory<D>& sm, const Backward& p, const CUtensorMap& q_map,
                       const CUtensorMap& k_map, const CUtensorMap& v_map,
                       const CUtensorMap& grad_output_map) {
  constexpr int kRows = kTileRows<D>, kBoxes = D / kBoxFeatures;
  const int group = p.H / p.G;
  Ring<kStages> rows, queue;
  uint32_t parity = 0;  // of k and v
  while (true) {
    // Not before the consumers are at their last tile: who takes an item early and starts it late makes others wait.
    barrier_wait(&sm.q_empty[rows.stage], rows.parity ^ 1);
    const Item item = Item::at(p, atomicAdd(p.next_item, 1), kRows);
    barrier_wait(&sm.item_empty[queue.stage], queue.parity ^ 1);
    sm.item[queue.stage] = item;
    barrier_arrive(&sm.item_full[queue.stage]);
    queue.next();
    if (item.key_tile < 0) return;
    if (item.steps == 0) continue;

    barrier_wait(&sm.k_empty, parity ^ 1);
    barrier_expect_bytes(&sm.k_full, sizeof(sm.k));
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      load_box(sm.k[box], k_map, &sm.k_full, box * kBoxFeatures, item.first_key + item.key_tile * kTileKeys,
               item.g, item.key_batch);
    barrier_wait(&sm.v_empty, parity ^ 1);
    barrier_expect_bytes(&sm.v_full, sizeof(sm.v));
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      load_box(sm.v[box], v_map, &sm.v_full, box * kBoxFeatures, item.first_key + item.key_tile * kTileKeys,
               item.g, item.key_batch);
    parity ^= 1;

    for (int h = item.g * group; h < (item.g + 1) * group; ++h)
      for (int tile = item.first_row_tile; tile < item.row_tiles; ++tile, rows.next()) {
        const int row = item.first_row + tile * kRows, stage = rows.stage;
        const int64_t fact = static_cast<int64_t>(item.b * p.H + h) * p.padded_rows + tile * kRows;
        constexpr uint32_t kFactBytes = kRows * sizeof(float);
        barrier_wait(&sm.q_empty[stage], rows.parity ^ 1);
        barrier_expect_bytes(&sm.q_full[stage], sizeof(sm.q[0]) + kFactBytes * (kConsistent ? 2 : 1));
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
          load_box(sm.q[stage][box], q_map, &sm.q_full[stage], box * kBoxFeatures, row, h, item.query_batch);
        load_bytes(sm.shift[stage], p.facts.shift + fact, kFactBytes, &sm.q_full[stage]);
        if (kConsistent) load_bytes(sm.inverse[stage], p.facts.inverse + fact, kFactBytes, &sm.q_full[stage]);
        barrier_wait(&sm.grad_output_empty[stage], rows.parity ^ 1);
        barrier_expect_bytes(&sm.grad_output_full[stage], sizeof(sm.grad_output[0]) + kFactBytes);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
          load_box(sm.grad_output[stage][box], grad_output_map, &sm.grad_output_full[stage],
                   box * kBoxFeatures, row, h, item.query_batch);
        load_bytes(sm.delta[stage], p.facts.delta + fact, kFactBytes, &sm.grad_output_full[stage]);
      }
  }
}

EK_DEVICE int load_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
EK_DEVICE void add_release(int* at, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Adds one warpgroup's parts of dQ to device memory, each in its turn: one thread. Key tile 0 comes last and is not
// added here: the warpgroup itself adds what it finds to its own part, and writes dQ.
template <int D>
EK_DEVICE void add_up_dq(SharedMemory<D>& sm, const Backward& p, int half) {
  constexpr int kRows = kTileRows<D>;
  constexpr int kPart = sizeof(sm.dq[0][0]) / sizeof(float);
  const int group = p.H / p.G;
  Ring<kStages> queue, parts;
  while (true) {
    barrier_wait(&sm.item_full[queue.stage], queue.parity);
    const Item item = sm.item[queue.stage];
    barrier_arrive(&sm.item_empty[queue.stage]);
    queue.next();
    if (item.key_tile < 0) break;
    if (item.key_tile == 0) continue;
    const Span span = span_of(p, item.b, kRows);
    for (int h = item.g * group; h < (item.g + 1) * group; ++h)
      for (int tile = item.first_row_tile; tile < item.row_tiles; ++tile, parts.next()) {
        const int64_t part = (static_cast<int64_t>(item.b * p.H + h) * p.row_tiles + tile) * 2 + half;
        const int before = span.last_key_tile(tile, kRows) - item.key_tile;
        float* const from = &sm.dq[parts.stage][half][0][0][0];
        barrier_wait(&sm.dq_full[parts.stage][half], parts.parity);
        if (before == 0) {
          store_bytes(p.dq_sum + part * kPart, from, sizeof(sm.dq[0][0]));
        } else {
          while (load_acquire(p.turn + part) < before) {
          }
          asm volatile("fence.proxy.async;" ::: "memory");
          add_floats(p.dq_sum + part * kPart, from, sizeof(sm.dq[0][0]));
        }
        store_commit();
        store_wait_read<0>();
        barrier_arrive(&sm.dq_empty[parts.stage][half]);
        store_wait<0>();
        asm volatile("fence.proxy.async;" ::: "memory");
        add_release(p.turn + part, 1);
      }
  }
}

// Zeroes rows [first, kRows) of a tile: what lies behind the end of a sequence may be anything, and 0 * NaN is NaN.
template <int kBoxes, int kRows>
EK_DEVICE void zero_rows(uint8_t (&tile)[kBoxes][kRows][kRowBytes], int first, int thread) {
  for (int box = 0; box < kBoxes; ++box)
    for (int n = first * kRowBytes / 16 + thread; n < kRows * kRowBytes / 16; n += kConsumerThreads)
      reinterpret_cast<uint4*>(tile[box])[n] = uint4{0, 0, 0, 0};
}

// An accumulator, scaled and rounded, to rows of device memory: 16 bytes a thread. `to` is (row 0 of the accumulator,
// feature 0); `rows` of its 64 rows hold values, rows up to `all_rows` get zeros, features up to `features` exist.
template <int n>
EK_DEVICE void write_rows(const float (&d)[n], float scale, __nv_bfloat16* to, int64_t stride, int rows,
                          int all_rows, int features) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * r;
#pragma unroll
    for (int j = 0; j < n / 4; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack_bf16(d[4 * (j + i) + 2 * r] * scale, d[4 * (j + i) + 2 * r + 1] * scale);
      quad_transpose(words);
      const int feature = 8 * (j + lane % 4);
      if (row < all_rows && feature < features)
        *reinterpret_cast<uint4*>(to + row * stride + feature) =
            row < rows ? uint4{words[0], words[1], words[2], words[3]} : uint4{0, 0, 0, 0};
    }
  }
}

// Key tile 0: the sum of all other key tiles' parts, when they are all there, and this one; scaled, rounded, written.
template <int D>
EK_DEVICE void finish_dq(const Backward& p, const volatile Item& item, int head, int tile, int consumer,
                         float (&dq)[32]) {
  constexpr int kRows = kTileRows<D>;
  const int thread = threadIdx.x % kWarpgroup;
  const int64_t part = (static_cast<int64_t>(item.b * p.H + head) * p.row_tiles + tile) * 2 + consumer;
  const int last_row = min((tile + 1) * kRows, item.rows) - 1, last_key = (item.keys - 1) / kTileKeys;
  const int before = p.causal ? min(last_key, (last_row + item.offset) / kTileKeys) : last_key;
  if (before > 0) {
    while (load_acquire(p.turn + part) < before) {
    }
    const float4* const sum = reinterpret_cast<const float4*>(p.dq_sum) + part * 8 * kWarpgroup + thread;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 four = __ldcg(sum + i * kWarpgroup);
      dq[4 * i] += four.x;
      dq[4 * i + 1] += four.y;
      dq[4 * i + 2] += four.z;
      dq[4 * i + 3] += four.w;
    }
  }
  const int row = tile * kRows + (D == 64 ? consumer * 64 : 0), feature = D == 64 ? 0 : consumer * 64;
  const int exist = min(64, item.rows - row);
  const int all = p.sequences.query_offsets ? exist : min(64, p.sequences.T - row);
  write_rows(dq, p.scale,
             p.dq + item.query_batch * p.dq_stride[0] + head * p.dq_stride[1] +
                 (item.first_row + row) * p.dq_stride[2] + feature,
             p.dq_stride[2], exist, all, p.D - feature);
}

// One consumer warpgroup: 64 keys of the tile.
template <int D, bool kConsistent>
EK_DEVICE void consume(SharedMemory<D>& sm, const Backward& p, int consumer) {
  constexpr int kRows = kTileRows<D>;
  constexpr int kScores = kRows / 2;  // a thread's, of 64 keys x kRows queries
  constexpr bool kEarlyDv = D > 64;   // with 64 scores a thread there are no registers for P's copy beside dP
  constexpr uint32_t kRowBox = sizeof(sm.q[0][0]), kKeyBox = sizeof(sm.k[0]);
  constexpr uint32_t kNext16Features = 32, kNext16Rows = 16 * kRowBytes;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int group = p.H / p.G;
  Ring<kStages> rows, queue, parts;
  uint32_t item_parity = 0;
  // Named barriers 3 and 4: a warpgroup has finished its dQ, the other one may overwrite dS.
  named_arrive(3 + consumer, kConsumerThreads);

  // This lane's part of a stmatrix into dS^T: row lane % 8 of matrix lane / 8; (key, 16-byte chunk of 8 queries).
  const int store_key = consumer * 64 + warp * 16 + lane / 8 % 2 * 8 + lane % 8;
  const uint32_t store_chunk = static_cast<uint32_t>((lane / 16) ^ (store_key & 7)) << 4;
  const uint64_t k_rows = operand(sm.k[0][consumer * 64]), v_rows = operand(sm.v[0][consumer * 64]);
  // dQ of this warpgroup: 64 of 128 queries and all features, or all 64 queries and 64 of 128 features.
  const uint64_t dq_keys = operand(sm.k[D == 64 ? 0 : consumer]);

  float dk[D / 2], dv[D / 2];  // 64 keys x D
  while (true) {
    barrier_wait(&sm.item_full[queue.stage], queue.parity);
    const volatile Item& item = sm.item[queue.stage];  // volatile: read again where needed, not kept
    if (item.key_tile < 0) return;
    const int steps = item.steps;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;

    if (steps > 0) {
      barrier_wait(&sm.k_full, item_parity);
      barrier_wait(&sm.v_full, item_parity);
      item_parity ^= 1;
      const int keys = item.keys - item.key_tile * kTileKeys;  // from the tile's first one on
      if (p.sequences.key_lengths && keys < kTileKeys) {
        zero_rows(sm.k, keys, threadIdx.x - kWarpgroup);
        zero_rows(sm.v, keys, threadIdx.x - kWarpgroup);
        store_fence();
        named_sync(2, kConsumerThreads);
      }

      float scores[kScores];  // S^T, then P^T: 64 keys x kRows queries
      // Waits for the tile's rows; those behind the end of a sequence become zeros.
      const auto await_rows = [&](int tile) {
        const int stage = rows.stage;
        barrier_wait(&sm.q_full[stage], rows.parity);
        if (p.sequences.query_lengths && (tile + 1) * kRows > item.rows) {
          barrier_wait(&sm.grad_output_full[stage], rows.parity);
          zero_rows(sm.q[stage], item.rows - tile * kRows, threadIdx.x - kWarpgroup);
          zero_rows(sm.grad_output[stage], item.rows - tile * kRows, threadIdx.x - kWarpgroup);
          store_fence();
          named_sync(2, kConsumerThreads);
        }
      };
      const auto begin_scores = [&] {
        const uint64_t q = operand(sm.q[rows.stage][0]);
        products_begin();
#pragma unroll
        for (int i = 0; i < D / 16; ++i)
          Wgmma<kRows>::template ss<false, false>(
              scores, advance(k_rows, i / 4 * kKeyBox + i % 4 * kNext16Features),
              advance(q, i / 4 * kRowBox + i % 4 * kNext16Features), i > 0);
        products_commit();
      };

      int tile = item.first_row_tile;
      await_rows(tile);
      begin_scores();
      products_wait<0>();
      settle(scores);
      for (int step = 0; step < steps; ++step) {
        const int stage = rows.stage, done_tile = tile;
        const bool last = step + 1 == steps;
        barrier_wait(&sm.grad_output_full[stage], rows.parity);
        float dprobs[kScores];  // dP^T
        const uint64_t grad_output = operand(sm.grad_output[stage][0]);
        products_begin();
#pragma unroll
        for (int i = 0; i < D / 16; ++i)
          Wgmma<kRows>::template ss<false, false>(
              dprobs, advance(v_rows, i / 4 * kKeyBox + i % 4 * kNext16Features),
              advance(grad_output, i / 4 * kRowBox + i % 4 * kNext16Features), i > 0);
        products_commit();

        // The mask, where the tile crosses the diagonal or the keys' end (rows behind the end have P = 0 by their shift).
        const int diagonal = p.causal ? item.key_tile * kTileKeys - item.offset - tile * kRows : -kTileKeys;
        const int keys = item.keys - item.key_tile * kTileKeys;
        if (diagonal > -kTileKeys + 1 || keys < kTileKeys) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int key = consumer * 64 + warp * 16 + lane / 4 + 8 * r;
            // Queries from this one on see the key.
            const int first_query = key < keys ? key + diagonal - 2 * (lane % 4) : kRows;
#pragma unroll
            for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
              for (int c = 0; c < 2; ++c)
                if (8 * j + c < first_query) scores[4 * j + 2 * r + c] = -INFINITY;
          }
        }
        uint32_t probs[kScores / 2], dscores[kScores / 2];  // as operands: [16 queries][4]
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i) {
          const float4 shift = *reinterpret_cast<const float4*>(&sm.shift[stage][16 * i + lane % 4 * 4]);
          const float shifts[4] = {shift.x, shift.y, shift.z, shift.w};
#pragma unroll
          for (int e = 0; e < 8; ++e)
            scores[8 * i + e] =
                exp2_approx(fmaf(scores[8 * i + e], p.scale_log2, -shifts[e / 4 * 2 + e % 2]));
          if (kConsistent) {  // the forward's rounded probabilities, over their sum
            const float4 inverse =
                *reinterpret_cast<const float4*>(&sm.inverse[stage][16 * i + lane % 4 * 4]);
            const float inverses[4] = {inverse.x, inverse.y, inverse.z, inverse.w};
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
              const uint32_t rounded = pack_bf16(scores[8 * i + e], scores[8 * i + e + 1]);
              scores[8 * i + e] = low_bf16(rounded) * inverses[e / 4 * 2];
              scores[8 * i + e + 1] = high_bf16(rounded) * inverses[e / 4 * 2 + 1];
            }
          }
        }
        const auto pack_probs = [&](int i) {
#pragma unroll
          for (int e = 0; e < 8; e += 2)
            probs[4 * i + e / 2] = pack_bf16(scores[8 * i + e], scores[8 * i + e + 1]);
        };
        const auto add_to_dv = [&] {
          const uint64_t grad_rows = operand(sm.grad_output[stage][0], kRowBox);
          products_begin();
#pragma unroll
          for (int i = 0; i < kRows / 16; ++i)
            Wgmma<D>::template rs<true>(dv, probs[4 * i], probs[4 * i + 1], probs[4 * i + 2],
                                        probs[4 * i + 3], advance(grad_rows, i * kNext16Rows), true);
          products_commit();
        };
        if constexpr (kEarlyDv) {
#pragma unroll
          for (int i = 0; i < kRows / 16; ++i) pack_probs(i);
          add_to_dv();
          products_wait<1>();
        } else {
          products_wait<0>();
        }
        settle(dprobs);
        if (last && lane == 0) barrier_arrive(&sm.v_empty);
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i) {
          const float4 delta = *reinterpret_cast<const float4*>(&sm.delta[stage][16 * i + lane % 4 * 4]);
          const float deltas[4] = {delta.x, delta.y, delta.z, delta.w};
          if constexpr (!kEarlyDv) pack_probs(i);
#pragma unroll
          for (int e = 0; e < 8; e += 2) {
            float ds[2];
#pragma unroll
            for (int c = 0; c < 2; ++c)
              ds[c] = scores[8 * i + e + c] * (dprobs[8 * i + e + c] - deltas[e / 4 * 2 + c]);
            dscores[4 * i + e / 2] = pack_bf16(ds[0], ds[1]);
          }
        }
        if constexpr (!kEarlyDv) add_to_dv();
        named_sync(3 + (1 - consumer), kConsumerThreads);
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i)
          store_matrices(sm.dscores[i / 4][store_key] + ((i % 4 * 32) ^ store_chunk), dscores[4 * i],
                         dscores[4 * i + 1], dscores[4 * i + 2], dscores[4 * i + 3]);
        {
          const uint64_t q_rows = operand(sm.q[stage][0], kRowBox);
          products_begin();
#pragma unroll
          for (int i = 0; i < kRows / 16; ++i)
            Wgmma<D>::template rs<true>(dk, dscores[4 * i], dscores[4 * i + 1], dscores[4 * i + 2],
                                        dscores[4 * i + 3], advance(q_rows, i * kNext16Rows), true);
          products_commit();
        }
        store_fence();
        named_sync(1, kConsumerThreads);  // the other warpgroup's keys of dS are there
        float dq[32];                     // 64 queries x 64 features
        const uint64_t dq_scores = operand(sm.dscores[D == 64 ? consumer : 0]);
        products_begin();
#pragma unroll
        for (int i = 0; i < kTileKeys / 16; ++i)
          Wgmma<64>::ss<true, true>(dq, advance(dq_scores, i * kNext16Rows),
                                    advance(dq_keys, i * kNext16Rows), i > 0);
        products_commit();

        products_wait<1>();  // dV and dK have read Q and dO
        if (lane == 0) {
          barrier_arrive(&sm.q_empty[stage]);
          barrier_arrive(&sm.grad_output_empty[stage]);
        }
        rows.next();
        const int head = item.g * group + (group == 1 ? 0 : step / (item.row_tiles - item.first_row_tile));
        if (!last) {
          tile = tile + 1 == item.row_tiles ? item.first_row_tile : tile + 1;
          await_rows(tile);
        }
        // The next tile's scores begin before dQ is looked at. After the last tile they are of whatever lies there, and
        // nobody reads them: a branch around a product would make the compiler wait for every product.
        begin_scores();
        products_wait<1>();
        settle(dq);
        named_arrive(3 + consumer, kConsumerThreads);
        if (item.key_tile > 0) {
          barrier_wait(&sm.dq_empty[parts.stage][consumer], parts.parity ^ 1);
#pragma unroll
          for (int i = 0; i < 8; ++i)
            *reinterpret_cast<float4*>(sm.dq[parts.stage][consumer][i][thread]) =
                float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
          store_fence();
          __syncwarp();
          if (lane == 0) barrier_arrive(&sm.dq_full[parts.stage][consumer]);
          parts.next();
        } else {
          finish_dq<D>(p, item, head, done_tile, consumer, dq);
        }
        products_wait<0>();
        settle(scores);
      }
      if (lane == 0) barrier_arrive(&sm.k_empty);
    }
    settle(dk);
    settle(dv);

    const int key = item.key_tile * kTileKeys + consumer * 64;
    const int exist = min(64, item.keys - key);
    const int all = p.sequences.key_offsets ? exist : min(64, p.sequences.N - key);
    const int64_t row = item.first_key + key, batch = item.key_batch, head = item.g;
    __syncwarp();
    if (lane == 0) barrier_arrive(&sm.item_empty[queue.stage]);
    queue.next();
    write_rows(dk, p.scale, p.dk + batch * p.dk_stride[0] + head * p.dk_stride[1] + row * p.dk_stride[2],
               p.dk_stride[2], exist, all, p.D);
    write_rows(dv, 1.0f, p.dv + batch * p.dv_stride[0] + head * p.dv_stride[1] + row * p.dv_stride[2],
               p.dv_stride[2], exist, all, p.D);
  }
}

template <int D, bool kConsistent>
__global__ void __launch_bounds__((1 + kConsumers) * kWarpgroup, 1)
    backward_kernel(const __grid_constant__ Backward p, const __grid_constant__ CUtensorMap q_map,
                    const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                    const __grid_constant__ CUtensorMap grad_output_map) {
  extern __shared__ __align__(1024) uint8_t shared[];  // its start is: the first tile lies there
  auto& sm = *reinterpret_cast<SharedMemory<D>*>(shared);
  if (threadIdx.x == 0) {
    barrier_init(&sm.k_full, 1);
    barrier_init(&sm.v_full, 1);
    barrier_init(&sm.k_empty, kConsumerWarps);
    barrier_init(&sm.v_empty, kConsumerWarps);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&sm.q_full[i], 1);
      barrier_init(&sm.grad_output_full[i], 1);
      barrier_init(&sm.item_full[i], 1);
      barrier_init(&sm.q_empty[i], kConsumerWarps);
      barrier_init(&sm.grad_output_empty[i], kConsumerWarps);
      barrier_init(&sm.item_empty[i], kConsumerWarps + kConsumers);
    }
    for (int i = 0; i < kStages; ++i)
      for (int half = 0; half < kConsumers; ++half) {
        barrier_init(&sm.dq_full[i][half], kConsumerWarps / kConsumers);
        barrier_init(&sm.dq_empty[i][half], 1);
      }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 0)
      produce<D, kConsistent>(sm, p, q_map, k_map, v_map, grad_output_map);
    else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= kConsumers)
      add_up_dq<D>(sm, p, threadIdx.x / 32 - 1);
  } else {
    take_registers<240>();
    consume<D, kConsistent>(sm, p, threadIdx.x / kWarpgroup - 1);
  }
}

// ------------------------------------------------------------------------------------------------------- host
constexpr int kernel_size(int64_t D) { return D <= 64 ? 64 : 128; }

// The parts of the workspace, one behind the other.
struct Workspace {
  size_t bytes = 0;
  uint8_t* base;
  explicit Workspace(void* workspace) : base(static_cast<uint8_t*>(workspace)) {}
  template <class T>
  T* take(int64_t count) {
    T* const at = reinterpret_cast<T*>(base + bytes);
    bytes += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return at;
  }
};

size_t lay_out(const AttentionProblem& problem, void* workspace, Backward& p, float*& exact_delta) {
  const int rows = kernel_size(problem.D) == 64 ? kTileRows<64> : kTileRows<128>;
  const int64_t heads = problem.B * problem.H;
  p.row_tiles = static_cast<int>((problem.T + rows - 1) / rows);
  p.key_tiles = static_cast<int>((problem.N + kTileKeys - 1) / kTileKeys);
  p.padded_rows = p.row_tiles * rows;
  Workspace parts(workspace);
  p.next_item = parts.take<int>(64);
  p.turn = parts.take<int>(heads * p.row_tiles * 2);
  p.facts.shift = parts.take<float>(heads * p.padded_rows);
  p.facts.delta = parts.take<float>(heads * p.padded_rows);
  const StabiliserRules& rules = rules_of(problem.plans[0].stabiliser);
  p.facts.inverse = parts.take<float>(rules.sum == SumRule::rounded_probs ? heads * p.padded_rows : 0);
  exact_delta = parts.take<float>(rules.delta == DeltaRule::probs ? heads * problem.T : 0);
  p.dq_sum = parts.take<float>(heads * p.padded_rows * kernel_size(problem.D));
  return parts.bytes;
}

template <int D, bool kConsistent>
void launch(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
            const Backward& p, cudaStream_t stream) {
  constexpr int kRows = kTileRows<D>;
  constexpr int kFactRows = 256 / (D / 8);
  const dim3 fact_blocks(static_cast<unsigned>(problem.B * problem.H),
                         (p.padded_rows + kFactRows - 1) / kFactRows);
  row_facts_kernel<D><<<fact_blocks, 256, 0, stream>>>(p);
  check_launch("starting the kernel of rows' facts");

  constexpr size_t kShared = sizeof(SharedMemory<D>);
  const auto kernel = backward_kernel<D, kConsistent>;
  allow_shared_memory(kernel, kShared);
  const int items = p.B * p.G * p.key_tiles, blocks = std::min(items, multiprocessors());
  kernel<<<blocks, (1 + kConsumers) * kWarpgroup, kShared, stream>>>(
      p, query_map(problem, in.q, kRows), key_map(problem, in.k, kTileKeys),
      key_map(problem, in.v, kTileKeys), query_map(problem, grad_output, kRows));
  check_launch("starting the backward kernel");
}

void copy_strides(int64_t (&to)[3], const DeviceTensor& tensor) {
  for (int axis = 0; axis < 3; ++axis) to[axis] = tensor.stride[static_cast<size_t>(axis)];
}

}  // namespace
}  // namespace hopper

std::shared_ptr<const FamilyPlan> hopper_prepare(const AttentionProblem& problem) {
  hopper::Backward p{};
  float* exact_delta = nullptr;
  auto plan = std::make_shared<FamilyPlan>();
  plan->sizes = {hopper::saved_layout(problem, nullptr).bytes,
                 hopper::lay_out(problem, nullptr, p, exact_delta)};
  return plan;
}

void hopper_backward(const AttentionProblem& problem, const FamilyPlan&, const PassInputs& in,
                     const DeviceTensor& grad_output, const ForwardPass& saved, const BackwardPass& out,
                     void* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  using namespace hopper;
  const PrecisionPlan& plan = problem.plans[0];
  const Saved kept = saved_layout(problem, saved.saved);
  Backward p{};
  float* delta = nullptr;
  lay_out(problem, workspace, p, delta);
  p.B = static_cast<int>(problem.B);
  p.H = static_cast<int>(problem.H);
  p.G = static_cast<int>(problem.G);
  p.D = static_cast<int>(problem.D);
  p.scale = problem.scale;
  p.scale_log2 = problem.scale * kLog2E;
  p.causal = problem.mask.causal;
  p.sequences = sequences(problem);
  p.grad_output = static_cast<const __nv_bfloat16*>(grad_output.data);
  p.o = static_cast<const __nv_bfloat16*>(saved.o.data);
  p.residue = kept.residue;
  p.lse = saved.lse;
  p.row_max = kept.row_max;
  p.row_sum = kept.row_sum;
  p.keel = plan.keel;
  p.delta_out = out.delta;
  p.dq = static_cast<__nv_bfloat16*>(out.dq.data);
  p.dk = static_cast<__nv_bfloat16*>(out.dk.data);
  p.dv = static_cast<__nv_bfloat16*>(out.dv.data);
  copy_strides(p.grad_output_stride, grad_output);
  copy_strides(p.o_stride, saved.o);
  copy_strides(p.dq_stride, out.dq);
  copy_strides(p.dk_stride, out.dk);
  copy_strides(p.dv_stride, out.dv);
  const StabiliserRules& rules = rules_of(plan.stabiliser);
  if (rules.delta == DeltaRule::probs) {
    exact_delta(problem, in, grad_output, saved.lse, delta, stream);
    p.exact_delta = delta;
  }
  const bool consistent = rules.sum == SumRule::rounded_probs;
  if (kernel_size(problem.D) == 64)
    (consistent ? launch<64, true> : launch<64, false>)(problem, in, grad_output, p, stream);
  else
    (consistent ? launch<128, true> : launch<128, false>)(problem, in, grad_output, p, stream);
}

}  // namespace evenkeel
