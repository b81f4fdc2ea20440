#include "model/cuda/device_layers.h"

#include <algorithm>

#include "attention/cuda/hopper.cuh"
#include "attention/cuda/kernels.h"
#include "model/cuda/warp.cuh"

namespace evenkeel::device {
namespace {

constexpr float kLayerNormEpsilon = 1e-5f;  // GPT-2's, and Hugging Face's

constexpr int64_t divide_up(int64_t value, int64_t step) { return (value + step - 1) / step; }
constexpr size_t at(int64_t n) { return static_cast<size_t>(n); }
unsigned grid(int64_t blocks) { return static_cast<unsigned>(blocks); }
void check_launch(const char* doing) { check_cuda(cudaGetLastError(), doing); }

__device__ __forceinline__ void store(float* p, float x) { *p = x; }
__device__ __forceinline__ void store(Bf16* p, float x) { *p = __float2bfloat16_rn(x); }

// kCount values at p, which is aligned to them all (16 bytes at most a move).
template <int kCount>
__device__ __forceinline__ void load_some(const float* p, float (&v)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const float4 four = *reinterpret_cast<const float4*>(p + n);
      v[n] = four.x, v[n + 1] = four.y, v[n + 2] = four.z, v[n + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) v[n] = p[n];
  }
}
template <int kCount>
__device__ __forceinline__ void store_some(float* p, const float (&v)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int n = 0; n < kCount; n += 4)
      *reinterpret_cast<float4*>(p + n) = make_float4(v[n], v[n + 1], v[n + 2], v[n + 3]);
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) p[n] = v[n];
  }
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}
__device__ __forceinline__ void unpack(uint32_t two, float& low, float& high) {
  low = __uint_as_float(two << 16);
  high = __uint_as_float(two & 0xffff0000u);
}
template <int kCount>
__device__ __forceinline__ void load_some(const Bf16* p, float (&v)[kCount]) {
  if constexpr (kCount == 8) {
    const uint4 eight = *reinterpret_cast<const uint4*>(p);
    unpack(eight.x, v[0], v[1]);
    unpack(eight.y, v[2], v[3]);
    unpack(eight.z, v[4], v[5]);
    unpack(eight.w, v[6], v[7]);
  } else if constexpr (kCount == 4) {
    const uint2 four = *reinterpret_cast<const uint2*>(p);
    unpack(four.x, v[0], v[1]);
    unpack(four.y, v[2], v[3]);
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) v[n] = to_float(p[n]);
  }
}
template <int kCount>
__device__ __forceinline__ void store_some(Bf16* p, const float (&v)[kCount]) {
  if constexpr (kCount == 8) {
    *reinterpret_cast<uint4*>(p) =
        make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
  } else if constexpr (kCount == 4) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) store(p + n, v[n]);
  }
}

// Calls launch.operator()<T>() with the element type that `type` names.
template <class Launch>
void with_type(TensorType type, Launch launch) {
  if (type == TensorType::bf16)
    launch.template operator()<Bf16>();
  else
    launch.template operator()<float>();
}

// --- Sums over rows

constexpr int kSumColumns = 32, kSumRows = 16;  // of a block of add_sums

__global__ void __launch_bounds__(kSumColumns* kSumRows) add_sums_kernel(const BlockSums* sums) {
  __shared__ float shared[kSumRows][kSumColumns];
  const BlockSums s = sums[blockIdx.y];
  const int column = blockIdx.x * kSumColumns + threadIdx.x;
  float sum = 0;
  if (column < s.columns)
#pragma unroll 4
    for (int block = threadIdx.y; block < s.blocks; block += kSumRows)
      sum += s.parts[static_cast<int64_t>(block) * s.columns + column];
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= s.columns) return;
  float total = 0;
#pragma unroll
  for (int row = 0; row < kSumRows; ++row) total += shared[row][threadIdx.x];
  s.total[column] += total;
}

// --- Embedding

constexpr int kThreads = 256;

template <int kVector>
__global__ void __launch_bounds__(kThreads)
    embedding_forward_kernel(const int32_t* tokens, const float* wte, const float* wpe, int64_t N, int64_t T,
                             int64_t C, float* x) {
  const int64_t pieces = C / kVector, n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n >= N * pieces) return;
  const int64_t row = n / pieces, c = n % pieces * kVector;
  float token[kVector], place[kVector];
  load_some(wte + tokens[row] * C + c, token);
  load_some(wpe + row % T * C + c, place);
#pragma unroll
  for (int i = 0; i < kVector; ++i) token[i] += place[i];
  store_some(x + row * C + c, token);
}

// A block for each place, a thread for some columns.
template <int kVector>
__global__ void __launch_bounds__(kThreads)
    position_backward_kernel(const float* dx, int64_t B, int64_t T, int64_t C, float* dwpe) {
  const int64_t t = blockIdx.x;
  for (int64_t c = threadIdx.x * kVector; c < C; c += kThreads * kVector) {
    float sum[kVector] = {}, value[kVector];
#pragma unroll 8
    for (int64_t b = 0; b < B; ++b) {
      load_some(dx + (b * T + t) * C + c, value);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += value[i];
    }
    load_some(dwpe + t * C + c, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) value[i] += sum[i];
    store_some(dwpe + t * C + c, value);
  }
}

// A block for each run.
template <int kVector>
__global__ void __launch_bounds__(kThreads)
    token_runs_kernel(const float* dx, const int32_t* places, const TokenRun* runs, float* parts, int64_t C,
                      float* dwte) {
  __shared__ int64_t row_of[kRunPlaces];
  const TokenRun run = runs[blockIdx.x];
  if (threadIdx.x < run.count) row_of[threadIdx.x] = places[run.first + threadIdx.x];
  __syncthreads();
  for (int64_t c = threadIdx.x * kVector; c < C; c += kThreads * kVector) {
    float sum[kVector] = {}, value[kVector];
#pragma unroll 8
    for (int place = 0; place < run.count; ++place) {
      load_some(dx + row_of[place] * C + c, value);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += value[i];
    }
    if (run.part >= 0) {
      store_some(parts + run.part * C + c, sum);
      continue;
    }
    float* to = dwte + run.token * C + c;
    load_some(to, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) value[i] += sum[i];
    store_some(to, value);
  }
}

// A block for each token of several runs.
template <int kVector>
__global__ void __launch_bounds__(kThreads)
    token_parts_kernel(const TokenParts* tokens, const float* parts, int64_t C, float* dwte) {
  const TokenParts token = tokens[blockIdx.x];
  for (int64_t c = threadIdx.x * kVector; c < C; c += kThreads * kVector) {
    float sum[kVector] = {}, value[kVector];
#pragma unroll 8
    for (int64_t part = token.first; part < token.first + token.count; ++part) {
      load_some(parts + part * C + c, value);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += value[i];
    }
    float* to = dwte + token.token * C + c;
    load_some(to, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) value[i] += sum[i];
    store_some(to, value);
  }
}

