// The forward pass on Hopper: O = softmax(a Q K^T) V, tile by tile, never in memory.
//
// A block stays on its multiprocessor and takes query tiles from a counter, the longest first. One thread of
// the last warpgroup drives the copy engine; each of the others owns 64 rows and works alone on them: it
// issues the scores of the next key tile (across the border of query tiles too) before the product P V of
// this one, and computes the softmax of the one while the tensor cores do the other. Key tiles run from the
// last to the first: the masked ones come first, and a warpgroup leaves out those that none of its rows sees.
#include <algorithm>
#include <limits>

#include "attention/cuda/hopper.cuh"
#include "numerics/random.h"

namespace evenkeel {
namespace hopper {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// How a row's shift follows its scores.
enum class Shift {
  plain,         // the largest score (and dither's part of log 2)
  consistent,    // rounded up to a whole number of log 2; the sum is of the rounded probabilities
  paper_capped,  // row_shift.h: ties are counted
};

struct ForwardArguments {
  Sequences sequences;
  __nv_bfloat16* o;     // (B, H, T, D)
  int64_t o_stride[3];  // batch, head, row
  float* lse;           // (B, H, T)
  Saved saved;
  int H, heads_per_group, D;
  bool causal;
  float scale, scale_log2;  // a, a log2(e)
  float slack;  // how far a row's largest score may pass its shift, in powers of two, before it is moved
  bool dither;
  RandomKey random;
  const uint32_t* device_step;
  float beta, cap, tie_tolerance;
  float below_all;  // -1, for hold: the assembler must not know
  // Query tiles of all heads: sections of heads whose keys fit the cache; in each, last tiles (the longest)
  // first.
  int tiles_per_head, heads, section_heads;
  uint32_t* next_tile;  // counter of those beyond the blocks' first, zero at the start; null: there are none
};

// One query tile, as the copying thread tells the others.
struct alignas(16) Item {
  int row, rows, keys, tiles;  // first row; the sequence's rows and keys; key tiles, < 0: no more work
  int head, h, first_row,
      query_batch;  // b H + h; h; place of the sequence on the tensors' row and batch axis
};

// Keys that row i sees: [0, limit).
EK_DEVICE int key_limit(bool causal, int row, int rows, int keys) {
  return causal ? min(keys, row + 1 + keys - rows) : keys;
}

template <int kHeadSize>
struct Tiles {
  // Head size 64: the exponentials need as many cycles as the products, and four warpgroups with small tiles
  // hide each other's waits. Head size 128: O takes twice the registers, and two warpgroups with large tiles
  // keep them.
  static constexpr int kWarpgroups = kHeadSize == 64 ? 4 : 2;
  static constexpr int kKeys = kHeadSize == 64 ? 64 : 128;
  static constexpr int kBoxes = kHeadSize / kBoxFeatures;
  static constexpr int kRows = kWarpgroups * kWarpgroupRows, kHalf = kKeys / 2;
  static constexpr bool kHalves = kHalf >= 64;  // a tile of which only the first half is seen is cut
  static constexpr int kQueryStages = 2, kItems = 2 * kQueryStages, kStages = kHeadSize == 64 ? 6 : 2;
  static constexpr int kWorkers = kWarpgroups * kWarpgroup;  // threads
  static constexpr int kThreads = kWorkers + kWarpgroup;
  // The pool is what the block got at its start: 5 x 96 = 4 x 112 + 32, 3 x 168 = 2 x 232 + 40.
  static constexpr int kWorkRegisters = kHeadSize == 64 ? 112 : 232,
                       kCopyRegisters = kHeadSize == 64 ? 32 : 40;
  static constexpr int kQueryBox = kRows * kRowBytes, kKeyBox = kKeys * kRowBytes,
                       kOutBox = kWarpgroupRows * kRowBytes;

