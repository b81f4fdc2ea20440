// The embedding of tokens and positions, and its gradients.
#include "model/cuda/device_layers.h"
#include "model/cuda/device_values.cuh"

namespace evenkeel::device {
namespace {

template <int kVector>
__global__ void __launch_bounds__(kThreads)
    embedding_forward_kernel(const int32_t* tokens, const float* wte, const float* wpe, int64_t N, int64_t T,
                             int64_t C, float* x) {
  const int64_t pieces = C / kVector, n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n >= N * pieces) return;
  const int64_t row = n / pieces, c = n % pieces * kVector;
  float token[kVector], place[kVector];
  load_some(wte + tokens[row] * C + c, token);
  if (wpe) {
    load_some(wpe + row % T * C + c, place);
#pragma unroll
    for (int i = 0; i < kVector; ++i) token[i] += place[i];
  }
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

}  // namespace

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

}  // namespace evenkeel::device