// --- LayerNorm
// Rows go from the last to the first: the product before has just left the last ones in the L2 cache, and the product
// behind begins with the first ones.
// A row belongs to a group of kWarps warps, and lies in their registers: kChunks pieces of kVector values a
// thread. The piece of chunk n starts at column (n kWarps 32 + thread) kVector.
template <int kVector, int kWarps, int kChunks>
struct NormShape {
  static constexpr int kGroupThreads = kWarps * kWarp;
  static constexpr int kGroups = kWarps == 1 ? 4 : 1;  // rows at a time of a block
  static constexpr int kBlockThreads = kGroups * kGroupThreads;
  static __device__ __forceinline__ int64_t column(int chunk) {
    return (int64_t{chunk} * kGroupThreads + threadIdx.x % kGroupThreads) * kVector;
  }
  // The same, or the row's last piece: there is always something to load.
  static __device__ __forceinline__ int64_t place(int chunk, int64_t C) {
    return min(column(chunk), C - kVector);
  }
};

// The sum over a group's threads, in all of them.
template <int kWarps>
__device__ __forceinline__ float group_sum(float x) {
  x = warp_sum(x);
  if constexpr (kWarps > 1) {
    __shared__ float shared[kWarps];
    __syncthreads();
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) x += shared[warp];
  }
  return x;
}

// A thread's pieces of a row; beyond column C they repeat its last piece. Without a branch, so that all of them are
// asked for before the first is used: otherwise a row would cost as many of memory's delays as it has chunks.
template <class Shape, int kChunks, int kVector, class T>
__device__ __forceinline__ void load_row(const T* row, int64_t C, float (&v)[kChunks][kVector]) {
#pragma unroll
  for (int n = 0; n < kChunks; ++n) load_some(row + Shape::place(n, C), v[n]);
}

template <int kChunks, int kVector>
__device__ __forceinline__ void zero_row(float (&v)[kChunks][kVector]) {
#pragma unroll
  for (int n = 0; n < kChunks; ++n)
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[n][i] = 0;
}

template <int kVector, int kWarps, int kChunks, class T>
__global__ void __launch_bounds__(NormShape<kVector, kWarps, kChunks>::kBlockThreads)
    layernorm_forward_kernel(const float* x, const float* gain, const float* bias, int64_t N, int64_t C, T* y,
                             float* mean, float* rstd) {
  using Shape = NormShape<kVector, kWarps, kChunks>;
  const int64_t row = N - 1 - int64_t{blockIdx.x} * Shape::kGroups - threadIdx.x / Shape::kGroupThreads;
  if (row < 0) return;  // a group as a whole
  const float count = static_cast<float>(C);
  float value[kChunks][kVector];
  load_row<Shape>(x + row * C, C, value);
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kChunks; ++n)
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum += Shape::column(n) < C ? value[n][i] : 0.0f;
  const float mu = group_sum<kWarps>(sum) / count;
  float squares = 0;
#pragma unroll
  for (int n = 0; n < kChunks; ++n)
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float apart = Shape::column(n) < C ? value[n][i] - mu : 0.0f;
      squares = fmaf(apart, apart, squares);
    }
  const float r = 1 / sqrtf(group_sum<kWarps>(squares) / count + kLayerNormEpsilon);
#pragma unroll
  for (int n = 0; n < kChunks; ++n) {
    const int64_t c = Shape::column(n);
    if (c >= C) break;
    float factor[kVector];
    load_some(gain + c, factor);
#pragma unroll
    for (int i = 0; i < kVector; ++i) value[n][i] = (value[n][i] - mu) * r * factor[i];
    if (bias) {
      load_some(bias + c, factor);
#pragma unroll
      for (int i = 0; i < kVector; ++i) value[n][i] += factor[i];
    }
    store_some(y + row * C + c, value[n]);
  }
  if (threadIdx.x % Shape::kGroupThreads == 0) {
    mean[row] = mu;
    rstd[row] = r;
  }
}

// Blocks walk over the rows; what they add to dgain and dbias stays in registers until the end. Three blocks of
// 128 threads a multiprocessor keep 12 rows of three arrays on their way, 90 KB at C = 768: more than memory's
// delay times its speed.
constexpr int kSumBlocksAtOnce = 3;
template <int kVector, int kWarps, int kChunks, bool kBias, class T>
__global__ void __launch_bounds__(NormShape<kVector, kWarps, kChunks>::kBlockThreads,
                                  kWarps > 1 || kVector * kChunks > 24 ? 1 : kSumBlocksAtOnce)
    layernorm_backward_kernel(const T* dy, const float* x, const float* gain, const float* mean,
                              const float* rstd, int64_t N, int64_t C, const float* dx_in, float* dx,
                              Bf16* dx_operand, float* gain_parts, float* bias_parts) {
  using Shape = NormShape<kVector, kWarps, kChunks>;
  const int group = threadIdx.x / Shape::kGroupThreads;
  const float count = static_cast<float>(C);
  float gain_sum[kChunks][kVector] = {}, bias_sum[kBias ? kChunks : 1][kVector] = {};
  for (int64_t row = N - 1 - int64_t{blockIdx.x} * Shape::kGroups - group; row >= 0;
       row -= int64_t{gridDim.x} * Shape::kGroups) {
    float xhat[kChunks][kVector], dxhat[kChunks][kVector], total[kChunks][kVector];
    if (dx_in)
      load_row<Shape>(dx_in + row * C, C, total);
    else
      zero_row(total);
    load_row<Shape>(x + row * C, C, xhat);
    load_row<Shape>(dy + row * C, C, dxhat);
    const float mu = mean[row], r = rstd[row];
    float sum = 0, dot = 0;  // of dy gain, and of dy gain xhat
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      float factor[kVector];
      load_some(gain + Shape::place(n, C), factor);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        xhat[n][i] = (xhat[n][i] - mu) * r;
        if (Shape::column(n) >= C) dxhat[n][i] = 0;
        gain_sum[n][i] = fmaf(dxhat[n][i], xhat[n][i], gain_sum[n][i]);
        if constexpr (kBias) bias_sum[n][i] += dxhat[n][i];
        dxhat[n][i] *= factor[i];
        sum += dxhat[n][i];
        dot = fmaf(dxhat[n][i], xhat[n][i], dot);
      }
    }
    const float mean_dxhat = group_sum<kWarps>(sum) / count, mean_dot = group_sum<kWarps>(dot) / count;
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      const int64_t at = row * C + Shape::column(n);
      if (Shape::column(n) >= C) break;
#pragma unroll
      for (int i = 0; i < kVector; ++i) total[n][i] += (dxhat[n][i] - mean_dxhat - xhat[n][i] * mean_dot) * r;
      store_some(dx + at, total[n]);
      if (dx_operand) store_some(dx_operand + at, total[n]);
    }
  }
  // The groups of a block, one after another.
  __shared__ float shared[Shape::kGroups][kVector * Shape::kGroupThreads];
  const auto write = [&](const float(&sums)[kVector], int n, float* parts) {
    const int lane = threadIdx.x % Shape::kGroupThreads;
    const int64_t c = Shape::column(n);
    if constexpr (Shape::kGroups > 1) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kVector; ++i) shared[group][i * Shape::kGroupThreads + lane] = sums[i];
      __syncthreads();
      if (group != 0 || c >= C) return;
      float of_block[kVector] = {};
#pragma unroll
      for (int g = 0; g < Shape::kGroups; ++g)