  struct Shared {
    uint8_t q[kQueryStages][kBoxes][kQueryBox];
    uint8_t k[kStages][kBoxes][kKeyBox], v[kStages][kBoxes][kKeyBox];
    uint8_t o[kWarpgroups][kBoxes][kOutBox];
    uint8_t ones[kHeadSize == 64 ? 16 * kRowBytes : 16];  // BF16, for Worker::kOnes
    // An item outlives its Q: a warpgroup that writes O may be up to kQueryStages query tiles behind.
    Item items[kItems];
    uint64_t q_full[kQueryStages], q_empty[kQueryStages];
    uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared) + 1024;  // to align it
};

// -------------------------------------------------------------------------------------------- copying thread
template <class S, class T>
EK_DEVICE void copy_tiles(S& shared, const CUtensorMap& q_map, const CUtensorMap& k_map,
                          const CUtensorMap& v_map, const ForwardArguments& a, T) {
  Ring<T::kQueryStages> q;
  Ring<T::kStages> k, v;
  int count = 0;  // of query tiles
  const int total = a.tiles_per_head * a.heads;
  const auto load = [&](uint8_t(&to)[T::kBoxes][T::kKeyBox], const CUtensorMap& map, uint64_t* full, int key,
                        int head, int batch) {
    barrier_expect_bytes(full, T::kBoxes * T::kKeyBox);
#pragma unroll
    for (int box = 0; box < T::kBoxes; ++box)
      load_box(to[box], map, full, box * kBoxFeatures, key, head, batch);
  };
  // V of a tile is asked for after K of the next: the order in which they are used.
  int pending_key = -1, pending_head = 0, pending_batch = 0;
  const auto load_pending = [&] {
    if (pending_key < 0) return;
    barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
    load(shared.v[v.stage], v_map, &shared.v_full[v.stage], pending_key, pending_head, pending_batch);
    v.next();
    pending_key = -1;
  };
  for (int index = blockIdx.x, following; index < total; index = following) {
    following = a.next_tile ? gridDim.x + atomicAdd(a.next_tile, 1u) : total;
    const int section = index / (a.section_heads * a.tiles_per_head);
    const int in_section = index - section * a.section_heads * a.tiles_per_head;
    const int section_heads = min(a.section_heads, a.heads - section * a.section_heads);
    const int tile = a.tiles_per_head - 1 - in_section / section_heads;
    const int head = section * a.section_heads + in_section % section_heads;
    const int b = head / a.H, h = head - b * a.H;
    const Sequence s = sequence(a.sequences, b);
    const int row = tile * T::kRows;
    Item item{row, s.rows, s.keys, 0, head, h, s.first_row, s.query_batch};
    if (row < s.rows) {
      const int limit = key_limit(a.causal, min(row + T::kRows, s.rows) - 1, s.rows, s.keys);
      item.tiles = max(0, (limit + T::kKeys - 1) / T::kKeys);
    }
    barrier_wait(&shared.q_empty[q.stage], q.parity ^ 1);
    shared.items[count++ % T::kItems] = item;
    if (item.tiles > 0) {
      barrier_expect_bytes(&shared.q_full[q.stage], T::kBoxes * T::kQueryBox);
#pragma unroll
      for (int box = 0; box < T::kBoxes; ++box)
        load_box(shared.q[q.stage][box], q_map, &shared.q_full[q.stage], box * kBoxFeatures,
                 s.first_row + row, h, s.query_batch);
    } else {
      barrier_arrive(&shared.q_full[q.stage]);
    }
    q.next();
    const int kv_head = h / a.heads_per_group;
    for (int j = item.tiles - 1; j >= 0; --j) {
      const int key = s.first_key + j * T::kKeys;
      barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
      load(shared.k[k.stage], k_map, &shared.k_full[k.stage], key, kv_head, s.key_batch);
      k.next();
      load_pending();
      pending_key = key, pending_head = kv_head, pending_batch = s.key_batch;
    }
  }
  load_pending();
  barrier_wait(&shared.q_empty[q.stage], q.parity ^ 1);
  shared.items[count % T::kItems].tiles = -1;
  barrier_arrive(&shared.q_full[q.stage]);
}

// --------------------------------------------------------------------------------------------------- numbers
EK_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
template <class N>
EK_DEVICE N quad_sum(N x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// random_unit of numerics/random.h, on the device.
EK_DEVICE float device_random_unit(const RandomKey& key, uint64_t element) {
  const uint64_t counter = element / kRandomGroup * kRandomLanes + element % kRandomLanes;
  uint32_t x0 = static_cast<uint32_t>(counter), x1 = static_cast<uint32_t>(counter >> 32), x2 = key.tensor,
           x3 = key.step;
  uint32_t key0 = static_cast<uint32_t>(key.seed), key1 = static_cast<uint32_t>(key.seed >> 32);
#pragma unroll 1
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * x0, product1 = uint64_t{kPhiloxMultiplier1} * x2;
    x0 = static_cast<uint32_t>(product1 >> 32) ^ x1 ^ key0;
    x1 = static_cast<uint32_t>(product1);
    x2 = static_cast<uint32_t>(product0 >> 32) ^ x3 ^ key1;
    x3 = static_cast<uint32_t>(product0);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  const int word = static_cast<int>(element % kRandomGroup / kRandomLanes);
  const uint32_t bits = word == 0 ? x0 : word == 1 ? x1 : word == 2 ? x2 : x3;
  return (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f;
}

// 16 random bits for a row: a hash of its number (J. K. Salmon's generator would take ten times as long; here only the
// mean matters).
EK_DEVICE uint32_t row_noise(const RandomKey& key, uint32_t row) {
  uint32_t x =
      row * 0x9E3779B1u + key.step * 0x85EBCA77u + key.tensor * 0xC2B2AE3Du + static_cast<uint32_t>(key.seed);
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return (x ^ x >> 16) >> 16;
}

// The residues of a pair (hopper.cuh), in the lower two bytes: floor(kResidueSteps (exact - rounded) + noise), in units of
// the BF16 ulp and with a noise in [0, 1) for each, here in 2^-16. It is byte 2 of that sum, modulo 2^32.
EK_DEVICE uint32_t residues(float low, float high, uint32_t packed, uint32_t low_noise, uint32_t high_noise) {
  const uint32_t first = __float_as_uint(low) * kResidueSteps - packed * (kResidueSteps << 16) + low_noise;
  const uint32_t second = (__float_as_uint(high) - (packed & 0xffff0000u)) * kResidueSteps + high_noise;
  return __byte_perm(first, second, 0x0062);
}

// Nothing that follows starts before x is known: a branch that is never taken, x being nowhere below
// `below_all`. The assembler moves a wait for products up to the last branch before it, whatever stands
// between.
EK_DEVICE void hold(float x, float below_all) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, %1;\n@p trap;\n}" ::"f"(x), "f"(below_all) : "memory");
}

// The state of the two rows a thread holds (with three others) of its warpgroup's 64.
template <Shift kShift>
struct Rows {
  float shift[2];  // in force, in powers of two; -inf: no key yet
  float sum[2];    // l: this thread's part of it
  float unit[2];   // dither: added to the shift; paper_capped: the row's own random number
  float max[2];    // paper_capped: the largest score so far, scaled
  int ties[2];     // paper_capped

