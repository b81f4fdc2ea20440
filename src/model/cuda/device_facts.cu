#include "model/cuda/device_facts.h"

#include "base/sizes.h"
#include "gpu/cuda/instructions.cuh"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/mma.cuh"
#include "gpu/cuda/raise.cuh"
#include "gpu/cuda/warp.cuh"

namespace evenkeel::device {

using namespace gpu;

namespace {

// One (batch, head, layer) of q and k.
template <class T>
struct Head {
  __device__ Head(const FactInputs& in, int64_t batch_head, int64_t layer)
      : head(batch_head % in.H), row_stride(in.row_stride), sums_index(layer * in.H + head) {
    const int64_t first = layer * in.layer_stride + batch_head / in.H * in.T * in.row_stride;
    q = static_cast<const T*>(in.q) + first + head * in.D;
    k = static_cast<const T*>(in.k) + first + head / (in.H / in.G) * in.D;
  }
  int64_t head, row_stride, sums_index;
  const T *q, *k;
};

// --- The largest score
// On the tensor cores: 8 warps of 16 rows; keys come in tiles of 64, the next one while this one is used.
constexpr int kRows = 128, kKeys = 64, kScoreWarps = kRows / 16;

template <int kD>
__global__ void __launch_bounds__(kScoreWarps* kWarp) largest_score_kernel(FactInputs in, FactSums* sums) {
  constexpr int kPieces = kD / 8;  // of 16 bytes in a row
  extern __shared__ __align__(128) unsigned char memory[];
  const uint32_t tiles = shared_address(memory);
  constexpr uint32_t kTileBytes = kKeys * kTileRowBytes<kD>;
  const Head<Bf16> head(in, blockIdx.x, blockIdx.z);
  const int T = static_cast<int>(in.T), D = static_cast<int>(in.D);
  const int first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kRows;  // long rows first
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  // `rows` rows of `from`, from `first` on; zeros beyond T and D.
  const auto copy_tile = [&](uint32_t target, const Bf16* from, int first, int rows) {
    for (int n = threadIdx.x; n < rows * kPieces; n += kScoreWarps * kWarp) {
      const int row = n / kPieces, piece = n % kPieces;
      const bool present = first + row < T && piece * 8 < D;
      copy_16_async(target + tile_offset<kD>(row, piece),
                    present ? from + (first + row) * head.row_stride + piece * 8 : from, present);
    }
    commit_copies();
  };
  // q goes through the place of both key tiles, into registers.
  copy_tile(tiles, head.q, first_row, kRows);
  wait_for_copies();
  __syncthreads();
  uint32_t q[kD / 16][4];
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) load_left<kD>(q[step], tiles, warp * 16, step, lane);
  __syncthreads();

  const int last_row = min(first_row + kRows, T) - 1, key_tiles = last_row / kKeys + 1;
  const int row = first_row + warp * 16 + lane / 4;  // and row + 8
  float most = -INFINITY;
  copy_tile(tiles, head.k, 0, kKeys);
  for (int tile = 0; tile < key_tiles; ++tile) {
    const uint32_t current = tiles + tile % 2 * kTileBytes, next = tiles + (tile + 1) % 2 * kTileBytes;
    wait_for_copies();
    __syncthreads();  // this tile is here, and nobody reads the other one any more
    if (tile + 1 < key_tiles) copy_tile(next, head.k, (tile + 1) * kKeys, kKeys);
#pragma unroll
    for (int part = 0; part < kKeys / 16; ++part) {
      float score[2][4] = {};
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) {
        uint32_t k[4];
        load_right_rows<kD>(k, current, part * 16, step, lane);
        multiply_add(score[0], q[step], k[0], k[1]);
        multiply_add(score[1], q[step], k[2], k[3]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = tile * kKeys + part * 16 + half * 8 + lane % 4 * 2;
        // A row beyond T sees keys beyond T: zeros both, which must not count.
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int i = row + n / 2 * 8, j = key + n % 2;
          if (j <= i && i < T) most = fmaxf(most, score[half][n]);
        }
      }
    }
  }
  most = warp_max(most);
  if (lane == 0) raise(&sums[head.sums_index].largest_score, most * in.scale);
}