#pragma unroll
        for (int i = 0; i < kVector; ++i) of_block[i] += shared[g][i * Shape::kGroupThreads + lane];
      store_some(parts + blockIdx.x * C + c, of_block);
    } else if (c < C) {
      store_some(parts + blockIdx.x * C + c, sums);
    }
  };
#pragma unroll
  for (int n = 0; n < kChunks; ++n) {
    write(gain_sum[n], n, gain_parts);
    if constexpr (kBias) write(bias_sum[n], n, bias_parts);
  }
}

// Calls launch.operator()<kVector, kWarps, kChunks>() with the smallest shape that holds C columns.
template <class Launch>
void with_norm_shape(int64_t C, Launch launch) {
  const auto chunks = [&]<int kVector, int kWarps>() {
    switch (divide_up(C, kVector * kWarps * kWarp)) {
      case 1:
        return launch.template operator()<kVector, kWarps, 1>();
      case 2:
        return launch.template operator()<kVector, kWarps, 2>();
      case 3:
        return launch.template operator()<kVector, kWarps, 3>();
      case 4:
        return launch.template operator()<kVector, kWarps, 4>();
      case 5:
      case 6:
        return launch.template operator()<kVector, kWarps, 6>();
      default:
        return launch.template operator()<kVector, kWarps, 8>();
    }
  };
  constexpr int kMostChunks = 8;
  static_assert(kLargestWidth == kMostChunks * kMostChunks * kWarp);
  if (C % 4 == 0) {
    if (C <= kMostChunks * 4 * kWarp)
      chunks.template operator()<4, 1>();
    else
      chunks.template operator()<4, 8>();
  } else {
    launch.template operator()<1, 8, 8>();
  }
}

// --- RMS norm of q and k
// A warp for each head of each row; up to kHeadValues features a lane.
constexpr int kHeadValues = 4, kHeadWarps = 8;

template <class T>
__global__ void __launch_bounds__(kHeadWarps* kWarp)
    rms_norm_forward_kernel(const T* qkv, const float* q_gain, const float* k_gain, int64_t N, int H, int D,
                            T* qk, float* rstd) {
  const int64_t item = blockIdx.x * int64_t{kHeadWarps} + threadIdx.x / kWarp;  // (n, q or k, h)
  const int lane = threadIdx.x % kWarp;
  if (item >= N * 2 * H) return;
  const int64_t n = item / (2 * H), head = item % (2 * H);
  const T* from = qkv + (n * 3 * H + head) * D;
  const float* gain = head < H ? q_gain : k_gain;
  float value[kHeadValues], squares = 0;
#pragma unroll
  for (int i = 0; i < kHeadValues; ++i) {
    const int d = i * kWarp + lane;
    value[i] = d < D ? to_float(from[d]) : 0.0f;
    squares = fmaf(value[i], value[i], squares);
  }
  const float r = 1 / sqrtf(warp_sum(squares) / static_cast<float>(D) + kLayerNormEpsilon);
#pragma unroll
  for (int i = 0; i < kHeadValues; ++i) {
    const int d = i * kWarp + lane;
    if (d < D) store(qk + item * D + d, value[i] * r * gain[d]);
  }
  if (lane == 0) rstd[item] = r;
}

template <class T>
__global__ void __launch_bounds__(kHeadWarps* kWarp)
    rms_norm_backward_kernel(T* dqkv, const T* qkv, const float* q_gain, const float* k_gain,
                             const float* rstd, int64_t N, int H, int D, float* q_parts, float* k_parts) {
  __shared__ float shared[kHeadWarps][kHeadValues * kWarp];
  const int part = blockIdx.y;  // q, k
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const float* gain = part == 0 ? q_gain : k_gain;
  float factor[kHeadValues], gain_sum[kHeadValues] = {};
#pragma unroll
  for (int i = 0; i < kHeadValues; ++i) factor[i] = i * kWarp + lane < D ? gain[i * kWarp + lane] : 0.0f;
  for (int64_t item = blockIdx.x * int64_t{kHeadWarps} + warp; item < N * H;
       item += int64_t{gridDim.x} * kHeadWarps) {
    const int64_t n = item / H, h = item % H, at = (n * 3 * H + part * H + h) * D;
    const float r = rstd[n * 2 * H + part * H + h];
    float xhat[kHeadValues], dxhat[kHeadValues], dot = 0;
#pragma unroll
    for (int i = 0; i < kHeadValues; ++i) {
      const int d = i * kWarp + lane;
      xhat[i] = d < D ? to_float(qkv[at + d]) * r : 0.0f;
      const float dy = d < D ? to_float(dqkv[at + d]) : 0.0f;
      gain_sum[i] = fmaf(dy, xhat[i], gain_sum[i]);
      dxhat[i] = dy * factor[i];
      dot = fmaf(dxhat[i], xhat[i], dot);
    }
    const float mean = warp_sum(dot) / static_cast<float>(D);
#pragma unroll
    for (int i = 0; i < kHeadValues; ++i) {
      const int d = i * kWarp + lane;
      if (d < D) store(dqkv + at + d, (dxhat[i] - xhat[i] * mean) * r);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeadValues; ++i) shared[warp][i * kWarp + lane] = gain_sum[i];
  __syncthreads();
  float* parts = part == 0 ? q_parts : k_parts;
  for (int d = threadIdx.x; d < D; d += kHeadWarps * kWarp) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kHeadWarps; ++w) total += shared[w][d];
    parts[int64_t{blockIdx.x} * D + d] = total;
  }
}

// --- Value by value
// body.operator()<kCount>(n): kCount values from n on; eights, then what is left one by one.
constexpr int kPiece = 8;
template <class Body>
__device__ __forceinline__ void for_each_piece(int64_t count, Body body) {
  const int64_t piece = blockIdx.x * int64_t{kThreads} + threadIdx.x, whole = count / kPiece;
  if (piece < whole)
    body.template operator()<kPiece>(piece * kPiece);
  else if (const int64_t n = whole * kPiece + (piece - whole); n < count)
    body.template operator()<1>(n);
}
unsigned piece_blocks(int64_t count) { return grid(divide_up(count / kPiece + count % kPiece, kThreads)); }

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + __expf(-x)); }

constexpr float kGeluScale = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;
__device__ __forceinline__ float gelu_sigmoid(float x) {
  return sigmoid(2 * kGeluScale * x * fmaf(kGeluCubic * x, x, 1.0f));
}
__device__ __forceinline__ float gelu_slope(float x) {
  const float open = gelu_sigmoid(x);
  const float v = fminf(fmaxf(x, -64.0f), 64.0f);  // 0 or 1 long before; beyond 2^64 a square would be Inf
  const float du = kGeluScale * fmaf(3 * kGeluCubic * v, v, 1.0f);
  return fmaf(v * open * (1 - open), du + du, open);
}

