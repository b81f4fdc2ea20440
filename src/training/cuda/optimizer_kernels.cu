// Norm, AdamW, and what Muon needs besides products. Multiplications and additions are written one by one (__fmul_rn,
// __fadd_rn), as the CPU rounds them: nothing is fused but where it says fma.
#include <math.h>

#include "base/sizes.h"
#include "training/cuda/optimizer_kernels.h"

namespace evenkeel {
namespace {

constexpr int kThreads = 256;

// Of all kCount threads of the block, as a tree; thread 0 gets it.
template <int kCount = kThreads>
__device__ double block_sum(double value) {
  __shared__ double sums[kCount];
  sums[threadIdx.x] = value;
  for (int half = kCount / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}

// The sum of squares of x[first], x[first + step], ...
__device__ double squares(const float* x, int64_t first, int64_t step, int64_t count) {
  double sum = 0;
  for (int64_t n = first; n < count; n += step)
    sum = fma(static_cast<double>(x[n]), static_cast<double>(x[n]), sum);
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    square_sums_kernel(const float* gradients, int64_t count, double* parts) {
  // Fours, and a thread's four values in order; count is a multiple of kFlagSpan.
  const auto* fours = reinterpret_cast<const float4*>(gradients);
  const int64_t first = blockIdx.x * (kNormBlock / 4), last = min(first + kNormBlock / 4, count / 4);
  double sum = 0;
#pragma unroll 4
  for (int64_t n = first + threadIdx.x; n < last; n += kThreads) {
    const float4 g = fours[n];
    for (float value : {g.x, g.y, g.z, g.w})
      sum = fma(static_cast<double>(value), static_cast<double>(value), sum);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

constexpr int kNormThreads = 1024;
__global__ void __launch_bounds__(kNormThreads)
    norm_kernel(const double* parts, int64_t count, float clip, GradientNorm* out) {
  double sum = 0;
#pragma unroll 8
  for (int64_t n = threadIdx.x; n < count; n += kNormThreads) sum += parts[n];
  sum = block_sum<kNormThreads>(sum);
  if (threadIdx.x != 0) return;
  const double norm = sqrt(sum);
  *out = {norm, clip > 0 && norm > clip ? static_cast<float>(clip / norm) : 1.0f, isfinite(norm) ? 1 : 0};
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(const AdamwStep s, const GradientNorm* norm) {
  if (!norm->finite) return;
  const float factor = norm->factor;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;  // of fours
  if (n >= s.count / 4) return;
  const uint8_t flags = s.flags[n / (kFlagSpan / 4)];
  if (flags & kIsMuons) return;
  const float keep = flags & kDecays ? s.keep : 1.0f;
  float4 four_g = reinterpret_cast<const float4*>(s.gradients)[n],
         four_w = reinterpret_cast<float4*>(s.parameters)[n], four_m = reinterpret_cast<float4*>(s.first)[n],
         four_v = reinterpret_cast<float4*>(s.second)[n];
  const auto update = [&](float& w, float& m, float& v, float gradient) {
    const float g = __fmul_rn(gradient, factor);
    m = __fadd_rn(__fmul_rn(s.beta1, m), __fmul_rn(1 - s.beta1, g));
    v = __fadd_rn(__fmul_rn(s.beta2, v), __fmul_rn(__fmul_rn(1 - s.beta2, g), g));
    const float size = __fadd_rn(__fmul_rn(__fsqrt_rn(v), s.inverse_root), s.epsilon);
    w = __fsub_rn(__fmul_rn(keep, w), __fdiv_rn(__fmul_rn(s.rate, m), size));
  };
  update(four_w.x, four_m.x, four_v.x, four_g.x);
  update(four_w.y, four_m.y, four_v.y, four_g.y);
  update(four_w.z, four_m.z, four_v.z, four_g.z);
  update(four_w.w, four_m.w, four_v.w, four_g.w);
  reinterpret_cast<float4*>(s.parameters)[n] = four_w;
  reinterpret_cast<float4*>(s.first)[n] = four_m;
  reinterpret_cast<float4*>(s.second)[n] = four_v;
}

// --- Muon: blockIdx.y is the matrix, x walks over its values.

__device__ int64_t place(const MuonGroup& group, int64_t n) {
  return group.starts[blockIdx.y] + n / group.columns * group.stride + n % group.columns;
}

__global__ void __launch_bounds__(kThreads)
    momentum_kernel(const MuonGroup group, const float* gradients, float* momentum, float mu,
                    const GradientNorm* norm, float* x) {
  if (!norm->finite) return;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                size = group.rows * group.columns;
  if (n >= size) return;
  const int64_t at = place(group, n);
  const float g = __fmul_rn(gradients[at], norm->factor);
  const float m = __fadd_rn(__fmul_rn(mu, momentum[at]), g);
  momentum[at] = m;
  x[blockIdx.y * size + n] = __fadd_rn(g, __fmul_rn(mu, m));
}

__global__ void __launch_bounds__(kThreads)
    matrix_norm_parts_kernel(const MuonGroup group, const float* x, double* parts) {
  const int64_t size = group.rows * group.columns;
  const double sum = block_sum(
      squares(x + blockIdx.y * size, blockIdx.x * kThreads + threadIdx.x, kMatrixParts * kThreads, size));
  if (threadIdx.x == 0) parts[blockIdx.y * kMatrixParts + blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    normalise_kernel(const MuonGroup group, float* x, const double* parts) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                size = group.rows * group.columns;
  if (n >= size) return;
  double sum = 0;
  for (int part = 0; part < kMatrixParts; ++part) sum += parts[blockIdx.y * kMatrixParts + part];
  if (sum == 0) return;
  x[blockIdx.y * size + n] *= static_cast<float>(1 / sqrt(sum));
}

__global__ void __launch_bounds__(kThreads)
    apply_kernel(const MuonGroup group, float* parameters, float keep, float scale, const GradientNorm* norm,
                 const float* x) {
  if (!norm->finite) return;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                size = group.rows * group.columns;
  if (n >= size) return;
  float& w = parameters[place(group, n)];
  w = __fsub_rn(__fmul_rn(keep, w), __fmul_rn(scale, x[blockIdx.y * size + n]));
}

dim3 grid_of(const MuonGroup& group) {
  return dim3(static_cast<unsigned>(divide_up(group.rows * group.columns, kThreads)),
              static_cast<unsigned>(group.batch));
}

}  // namespace

void square_sums(const float* gradients, int64_t count, double* parts, cudaStream_t stream) {
  if (count == 0) return;  // an empty slice
  square_sums_kernel<<<static_cast<unsigned>(norm_parts(count)), kThreads, 0, stream>>>(gradients, count,
                                                                                        parts);
}

void gradient_norm(const double* parts, int64_t count, float clip, GradientNorm* norm, cudaStream_t stream) {
  norm_kernel<<<1, kNormThreads, 0, stream>>>(parts, count, clip, norm);
}

void adamw(const AdamwStep& step, const GradientNorm* norm, cudaStream_t stream) {
  if (step.count == 0) return;  // an empty slice
  const auto blocks = static_cast<unsigned>(divide_up(step.count / 4, kThreads));
  adamw_kernel<<<blocks, kThreads, 0, stream>>>(step, norm);
}

void muon_momentum(const MuonGroup& group, const float* gradients, float* momentum, float mu,
                   const GradientNorm* norm, float* x, cudaStream_t stream) {
  momentum_kernel<<<grid_of(group), kThreads, 0, stream>>>(group, gradients, momentum, mu, norm, x);
}

void muon_normalise(const MuonGroup& group, float* x, double* parts, cudaStream_t stream) {
  matrix_norm_parts_kernel<<<dim3(kMatrixParts, static_cast<unsigned>(group.batch)), kThreads, 0, stream>>>(
      group, x, parts);
  normalise_kernel<<<grid_of(group), kThreads, 0, stream>>>(group, x, parts);
}

void muon_apply(const MuonGroup& group, float* parameters, float keep, float scale, const GradientNorm* norm,
                const float* x, cudaStream_t stream) {
  apply_kernel<<<grid_of(group), kThreads, 0, stream>>>(group, parameters, keep, scale, norm, x);
}

}  // namespace evenkeel