  EK_DEVICE void start(const ForwardArguments& a, int head, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shift[r] = max[r] = kMinusInfinity;
      sum[r] = 0;
      unit[r] = 0;
      ties[r] = 0;
      if (kShift == Shift::paper_capped || (kShift == Shift::plain && a.dither)) {
        RandomKey key = a.random;
        if (a.device_step) key.step = *a.device_step;
        unit[r] = device_random_unit(key, static_cast<uint64_t>(head) * a.sequences.T + row + 8 * r);
      }
    }
  }

  // The shift with a tile whose largest score (unscaled; -inf: none) is tile_max, of which `tile_ties` tie.
  EK_DEVICE float moved(const ForwardArguments& a, int r, float tile_max, int tile_ties) {
    if constexpr (kShift == Shift::plain) {
      return fmaf(tile_max, a.scale_log2, unit[r]);
    } else if constexpr (kShift == Shift::consistent) {
      return ceilf(tile_max * a.scale_log2);
    } else {
      const float before = max[r], scaled = tile_max * a.scale;
      if (scaled == kMinusInfinity) return kMinusInfinity;
      max[r] = fmaxf(before, scaled);
      ties[r] = (max[r] - before <= a.tie_tolerance ? ties[r] : 0) + tile_ties;
      float m = max[r];
      if (ties[r] > 1) {
        const float least = kLn2 * (0.25f + 0.75f * unit[r]);
        const float most = fmaxf(least, a.cap * (0.5f + 0.5f * unit[r]));
        m += fminf(fmaxf(max[r] > 0 ? (a.beta - 1) * max[r] : -max[r], least), most);
      }
      return m * kLog2E;
    }
  }
};

// ------------------------------------------------------------------------------------------------- warpgroup
template <int kHeadSize, Shift kShift>
struct Worker {
  using T = Tiles<kHeadSize>;
  using Shared = typename T::Shared;
  // Two warpgroups take turns at the tensor cores; four get out of step by themselves.
  static constexpr bool kTurns = T::kWarpgroups == 2;
  // consistent with head size 64: l is one more feature of O, the product with a V of ones; to unpack the
  // rounded probabilities and add them would take two instructions for each.
  static constexpr bool kOnes = kShift == Shift::consistent && kHeadSize == 64;
  static constexpr int kOutputs = kHeadSize / 2 + (kOnes ? 4 : 0);                       // a thread's
  static constexpr int kNextBarrier = 1, kStoreBarrier = kNextBarrier + T::kWarpgroups;  // named barriers
  static constexpr int kScores = T::kKeys / 2, kPairs = kScores / 2;                     // a thread's