template <class T>
__global__ void __launch_bounds__(kThreads) gelu_forward_kernel(const T* x, int64_t count, T* y) {
  for_each_piece(count, [&]<int kCount>(int64_t n) {
    float v[kCount];
    load_some(x + n, v);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] *= gelu_sigmoid(v[i]);
    store_some(y + n, v);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gelu_backward_kernel(const float* dy, const T* x, int64_t count, T* dx) {
  for_each_piece(count, [&]<int kCount>(int64_t n) {
    float v[kCount], d[kCount];
    load_some(x + n, v);
    load_some(dy + n, d);
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[i] *= gelu_slope(v[i]);
    store_some(dx + n, d);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gate_forward_kernel(const T* x, const T* gate, int64_t count, T* y) {
  for_each_piece(count, [&]<int kCount>(int64_t n) {
    float v[kCount], g[kCount];
    load_some(x + n, v);
    load_some(gate + n, g);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] *= sigmoid(g[i]);
    store_some(y + n, v);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gate_backward_kernel(const float* dy, const T* x, const T* gate, int64_t count, T* dx, T* dgate) {
  for_each_piece(count, [&]<int kCount>(int64_t n) {
    float d[kCount], v[kCount], g[kCount];
    load_some(dy + n, d);
    load_some(x + n, v);
    load_some(gate + n, g);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float open = sigmoid(g[i]);
      v[i] = d[i] * v[i] * open * (1 - open);
      d[i] *= open;
    }
    store_some(dx + n, d);
    store_some(dgate + n, v);
  });
}

__global__ void __launch_bounds__(kThreads) round_kernel(const float* from, int64_t count, Bf16* to) {
  for_each_piece(count, [&]<int kCount>(int64_t n) {
    float v[kCount];
    load_some(from + n, v);
    store_some(to + n, v);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    column_sums_kernel(const T* x, int64_t N, int64_t columns, float* parts) {
  const int64_t column = blockIdx.y * int64_t{kThreads} + threadIdx.x;
  if (column >= columns) return;
  const int64_t first = N * blockIdx.x / gridDim.x, last = N * (blockIdx.x + 1) / gridDim.x;
  float sum = 0;
#pragma unroll 8
  for (int64_t n = first; n < last; ++n) sum += to_float(x[n * columns + column]);
  parts[blockIdx.x * columns + column] = sum;
}

__global__ void __launch_bounds__(kThreads)
    scale_query_key_kernel(float* w, float* bias, const float* factors, int64_t C, int64_t D) {
  const int64_t column = blockIdx.x * int64_t{kThreads} + threadIdx.x;  // of q and k
  if (column >= 2 * C) return;
  const float factor = factors[column % C / D];
  if (factor == 1) return;
  for (int64_t row = blockIdx.y; row < C; row += gridDim.y) w[row * 3 * C + column] *= factor;
  if (bias && blockIdx.y == 0) bias[column] *= factor;
}

// --- Cross-entropy

constexpr float kLog2E = 1.44269504f;
__device__ __forceinline__ float exp2f_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes into shared memory, on their own; a group of copies ends with commit.
__device__ __forceinline__ void copy_async(void* shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(from)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_all_but_last() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
}

// exp(x - most). From BF16 logits: off by 2 units in the last place, and by |most| 2^-24 of itself (the rounding of
// most in powers of 2): far below BF16's 2^-9.
template <class T>
__device__ __forceinline__ float exp_above(float x, float most) {
  if constexpr (sizeof(T) == 2)
    return exp2f_approx(fmaf(x, kLog2E, -most * kLog2E));
  else
    return expf(x - most);
}

// A block walks over rows; a thread has the same pieces of every row. kStaged: the next row comes into shared
// memory (2 x stride values) while this one is worked on, so that memory never waits for arithmetic. Otherwise a
// row is read twice.
template <class T, bool kGradients, bool kStaged, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads)
    cross_entropy_kernel(T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride, float scale,
                         float* losses) {
  constexpr int kWarps = kBlockThreads / kWarp, kStep = kBlockThreads * kPiece;
  constexpr float kLowest = -0x1p126f;  // of no logits at all; log2(e) times that is finite
  extern __shared__ __align__(16) unsigned char stage_bytes[];
  T* const stage = reinterpret_cast<T*>(stage_bytes);
  __shared__ float shared_most[2][kWarps], shared_sum[2][kWarps];
  const int columns = static_cast<int>(V), padded = static_cast<int>(stride);
  const int first = threadIdx.x * kPiece, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto fetch = [&](int64_t row, int slot) {
    constexpr int kCopy = 16 / sizeof(T);  // values of one copy
    if (row < N)
      for (int c = first; c < columns; c += kStep)
#pragma unroll
        for (int i = 0; i < kPiece; i += kCopy)
          copy_async(stage + slot * padded + c + i, logits + row * stride + c + i);
    commit_copies();
  };
  int slot = 0;
  if constexpr (kStaged) fetch(blockIdx.x, slot);
  for (int64_t row = blockIdx.x; row < N; row += gridDim.x, slot ^= 1) {
    const int target = targets[row];
    T* const x = logits + row * stride;
    if constexpr (kStaged) {
      fetch(row + gridDim.x, slot ^ 1);
      wait_for_all_but_last();  // a thread reads what it fetched itself
    }
    const T* const from = kStaged ? stage + slot * padded : x;

    // Each thread's largest value so far, and its sum of exp(x - largest).
    float most = kLowest, sum = 0;
#pragma unroll 2
    for (int c = first; c < columns; c += kStep) {
      float v[kPiece];
      load_some(from + c, v);
      if (c + kPiece > columns)
#pragma unroll
        for (int i = 0; i < kPiece; ++i) v[i] = c + i < columns ? v[i] : -INFINITY;
      float largest = v[0];
#pragma unroll
      for (int i = 1; i < kPiece; ++i) largest = fmaxf(largest, v[i]);
      if (largest > most) {
        sum *= exp_above<T>(most, largest);
        most = largest;
      }
#pragma unroll
      for (int i = 0; i < kPiece; ++i) sum += exp_above<T>(v[i], most);
    }
    // Of the warp, then of the block. The next row's go to the other slot, so that one barrier is enough.
    const float warp_most = warp_max(most), warp_total = warp_sum(sum * exp_above<T>(most, warp_most));
    if (lane == 0) shared_most[slot][warp] = warp_most, shared_sum[slot][warp] = warp_total;
    __syncthreads();
    const float other_most = lane < kWarps ? shared_most[slot][lane] : kLowest,
                other_sum = lane < kWarps ? shared_sum[slot][lane] : 0.0f;
    const float m = warp_max(other_most), total = warp_sum(other_sum * exp_above<T>(other_most, m));
    if (target / kPiece % kBlockThreads == threadIdx.x)  // it alone may still read this logit
      losses[row] = logf(total) + (m - to_float(from[target]));
    if constexpr (kGradients) {
      const float factor = scale / total;
#pragma unroll 2
      for (int c = first; c < padded; c += kStep) {
        float v[kPiece] = {};
        if (c < columns) {
          load_some(from + c, v);
#pragma unroll
          for (int i = 0; i < kPiece; ++i) {
            v[i] = exp_above<T>(v[i], m) * factor;
            if (c + i == target) v[i] -= scale;
            if (c + i >= columns) v[i] = 0;
          }
        }
        store_some(x + c, v);
      }
    }
  }
}

// --- Cross-entropy, cached

constexpr int kCachedThreads = 1024;

// One block a row, which stays in shared memory (stride values) between its two uses, each thread's pieces its own.
template <class T>
__global__ void __launch_bounds__(kCachedThreads, 2048 / kCachedThreads)
    cross_entropy_cached_kernel(T* logits, const int32_t* targets, int64_t V, int64_t stride, float scale,
                                float* losses) {
  constexpr int kWarps = kCachedThreads / kWarp;
  const auto exp_of = [](float x) { return sizeof(T) == 2 ? __expf(x) : expf(x); };
  extern __shared__ __align__(16) unsigned char cache_bytes[];
  T* const cache = reinterpret_cast<T*>(cache_bytes);
  __shared__ float shared_max[kWarps], shared_sum[kWarps];
  const int64_t row = blockIdx.x;
  T* const x = logits + row * stride;
  const int columns = static_cast<int>(V), padded = static_cast<int>(stride);
  const int target = targets[row];
  const float at_target = to_float(x[target]);  // before anyone writes
  float most = -INFINITY, sum = 0;
#pragma unroll 2
  for (int c = threadIdx.x * kPiece; c < columns; c += kCachedThreads * kPiece) {
    float v[kPiece];
    load_some(x + c, v);
    store_some(cache + c, v);  // exact: they are T's
    if (c + kPiece > columns)
#pragma unroll
      for (int i = 0; i < kPiece; ++i) v[i] = c + i < columns ? v[i] : -INFINITY;
    float largest = v[0];
#pragma unroll
    for (int i = 1; i < kPiece; ++i) largest = fmaxf(largest, v[i]);
    if (largest > most) {
      sum *= exp_of(most - largest);
      most = largest;
    }
#pragma unroll
    for (int i = 0; i < kPiece; ++i) sum += exp_of(v[i] - most);
  }
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const float warp_most = warp_max(most);
  if (lane == 0) shared_max[warp] = warp_most;
  __syncthreads();
  static_assert(kWarps == kWarp);
  const float m = warp_max(shared_max[lane]);
  // A thread that saw nothing has exp(-inf) = 0 of 0.
  const float warp_total = warp_sum(sum * exp_of(most - m));
  if (lane == 0) shared_sum[warp] = warp_total;
  __syncthreads();
  const float total = warp_sum(shared_sum[lane]), factor = scale / total;
  if (threadIdx.x == 0) losses[row] = logf(total) + (m - at_target);
#pragma unroll 2
  for (int c = threadIdx.x * kPiece; c < padded; c += kCachedThreads * kPiece) {
    float v[kPiece] = {};
    if (c < columns) {
      load_some(cache + c, v);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        v[i] = exp_of(v[i] - m) * factor;
        if (c + i == target) v[i] -= scale;
        if (c + i >= columns) v[i] = 0;
      }
    }
    store_some(x + c, v);
  }
}

// --- Cross-entropy, a row in registers

// 16 bytes of a row: kWordValues<T> values.
using Word = uint4;
template <class T>
constexpr int kWordValues = sizeof(Word) / sizeof(T);

__device__ __forceinline__ void values_of(const Word& word, float (&v)[4]) {
  v[0] = __uint_as_float(word.x), v[1] = __uint_as_float(word.y);
  v[2] = __uint_as_float(word.z), v[3] = __uint_as_float(word.w);
}
__device__ __forceinline__ void values_of(const Word& word, float (&v)[8]) {
  unpack(word.x, v[0], v[1]);
  unpack(word.y, v[2], v[3]);
  unpack(word.z, v[4], v[5]);
  unpack(word.w, v[6], v[7]);
}

// Only the first `kept` values are left; the others become -infinity.
__device__ __forceinline__ void hide_behind(Word& word, int kept, float) {
  const auto hide = [&](uint32_t& value, int place) { value = place < kept ? value : 0xff800000u; };
  hide(word.x, 0), hide(word.y, 1), hide(word.z, 2), hide(word.w, 3);
}
__device__ __forceinline__ void hide_behind(Word& word, int kept, Bf16) {
  const auto hide = [&](uint32_t& two, int place) {
    if (place >= kept) two = (two & 0xffff0000u) | 0xff80u;
    if (place + 1 >= kept) two = (two & 0xffffu) | 0xff800000u;
  };
  hide(word.x, 0), hide(word.y, 2), hide(word.z, 4), hide(word.w, 6);
}

// The compiler no longer knows what is in them, and computes anew what it has computed from them.
template <int kWords>
__device__ __forceinline__ void forget(Word (&words)[kWords]) {
#pragma unroll
  for (int n = 0; n < kWords; ++n)
    asm volatile("" : "+r"(words[n].x), "+r"(words[n].y), "+r"(words[n].z), "+r"(words[n].w));
}

// The largest value of words, without NaN: pairs of BF16 at a time.
template <int kWords>
__device__ __forceinline__ float largest_of(const Word (&words)[kWords], float) {
  float most = -INFINITY;
#pragma unroll
  for (int n = 0; n < kWords; ++n) {
    float v[4];
    values_of(words[n], v);
    most = fmaxf(fmaxf(fmaxf(most, v[0]), fmaxf(v[1], v[2])), v[3]);
  }
  return most;
}
template <int kWords>
__device__ __forceinline__ float largest_of(const Word (&words)[kWords], Bf16) {
  const auto two = [](const uint32_t& bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); };
  __nv_bfloat162 most = two(words[0].x);
#pragma unroll
  for (int n = 0; n < kWords; ++n)
    most = __hmax2(__hmax2(most, two(words[n].x)),
                   __hmax2(__hmax2(two(words[n].y), two(words[n].z)), two(words[n].w)));
  return fmaxf(__low2float(most), __high2float(most));
}

// Rows on their way into shared memory, slots of `bytes` (a multiple of 16): all threads make the same calls. Hopper's
// copy engine moves a row with no thread and no load unit busy; before it, every thread copies its own words.
template <int kSlots, int kBlockThreads>
class RowsAhead {
 public:
  __device__ RowsAhead(unsigned char* memory, int bytes) : memory_(memory), bytes_(bytes) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < kSlots; ++slot) hopper::barrier_init(barriers() + slot, 1);
      hopper::barrier_init_fence();
    }
    __syncthreads();
#endif
  }
  __device__ const unsigned char* slot(int slot) const { return memory_ + slot * bytes_; }
  // REQUIRES: every thread has read what it wants of the slot, and a barrier since. row: nullptr for none
  __device__ void fetch(const void* row, int slot) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x != 0 || !row) return;
    hopper::barrier_expect_bytes(barriers() + slot, static_cast<uint32_t>(bytes_));
    hopper::load_bytes(memory_ + slot * bytes_, row, static_cast<uint32_t>(bytes_), barriers() + slot);
#else
    if (row)
      for (int byte = threadIdx.x * sizeof(Word); byte < bytes_; byte += kBlockThreads * sizeof(Word))
        copy_async(memory_ + slot * bytes_ + byte, static_cast<const unsigned char*>(row) + byte);
    commit_copies();
#endif
  }
  // For the oldest fetch, which is the slot's; parity: of the number of fetches into it before.
  __device__ void wait(int slot, uint32_t parity) const {
#if __CUDA_ARCH__ >= 900
    hopper::barrier_wait(barriers() + slot, parity);
#else
    static_assert(kSlots == 2);
    wait_for_all_but_last();
#endif
  }

 private:
  static __device__ uint64_t* barriers() {
    __shared__ __align__(8) uint64_t shared[kSlots];
    return shared;
  }
  unsigned char* memory_;
  int bytes_;
};

// A block walks over rows; a thread has the same words of every row, in registers from the one read to the one write:
// three passes over them (largest, sum, gradient) with no load between. kAhead: rows come through shared memory
// (2 x stride values), where the next two are already on their way. REQUIRES: stride <= kWords kBlockThreads values of
// a word.
template <class T, bool kGradients, bool kAhead, int kBlockThreads, int kWords>
__global__ void __launch_bounds__(kBlockThreads)
    cross_entropy_registers_kernel(T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride,
                                   float scale, float* losses) {
  constexpr int kWarps = kBlockThreads / kWarp, kValues = kWordValues<T>, kSlots = 2;
  extern __shared__ __align__(128) unsigned char row_bytes[];
  __shared__ float shared_most[kWarps], shared_sum[kWarps];
  const int columns = static_cast<int>(V), padded = static_cast<int>(stride);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto word_of = [](int n) { return n * kBlockThreads + static_cast<int>(threadIdx.x); };
  const auto row_at = [&](int64_t row) { return row < N ? logits + row * stride : nullptr; };

  const RowsAhead<kSlots, kBlockThreads> rows(row_bytes, padded * static_cast<int>(sizeof(T)));
  int slot = 0;
  uint32_t parity = 0;
  if constexpr (kAhead)
    for (int n = 0; n < kSlots; ++n) rows.fetch(row_at(blockIdx.x + int64_t{n} * gridDim.x), n);

  int next_target = targets[blockIdx.x];
  for (int64_t row = blockIdx.x; row < N; row += gridDim.x) {
    const int target = next_target;
    const bool has_target = target / kValues % kBlockThreads == threadIdx.x;
    if (row + gridDim.x < N) next_target = targets[row + gridDim.x];
    T* const x = logits + row * stride;
    Word words[kWords];
    if constexpr (kAhead) rows.wait(slot, parity);
    const auto* const from = kAhead ? rows.slot(slot) : reinterpret_cast<const unsigned char*>(x);
    // Without a branch: all are asked for before the first is used.
#pragma unroll
    for (int n = 0; n < kWords; ++n)
      words[n] = reinterpret_cast<const Word*>(from)[min(word_of(n), padded / kValues - 1)];
    const float at_target = has_target ? to_float(reinterpret_cast<const T*>(from)[target]) : 0.0f;
    // What lies from V on is no logit, and adds exp(-inf) = 0 to the sum.
#pragma unroll
    for (int n = 0; n < kWords; ++n)
      if (const int kept = columns - word_of(n) * kValues; kept < kValues) hide_behind(words[n], kept, T{});

    const float warp_most = warp_max(largest_of(words, T{}));
    if (lane == 0) shared_most[warp] = warp_most;
    __syncthreads();
    if constexpr (kAhead) {
      rows.fetch(row_at(row + kSlots * int64_t{gridDim.x}), slot);
      if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    const float m = warp_max(lane < kWarps ? shared_most[lane] : -INFINITY);

    float sum = 0;
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      float v[kValues];
      values_of(words[n], v);
      float of_word = 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) of_word += exp_above<T>(v[i], m);
      sum += of_word;
    }
    const float warp_total = warp_sum(sum);
    if (lane == 0) shared_sum[warp] = warp_total;
    __syncthreads();
    const float total = warp_sum(lane < kWarps ? shared_sum[lane] : 0.0f);
    if (has_target) losses[row] = logf(total) + (m - at_target);

    if constexpr (kGradients) {
      const float factor = scale / total;
      forget(words);  // its registers could not hold all exponentials
#pragma unroll
      for (int n = 0; n < kWords; ++n) {
        if (word_of(n) * kValues >= padded) break;
        float v[kValues];
        values_of(words[n], v);
#pragma unroll
        for (int i = 0; i < kValues; ++i) v[i] = exp_above<T>(v[i], m) * factor;
        if (const int kept = columns - word_of(n) * kValues; kept < kValues)  // zero, and not zero times NaN
#pragma unroll
          for (int i = 0; i < kValues; ++i) v[i] = i < kept ? v[i] : 0;
        store_some(x + word_of(n) * kValues, v);
      }
      if (has_target) store(x + target, exp_above<T>(at_target, m) * factor - scale);  // over its own word
    }
  }
}

