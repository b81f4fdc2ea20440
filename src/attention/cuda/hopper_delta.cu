// zero_sum's delta on Hopper: sum_j P_ij dP_ij / sum_j P_ij, by a pass over the keys of its own. Both sums
// are over the probabilities that this pass computes, so that P (dP - delta) adds up to zero whatever the
// forward pass rounded.
//
// A block takes 256 query rows of one head, 64 a warpgroup; one thread of a fifth warpgroup drives the copy
// engine.
#include <algorithm>

#include "attention/cuda/hopper.cuh"
#include "base/sizes.h"

namespace evenkeel::hopper {
namespace {

struct DeltaArguments {
  Sequences sequences;
  const float* lse;  // (B, H, T)
  float* delta;      // (B, H, T)
  int H, heads_per_group;
  bool causal;
  float scale_log2;  // a log2(e)
  int tiles_per_head, heads, section_heads;
};

template <int kHeadSize>
struct Tiles {
  static constexpr int kBoxes = kHeadSize / kBoxFeatures;
  static constexpr int kWarpgroups = 4, kRows = kWarpgroups * kWarpgroupRows, kKeys = 64;
  static constexpr int kStages = kHeadSize == 64 ? 6 : 2;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  static constexpr int kQueryBox = kRows * kRowBytes, kKeyBox = kKeys * kRowBytes;

  struct Shared {
    uint8_t q[kBoxes][kQueryBox], grad[kBoxes][kQueryBox];
    uint8_t k[kStages][kBoxes][kKeyBox], v[kStages][kBoxes][kKeyBox];
    uint64_t query_full, full[kStages], empty[kStages];
  };
  static constexpr size_t kSharedBytes = sizeof(Shared) + 1024;  // to align it
};

// Keys that row i sees: [0, limit).
EK_DEVICE int key_limit(bool causal, int row, int rows, int keys) {
  return causal ? max(0, min(keys, row + 1 + keys - rows)) : keys;
}

// Loads everything: one thread.
template <int kHeadSize>
EK_DEVICE void load_tiles(typename Tiles<kHeadSize>::Shared& shared, const CUtensorMap& q_map,
                          const CUtensorMap& k_map, const CUtensorMap& v_map, const CUtensorMap& grad_map,
                          const DeltaArguments& a, const Sequence& s, int h, int tile_row, int tiles) {
  using T = Tiles<kHeadSize>;
  Ring<T::kStages> ring;
  barrier_expect_bytes(&shared.query_full, 2 * T::kBoxes * T::kQueryBox);
#pragma unroll
  for (int box = 0; box < T::kBoxes; ++box) {
    load_box(shared.q[box], q_map, &shared.query_full, box * kBoxFeatures, s.first_row + tile_row, h,
             s.query_batch);
    load_box(shared.grad[box], grad_map, &shared.query_full, box * kBoxFeatures, s.first_row + tile_row, h,
             s.query_batch);
  }
  for (int j = 0; j < tiles; ++j) {
    const int key = s.first_key + j * T::kKeys, kv_head = h / a.heads_per_group;
    uint64_t* const full = &shared.full[ring.stage];
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    barrier_expect_bytes(full, 2 * T::kBoxes * T::kKeyBox);
#pragma unroll
    for (int box = 0; box < T::kBoxes; ++box) {
      load_box(shared.k[ring.stage][box], k_map, full, box * kBoxFeatures, key, kv_head, s.key_batch);
      load_box(shared.v[ring.stage][box], v_map, full, box * kBoxFeatures, key, kv_head, s.key_batch);
    }
    ring.next();
  }
}

// scores = rows times keys, both tiles in shared memory.
template <int kHeadSize>
EK_DEVICE void begin_product(float (&scores)[Tiles<kHeadSize>::kKeys / 2], uint64_t rows, uint64_t keys) {
  using T = Tiles<kHeadSize>;
  products_begin();
#pragma unroll
  for (int step = 0; step < kHeadSize / 16; ++step)
    Wgmma<T::kKeys>::template ss<false, false>(scores, advance(rows, step / 4 * T::kQueryBox + step % 4 * 32),
                                               advance(keys, step / 4 * T::kKeyBox + step % 4 * 32),
                                               step > 0);
  products_commit();
}

template <int kHeadSize>
__global__ void __launch_bounds__(Tiles<kHeadSize>::kThreads, 1)
    delta_rows(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap grad_map,
               const __grid_constant__ DeltaArguments a) {
  using T = Tiles<kHeadSize>;
  extern __shared__ uint8_t memory[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(memory + (-shared_address(memory) & 1023));
  if (threadIdx.x == 0) {
    barrier_init(&shared.query_full, 1);
    for (int i = 0; i < T::kStages; ++i)
      barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], T::kWarpgroups * kWarpgroup / 32);
    barrier_init_fence();
    prefetch_map(q_map), prefetch_map(k_map), prefetch_map(v_map), prefetch_map(grad_map);
  }
  __syncthreads();

  // The order of the forward pass: sections of heads whose keys fit the cache, in each the longest tiles
  // first.
  const int index = blockIdx.x, section = index / (a.section_heads * a.tiles_per_head);
  const int in_section = index - section * a.section_heads * a.tiles_per_head;
  const int section_heads = min(a.section_heads, a.heads - section * a.section_heads);
  const int tile_row = (a.tiles_per_head - 1 - in_section / section_heads) * T::kRows;
  const int head = section * a.section_heads + in_section % section_heads;
  const int b = head / a.H, h = head - b * a.H;
  const Sequence s = sequence(a.sequences, b);
  const int tiles =
      tile_row < s.rows
          ? (key_limit(a.causal, min(tile_row + T::kRows, s.rows) - 1, s.rows, s.keys) + T::kKeys - 1) /
                T::kKeys
          : 0;