  Shared& shared;
  const ForwardArguments& a;
  const CUtensorMap& o_map;
  const int group;   // which warpgroup of the working ones
  const int thread;  // in it
  const int lane_row,
      lane_column;  // of the accumulator's first element, in the warpgroup's 64 rows and a tile's keys

  int count = 0;  // of query tiles so far: names Q's stage and the item
  Ring<T::kStages> k, v;
  int row;             // this warpgroup's first row in the query tile at hand
  int j;               // key tile whose scores are next (or just computed)
  bool half;           // only the first half of that tile is seen
  float s[kScores];    // of 64 rows x kKeys keys
  uint32_t p[kPairs];  // probabilities
  float o[kOutputs];
  Rows<kShift> state;

  EK_DEVICE Worker(Shared& shared_, const ForwardArguments& a_, const CUtensorMap& o_map_, int group_)
      : shared(shared_),
        a(a_),
        o_map(o_map_),
        group(group_),
        thread(threadIdx.x % kWarpgroup),
        lane_row(thread / 32 * 16 + thread % 32 / 4),
        lane_column(thread % 4 * 2) {}

  EK_DEVICE void release(uint64_t* empty) {
    if (thread % 32 == 0) barrier_arrive(empty);
  }
  EK_DEVICE void wait_turn() {
    if (kTurns) named_sync(kNextBarrier + group, 2 * kWarpgroup);
  }
  EK_DEVICE void pass_turn() {
    if (kTurns) named_arrive(kNextBarrier + (group + 1 == T::kWarpgroups ? 0 : group + 1), 2 * kWarpgroup);
  }

  // Which 64 rows of a query tile: in turn from both ends, so that with a causal mask all do the same work in
  // the end.
  EK_DEVICE int block_of(int item) const {
    return T::kStages > 3 && item % 2 ? T::kWarpgroups - 1 - group : group;
  }
  EK_DEVICE const Item& item() const { return shared.items[count % T::kItems]; }
  // The query tile `count`: its key tiles (< 0: no more work), and how many of them this warpgroup sees.
  EK_DEVICE int look(int& own) {
    barrier_wait(&shared.q_full[count % T::kQueryStages], count / T::kQueryStages & 1);
    const Item& item = this->item();
    row = item.row + block_of(count) * kWarpgroupRows;
    int limit = 0;
    if (row < item.rows)
      limit = max(0, key_limit(a.causal, min(row + kWarpgroupRows, item.rows) - 1, item.rows, item.keys));
    own = (limit + T::kKeys - 1) / T::kKeys;
    half = T::kHalves && own * T::kKeys - limit >= T::kHalf;
    j = own - 1;
    return item.tiles;
  }
  EK_DEVICE void skip_keys(int tiles) {
    for (; tiles > 0; --tiles) {
      wait_turn();
      pass_turn();
      barrier_wait(&shared.k_full[k.stage], k.parity);
      release(&shared.k_empty[k.stage]);
      k.next();
    }
  }
  EK_DEVICE void skip_values(int tiles) {
    for (; tiles > 0; --tiles) {
      barrier_wait(&shared.v_full[v.stage], v.parity);
      release_values();
    }
  }
  // Stands before the first key tile of the next query tile whose rows see a key. False: no more work.
  EK_DEVICE bool seek_item() {
    while (true) {
      int own;
      const int tiles = look(own);
      if (tiles < 0) return false;
      for (int skipped = own; skipped < tiles; ++skipped) skip_keys(1), skip_values(1);
      if (own > 0) return true;
      release_query();
      write_empty_rows(item());
      ++count;
    }
  }
  EK_DEVICE void release_query() { release(&shared.q_empty[count % T::kQueryStages]); }