// --- Cross-entropy, exponentials in registers

// As above with kAhead, but what stays in registers are the exponentials: each is computed once. Rows are read twice from
// shared memory, for the largest value and for these.
template <class T, bool kGradients, int kBlockThreads, int kWords>
__global__ void __launch_bounds__(kBlockThreads)
    cross_entropy_once_kernel(T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride,
                              float scale, float* losses) {
  constexpr int kWarps = kBlockThreads / kWarp, kValues = kWordValues<T>, kSlots = 2;
  extern __shared__ __align__(128) unsigned char row_bytes[];
  __shared__ float shared_most[kWarps], shared_sum[kWarps];
  const int columns = static_cast<int>(V), padded = static_cast<int>(stride);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto word_of = [](int n) { return n * kBlockThreads + static_cast<int>(threadIdx.x); };
  const auto row_at = [&](int64_t row) { return row < N ? logits + row * stride : nullptr; };

  const RowsAhead<kSlots, kBlockThreads> rows(row_bytes, padded * static_cast<int>(sizeof(T)));
  int slot = 0;
  uint32_t parity = 0;
  for (int n = 0; n < kSlots; ++n) rows.fetch(row_at(blockIdx.x + int64_t{n} * gridDim.x), n);

  int next_target = targets[blockIdx.x];
  for (int64_t row = blockIdx.x; row < N; row += gridDim.x) {
    const int target = next_target;
    const bool has_target = target / kValues % kBlockThreads == threadIdx.x;
    if (row + gridDim.x < N) next_target = targets[row + gridDim.x];
    T* const x = logits + row * stride;
    rows.wait(slot, parity);
    const auto* const from = reinterpret_cast<const Word*>(rows.slot(slot));
    const float at_target = has_target ? to_float(reinterpret_cast<const T*>(from)[target]) : 0.0f;
    const auto word_at = [&](int n) {
      Word word = from[min(word_of(n), padded / kValues - 1)];
      if (const int kept = columns - word_of(n) * kValues; kept < kValues) hide_behind(word, kept, T{});
      return word;
    };
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      const Word one[1] = {word_at(n)};
      most = fmaxf(most, largest_of(one, T{}));
    }
    most = warp_max(most);
    if (lane == 0) shared_most[warp] = most;
    __syncthreads();
    const float m = warp_max(lane < kWarps ? shared_most[lane] : -INFINITY);

    float e[kWords][kValues], sum = 0;
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      values_of(word_at(n), e[n]);
      float of_word = 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) of_word += e[n][i] = exp_above<T>(e[n][i], m);
      sum += of_word;
    }
    const float warp_total = warp_sum(sum);
    if (lane == 0) shared_sum[warp] = warp_total;
    __syncthreads();
    rows.fetch(row_at(row + kSlots * int64_t{gridDim.x}), slot);
    if (++slot == kSlots) slot = 0, parity ^= 1;
    const float total = warp_sum(lane < kWarps ? shared_sum[lane] : 0.0f);
    if (has_target) losses[row] = logf(total) + (m - at_target);

    if constexpr (kGradients) {
      const float factor = scale / total;
#pragma unroll
      for (int n = 0; n < kWords; ++n) {
        if (word_of(n) * kValues >= padded) break;
#pragma unroll
        for (int i = 0; i < kValues; ++i) e[n][i] *= factor;
        if (const int kept = columns - word_of(n) * kValues; kept < kValues)  // zero, and not zero times NaN
#pragma unroll
          for (int i = 0; i < kValues; ++i) e[n][i] = i < kept ? e[n][i] : 0;
        store_some(x + word_of(n) * kValues, e[n]);
      }
      if (has_target) store(x + target, exp_above<T>(at_target, m) * factor - scale);  // over its own word
    }
  }
}

