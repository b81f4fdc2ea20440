// What HeadFacts are made of, reduced on the GPU: all layers and heads in one go, after the backward pass.
// Internal to src/model.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/attention_problem.h"
#include "model/model.h"

namespace evenkeel::device {

// Of all layers: what attention was given and what it left.
struct FactInputs {
  int64_t L, B, H, G, T, D;
  TensorType type;
  float scale;        // of scores
  const void *q, *k;  // (L, B, T, H, D) and (L, B, T, G, D) by strides, in elements; heads are D apart
  int64_t layer_stride, row_stride;
  int64_t row_layer_stride;  // of what follows, (L, B, H, T), in elements
  const float* lse;
  // (L, H) each, as ForwardPass has them, or null: not found yet.
  const float *largest_score, *largest_row_mean;
  int64_t fact_sequences;         // the first so many of B, which what follows is of
  const int32_t* ties;            // nullptr: not asked for
  const float *residual, *delta;  // the same
};

// sums: (L, H), written. With `scores`, the largest score and row mean too. Where `in` does not have them, they cost one
// more pass over q and k on the tensor cores, 2 B H T^2 D operations a layer.
void head_facts(const FactInputs& in, bool scores, FactSums* sums, cudaStream_t stream);

}  // namespace evenkeel::device
