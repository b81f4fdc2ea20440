// The inner loops of CPU attention: products and lane-by-lane passes over one tile. Internal to
// src/attention.
//
// Tiles are laid out with the query row in the lane: score (i, j) is tile[j * stride + i]. So row statistics
// (maximum, sum) are vertical: they add up in the order of the keys, whatever the vector width, and no
// product needs a transposed copy of the probabilities.
//
// `columns` is a multiple of kColumnStep everywhere; the memory between is the caller's padding.
#pragma once

#include <stdint.h>

#include "numerics/cpu.h"

namespace evenkeel {

struct AttentionKernels {
  // C[m][n] = (accumulate ? C[m][n] : 0) + sum_k A[m][k] B[k][n], one fused multiply-add after another with k ascending.
  // Where it does not accumulate, the result is multiplied by `scale`. A(m, k) = a[m * a_row + k * a_column].
  void (*multiply)(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
                   int64_t a_column, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                   bool accumulate, float scale);
  // running[i] = max(running[i], max_j x[j][i]); a NaN is passed over.
  void (*column_max)(const float* x, int64_t rows, int64_t columns, int64_t stride, float* running);
  // x[j][i] = exp(x[j][i] - shift[i]), and sum[i] += x[j][i], j ascending.
  void (*exp_shifted)(float* x, int64_t rows, int64_t columns, int64_t stride, const float* shift,
                      float* sum);
  // x[j][i] = exp(x[j][i]) 2^-power[i], power a whole number: changing it by n changes x by exactly 2^-n.
  void (*exp_scaled)(float* x, int64_t rows, int64_t columns, int64_t stride, const float* power);
  void (*subtract)(float* x, int64_t rows, int64_t columns, int64_t stride, const float* shift);
  void (*column_sum)(const float* x, int64_t rows, int64_t columns, int64_t stride, float* sum);
  void (*scale_columns)(float* x, int64_t rows, int64_t columns, int64_t stride, const float* factor);
  // out[j][i] = x[j][i] / divisor[i].
  void (*divide_columns)(float* out, const float* x, int64_t rows, int64_t columns, int64_t stride,
                         const float* divisor);
  // sum[i] = fma(x[j][i], y[j][i], sum[i]), j ascending.
  void (*column_dot)(const float* x, const float* y, int64_t rows, int64_t columns, int64_t stride,
                     float* sum);
  // dp[j][i] = (scale p[j][i]) (dp[j][i] - delta[i]).
  void (*score_gradient)(const float* p, float* dp, int64_t rows, int64_t columns, int64_t stride,
                         const float* delta, float scale);
  // target[c * target_stride + r] = source[r * source_stride + c].
  void (*transpose)(float* target, int64_t target_stride, const float* source, int64_t source_stride,
                    int64_t rows, int64_t columns);
  // Fused multiply-adds a second of one thread, for the bench: independent chains in registers. Returns the
  // count of scalar multiply-adds done in `rounds` rounds; *sink keeps the compiler from dropping them.
  int64_t (*fma_rounds)(int64_t rounds, float* sink);
};

inline constexpr int64_t kColumnStep = 16;

const AttentionKernels& attention_kernels();  // of this machine's CPU target

EVENKEEL_DECLARE_BY_TARGET(const AttentionKernels, kAttentionKernels);

}  // namespace evenkeel