// Of any type and head size: 16 x 16 threads, each with 4 x 4 scores of a tile of 64 x 64.
constexpr int kPlainTile = 64, kPlainSide = 16, kPlainDepth = 16;

template <class T>
__global__ void __launch_bounds__(kPlainSide* kPlainSide)
    largest_score_plain_kernel(FactInputs in, FactSums* sums) {
  __shared__ float q[kPlainDepth][kPlainTile + 1], k[kPlainDepth][kPlainTile + 1];
  const Head<T> head(in, blockIdx.x, blockIdx.z);
  const int64_t first_row = int64_t{blockIdx.y} * kPlainTile;
  const int x = threadIdx.x % kPlainSide, y = threadIdx.x / kPlainSide;
  float most = -INFINITY;
  for (int64_t first_key = 0; first_key <= first_row; first_key += kPlainTile) {
    float score[4][4] = {};
    for (int64_t first = 0; first < in.D; first += kPlainDepth) {
      __syncthreads();
      for (int n = threadIdx.x; n < kPlainTile * kPlainDepth; n += kPlainSide * kPlainSide) {
        const int row = n / kPlainDepth, d = n % kPlainDepth;
        const auto value = [&](const T* from, int64_t i) {
          return i < in.T && first + d < in.D ? to_float(from[i * head.row_stride + first + d]) : 0.0f;
        };
        q[d][row] = value(head.q, first_row + row);
        k[d][row] = value(head.k, first_key + row);
      }
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kPlainDepth; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            score[i][j] = fmaf(q[d][y + i * kPlainSide], k[d][x + j * kPlainSide], score[i][j]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t row = first_row + y + i * kPlainSide, key = first_key + x + j * kPlainSide;
        if (key <= row && row < in.T) most = fmaxf(most, score[i][j] * in.scale);
      }
  }
  most = warp_max(most);
  if (threadIdx.x % kWarp == 0) raise(&sums[head.sums_index].largest_score, most);
}

// --- The largest row mean
// The mean of a row's scores is its q times the mean of the keys that it sees. A block for each head of each
// sequence; each warp walks over its part of the rows with the sum of all keys so far.
constexpr int kMeanWarps = 8, kFactValues = 4;  // up to 128 features

template <class T>
__global__ void __launch_bounds__(kMeanWarps* kWarp) largest_row_mean_kernel(FactInputs in, FactSums* sums) {
  __shared__ float shared[kMeanWarps][kFactValues * kWarp];
  const Head<T> head(in, blockIdx.x, blockIdx.y);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, D = static_cast<int>(in.D);
  const int64_t first = in.T * warp / kMeanWarps, last = in.T * (warp + 1) / kMeanWarps;
  const auto load = [&](const T* row, float(&values)[kFactValues]) {
#pragma unroll
    for (int n = 0; n < kFactValues; ++n) {
      const int d = n * kWarp + lane;
      values[n] = d < D ? to_float(row[d]) : 0.0f;
    }
  };
  float sum[kFactValues] = {}, key[kFactValues], query[kFactValues];
#pragma unroll 4
  for (int64_t i = first; i < last; ++i) {
    load(head.k + i * head.row_stride, key);
#pragma unroll
    for (int n = 0; n < kFactValues; ++n) sum[n] += key[n];
  }
#pragma unroll
  for (int n = 0; n < kFactValues; ++n) shared[warp][n * kWarp + lane] = sum[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kFactValues; ++n) {
    sum[n] = 0;
    for (int before = 0; before < warp; ++before) sum[n] += shared[before][n * kWarp + lane];
  }
  float most = 0;
#pragma unroll 2
  for (int64_t i = first; i < last; ++i) {
    load(head.k + i * head.row_stride, key);
    load(head.q + i * head.row_stride, query);
    float dot = 0;
#pragma unroll
    for (int n = 0; n < kFactValues; ++n) {
      sum[n] += key[n];
      dot = fmaf(query[n], sum[n], dot);
    }
    most = fmaxf(most, fabsf(warp_sum(dot) * in.scale / static_cast<float>(i + 1)));
  }
  if (lane == 0) raise(&sums[head.sums_index].largest_row_mean, most);
}

// --- Sums over rows: a block for each head of each layer, a warp for each of its sequences in turn.
constexpr int kSumWarps = 32;

// What a thread, then a warp, then the block has added up.
struct RowSums {
  double lse, residual, residual_squares, delta_squares;
  float largest_lse;
  int tied;

  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int lane = kWarp / 2; lane > 0; lane /= 2) {
      lse += __shfl_xor_sync(~0u, lse, lane);
      residual += __shfl_xor_sync(~0u, residual, lane);
      residual_squares += __shfl_xor_sync(~0u, residual_squares, lane);
      delta_squares += __shfl_xor_sync(~0u, delta_squares, lane);
      tied += __shfl_xor_sync(~0u, tied, lane);
    }
    largest_lse = warp_max(largest_lse);
  }
};

