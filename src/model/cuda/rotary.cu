// Rotary positions.
#include "model/cuda/device_layers.h"
#include "model/cuda/device_values.cuh"

namespace evenkeel::device {
namespace {

// kCount pairs of one head of one row a thread. Reads all of them before it writes, so that y may be x.
template <int kCount, bool kNeighbours, class T>
__global__ void __launch_bounds__(kThreads)
    rotary_kernel(const T* x, int64_t x_stride, const float* turns, float sign, int64_t N, int64_t places,
                  int64_t heads, int64_t D, T* y, int64_t y_stride) {
  const int64_t pieces = D / 2 / kCount, item = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (item >= N * heads * pieces) return;
  const int64_t n = item / (heads * pieces), head = item / pieces % heads, p = item % pieces * kCount;
  const T* from = x + n * x_stride + head * D;
  T* to = y + n * y_stride + head * D;
  float a[kCount], b[kCount], both[2 * kCount], turn[2 * kCount];
  load_some(turns + n % places * D + 2 * p, turn);
  if constexpr (kNeighbours) {
    load_some(from + 2 * p, both);
#pragma unroll
    for (int i = 0; i < kCount; ++i) a[i] = both[2 * i], b[i] = both[2 * i + 1];
  } else {
    load_some(from + p, a);
    load_some(from + D / 2 + p, b);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float cosine = turn[2 * i], sine = sign * turn[2 * i + 1], real = a[i];
    a[i] = real * cosine - b[i] * sine;
    b[i] = real * sine + b[i] * cosine;
  }
  if constexpr (kNeighbours) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) both[2 * i] = a[i], both[2 * i + 1] = b[i];
    store_some(to + 2 * p, both);
  } else {
    store_some(to + p, a);
    store_some(to + D / 2 + p, b);
  }
}

template <bool kNeighbours, class T>
void launch(const void* x, int64_t x_stride, const float* turns, float sign, int64_t N, int64_t T_,
            int64_t heads, int64_t D, void* y, int64_t y_stride, cudaStream_t stream) {
  constexpr int kMany = 4;  // 8 bytes of BF16 from each half, or 16 of neighbours
  const auto run = [&]<int kCount>() {
    rotary_kernel<kCount, kNeighbours, T>
        <<<grid(divide_up(N * heads * (D / 2 / kCount), kThreads)), kThreads, 0, stream>>>(
            static_cast<const T*>(x), x_stride, turns, sign, N, T_, heads, D, static_cast<T*>(y), y_stride);
  };
  if (D % (2 * kMany) == 0 && x_stride % (2 * kMany) == 0 && y_stride % (2 * kMany) == 0)
    run.template operator()<kMany>();
  else
    run.template operator()<1>();
}

}  // namespace

void rotary(const void* x, int64_t x_stride, const float* turns, bool neighbours, bool back, int64_t N,
            int64_t T_, int64_t heads, int64_t D, TensorType type, void* y, int64_t y_stride,
            cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    const auto run = neighbours ? launch<true, T> : launch<false, T>;
    run(x, x_stride, turns, back ? -1.0f : 1.0f, N, T_, heads, D, y, y_stride, stream);
  });
  check_launch("rotary positions");
}

}  // namespace evenkeel::device