constexpr int kLossThreads = 1024;
__global__ void __launch_bounds__(kLossThreads)
    mean_loss_kernel(const float* losses, int64_t N, double* mean) {
  __shared__ double shared[kLossThreads];
  double sum = 0;
#pragma unroll 8
  for (int64_t n = threadIdx.x; n < N; n += kLossThreads) sum += static_cast<double>(losses[n]);
  shared[threadIdx.x] = sum;
  for (int half = kLossThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *mean = shared[0] / static_cast<double>(N);
}

// Shared memory that a block may have besides a kilobyte of its own.
int64_t most_staged_bytes() {
  static const int64_t most = [] {
    int ordinal = 0, bytes = 0;
    check_cuda(cudaGetDevice(&ordinal), "asking for the device");
    check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal),
               "asking for the size of shared memory");
    return int64_t{bytes} - 1024;
  }();
  return most;
}

// Calls launch.operator()<kVector>(): four columns at a time where rows allow it.
template <class Launch>
void with_vector(int64_t C, Launch launch) {
  if (C % 4 == 0)
    launch.template operator()<4>();
  else
    launch.template operator()<1>();
}

}  // namespace

int64_t sum_blocks(int64_t rows) {
  static const int64_t most = int64_t{cuda_device().multiprocessors} * kSumBlocksAtOnce;
  return std::min(most, divide_up(rows, 4));
}

