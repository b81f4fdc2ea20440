// zero_sum's delta on Hopper: sum_j P_ij dP_ij / sum_j P_ij, by a pass over the keys of its own. Both sums
// are over the probabilities that this pass computes, so that P (dP - delta) adds up to zero whatever the
// forward pass rounded.
//
// A block takes 256 query rows of one head, 64 a warpgroup; one thread of a fifth warpgroup drives the copy
// engine.
#include "attention/cuda/hopper_backward.cuh"
#include "base/sizes.h"
#include "gpu/cuda/launch.h"

namespace evenkeel::hopper {
namespace {

struct DeltaArguments : ScoreForms {
  const float* lse;  // (B, H, T)
  float* delta;      // (B, H, T)
  float* log_sum;    // (B, H, T) or null
  int H, heads_per_group;
  HeadList list;
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

// Loads everything: one thread.
template <int kHeadSize>
EK_DEVICE void load_tiles(typename Tiles<kHeadSize>::Shared& shared, const CUtensorMap& q_map,
                          const CUtensorMap& k_map, const CUtensorMap& v_map, const CUtensorMap& grad_map,
                          const DeltaArguments& a, const Sequence& s, int h, int tile_row, int first_tile,
                          int end_tile) {
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
  for (int j = first_tile; j < end_tile; ++j) {
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

// Of a thread's two rows and their keys from `key` on: soft caps (the scores are then tanh) and slopes.
template <int n>
EK_DEVICE void shape_scores(const DeltaArguments& a, const Band& band, int h, int row, int key,
                            float (&scores)[n]) {
  if (a.softcap > 0) {
    const float factor = a.scale / a.softcap;
#pragma unroll
    for (int i = 0; i < n; ++i) scores[i] = tanh_of(scores[i] * factor);
  }
  if (!a.slopes) return;
  const float slope = slope_of(a, h);
  const int distance = row + band.offset - key;
#pragma unroll
  for (int i = 0; i < n; ++i)
    scores[i] =
        fmaf(-slope, fabsf(static_cast<float>(distance + i / 2 % 2 * 8 - (i / 4 * 8 + i % 2))), scores[i]);
}
// What a mask of its own hides.
template <int n>
EK_DEVICE void hide(const DeltaArguments& a, const Band& band, int b, int h, int row, int key,
                    float (&probs)[n]) {
  const Visible visible(a, b, h);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int own = row + i / 2 % 2 * 8, other = key + i / 4 * 8 + i % 2;
    if (own < band.s.rows && other < band.s.keys && !visible(own, other)) probs[i] = 0;
  }
}

// kForms: with windows, soft caps, slopes, masks and sinks.
template <class Pairs, int kHeadSize, bool kForms>
__global__ void __launch_bounds__(Tiles<kHeadSize>::kThreads, 1)
    delta_rows(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap grad_map,
               const __grid_constant__ DeltaArguments a) {
  using T = Tiles<kHeadSize>;
  constexpr bool kFp16 = std::is_same_v<Pairs, Fp16Pairs>;
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

  const TilePlace place(blockIdx.x, a.tiles_per_head, a.heads, a.section_heads);
  const int tile_row = place.tile * T::kRows, listed = place.head;
  const int b = listed / a.list.count, h = a.list.head_at(listed - b * a.list.count), head = b * a.H + h;
  const Band band(a, b);
  const Sequence& s = band.s;
  const int first_tile = kForms ? band.first_key_tile(tile_row, T::kKeys) : 0,
            end_tile = band.end_key_tile(tile_row, T::kRows, T::kKeys);
  const bool any = first_tile < end_tile;

  const int group = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (group == T::kWarpgroups) {
    if (threadIdx.x % kWarpgroup != 0 || !any) return;
    load_tiles<kHeadSize>(shared, q_map, k_map, v_map, grad_map, a, s, h, tile_row, first_tile, end_tile);
    return;
  }

  const int thread = threadIdx.x % kWarpgroup, lane_column = thread % 4 * 2;
  const int first_row = tile_row + group * kWarpgroupRows,
            row = first_row + thread / 32 * 16 + thread % 32 / 4;
  // Key tiles that all of the warpgroup's rows see whole.
  const int clear = max(0, band.end_key(first_row)) / T::kKeys;
  const int clear_from =
      kForms ? (band.first_key(first_row + kWarpgroupRows - 1) + T::kKeys - 1) / T::kKeys : 0;
  Ring<T::kStages> ring;
  float shift[2], sum[2] = {0, 0}, weighted[2] = {0, 0};
  int from[2], limit[2];  // keys that a row sees
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = row + 8 * r;
    from[r] = kForms ? band.first_key(i) : 0;
    limit[r] = i < s.rows ? max(0, band.end_key(i)) : 0;
    shift[r] = limit[r] > 0 ? a.lse[static_cast<size_t>(head) * a.sequences.T + i] * kLog2E : 0.0f;
  }
  if (any) barrier_wait(&shared.query_full, 0);
  const uint64_t query = operand(shared.q[0] + group * kWarpgroupRows * kRowBytes);
  const uint64_t grad = operand(shared.grad[0] + group * kWarpgroupRows * kRowBytes);
  for (int j = first_tile; j < end_tile; ++j) {
    float scores[T::kKeys / 2], dprobs[T::kKeys / 2];
    barrier_wait(&shared.full[ring.stage], ring.parity);
    const uint64_t key = operand(shared.k[ring.stage][0]), value = operand(shared.v[ring.stage][0]);
    begin_product<kHeadSize, T::kQueryBox, T::kKeyBox, kFp16>(scores, query, key);
    begin_product<kHeadSize, T::kQueryBox, T::kKeyBox, kFp16>(dprobs, grad, value);
    products_wait<1>();
    settle(scores);
    if constexpr (kForms) shape_scores(a, band, h, row, j * T::kKeys + lane_column, scores);
#pragma unroll
    for (int i = 0; i < T::kKeys / 2; ++i)
      scores[i] = exp2_approx(fmaf(scores[i], a.score_log2, -shift[i / 2 % 2]));
    settle(scores);
    products_wait<0>();
    settle(dprobs);
    if (thread % 32 == 0) barrier_arrive(&shared.empty[ring.stage]);
    ring.next();
    if (j >= clear || j < clear_from) {  // masked, or behind the last key: anything may stand there
#pragma unroll
      for (int i = 0; i < T::kKeys / 2; ++i) {
        const int key = j * T::kKeys + i / 4 * 8 + i % 2 + lane_column;
        if (key >= limit[i / 2 % 2] || (kForms && key < from[i / 2 % 2])) scores[i] = dprobs[i] = 0;
      }
    }
    if (kForms && a.visible) hide(a, band, b, h, row, j * T::kKeys + lane_column, scores);
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
    if (kForms && limit[r] > 0) sum[r] += exp2_approx(sink_log2(a, h) - shift[r]);
    const int i = row + 8 * r;
    if (lane_column == 0 && i < a.sequences.T) {
      const bool seen = limit[r] > 0 && sum[r] > 0;
      const size_t at = static_cast<size_t>(head) * a.sequences.T + i;
      a.delta[at] = seen ? weighted[r] / sum[r] : 0.0f;
      if (a.log_sum) a.log_sum[at] = seen ? log2f(sum[r]) : 0.0f;
    }
  }
}

template <class Pairs, int kHeadSize, bool kForms>
void launch(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
            DeltaArguments a, cudaStream_t stream) {
  using T = Tiles<kHeadSize>;
  static_assert(T::kSharedBytes <= 227 * 1024);
  const CUtensorMap q_map = query_map(problem, in.q, T::kRows), k_map = key_map(problem, in.k, T::kKeys),
                    v_map = key_map(problem, in.v, T::kKeys),
                    grad_map = query_map(problem, grad_output, T::kRows);
  a.tiles_per_head = static_cast<int>(divide_up(problem.T, T::kRows));
  const auto kernel = delta_rows<Pairs, kHeadSize, kForms>;
  allow_shared_memory(kernel, T::kSharedBytes);
  kernel<<<a.tiles_per_head * a.heads, T::kThreads, T::kSharedBytes, stream>>>(q_map, k_map, v_map, grad_map,
                                                                               a);
  check_launch("starting the Hopper delta kernel");
}

}  // namespace

void exact_delta(const AttentionProblem& problem, const HeadGroup& group, const PassInputs& in,
                 const DeviceTensor& grad_output, const float* lse, float* delta, float* log_sum,
                 cudaStream_t stream) {
  DeltaArguments a{};
  static_cast<ScoreForms&>(a) = score_forms(problem);
  a.lse = lse;
  a.delta = delta;
  a.log_sum = log_sum;
  a.H = static_cast<int>(problem.H);
  a.heads_per_group = static_cast<int>(problem.H / problem.G);
  a.list = group.list;
  a.heads = static_cast<int>(problem.B) * group.list.count;
  a.section_heads = heads_in_cache(problem, a.heads);
  const auto with_head = [&]<class Pairs, int kHeadSize>() {
    (has_forms(problem) ? launch<Pairs, kHeadSize, true>
                        : launch<Pairs, kHeadSize, false>)(problem, in, grad_output, a, stream);
  };
  const auto with_type = [&]<class Pairs>() {
    if (problem.D <= 64)
      with_head.template operator()<Pairs, 64>();
    else
      with_head.template operator()<Pairs, 128>();
  };
  if (problem.type == TensorType::fp16)
    with_type.template operator()<Fp16Pairs>();
  else
    with_type.template operator()<Bf16Pairs>();
}

}  // namespace evenkeel::hopper
