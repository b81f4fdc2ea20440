// The layers of a model on a GPU besides products and attention: the passes over rows of layers.h, which is their
// definition, on device memory. Queued on a stream; the same bits every time. Internal to src/model.
//
// Sizes: N rows (tokens of all sequences), C features, B sequences of T tokens, H heads of D features, V tokens of
// the vocabulary. `type` is that of activations (bf16 or FP32). The residual stream, its gradient, parameters and
// sums are FP32. Arrays are contiguous and start at multiples of 16 bytes where nothing else is said.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/attention_problem.h"

namespace evenkeel::device {

inline constexpr int64_t kLargestWidth =
    2048;  // of a LayerNorm of any width; four times that of a multiple of 4

// What blocks of rows add to one vector, which waits for add_sums: parts (blocks, columns), total (columns).
struct BlockSums {
  const float* parts;
  float* total;
  int32_t blocks, columns;
};
int64_t sum_blocks(int64_t rows);  // of every sum over rows below
// total = the sum of its parts, or += where `add`, for `count` of them. sums: device memory; most_columns: of any.
void add_sums(const BlockSums* sums, int64_t count, int64_t most_columns, bool add, cudaStream_t stream);

// x[b][t] = wte[tokens[b][t]] + wpe[t]: x (N, C); wpe may be nullptr. Moves 4 N C bytes, and reads as many.
void embedding_forward(const int32_t* tokens, const float* wte, const float* wpe, int64_t N, int64_t T,
                       int64_t C, float* x, cudaStream_t stream);
// dwpe[t] += sum over sequences of dx[b][t].
void position_backward(const float* dx, int64_t B, int64_t T, int64_t C, float* dwpe, cudaStream_t stream);

// dwte is summed by runs: up to kRunPlaces places of one token, ascending. A token's only run is added to its
// row of dwte at once. Other runs go to rows of `parts`, which follow one another for a token. They are then
// added up in order.
inline constexpr int kRunPlaces = 32;
struct TokenRun {
  int32_t token, first, count;  // places[first ... first + count)
  int32_t part;                 // a row of parts, or -1
};
struct TokenParts {
  int32_t token, first, count;  // rows of parts
};
// The most that N places of tokens below V can have: runs, and tokens of several runs.
constexpr int64_t most_runs(int64_t N, int64_t V) { return (N < V ? N : V) + N / kRunPlaces + 1; }
constexpr int64_t most_split_tokens(int64_t N) { return N / kRunPlaces + 1; }
void token_backward(const float* dx, const int32_t* places, const TokenRun* runs, int64_t run_count,
                    const TokenParts* tokens, int64_t token_count, float* parts, int64_t C, float* dwte,
                    cudaStream_t stream);

// y = (x - mean) rstd gain + bias: reads 4 N C bytes, writes 2 N C (bf16). bias may be nullptr.
void layernorm_forward(const float* x, const float* gain, const float* bias, int64_t N, int64_t C,
                       TensorType type, void* y, float* mean, float* rstd, cudaStream_t stream);
// dx = dx_in + the gradient (dx_in nullptr: 0; may be dx), and the same as an operand in bf16 (nullptr: not
// wanted). gain_parts, bias_parts (nullptr: no bias): (sum_blocks(N), C). Reads 10 N C bytes (dy of bf16),
// writes 6 N C.
void layernorm_backward(const void* dy, TensorType dy_type, const float* x, const float* gain,
                        const float* mean, const float* rstd, int64_t N, int64_t C, const float* dx_in,
                        float* dx, void* dx_operand, float* gain_parts, float* bias_parts,
                        cudaStream_t stream);

// y = x rstd gain with rstd = 1 / sqrt(mean x^2 + epsilon), and its gradient; otherwise as the LayerNorm's.
void rms_norm_forward(const float* x, const float* gain, float epsilon, int64_t N, int64_t C, TensorType type,
                      void* y, float* rstd, cudaStream_t stream);
void rms_norm_backward(const void* dy, TensorType dy_type, const float* x, const float* gain,
                       const float* rstd, int64_t N, int64_t C, const float* dx_in, float* dx,
                       void* dx_operand, float* gain_parts, cudaStream_t stream);

// q and k of the packed qkv (N, H + 2 G, D), each head over its root mean square, times its gain (D): qk (N, H + G,
// D); rstd (N, H + G).
void head_norm_forward(const void* qkv, const float* q_gain, const float* k_gain, float epsilon, int64_t N,
                       int64_t H, int64_t G, int64_t D, TensorType type, void* qk, float* rstd,
                       cudaStream_t stream);
// dqkv's q and k come in as the gradients of qk and leave as those of qkv. q_parts, k_parts: (sum_blocks(N), D).
void head_norm_backward(void* dqkv, const void* qkv, const float* q_gain, const float* k_gain,
                        const float* rstd, int64_t N, int64_t H, int64_t G, int64_t D, TensorType type,
                        float* q_parts, float* k_parts, cudaStream_t stream);

// Rotary positions (layers.h) of the first `heads` heads of each row, forward or back; turns (at least T, D / 2, 2) in
// FP32. y may be x.
void rotary(const void* x, int64_t x_stride, const float* turns, bool neighbours, bool back, int64_t N,
            int64_t T, int64_t heads, int64_t D, TensorType type, void* y, int64_t y_stride,
            cudaStream_t stream);

// y = gate sigmoid(gate) up: x (N, 2 F) holds gate and up side by side, y (N, F); and its gradient.
void swiglu_forward(const void* x, int64_t N, int64_t F, TensorType type, void* y, cudaStream_t stream);
void swiglu_backward(const void* x, const void* dy, int64_t N, int64_t F, TensorType type, void* dx,
                     cudaStream_t stream);

// y = GELU(x), and dx = dy GELU'(x) with dy in FP32; where the product does not do it itself.
void gelu_forward(const void* x, int64_t count, TensorType type, void* y, cudaStream_t stream);
void gelu_backward(const float* dy, const void* x, int64_t count, TensorType type, void* dx,
                   cudaStream_t stream);

// y = x sigmoid(gate); dx = dy sigmoid(gate) and dgate = dy x sigmoid'(gate), with dy in FP32.
void gate_forward(const void* x, const void* gate, int64_t count, TensorType type, void* y,
                  cudaStream_t stream);
void gate_backward(const float* dy, const void* x, const void* gate, int64_t count, TensorType type, void* dx,
                   void* dgate, cudaStream_t stream);

// Column sums of x (N, columns) by blocks: parts (sum_blocks(N), columns).
void column_sums(const void* x, int64_t N, int64_t columns, TensorType type, float* parts,
                 cudaStream_t stream);

// losses[n] = log sum exp(logits[n]) - logits[n][target]; logits (N, V), rows `stride` apart, a multiple of 8.
// With gradients, a row becomes (softmax - onehot) scale, and zero from V to stride. Every logit is read once and
// written once where two rows fit into shared memory (57,344 of BF16 on Hopper), and read twice otherwise.
void cross_entropy(void* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride,
                   TensorType type, bool gradients, float scale, float* losses, cudaStream_t stream);
// mean = the mean of losses (N), summed in FP64 in a fixed order.
void mean_loss(const float* losses, int64_t N, double* mean, cudaStream_t stream);

// FP32 to bf16, to nearest even.
void round_to_bf16(const float* from, int64_t count, void* to, cudaStream_t stream);

// w (C, 3 H D), bias (3 H D) or nullptr: the columns of q and k of head h times factors[h].
void scale_query_key(float* w, float* bias, const float* factors, int64_t C, int64_t H, int64_t D,
                     cudaStream_t stream);

}  // namespace evenkeel::device
