// Sums over rows: by blocks of rows, then over the blocks, in a fixed order.
#include "model/cuda/device_layers.h"

#include <algorithm>

#include "gpu/device.h"
#include "model/cuda/device_values.cuh"

namespace evenkeel::device {
namespace {

constexpr int kSumColumns = 32, kSumRows = 16;  // of a block of add_sums

__global__ void __launch_bounds__(kSumColumns* kSumRows) add_sums_kernel(const BlockSums* sums, bool add) {
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
  s.total[column] = (add ? s.total[column] : 0) + total;
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

}  // namespace

int64_t sum_blocks(int64_t rows) {
  static const int64_t most = int64_t{cuda_device().multiprocessors} * kSumBlocksAtOnce;
  return std::min(most, divide_up(rows, 4));
}

void add_sums(const BlockSums* sums, int64_t count, int64_t most_columns, bool add, cudaStream_t stream) {
  const dim3 blocks(grid(divide_up(most_columns, kSumColumns)), grid(count)), threads(kSumColumns, kSumRows);
  add_sums_kernel<<<blocks, threads, 0, stream>>>(sums, add);
  check_launch("adding up sums over rows");
}

void column_sums(const void* x, int64_t N, int64_t columns, TensorType type, float* parts,
                 cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    column_sums_kernel<<<dim3(grid(sum_blocks(N)), grid(divide_up(columns, kThreads))), kThreads, 0,
                         stream>>>(static_cast<const T*>(x), N, columns, parts);
  });
  check_launch("the gradient of a bias");
}

}  // namespace evenkeel::device