void add_sums(const BlockSums* sums, int64_t count, int64_t most_columns, cudaStream_t stream) {
  const dim3 blocks(grid(divide_up(most_columns, kSumColumns)), grid(count)), threads(kSumColumns, kSumRows);
  add_sums_kernel<<<blocks, threads, 0, stream>>>(sums);
  check_launch("adding up sums over rows");
}

void embedding_forward(const int32_t* tokens, const float* wte, const float* wpe, int64_t N, int64_t T,
                       int64_t C, float* x, cudaStream_t stream) {
  with_vector(C, [&]<int kVector>() {
    embedding_forward_kernel<kVector>
        <<<grid(divide_up(N * (C / kVector), kThreads)), kThreads, 0, stream>>>(tokens, wte, wpe, N, T, C, x);
  });
  check_launch("the embedding");
}

void position_backward(const float* dx, int64_t B, int64_t T, int64_t C, float* dwpe, cudaStream_t stream) {
  with_vector(C, [&]<int kVector>() {
    position_backward_kernel<kVector><<<grid(T), kThreads, 0, stream>>>(dx, B, T, C, dwpe);
  });
  check_launch("the gradient of positions");
}

void token_backward(const float* dx, const int32_t* places, const TokenRun* runs, int64_t run_count,
                    const TokenParts* tokens, int64_t token_count, float* parts, int64_t C, float* dwte,
                    cudaStream_t stream) {
  with_vector(C, [&]<int kVector>() {
    token_runs_kernel<kVector><<<grid(run_count), kThreads, 0, stream>>>(dx, places, runs, parts, C, dwte);
    check_launch("the gradient of tokens");
    if (token_count == 0) return;
    token_parts_kernel<kVector><<<grid(token_count), kThreads, 0, stream>>>(tokens, parts, C, dwte);
  });
  check_launch("the gradient of tokens");
}

void layernorm_forward(const float* x, const float* gain, const float* bias, int64_t N, int64_t C,
                       TensorType type, void* y, float* mean, float* rstd, cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    with_norm_shape(C, [&]<int kVector, int kWarps, int kChunks>() {
      using Shape = NormShape<kVector, kWarps, kChunks>;
      layernorm_forward_kernel<kVector, kWarps, kChunks>
          <<<grid(divide_up(N, Shape::kGroups)), Shape::kBlockThreads, 0, stream>>>(
              x, gain, bias, N, C, static_cast<T*>(y), mean, rstd);
    });
  });
  check_launch("a LayerNorm");
}

void layernorm_backward(const void* dy, TensorType dy_type, const float* x, const float* gain,
                        const float* mean, const float* rstd, int64_t N, int64_t C, const float* dx_in,
                        float* dx, void* dx_operand, float* gain_parts, float* bias_parts,
                        cudaStream_t stream) {
  with_type(dy_type, [&]<class T>() {
    with_norm_shape(C, [&]<int kVector, int kWarps, int kChunks>() {
      using Shape = NormShape<kVector, kWarps, kChunks>;
      const auto launch = [&](auto kernel) {
        kernel<<<grid(sum_blocks(N)), Shape::kBlockThreads, 0, stream>>>(
            static_cast<const T*>(dy), x, gain, mean, rstd, N, C, dx_in, dx, static_cast<Bf16*>(dx_operand),
            gain_parts, bias_parts);
      };
      if (bias_parts)
        launch(layernorm_backward_kernel<kVector, kWarps, kChunks, true, T>);
      else
        launch(layernorm_backward_kernel<kVector, kWarps, kChunks, false, T>);
    });
  });
  check_launch("the gradient of a LayerNorm");
}

void rms_norm_forward(const void* qkv, const float* q_gain, const float* k_gain, int64_t N, int64_t H,
                      int64_t D, TensorType type, void* qk, float* rstd, cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    rms_norm_forward_kernel<<<grid(divide_up(N * 2 * H, kHeadWarps)), kHeadWarps * kWarp, 0, stream>>>(
        static_cast<const T*>(qkv), q_gain, k_gain, N, static_cast<int>(H), static_cast<int>(D),
        static_cast<T*>(qk), rstd);
  });
  check_launch("qk_norm");
}

void rms_norm_backward(void* dqkv, const void* qkv, const float* q_gain, const float* k_gain,
                       const float* rstd, int64_t N, int64_t H, int64_t D, TensorType type, float* q_parts,
                       float* k_parts, cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    rms_norm_backward_kernel<<<dim3(grid(sum_blocks(N)), 2), kHeadWarps * kWarp, 0, stream>>>(
        static_cast<T*>(dqkv), static_cast<const T*>(qkv), q_gain, k_gain, rstd, N, static_cast<int>(H),
        static_cast<int>(D), q_parts, k_parts);
  });
  check_launch("the gradient of qk_norm");
}