  EK_DEVICE void wait_keys() { barrier_wait(&shared.k_full[k.stage], k.parity); }
  EK_DEVICE void wait_values() { barrier_wait(&shared.v_full[v.stage], v.parity); }
  EK_DEVICE void issue_scores() {
    const uint64_t query =
        operand(shared.q[count % T::kQueryStages][0] + block_of(count) * kWarpgroupRows * kRowBytes);
    const uint64_t key = operand(shared.k[k.stage][0]);
    products_begin();
#pragma unroll
    for (int step = 0; step < kHeadSize / 16; ++step)
      Wgmma<T::kKeys>::template ss<false, false>(s, advance(query, step / 4 * T::kQueryBox + step % 4 * 32),
                                                 advance(key, step / 4 * T::kKeyBox + step % 4 * 32),
                                                 step > 0);
    products_commit();
  }
  EK_DEVICE void release_keys() {
    settle(s);
    release(&shared.k_empty[k.stage]);
    k.next();
  }
  EK_DEVICE void issue_values() {
    // The ones stand where the box of the next 64 features would: nearer from step to step.
    const uint64_t value =
        operand(shared.v[v.stage][0], kOnes ? shared.ones - shared.v[v.stage][0] : T::kKeyBox);
    constexpr uint32_t kStepBytes = 16 * kRowBytes, kNearer = kOnes ? (kStepBytes >> 4) << 16 : 0;
    products_begin();
#pragma unroll
    for (int step = 0; step < T::kKeys / 16; ++step)
      Wgmma<kHeadSize + (kOnes ? 8 : 0)>::template rs<true>(
          o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
          advance(value, step * kStepBytes) - step * kNearer, true);
    products_commit();
  }
  EK_DEVICE void release_values() {
    release(&shared.v_empty[v.stage]);
    v.next();
  }
  // Rows behind the sequence's last key may hold anything, NaN too; their probability is 0. Every warpgroup
  // clears them for itself: doing it twice does no harm.
  EK_DEVICE void clear_values() {
    const int here = item().keys - j * T::kKeys;
    if (here >= T::kKeys || !a.sequences.key_lengths) return;
    wait_values();
#pragma unroll
    for (int box = 0; box < T::kBoxes; ++box)
      for (int at = here * kRowBytes + thread * 16; at < T::kKeyBox; at += kWarpgroup * 16)
        *reinterpret_cast<uint4*>(shared.v[v.stage][box] + at) = uint4{0, 0, 0, 0};
    store_fence();
    named_sync(kStoreBarrier + group, kWarpgroup);
  }

  // f(index, which of the two rows) over a thread's scores, or the first half of them.
  template <class F>
  EK_DEVICE void each_score(F f) {
#pragma unroll
    for (int i = 0; i < (T::kHalves ? kScores / 2 : kScores); ++i) f(i, i / 2 % 2);
    if (T::kHalves && !half) {
#pragma unroll
      for (int i = kScores / 2; i < kScores; ++i) f(i, i / 2 % 2);
    }
  }
  EK_DEVICE void mask() {
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      limit[r] =
          key_limit(a.causal, row + lane_row + 8 * r, item().rows, item().keys) - j * T::kKeys - lane_column;
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = kMinusInfinity;
  }