// Also clears the facts that others raise: this kernel comes first.
__global__ void __launch_bounds__(kSumWarps* kWarp) row_sums_kernel(FactInputs in, FactSums* sums) {
  __shared__ RowSums of_warp[kSumWarps];
  const int head = blockIdx.x, layer = blockIdx.y, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int B = static_cast<int>(in.B), T = static_cast<int>(in.T);
  RowSums own{};
  for (int b = warp; b < B; b += kSumWarps) {
    const int64_t first = layer * in.row_layer_stride + (int64_t{b} * in.H + head) * T;
    const float* const lse = in.lse + first;
#pragma unroll 8
    for (int t = lane; t < T; t += kWarp) {
      own.lse += static_cast<double>(lse[t]);
      own.largest_lse = fmaxf(own.largest_lse, fabsf(lse[t]));
    }
    if (b >= in.fact_sequences) continue;
    if (in.ties)
#pragma unroll 8
      for (int t = lane; t < T; t += kWarp) own.tied += in.ties[first + t] > 1;
    if (!in.residual) continue;
#pragma unroll 8
    for (int t = lane; t < T; t += kWarp) {
      const double rho = in.residual[first + t], delta = in.delta[first + t];
      own.residual += rho;
      own.residual_squares += rho * rho;
      own.delta_squares += delta * delta;
    }
  }
  own.add_lanes();
  if (lane == 0) of_warp[warp] = own;
  __syncthreads();
  if (warp != 0) return;
  own = of_warp[lane];
  own.add_lanes();
  if (lane != 0) return;
  FactSums out;
  out.rows = in.B * in.T;
  out.sampled = in.fact_sequences * in.T;
  out.lse = own.lse;
  out.largest_lse = own.largest_lse;
  out.tied = own.tied;
  out.residual = own.residual;
  out.residual_squares = own.residual_squares;
  out.delta_squares = own.delta_squares;
  if (in.largest_score) {  // all bits are still set: no row saw a key
    out.largest_score = fmaxf(out.largest_score, in.largest_score[layer * in.H + head]);
    out.largest_row_mean = fmaxf(out.largest_row_mean, in.largest_row_mean[layer * in.H + head]);
  }
  sums[layer * in.H + head] = out;
}
static_assert(kSumWarps == kWarp);

// --- What the keys share: a block for each head of each layer, its warps in equal numbers for each of the first sequences,
// each with a part of the sequence's keys. Sums in a fixed order.
constexpr int kShareWarps = 32, kWarpsOfSequence = kShareWarps / static_cast<int>(kKeySequences),
              kKeyValues = 8;  // up to 256 features

