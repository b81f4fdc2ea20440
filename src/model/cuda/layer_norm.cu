// LayerNorm and RMS norm. The second is the first with a mean of zero, which is neither computed nor kept.
#include "model/cuda/device_layers.h"
#include "model/cuda/device_values.cuh"

namespace evenkeel::device {
namespace {

// Rows go from the last to the first: the product before has just left the last ones in the L2 cache, and the product
// behind begins with the first ones.
// A row belongs to a group of kWarps warps, and lies in their registers: kChunks pieces of kVector values a
// thread. The piece of chunk n starts at column (n kWarps 32 + thread) kVector.
template <int kVector, int kWarps, int kChunks>
struct NormShape {
  static constexpr int kGroupThreads = kWarps * kWarp;
  static constexpr int kGroups = kWarps == 1 ? 4 : 1;  // rows at a time of a block
  static constexpr int kBlockThreads = kGroups * kGroupThreads;
  static EK_DEVICE int64_t column(int chunk) {
    return (int64_t{chunk} * kGroupThreads + threadIdx.x % kGroupThreads) * kVector;
  }
  // The same, or the row's last piece: there is always something to load.
  static EK_DEVICE int64_t place(int chunk, int64_t C) { return min(column(chunk), C - kVector); }
};

// The sum over a group's threads, in all of them.
template <int kWarps>
EK_DEVICE float group_sum(float x) {
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
EK_DEVICE void load_row(const T* row, int64_t C, float (&v)[kChunks][kVector]) {
#pragma unroll
  for (int n = 0; n < kChunks; ++n) load_some(row + Shape::place(n, C), v[n]);
}

template <int kChunks, int kVector>
EK_DEVICE void zero_row(float (&v)[kChunks][kVector]) {
#pragma unroll
  for (int n = 0; n < kChunks; ++n)
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[n][i] = 0;
}

template <int kVector, int kWarps, int kChunks, bool kRms, class T>
__global__ void __launch_bounds__(NormShape<kVector, kWarps, kChunks>::kBlockThreads)
    norm_forward_kernel(const float* x, const float* gain, const float* bias, float epsilon, int64_t N,
                        int64_t C, T* y, float* mean, float* rstd) {
  using Shape = NormShape<kVector, kWarps, kChunks>;
  const int64_t row = N - 1 - int64_t{blockIdx.x} * Shape::kGroups - threadIdx.x / Shape::kGroupThreads;
  if (row < 0) return;  // a group as a whole
  const float count = static_cast<float>(C);
  float value[kChunks][kVector];
  load_row<Shape>(x + row * C, C, value);
  float mu = 0;
  if constexpr (!kRms) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum += Shape::column(n) < C ? value[n][i] : 0.0f;
    mu = group_sum<kWarps>(sum) / count;
  }
  float squares = 0;
#pragma unroll
  for (int n = 0; n < kChunks; ++n)
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float apart = Shape::column(n) < C ? value[n][i] - mu : 0.0f;
      squares = fmaf(apart, apart, squares);
    }
  const float r = 1 / sqrtf(group_sum<kWarps>(squares) / count + epsilon);
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
    if constexpr (!kRms) mean[row] = mu;
    rstd[row] = r;
  }
}

// Blocks walk over the rows; what they add to dgain and dbias stays in registers until the end. Three blocks of
// 128 threads a multiprocessor keep 12 rows of three arrays on their way, 90 KB at C = 768: more than memory's
// delay times its speed.
enum class NormForm { plain, biased, rms };  // LayerNorm without a bias and with one; RMS norm