  // s: scores to p: probabilities; moves the rows' shifts, and O with them (after the product in flight).
  template <bool kInFlight>
  EK_DEVICE void softmax() {
    // Two chains a row: a maximum takes its unit two cycles, but four until it can be used.
    float chain[4] = {s[0], s[1], s[2], s[3]};
    each_score([&](int i, int) {
      if (i >= 4) chain[i % 4] = fmaxf(chain[i % 4], s[i]);
    });
    float most[2] = {quad_max(fmaxf(chain[0], chain[1])), quad_max(fmaxf(chain[2], chain[3]))};
    int ties[2] = {0, 0};
    if constexpr (kShift == Shift::paper_capped) {
      float threshold[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) threshold[r] = fmaxf(state.max[r], most[r] * a.scale) - a.tie_tolerance;
      each_score([&](int i, int r) { ties[r] += s[i] * a.scale >= threshold[r]; });
#pragma unroll
      for (int r = 0; r < 2; ++r) ties[r] = quad_sum(ties[r]);
    }
    float before[2], used[2];
    bool moves = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      before[r] = state.shift[r];
      const float moved = state.moved(a, r, most[r], ties[r]);
      if (moved > before[r] + a.slack) {
        state.shift[r] = moved;
        moves = true;
      }
      used[r] = state.shift[r] == kMinusInfinity ? 0.0f : state.shift[r];
    }
    if constexpr (kInFlight) {
      hold(fabsf(used[0]) + fabsf(used[1]), a.below_all);
      products_wait<0>();
      settle(o);
      if (__any_sync(~0u, moves)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          before[r] = exp2_approx(before[r] - used[r]);
          state.sum[r] *= before[r];
        }
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[i] *= before[i / 2 % 2];
      }
    }
    each_score([&](int i, int r) {
      s[i] = exp2_approx(fmaf(s[i], a.scale_log2, -used[r]));
      if (kShift != Shift::consistent) state.sum[r] += s[i];
      if (i % 2 == 0) return;
      p[i / 2] = pack_bf16(s[i - 1], s[i]);
      if (kShift == Shift::consistent && !kOnes) {
        state.sum[r] += low_bf16(p[i / 2]);
        state.sum[r] += high_bf16(p[i / 2]);
      }
    });
    if (T::kHalves && half) {
#pragma unroll
      for (int pair = kPairs / 2; pair < kPairs; ++pair) p[pair] = 0;
    }
  }

  // O / l, L and what backward needs, of a query tile that is done.
  EK_DEVICE void write(const Item& done, int row) {
    float sum[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = kOnes ? o[kOutputs - 4 + 2 * r] : quad_sum(state.sum[r]);
      factor[r] = sum[r] == 0 ? 0.0f : __fdividef(1.0f, sum[r]);  // no key in sight: O = 0
    }
#pragma unroll
    for (int i = 0; i < kHeadSize / 2; ++i) o[i] *= factor[(i / 2) % 2];
    if (row + kWarpgroupRows > done.rows) {  // rows that do not exist may hold anything
#pragma unroll
      for (int i = 0; i < kHeadSize / 2; ++i)
        if (row + lane_row + i / 2 % 2 * 8 >= done.rows) o[i] = 0;
    }
    uint32_t packed[kHeadSize / 4];
#pragma unroll
    for (int pair = 0; pair < kHeadSize / 4; ++pair) packed[pair] = pack_bf16(o[2 * pair], o[2 * pair + 1]);
    const bool is_packed = a.sequences.query_offsets;
    if (is_packed && row + kWarpgroupRows > done.rows) {
      // The next sequence's rows follow at once.
#pragma unroll
      for (int pair = 0; pair < kHeadSize / 4; ++pair) {
        const int i = row + lane_row + pair % 2 * 8, feature = pair / 2 * 8 + lane_column;
        if (i < done.rows && feature < a.D)
          *reinterpret_cast<uint32_t*>(a.o + done.h * a.o_stride[1] +
                                       (static_cast<int64_t>(done.first_row) + i) * a.o_stride[2] + feature) =
              packed[pair];
      }
    } else {
      const int lane = thread % 32, warp_row = thread / 32 * 16, box_row = warp_row + lane % 16;
      if (lane == 0) store_wait_read<0>();
      __syncwarp();
#pragma unroll
      for (int block = 0; block < kHeadSize / 16; ++block)  // 16 rows x 16 features a warp
        store_matrices(shared.o[group][block / 4] + swizzled(box_row, block % 4 * 2 + lane / 16),
                       packed[4 * block], packed[4 * block + 1], packed[4 * block + 2],
                       packed[4 * block + 3]);
      store_fence();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int box = 0; box < T::kBoxes; ++box)
          store_box(o_map, shared.o[group][box] + warp_row * kRowBytes, box * kBoxFeatures,
                    done.first_row + row + warp_row, done.h, done.query_batch);
        store_commit();
      }
    }
    if (a.saved.residue) write_residue(done, row, packed);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + lane_row + 8 * r;
      if (lane_column != 0 || i >= a.sequences.T) continue;
      const bool exists = i < done.rows;
      const size_t at = static_cast<size_t>(done.head) * a.sequences.T + i;
      a.lse[at] = exists ? fmaf(state.shift[r], kLn2, __logf(sum[r])) : kMinusInfinity;
      if (kShift == Shift::consistent) {
        a.saved.row_max[at] = exists ? state.shift[r] : kMinusInfinity;
        a.saved.row_sum[at] = exists ? sum[r] : 0.0f;
      }
    }
  }

  // A row's bytes lie two by two with the four lanes of a quad; after a transposition each lane has 16 in
  // order.
  EK_DEVICE void write_residue(const Item& done, int row, const uint32_t (&packed)[kHeadSize / 4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + lane_row + 8 * r;
      const size_t at = static_cast<size_t>(done.head) * a.sequences.T + i;
      int8_t* const to = a.saved.residue + at * a.D;
      RandomKey key = a.random;
      if (a.device_step) key.step = *a.device_step;
      // Every feature's noise is uniform; those of a row lie sixteen steps apart, so that errors of features whose
      // gradients have one sign do not add up.
      const uint32_t start = row_noise(key, static_cast<uint32_t>(at)) + thread % 4 * 0x1000u;
      uint32_t noise[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) noise[n] = (start + n * 0x4000u) & 0xffffu;
#pragma unroll
      for (int box = 0; box < T::kBoxes; ++box) {
        uint32_t word[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int pair = box * 16 + w * 4 + r;  // and the one of the next 8 features
          word[w] = __byte_perm(
              residues(o[2 * pair], o[2 * pair + 1], packed[pair], noise[0], noise[1]),
              residues(o[2 * pair + 4], o[2 * pair + 5], packed[pair + 2], noise[2], noise[3]), 0x5410);
        }
        quad_transpose(word);
        const int feature = box * kBoxFeatures + thread % 4 * 16;
        const uint2 low{__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[2], word[3], 0x5410)};
        const uint2 high{__byte_perm(word[0], word[1], 0x7632), __byte_perm(word[2], word[3], 0x7632)};
        if (i >= a.sequences.T) continue;
        if (a.D % 16 == 0) {
          if (feature < a.D) *reinterpret_cast<uint4*>(to + feature) = uint4{low.x, low.y, high.x, high.y};
        } else {
          if (feature < a.D) *reinterpret_cast<uint2*>(to + feature) = low;
          if (feature + 8 < a.D) *reinterpret_cast<uint2*>(to + feature + 8) = high;
        }
      }
    }
  }

  // A warpgroup whose rows see no key.
  EK_DEVICE void write_empty_rows(const Item& empty) {
    const bool is_packed = a.sequences.query_offsets;
    const int end = min(row + kWarpgroupRows, a.sequences.T);
    for (int i = row + thread / 2; i < end; i += kWarpgroup / 2) {
      const size_t at = static_cast<size_t>(empty.head) * a.sequences.T + i;
      if (thread % 2 == 0) {
        a.lse[at] = kMinusInfinity;
        if (kShift == Shift::consistent) {
          a.saved.row_max[at] = kMinusInfinity;
          a.saved.row_sum[at] = 0;
        }
      }
      __nv_bfloat16* const to = a.o + empty.query_batch * a.o_stride[0] + empty.h * a.o_stride[1] +
                                (static_cast<int64_t>(empty.first_row) + i) * a.o_stride[2];
      for (int feature = thread % 2 * 8; feature < a.D; feature += 16) {
        if (!is_packed || i < empty.rows) *reinterpret_cast<uint4*>(to + feature) = uint4{0, 0, 0, 0};
        if (a.saved.residue) *reinterpret_cast<uint2*>(a.saved.residue + at * a.D + feature) = uint2{0, 0};
      }
    }
  }

  // The scores of key tile j and the product of the one before, together.
  EK_DEVICE void issue_both() {
    wait_keys();
    wait_values();
    wait_turn();
    issue_scores();
    issue_values();
    pass_turn();
  }
  EK_DEVICE void step(int clear) {
    --j;
    half = false;
    issue_both();
    products_wait<1>();
    release_keys();
    if (j >= clear) mask();
    softmax<true>();
    release_values();
  }

  EK_DEVICE void run() {
    if (group + 1 == T::kWarpgroups) pass_turn();
    while (seek_item()) {
      wait_keys();
      wait_turn();
      issue_scores();
      pass_turn();
      products_wait<0>();
      release_keys();
      for (bool chained = true; chained;) {
        state.start(a, item().head, row + lane_row);
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[i] = 0;
        // Key tiles that all of the rows see whole.
        const int clear = max(0, key_limit(a.causal, row, item().rows, item().keys)) / T::kKeys;
        if (j >= clear) mask();
        softmax<false>();
        clear_values();
        while (j > 0) step(clear);
        release_query();
        const Item& done = item();
        const int done_row = row;
        ++count;
        int own;
        const int skipped = look(own) - own;
        chained = own > 0 && skipped >= 0 && skipped <= T::kStages - 2;  // further ahead, V would not follow
        if (chained) {
          skip_keys(skipped);
          issue_both();
          products_wait<0>();
          release_keys();
        } else {
          wait_values();
          issue_values();
          products_wait<0>();
        }
        settle(o);
        release_values();
        write(done, done_row);
        if (chained) skip_values(skipped);
      }
    }
    if (thread % 32 == 0) store_wait<0>();
  }
};