  const int group = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (group == T::kWarpgroups) {
    if (threadIdx.x % kWarpgroup != 0 || tiles == 0) return;
    load_tiles<kHeadSize>(shared, q_map, k_map, v_map, grad_map, a, s, h, tile_row, tiles);
    return;
  }

  const int thread = threadIdx.x % kWarpgroup, lane_column = thread % 4 * 2;
  const int first_row = tile_row + group * kWarpgroupRows,
            row = first_row + thread / 32 * 16 + thread % 32 / 4;
  // Key tiles that all of the warpgroup's rows see whole.
  const int clear = key_limit(a.causal, first_row, s.rows, s.keys) / T::kKeys;
  Ring<T::kStages> ring;
  float shift[2], sum[2] = {0, 0}, weighted[2] = {0, 0};
  int limit[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = row + 8 * r;
    limit[r] = i < s.rows ? key_limit(a.causal, i, s.rows, s.keys) : 0;
    shift[r] = limit[r] > 0 ? a.lse[static_cast<size_t>(head) * a.sequences.T + i] * kLog2E : 0.0f;
  }
  if (tiles > 0) barrier_wait(&shared.query_full, 0);
  const uint64_t query = operand(shared.q[0] + group * kWarpgroupRows * kRowBytes);
  const uint64_t grad = operand(shared.grad[0] + group * kWarpgroupRows * kRowBytes);
  for (int j = 0; j < tiles; ++j) {
    float scores[T::kKeys / 2], dprobs[T::kKeys / 2];
    barrier_wait(&shared.full[ring.stage], ring.parity);
    const uint64_t key = operand(shared.k[ring.stage][0]), value = operand(shared.v[ring.stage][0]);
    begin_product<kHeadSize>(scores, query, key);
    begin_product<kHeadSize>(dprobs, grad, value);
    products_wait<1>();
    settle(scores);
#pragma unroll
    for (int i = 0; i < T::kKeys / 2; ++i)
      scores[i] = exp2_approx(fmaf(scores[i], a.scale_log2, -shift[i / 2 % 2]));
    settle(scores);
    products_wait<0>();
    settle(dprobs);
    if (thread % 32 == 0) barrier_arrive(&shared.empty[ring.stage]);
    ring.next();
    if (j >= clear) {  // masked, or behind the last key: anything may stand there
#pragma unroll
      for (int i = 0; i < T::kKeys / 2; ++i)
        if (j * T::kKeys + i / 4 * 8 + i % 2 + lane_column >= limit[i / 2 % 2]) scores[i] = dprobs[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < T::kKeys / 2; ++i) {
      sum[i / 2 % 2] += scores[i];
      weighted[i / 2 % 2] = fmaf(scores[i], dprobs[i], weighted[i / 2 % 2]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], lanes);
      weighted[r] += __shfl_xor_sync(~0u, weighted[r], lanes);
    }
    const int i = row + 8 * r;
    if (lane_column == 0 && i < a.sequences.T)
      a.delta[static_cast<size_t>(head) * a.sequences.T + i] = limit[r] > 0 ? weighted[r] / sum[r] : 0.0f;
  }
}

template <int kHeadSize>
void launch(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
            DeltaArguments a, cudaStream_t stream) {
  using T = Tiles<kHeadSize>;
  static_assert(T::kSharedBytes <= 227 * 1024);
  const CUtensorMap q_map = query_map(problem, in.q, T::kRows), k_map = key_map(problem, in.k, T::kKeys),
                    v_map = key_map(problem, in.v, T::kKeys),
                    grad_map = query_map(problem, grad_output, T::kRows);
  a.tiles_per_head = static_cast<int>(divide_up(problem.T, T::kRows));
  const auto kernel = delta_rows<kHeadSize>;
  allow_shared_memory(kernel, T::kSharedBytes);
  kernel<<<a.tiles_per_head * a.heads, T::kThreads, T::kSharedBytes, stream>>>(q_map, k_map, v_map, grad_map,
                                                                               a);
  check_launch("starting the Hopper delta kernel");
}

}  // namespace

void exact_delta(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                 const float* lse, float* delta, cudaStream_t stream) {
  DeltaArguments a{};
  a.sequences = sequences(problem);
  a.lse = lse;
  a.delta = delta;
  a.H = static_cast<int>(problem.H);
  a.heads_per_group = static_cast<int>(problem.H / problem.G);
  a.causal = problem.mask.causal;
  a.scale_log2 = problem.scale * kLog2E;
  a.heads = static_cast<int>(problem.B * problem.H);
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t key_bytes = std::max<int64_t>(1, problem.N * problem.D * 2 * 2);  // K and V of one head
  a.section_heads =
      static_cast<int>(std::clamp<int64_t>(kCacheBytes / key_bytes * a.heads_per_group, 1, a.heads));
  if (problem.D <= 64)
    launch<64>(problem, in, grad_output, a, stream);
  else
    launch<128>(problem, in, grad_output, a, stream);
}

}  // namespace evenkeel::hopper
