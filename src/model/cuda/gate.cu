// The gate of attention.
#include "model/cuda/device_layers.h"
#include "model/cuda/device_values.cuh"

namespace evenkeel::device {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads)
    gate_forward_kernel(const T* x, const T* gate, int64_t count, T* y) {
  multiply_pieces(x, gate, count, y, [](float g) { return sigmoid(g); });
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

}  // namespace

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

}  // namespace evenkeel::device