template <int kHeadSize, Shift kShift>
__global__ void __launch_bounds__(Tiles<kHeadSize>::kThreads, 1)
    forward(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
            const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map,
            const __grid_constant__ ForwardArguments arguments) {
  using T = Tiles<kHeadSize>;
  extern __shared__ uint8_t memory[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(memory + (-shared_address(memory) & 1023));
  if (threadIdx.x == 0) {
    constexpr int kWarps = T::kWorkers / 32;
    for (int i = 0; i < T::kQueryStages; ++i)
      barrier_init(&shared.q_full[i], 1), barrier_init(&shared.q_empty[i], kWarps);
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(&shared.k_full[i], 1), barrier_init(&shared.k_empty[i], kWarps);
      barrier_init(&shared.v_full[i], 1), barrier_init(&shared.v_empty[i], kWarps);
    }
    barrier_init_fence();
    prefetch_map(q_map), prefetch_map(k_map), prefetch_map(v_map), prefetch_map(o_map);
  }
  for (int at = threadIdx.x * 4; at < sizeof(shared.ones); at += T::kThreads * 4)
    *reinterpret_cast<uint32_t*>(shared.ones + at) = 0x3f803f80;
  store_fence();
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (group == T::kWarpgroups) {
    give_registers<T::kCopyRegisters>();
    if (threadIdx.x == T::kWorkers) copy_tiles(shared, q_map, k_map, v_map, arguments, T{});
  } else {
    take_registers<T::kWorkRegisters>();
    Worker<kHeadSize, kShift>(shared, arguments, o_map, group).run();
  }
}

