#include "training/cuda/ranks_kernels.h"

namespace evenkeel {
namespace {

constexpr int kAddThreads = 256;
constexpr int64_t kMostBlocks = 4096;  // more than any GPU runs at once

__global__ void __launch_bounds__(kAddThreads) add_kernel(float* to, const float* left, int64_t count) {
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kAddThreads + threadIdx.x; n < count;
       n += static_cast<int64_t>(gridDim.x) * kAddThreads)
    to[n] = __fadd_rn(left[n], to[n]);
}

}  // namespace

void add_floats(float* to, const float* left, int64_t count, cudaStream_t stream) {
  if (count <= 0) return;
  const int64_t blocks = (count + kAddThreads - 1) / kAddThreads;
  add_kernel<<<static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks), kAddThreads, 0, stream>>>(
      to, left, count);
}

}  // namespace evenkeel