void gelu_forward(const void* x, int64_t count, TensorType type, void* y, cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    gelu_forward_kernel<<<piece_blocks(count), kThreads, 0, stream>>>(static_cast<const T*>(x), count,
                                                                      static_cast<T*>(y));
  });
  check_launch("GELU");
}

void gelu_backward(const float* dy, const void* x, int64_t count, TensorType type, void* dx,
                   cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    gelu_backward_kernel<<<piece_blocks(count), kThreads, 0, stream>>>(dy, static_cast<const T*>(x), count,
                                                                       static_cast<T*>(dx));
  });
  check_launch("the gradient of GELU");
}

void gate_forward(const void* x, const void* gate, int64_t count, TensorType type, void* y,
                  cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    gate_forward_kernel<<<piece_blocks(count), kThreads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(gate), count, static_cast<T*>(y));
  });
  check_launch("the gate");
}

void gate_backward(const float* dy, const void* x, const void* gate, int64_t count, TensorType type, void* dx,
                   void* dgate, cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    gate_backward_kernel<<<piece_blocks(count), kThreads, 0, stream>>>(
        dy, static_cast<const T*>(x), static_cast<const T*>(gate), count, static_cast<T*>(dx),
        static_cast<T*>(dgate));
  });
  check_launch("the gradient of the gate");
}

void column_sums(const void* x, int64_t N, int64_t columns, TensorType type, float* parts,
                 cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    column_sums_kernel<<<dim3(grid(sum_blocks(N)), grid(divide_up(columns, kThreads))), kThreads, 0,
                         stream>>>(static_cast<const T*>(x), N, columns, parts);
  });
  check_launch("the gradient of a bias");
}

namespace {

// As many blocks as run at once, or one a row where those are fewer.
template <class Kernel, class... Arguments>
void launch_over_rows(Kernel kernel, int64_t N, int threads, size_t shared_bytes, cudaStream_t stream,
                      Arguments... arguments) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)),
             "asking for shared memory");
  int blocks = 0;  // of a multiprocessor
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
             "asking for a grid's size");
  kernel<<<grid(std::min<int64_t>(N, int64_t{blocks} * cuda_device().multiprocessors)), threads, shared_bytes,
           stream>>>(arguments...);
}

// True: it took the rows.
template <class T>
bool cross_entropy_cached(T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride,
                          bool gradients, float scale, float* losses, cudaStream_t stream) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(T));
  if (!gradients || bytes > most_staged_bytes()) return false;
  const auto kernel = cross_entropy_cached_kernel<T>;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "asking for shared memory");
  kernel<<<grid(N), kCachedThreads, at(bytes), stream>>>(logits, targets, V, stride, scale, losses);
  return true;
}

// True: it took the rows.
template <bool kAhead, class T>
bool cross_entropy_in_registers(T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride,
                                bool gradients, float scale, float* losses, cudaStream_t stream) {
  const auto shared_bytes = static_cast<int64_t>(kAhead ? 2 * sizeof(T) : 0) * stride;
  const auto launch = [&]<int kBlockThreads, int kWords>() {
    if (stride > kWords * kBlockThreads * kWordValues<T> || shared_bytes > most_staged_bytes()) return false;
    const auto kernel = gradients ? cross_entropy_registers_kernel<T, true, kAhead, kBlockThreads, kWords>
                                  : cross_entropy_registers_kernel<T, false, kAhead, kBlockThreads, kWords>;
    launch_over_rows(kernel, N, kBlockThreads, at(shared_bytes), stream, logits, targets, N, V, stride, scale,
                     losses);
    return true;
  };
  // Small rows: several blocks a multiprocessor. 7 words of 1024 threads: 57,344 of BF16.
  return launch.template operator()<256, 4>() || launch.template operator()<1024, 7>();
}

// True: it took the rows.
template <class T>
bool cross_entropy_once(T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride,
                        bool gradients, float scale, float* losses, cudaStream_t stream) {
  const int64_t shared_bytes = 2 * stride * static_cast<int64_t>(sizeof(T));
  const auto launch = [&]<int kBlockThreads, int kWords>() {
    if (stride > kWords * kBlockThreads * kWordValues<T> || shared_bytes > most_staged_bytes()) return false;
    const auto kernel = gradients ? cross_entropy_once_kernel<T, true, kBlockThreads, kWords>
                                  : cross_entropy_once_kernel<T, false, kBlockThreads, kWords>;
    launch_over_rows(kernel, N, kBlockThreads, at(shared_bytes), stream, logits, targets, N, V, stride, scale,
                     losses);
    return true;
  };
  // 10 words of 640 threads: 51,200 of BF16, in 80 of the 96 registers that a thread can have then.
  return launch.template operator()<256, 4>() || launch.template operator()<640, 10>();
}

}  // namespace

void cross_entropy(void* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride,
                   TensorType type, bool gradients, float scale, float* losses, cudaStream_t stream,
                   CrossEntropyKernel choice) {
  with_type(type, [&]<class T>() {
    const auto by = [&](auto way) {
      return way(static_cast<T*>(logits), targets, N, V, stride, gradients, scale, losses, stream);
    };
    if (choice == CrossEntropyKernel::cached && by(cross_entropy_cached<T>)) return;
    if (choice == CrossEntropyKernel::registers && by(cross_entropy_in_registers<false, T>)) return;
    if (choice == CrossEntropyKernel::ahead && by(cross_entropy_in_registers<true, T>)) return;
    if (choice == CrossEntropyKernel::once && by(cross_entropy_once<T>)) return;
    const auto launch = [&]<bool kStaged, int kBlockThreads>() {
      const auto kernel = gradients ? cross_entropy_kernel<T, true, kStaged, kBlockThreads>
                                    : cross_entropy_kernel<T, false, kStaged, kBlockThreads>;
      launch_over_rows(kernel, N, kBlockThreads, kStaged ? at(2 * stride) * sizeof(T) : 0, stream,
                       static_cast<T*>(logits), targets, N, V, stride, scale, losses);
    };
    // Small rows: several blocks a multiprocessor, each with four pieces a thread or fewer.
    if (2 * stride * static_cast<int64_t>(sizeof(T)) > most_staged_bytes())
      launch.template operator()<false, 1024>();
    else if (stride > 4 * 256 * kPiece)
      launch.template operator()<true, 1024>();
    else
      launch.template operator()<true, 256>();
  });
  check_launch("the loss");
}

void mean_loss(const float* losses, int64_t N, double* mean, cudaStream_t stream) {
  mean_loss_kernel<<<1, kLossThreads, 0, stream>>>(losses, N, mean);
  check_launch("the mean loss");
}

void round_to_bf16(const float* from, int64_t count, void* to, cudaStream_t stream) {
  round_kernel<<<piece_blocks(count), kThreads, 0, stream>>>(from, count, static_cast<Bf16*>(to));
  check_launch("rounding to bf16");
}

void scale_query_key(float* w, float* bias, const float* factors, int64_t C, int64_t H, cudaStream_t stream) {
  constexpr unsigned kRows = 64;
  scale_query_key_kernel<<<dim3(grid(divide_up(2 * C, kThreads)), kRows), kThreads, 0, stream>>>(
      w, bias, factors, C, C / H);
  check_launch("qk_clip");
}

}  // namespace evenkeel::device