template <int kHeadSize, Shift kShift>
void launch(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out, ForwardArguments a,
            void* workspace, cudaStream_t stream) {
  using T = Tiles<kHeadSize>;
  static_assert(T::kSharedBytes <= 227 * 1024);
  const CUtensorMap q_map = query_map(problem, in.q, T::kRows), k_map = key_map(problem, in.k, T::kKeys),
                    v_map = key_map(problem, in.v, T::kKeys),
                    o_map = query_map(problem, out.o, kWarpgroupRows / 4);
  a.tiles_per_head = static_cast<int>((problem.T + T::kRows - 1) / T::kRows);
  const auto kernel = forward<kHeadSize, kShift>;
  allow_shared_memory(kernel, T::kSharedBytes);
  const int tiles = a.tiles_per_head * a.heads, blocks = std::min(multiprocessors(), tiles);
  if (tiles > blocks) {
    a.next_tile = static_cast<uint32_t*>(workspace);
    check_cuda(cudaMemsetAsync(workspace, 0, sizeof(uint32_t), stream),
               "clearing the forward kernel's counter");
  }
  kernel<<<blocks, T::kThreads, T::kSharedBytes, stream>>>(q_map, k_map, v_map, o_map, a);
  check_launch("starting the Hopper forward kernel");
}

template <int kHeadSize>
void launch(const AttentionProblem& problem, const PassInputs& in, const ForwardPass& out,
            const ForwardArguments& a, void* workspace, cudaStream_t stream) {
  switch (rules_of(problem.plans[0].stabiliser).shift) {
    case ShiftRule::power_of_two:
      return launch<kHeadSize, Shift::consistent>(problem, in, out, a, workspace, stream);
    case ShiftRule::paper_capped:
      return launch<kHeadSize, Shift::paper_capped>(problem, in, out, a, workspace, stream);
    default:
      return launch<kHeadSize, Shift::plain>(problem, in, out, a, workspace, stream);
  }
}

}  // namespace
}  // namespace hopper

void hopper_forward(const AttentionProblem& problem, const FamilyPlan&, const PassInputs& in,
                    const ForwardPass& out, void* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  using namespace hopper;
  const PrecisionPlan& plan = problem.plans[0];
  ForwardArguments a{};
  a.sequences = sequences(problem);
  a.o = static_cast<__nv_bfloat16*>(out.o.data);
  for (int axis = 0; axis < 3; ++axis) a.o_stride[axis] = out.o.stride[axis];
  a.lse = out.lse;
  a.saved = saved_layout(problem, out.saved);
  a.H = static_cast<int>(problem.H);
  a.heads_per_group = static_cast<int>(problem.H / problem.G);
  a.D = static_cast<int>(problem.D);
  a.causal = problem.mask.causal;
  a.scale = problem.scale;
  a.scale_log2 = problem.scale * kLog2E;
  // A shift may stay behind the row's largest score for a while: P is then at most 2^8, and O need not be
  // scaled for each new maximum (5 % of the time). Of a shift by powers of two that changes no rounding. row_max stays
  // exact: with a shift that lags, scores that tie with the maximum would no longer have P = 1, and the failure that
  // the stabiliser `none` is there to show would be hidden.
  const ShiftRule shift = rules_of(plan.stabiliser).shift;
  a.slack = may_lag(shift) ? 8.0f : 0.0f;
  a.dither = shift == ShiftRule::dither;
  a.random = {plan.seed, problem.step, problem.layer * 64 + 63};
  a.device_step = problem.device_step;
  a.beta = plan.beta, a.cap = plan.cap, a.tie_tolerance = plan.tie_tolerance;
  a.below_all = -1;
  a.heads = static_cast<int>(problem.B * problem.H);
  constexpr int64_t kCacheBytes = 32 << 20;                 // of the second-level cache, for keys and values
  const int64_t key_bytes = problem.N * problem.D * 2 * 2;  // K and V of one head
  a.section_heads = static_cast<int>(
      std::clamp<int64_t>(kCacheBytes / std::max<int64_t>(1, key_bytes) * a.heads_per_group, 1, a.heads));
  if (problem.D <= 64)
    launch<64>(problem, in, out, a, workspace, stream);
  else
    launch<128>(problem, in, out, a, workspace, stream);
}

}  // namespace evenkeel
