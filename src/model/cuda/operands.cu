// Parameters as operands of products.
#include "model/cuda/device_layers.h"
#include "model/cuda/device_values.cuh"

namespace evenkeel::device {
namespace {

__global__ void __launch_bounds__(kThreads) round_kernel(const float* from, int64_t count, Bf16* to) {
  for_each_piece(count, [&]<int kCount>(int64_t n) {
    float v[kCount];
    load_some(from + n, v);
    store_some(to + n, v);
  });
}

}  // namespace

void round_to_bf16(const float* from, int64_t count, void* to, cudaStream_t stream) {
  round_kernel<<<piece_blocks(count), kThreads, 0, stream>>>(from, count, static_cast<Bf16*>(to));
  check_launch("rounding to bf16");
}

}  // namespace evenkeel::device
