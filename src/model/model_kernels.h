// The inner loops of the CPU's layers: matrix products and passes over rows. Internal to src/model.
//
// The same bits on every CPU target. Products are chains in the order of the summed index. A sum over a
// row is kSumLanes interleaved partial sums whatever the vector width, added up as a tree.
#pragma once

#include <stdint.h>

#include "numerics/cpu.h"

namespace evenkeel {

// GPT-2's value, and Hugging Face's.
inline constexpr float kLayerNormEpsilon = 1e-5f;
inline constexpr int kSumLanes = 16;

// C = bias + base + A B on one panel of columns; A(m, k) = a[m * a_row + k * a_column].
struct PanelProduct {
  int64_t rows, columns, depth;  // columns <= panel_columns
  const float* a;
  int64_t a_row, a_column;
  const float* panel;  // (depth, panel_columns), as pack_panel made it
  float* c;            // (rows, columns)
  int64_t c_stride;
  const float* bias;  // (columns), or nullptr
  const float* base;  // (rows, columns), or nullptr; may be c
  int64_t base_stride;
};

struct ModelKernels {
  int64_t panel_columns;
  // panel[k][n] = B(k, n) = b[k * b_row + n * b_column] for n < columns, 0 behind. One of the strides is 1.
  void (*pack_panel)(float* panel, const float* b, int64_t b_row, int64_t b_column, int64_t depth,
                     int64_t columns);
  // A sum of products is a chain of fused multiply-adds from 0 with k ascending; then bias, then base are
  // added.
  void (*multiply_panel)(const PanelProduct& p);

  // y = (x - mean) rstd gain + bias for every row; bias may be nullptr.
  void (*layernorm_forward)(const float* x, const float* gain, const float* bias, int64_t rows,
                            int64_t columns, float* y, float* mean, float* rstd);
  // dx += the gradient; dgain and dbias (columns each; dbias may be nullptr) += theirs, rows ascending.
  void (*layernorm_backward)(const float* dy, const float* x, const float* gain, const float* mean,
                             const float* rstd, int64_t rows, int64_t columns, float* dx, float* dgain,
                             float* dbias);
  // y = x rstd gain for every row, with rstd = 1 / sqrt(mean x^2 + epsilon).
  void (*rms_norm_forward)(const float* x, const float* gain, float epsilon, int64_t rows, int64_t columns,
                           float* y, float* rstd);
  // dx += the gradient; dgain (columns) += its own, rows ascending.
  void (*rms_norm_backward)(const float* dy, const float* x, const float* gain, const float* rstd,
                            int64_t rows, int64_t columns, float* dx, float* dgain);
  // y = x s with s = 1 / (1 + exp(-2 u)), u = sqrt(2/pi) (x + 0.044715 x^3): GPT-2's GELU, as 1 + tanh(u) = 2
  // s; and slope = dy/dx, which shares the exponential. slope may be x.
  void (*gelu_forward)(const float* x, float* y, float* slope, int64_t count);
  // y = gate sigmoid(gate) up.
  void (*swiglu_forward)(const float* gate, const float* up, float* y, int64_t count);
  void (*swiglu_backward)(const float* gate, const float* up, const float* dy, float* dgate, float* dup,
                          int64_t count);
  // y = x sigmoid(gate).
  void (*gate_forward)(const float* x, const float* gate, float* y, int64_t count);
  // dx = dy sigmoid(gate), dgate = dy x sigmoid'(gate); dx may be dy.
  void (*gate_backward)(const float* x, const float* gate, const float* dy, float* dx, float* dgate,
                        int64_t count);
  // Returns log sum exp(logits) - logits[target], and leaves (softmax(logits) - onehot(target)) scale.
  float (*cross_entropy)(float* logits, int64_t columns, int64_t target, float scale);
  // sums[n] += x[m][n], m ascending.
  void (*column_sums)(const float* x, int64_t rows, int64_t columns, int64_t stride, float* sums);
  void (*add)(float* x, const float* y, int64_t count);    // x += y
  void (*scale)(float* x, const float* y, int64_t count);  // x *= y
};

const ModelKernels& model_kernels();  // of this machine's CPU target

EVENKEEL_DECLARE_BY_TARGET(const ModelKernels, kModelKernels);

}  // namespace evenkeel
