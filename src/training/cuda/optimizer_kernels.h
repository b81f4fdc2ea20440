// The kernels of the device optimiser, as optimizer_cuda.cpp queues them. Internal to src/training.
//
// Pointers are device memory; flat buffers have the layout of ParameterTable. Nothing depends on the device's size or
// speed: the same bits on every GPU, and for AdamW those of the CPU where the clipping factor is the same.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace evenkeel {

// What the norm leaves for the kernels behind it; the host reads it once a step.
struct GradientNorm {
  double norm;     // of the whole gradient, before it is clipped
  float factor;    // on every gradient, clips it
  int32_t finite;  // 0: nothing may change
};

// The sum of squares in FP64 (a square of a float is exact there), in two stages of fixed order: the part of every
// kNormBlock values (a block of threads, a tree over its threads' own sums of 32), then one block of threads over all
// parts. Parts depend on nothing but their own values, and parts of zero at the end change nothing. So ranks that each
// make those of their slice have the bits of one that makes them all. The relative error of the sum is below
// (parts / 1024 + 50) 2^-53.
inline constexpr int64_t kNormBlock = 8192;
constexpr int64_t norm_parts(int64_t count) { return (count + kNormBlock - 1) / kNormBlock; }
// gradients: (count), a multiple of kFlagSpan; parts: (norm_parts(count)).
void square_sums(const float* gradients, int64_t count, double* parts, cudaStream_t stream);
// parts: (count), of the whole gradient.
void gradient_norm(const double* parts, int64_t count, float clip, GradientNorm* norm, cudaStream_t stream);

// One byte for every kFlagSpan floats of the flat buffer: tensors start at multiples of it.
inline constexpr int64_t kFlagSpan = 64;
inline constexpr uint8_t kDecays = 1, kIsMuons = 2;

struct AdamwStep {
  float *parameters, *first, *second;  // (count)
  const float* gradients;              // (count)
  const uint8_t* flags;                // (count / kFlagSpan)
  int64_t count;                       // a multiple of kFlagSpan
  float beta1, beta2, epsilon;
  float rate;          // lr / (1 - beta1^t)
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
  float keep;          // 1 - lr weight_decay, where a tensor decays
};
// All of the buffer, or a slice of it, in one pass, but for what is Muon's: 28 bytes a parameter.
void adamw(const AdamwStep& step, const GradientNorm* norm, cudaStream_t stream);

// Matrices of one shape, anywhere in the flat buffer: value (i, j) of matrix b lies at starts[b] + i stride + j.
struct MuonGroup {
  int64_t rows, columns, stride;
  int64_t batch;          // matrices
  const int64_t* starts;  // (batch)
};
// momentum = mu momentum + g; x = g + mu momentum. x: (batch, rows, columns).
void muon_momentum(const MuonGroup& group, const float* gradients, float* momentum, float mu,
                   const GradientNorm* norm, float* x, cudaStream_t stream);
// Every matrix of x over its own norm; exact zero stays zero. parts: (batch, kMatrixParts).
inline constexpr int kMatrixParts = 16;
void muon_normalise(const MuonGroup& group, float* x, double* parts, cudaStream_t stream);
// parameters = keep parameters - scale x.
void muon_apply(const MuonGroup& group, float* parameters, float keep, float scale, const GradientNorm* norm,
                const float* x, cudaStream_t stream);

}  // namespace evenkeel