template <class T>
__global__ void __launch_bounds__(kShareWarps* kWarp) key_share_kernel(FactInputs in, FactSums* sums) {
  __shared__ float sum_of_part[kShareWarps][kKeyValues * kWarp];
  __shared__ float squares_of_part[kShareWarps];
  __shared__ double share[kKeySequences];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, D = static_cast<int>(in.D);
  const int b = warp / kWarpsOfSequence, part = warp % kWarpsOfSequence;
  const int sequences = static_cast<int>(min(in.B, kKeySequences));
  float sum[kKeyValues] = {}, squares = 0;
  if (b < sequences) {
    const Head<T> head(in, int64_t{b} * in.H + blockIdx.x, blockIdx.y);
    const int64_t last = in.T * (part + 1) / kWarpsOfSequence;
#pragma unroll 4
    for (int64_t t = in.T * part / kWarpsOfSequence; t < last; ++t) {
      const T* const key = head.k + t * head.row_stride;
#pragma unroll
      for (int n = 0; n < kKeyValues; ++n) {
        const int d = n * kWarp + lane;
        const float x = d < D ? to_float(key[d]) : 0.0f;
        sum[n] += x;
        squares = fmaf(x, x, squares);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kKeyValues; ++n) sum_of_part[warp][n * kWarp + lane] = sum[n];
  squares = warp_sum(squares);
  if (lane == 0) squares_of_part[warp] = squares;
  __syncthreads();
  if (part == 0) {
    float of_mean = 0, all = 0;
#pragma unroll
    for (int n = 0; n < kKeyValues; ++n) {
      float total = 0;
      for (int other = 0; other < kWarpsOfSequence; ++other)
        total += sum_of_part[warp + other][n * kWarp + lane];
      of_mean = fmaf(total, total, of_mean);
    }
    of_mean = warp_sum(of_mean);
    for (int other = 0; other < kWarpsOfSequence; ++other) all += squares_of_part[warp + other];
    if (lane == 0) share[b] = all == 0 ? 0 : of_mean / (static_cast<double>(in.T) * all);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  FactSums& out = sums[int64_t{blockIdx.y} * in.H + blockIdx.x];
  for (int n = 0; n < sequences; ++n) out.key_share += share[n];
  out.key_sequences = sequences;
}
static_assert(kShareWarps % kKeySequences == 0);

template <class T>
void launch_key_share(const FactInputs& in, FactSums* sums, cudaStream_t stream) {
  key_share_kernel<T><<<dim3(grid(in.H), grid(in.L)), kShareWarps * kWarp, 0, stream>>>(in, sums);
  check_launch("what the keys share");
}

template <int kD>
void launch_largest_score(const FactInputs& in, FactSums* sums, cudaStream_t stream) {
  const dim3 blocks(grid(in.B * in.H), grid(divide_up(in.T, kRows)), grid(in.L));
  constexpr int kBytes = kRows * kTileRowBytes<kD>;  // q, then two tiles of keys
  static_assert(kRows == 2 * kKeys);
  allow_shared_memory(largest_score_kernel<kD>, kBytes);
  largest_score_kernel<kD><<<blocks, kScoreWarps * kWarp, kBytes, stream>>>(in, sums);
}

template <class T>
void launch_scores(const FactInputs& in, FactSums* sums, cudaStream_t stream) {
  largest_row_mean_kernel<T>
      <<<dim3(grid(in.B * in.H), grid(in.L)), kMeanWarps * kWarp, 0, stream>>>(in, sums);
  check_launch("the largest row mean");
  const bool wide = sizeof(T) == 2 && in.D % 8 == 0 && in.row_stride % 8 == 0;
  if (wide && in.D <= 64) {
    launch_largest_score<64>(in, sums, stream);
  } else if (wide) {
    launch_largest_score<128>(in, sums, stream);
  } else {
    const dim3 blocks(grid(in.B * in.H), grid(divide_up(in.T, kPlainTile)), grid(in.L));
    largest_score_plain_kernel<T><<<blocks, kPlainSide * kPlainSide, 0, stream>>>(in, sums);
  }
  check_launch("the largest score");
}

}  // namespace

void head_facts(const FactInputs& in, bool scores, FactSums* sums, cudaStream_t stream) {
  row_sums_kernel<<<dim3(grid(in.H), grid(in.L)), kSumWarps * kWarp, 0, stream>>>(in, sums);
  check_launch("sums of facts");
  if (!scores) return;
  const bool bf16 = in.type == TensorType::bf16;
  bf16 ? launch_key_share<Bf16>(in, sums, stream) : launch_key_share<float>(in, sums, stream);
  if (in.largest_score) return;
  bf16 ? launch_scores<Bf16>(in, sums, stream) : launch_scores<float>(in, sums, stream);
}

}  // namespace evenkeel::device
