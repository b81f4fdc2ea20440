// SwiGLU.
#include "model/cuda/device_layers.h"
#include "model/cuda/device_values.cuh"

namespace evenkeel::device {
namespace {

// kCount values of one row a thread.
template <int kCount, class T>
__global__ void __launch_bounds__(kThreads) swiglu_forward_kernel(const T* x, int64_t N, int64_t F, T* y) {
  const int64_t pieces = F / kCount, item = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (item >= N * pieces) return;
  const int64_t n = item / pieces, f = item % pieces * kCount;
  float gate[kCount], up[kCount];
  load_some(x + n * 2 * F + f, gate);
  load_some(x + n * 2 * F + F + f, up);
#pragma unroll
  for (int i = 0; i < kCount; ++i) up[i] *= gate[i] * sigmoid(gate[i]);
  store_some(y + n * F + f, up);
}

template <int kCount, class T>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const T* x, const T* dy, int64_t N, int64_t F, T* dx) {
  const int64_t pieces = F / kCount, item = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (item >= N * pieces) return;
  const int64_t n = item / pieces, f = item % pieces * kCount;
  float gate[kCount], up[kCount], d[kCount];
  load_some(x + n * 2 * F + f, gate);
  load_some(x + n * 2 * F + F + f, up);
  load_some(dy + n * F + f, d);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float open = sigmoid(gate[i]), slope = fmaf(gate[i] * open, 1 - open, open);
    const float dgate = d[i] * up[i] * slope;
    up[i] = d[i] * (gate[i] * open);
    gate[i] = dgate;
  }
  store_some(dx + n * 2 * F + f, gate);
  store_some(dx + n * 2 * F + F + f, up);
}

// Calls launch.operator()<kCount>(): eights where every row starts at 16 bytes.
template <class Launch>
void with_count(int64_t F, Launch launch) {
  if (F % kPiece == 0)
    launch.template operator()<kPiece>();
  else
    launch.template operator()<1>();
}

}  // namespace

void swiglu_forward(const void* x, int64_t N, int64_t F, TensorType type, void* y, cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    with_count(F, [&]<int kCount>() {
      swiglu_forward_kernel<kCount, T><<<grid(divide_up(N * (F / kCount), kThreads)), kThreads, 0, stream>>>(
          static_cast<const T*>(x), N, F, static_cast<T*>(y));
    });
  });
  check_launch("SwiGLU");
}

void swiglu_backward(const void* x, const void* dy, int64_t N, int64_t F, TensorType type, void* dx,
                     cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    with_count(F, [&]<int kCount>() {
      swiglu_backward_kernel<kCount, T><<<grid(divide_up(N * (F / kCount), kThreads)), kThreads, 0, stream>>>(
          static_cast<const T*>(x), static_cast<const T*>(dy), N, F, static_cast<T*>(dx));
    });
  });
  check_launch("the gradient of SwiGLU");
}

}  // namespace evenkeel::device
