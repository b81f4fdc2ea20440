// The layers of a model on the CPU, as pairs of a forward and a backward pass over plain arrays. All threads;
// the same bits for any number of them.
//
// Everything is FP32 and contiguous, row after row, where nothing else is said. Sizes: N rows (tokens of all
// sequences), C features, B sequences of T tokens, H heads of D features, V tokens of the vocabulary.
// Gradients of parameters are added to what is there. Rows may come in parts, in order. Parameters' gradients get
// the same bits as from all rows at once where all parts but the last have a multiple of kProductBlock rows
// (the embedding's alone need all rows in one call).
#pragma once

#include <cstdint>
#include <vector>

#include "numerics/rounding.h"

namespace evenkeel {

// x[b][t] = wte[tokens[b][t]] + wpe[t]; x (B, T, C), wte (V, C), wpe (at least T, C; nullptr: 0).
void embedding_forward(const int32_t* tokens, const float* wte, const float* wpe, int64_t B, int64_t T,
                       int64_t C, float* x);
// A row of dwte is summed over its token's places in ascending order. dwpe may be nullptr.
void embedding_backward(const int32_t* tokens, const float* dx, int64_t B, int64_t T, int64_t C, int64_t V,
                        float* dwte, float* dwpe);

// y = (x - mean) / sqrt(variance + epsilon) * gain + bias; bias (C) may be nullptr; mean and rstd (N) are
// kept.
void layernorm_forward(const float* x, const float* gain, const float* bias, int64_t N, int64_t C, float* y,
                       float* mean, float* rstd);
// dx += the gradient, as the residual stream needs it.
void layernorm_backward(const float* dy, const float* x, const float* gain, const float* mean,
                        const float* rstd, int64_t N, int64_t C, float* dx, float* dgain, float* dbias);

// y = x / sqrt(mean x^2 + epsilon) * gain; rstd (N) is kept.
void rms_norm_forward(const float* x, const float* gain, float epsilon, int64_t N, int64_t C, float* y,
                      float* rstd);
// dx += the gradient, as the residual stream needs it.
void rms_norm_backward(const float* dy, const float* x, const float* gain, const float* rstd, int64_t N,
                       int64_t C, float* dx, float* dgain);

// The same for heads. Each of N rows holds H groups of D features, rows x_stride apart. Per group
// y = x / sqrt(mean x^2 + epsilon) * gain. The heads share the gain (D). The rstd (N, H) is kept.
void head_norm_forward(const float* x, int64_t x_stride, const float* gain, float epsilon, int64_t N,
                       int64_t H, int64_t D, float* y, int64_t y_stride, float* rstd);
void head_norm_backward(const float* dy, int64_t dy_stride, const float* x, int64_t x_stride,
                        const float* gain, const float* rstd, int64_t N, int64_t H, int64_t D, float* dx,
                        int64_t dx_stride,
                        float* dgain);  // dx may be dy

// Rotary positions. turns (T, D / 2, 2): cosine and sine of t base^(-2 p / D), place t, pair p; computed in FP64.
std::vector<float> rotary_turns(float base, int64_t T, int64_t D);
// Row n is place n % T and holds H heads of D features, rows x_stride apart. Each pair (a, b) of features becomes
// (a cos - b sin, a sin + b cos): features p and p + D / 2, or 2 p and 2 p + 1 where neighbours are paired.
// y may be x.
void rotary_forward(const float* x, int64_t x_stride, const float* turns, bool neighbours, int64_t N,
                    int64_t T, int64_t H, int64_t D, float* y, int64_t y_stride);
// The turn back, in place: dy becomes dx.
void rotary_backward(float* dy, int64_t stride, const float* turns, bool neighbours, int64_t N, int64_t T,
                     int64_t H, int64_t D);

// y = residual + x w + bias: x (N, in), w (in, out) as Hugging Face's Conv1D keeps it, y and residual (N,
// out). bias and residual may be nullptr.
void linear_forward(const float* x, const float* w, const float* bias, const float* residual, int64_t N,
                    int64_t in, int64_t out, float* y);
// dx = dy w^T (nullptr: not wanted); with add_dx it is added. dw += x^T dy; dbias += column sums of dy.
void linear_backward(const float* dy, const float* x, const float* w, int64_t N, int64_t in, int64_t out,
                     float* dx, float* dw, float* dbias, bool add_dx = false);

// GPT-2's GELU, the tanh form; keeps its slope, which may take the place of x.
void gelu_forward(const float* x, float* y, float* slope, int64_t count);
void gelu_backward(const float* slope, float* dy, int64_t count);  // dy becomes dx

// y = gate sigmoid(gate) up: x (N, 2 F) holds gate and up side by side, y (N, F).
void swiglu_forward(const float* x, int64_t N, int64_t F, float* y);
void swiglu_backward(const float* x, const float* dy, int64_t N, int64_t F, float* dx);  // dx (N, 2 F)

// y = x sigmoid(gate).
void gate_forward(const float* x, const float* gate, float* y, int64_t count);
void gate_backward(const float* x, const float* gate, const float* dy, float* dx, float* dgate,
                   int64_t count);  // dx may be dy

// The output layer and its loss. Logits x w^T exist for some rows at a time, and become their own gradient in
// place.
struct Classifier {
  const float* x;          // (N, C)
  const float* w;          // (V, C)
  const int32_t* targets;  // (N)
  float* losses;           // (N), written: cross-entropies
  int64_t N, C, V;
  // The backward pass goes along where these are given: of the sum of losses times gradient_scale.
  float gradient_scale = 1;
  float* dx = nullptr;  // (N, C), overwritten
  float* dw = nullptr;  // (V, C), added to
  Rounding operands;    // of dlogits as an operand of dx and dw
};
void classifier(const Classifier& c);

// x rounded in place.
void round_operand(const Rounding& rounding, float* x, int64_t count);
void round_operand(const Rounding& rounding, float* target, const float* source, int64_t count);

}  // namespace evenkeel