template <int kVector, int kWarps, int kChunks, NormForm kForm, class T>
__global__ void __launch_bounds__(NormShape<kVector, kWarps, kChunks>::kBlockThreads,
                                  kWarps > 1 || kVector * kChunks > 24 ? 1 : kSumBlocksAtOnce)
    norm_backward_kernel(const T* dy, const float* x, const float* gain, const float* mean, const float* rstd,
                         int64_t N, int64_t C, const float* dx_in, float* dx, Bf16* dx_operand,
                         float* gain_parts, float* bias_parts) {
  using Shape = NormShape<kVector, kWarps, kChunks>;
  constexpr bool kBias = kForm == NormForm::biased, kRms = kForm == NormForm::rms;
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
    const float mu = kRms ? 0.0f : mean[row], r = rstd[row];
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
    const float mean_dxhat = kRms ? 0.0f : group_sum<kWarps>(sum) / count;
    const float mean_dot = group_sum<kWarps>(dot) / count;
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

template <bool kRms>
void launch_forward(const float* x, const float* gain, const float* bias, float epsilon, int64_t N, int64_t C,
                    TensorType type, void* y, float* mean, float* rstd, cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    with_norm_shape(C, [&]<int kVector, int kWarps, int kChunks>() {
      using Shape = NormShape<kVector, kWarps, kChunks>;
      norm_forward_kernel<kVector, kWarps, kChunks, kRms>
          <<<grid(divide_up(N, Shape::kGroups)), Shape::kBlockThreads, 0, stream>>>(
              x, gain, bias, epsilon, N, C, static_cast<T*>(y), mean, rstd);
    });
  });
  check_launch("a norm");
}

template <NormForm kForm>
void launch_backward(const void* dy, TensorType dy_type, const float* x, const float* gain, const float* mean,
                     const float* rstd, int64_t N, int64_t C, const float* dx_in, float* dx, void* dx_operand,
                     float* gain_parts, float* bias_parts, cudaStream_t stream) {
  with_type(dy_type, [&]<class T>() {
    with_norm_shape(C, [&]<int kVector, int kWarps, int kChunks>() {
      using Shape = NormShape<kVector, kWarps, kChunks>;
      norm_backward_kernel<kVector, kWarps, kChunks, kForm>
          <<<grid(sum_blocks(N)), Shape::kBlockThreads, 0, stream>>>(
              static_cast<const T*>(dy), x, gain, mean, rstd, N, C, dx_in, dx, static_cast<Bf16*>(dx_operand),
              gain_parts, bias_parts);
    });
  });
  check_launch("the gradient of a norm");
}

}  // namespace

void layernorm_forward(const float* x, const float* gain, const float* bias, int64_t N, int64_t C,
                       TensorType type, void* y, float* mean, float* rstd, cudaStream_t stream) {
  launch_forward<false>(x, gain, bias, kNormEpsilon, N, C, type, y, mean, rstd, stream);
}

void layernorm_backward(const void* dy, TensorType dy_type, const float* x, const float* gain,
                        const float* mean, const float* rstd, int64_t N, int64_t C, const float* dx_in,
                        float* dx, void* dx_operand, float* gain_parts, float* bias_parts,
                        cudaStream_t stream) {
  const auto launch = bias_parts ? launch_backward<NormForm::biased> : launch_backward<NormForm::plain>;
  launch(dy, dy_type, x, gain, mean, rstd, N, C, dx_in, dx, dx_operand, gain_parts, bias_parts, stream);
}

void rms_norm_forward(const float* x, const float* gain, float epsilon, int64_t N, int64_t C, TensorType type,
                      void* y, float* rstd, cudaStream_t stream) {
  launch_forward<true>(x, gain, nullptr, epsilon, N, C, type, y, nullptr, rstd, stream);
}

void rms_norm_backward(const void* dy, TensorType dy_type, const float* x, const float* gain,
                       const float* rstd, int64_t N, int64_t C, const float* dx_in, float* dx,
                       void* dx_operand, float* gain_parts, cudaStream_t stream) {
  launch_backward<NormForm::rms>(dy, dy_type, x, gain, nullptr, rstd, N, C, dx_in, dx, dx_operand, gain_parts,
                                 nullptr, stream);
}

}  // namespace evenkeel::device
