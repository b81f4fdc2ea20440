// The RMS norm of q and k, and qk_clip.
#include "model/cuda/device_layers.h"
#include "model/cuda/device_values.cuh"

namespace evenkeel::device {
namespace {

// A warp for each head of each row; up to kHeadValues features a lane.
constexpr int kHeadValues = 4, kHeadWarps = 8;

template <class T>
__global__ void __launch_bounds__(kHeadWarps* kWarp)
    head_norm_forward_kernel(const T* qkv, const float* q_gain, const float* k_gain, float epsilon, int64_t N,
                             int H, int G, int D, T* qk, float* rstd) {
  const int64_t item = blockIdx.x * int64_t{kHeadWarps} + threadIdx.x / kWarp;  // (n, q or k, h)
  const int lane = threadIdx.x % kWarp;
  if (item >= N * (H + G)) return;
  const int64_t n = item / (H + G), head = item % (H + G);
  const T* from = qkv + (n * (H + 2 * G) + head) * D;
  const float* gain = head < H ? q_gain : k_gain;
  float value[kHeadValues], squares = 0;
#pragma unroll
  for (int i = 0; i < kHeadValues; ++i) {
    const int d = i * kWarp + lane;
    value[i] = d < D ? to_float(from[d]) : 0.0f;
    squares = fmaf(value[i], value[i], squares);
  }
  const float r = 1 / sqrtf(warp_sum(squares) / static_cast<float>(D) + epsilon);
#pragma unroll
  for (int i = 0; i < kHeadValues; ++i) {
    const int d = i * kWarp + lane;
    if (d < D) store(qk + item * D + d, value[i] * r * gain[d]);
  }
  if (lane == 0) rstd[item] = r;
}

template <class T>
__global__ void __launch_bounds__(kHeadWarps* kWarp)
    head_norm_backward_kernel(T* dqkv, const T* qkv, const float* q_gain, const float* k_gain,
                              const float* rstd, int64_t N, int H, int G, int D, float* q_parts,
                              float* k_parts) {
  __shared__ float shared[kHeadWarps][kHeadValues * kWarp];
  const int part = blockIdx.y;  // q, k
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const float* gain = part == 0 ? q_gain : k_gain;
  float factor[kHeadValues], gain_sum[kHeadValues] = {};
#pragma unroll
  for (int i = 0; i < kHeadValues; ++i) factor[i] = i * kWarp + lane < D ? gain[i * kWarp + lane] : 0.0f;
  const int heads = part == 0 ? H : G;
  for (int64_t item = blockIdx.x * int64_t{kHeadWarps} + warp; item < N * heads;
       item += int64_t{gridDim.x} * kHeadWarps) {
    const int64_t n = item / heads, h = part * H + item % heads, at = (n * (H + 2 * G) + h) * D;
    const float r = rstd[n * (H + G) + h];
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

__global__ void __launch_bounds__(kThreads)
    scale_query_key_kernel(float* w, float* bias, const float* factors, int64_t C, int64_t Q, int64_t D) {
  const int64_t column = blockIdx.x * int64_t{kThreads} + threadIdx.x;  // of q and k
  if (column >= 2 * Q) return;
  const float factor = factors[column % Q / D];
  if (factor == 1) return;
  for (int64_t row = blockIdx.y; row < C; row += gridDim.y) w[row * 3 * Q + column] *= factor;
  if (bias && blockIdx.y == 0) bias[column] *= factor;
}

}  // namespace

void head_norm_forward(const void* qkv, const float* q_gain, const float* k_gain, float epsilon, int64_t N,
                       int64_t H, int64_t G, int64_t D, TensorType type, void* qk, float* rstd,
                       cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    head_norm_forward_kernel<<<grid(divide_up(N * (H + G), kHeadWarps)), kHeadWarps * kWarp, 0, stream>>>(
        static_cast<const T*>(qkv), q_gain, k_gain, epsilon, N, static_cast<int>(H), static_cast<int>(G),
        static_cast<int>(D), static_cast<T*>(qk), rstd);
  });
  check_launch("qk_norm");
}

void head_norm_backward(void* dqkv, const void* qkv, const float* q_gain, const float* k_gain,
                        const float* rstd, int64_t N, int64_t H, int64_t G, int64_t D, TensorType type,
                        float* q_parts, float* k_parts, cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    head_norm_backward_kernel<<<dim3(grid(sum_blocks(N)), 2), kHeadWarps * kWarp, 0, stream>>>(
        static_cast<T*>(dqkv), static_cast<const T*>(qkv), q_gain, k_gain, rstd, N, static_cast<int>(H),
        static_cast<int>(G), static_cast<int>(D), q_parts, k_parts);
  });
  check_launch("the gradient of qk_norm");
}

void scale_query_key(float* w, float* bias, const float* factors, int64_t C, int64_t H, int64_t D,
                     cudaStream_t stream) {
  constexpr unsigned kRows = 64;
  scale_query_key_kernel<<<dim3(grid(divide_up(2 * H * D, kThreads)), kRows), kThreads, 0, stream>>>(
      w, bias, factors, C, H * D, D);
  check_launch("qk_clip");
}

}  // namespace evenkeel::device
