// GELU, where the product does not do it itself.
#include "model/cuda/device_layers.h"
#include "model/cuda/device_values.cuh"

namespace evenkeel::device {
namespace {

constexpr float kGeluScale = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;
EK_DEVICE float gelu_sigmoid(float x) { return sigmoid(2 * kGeluScale * x * fmaf(kGeluCubic * x, x, 1.0f)); }
EK_DEVICE float gelu_slope(float x) {
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
  multiply_pieces(dy, x, count, dx, [](float v) { return gelu_slope(v); });
}

}  // namespace

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

}  // namespace evenkeel::device
