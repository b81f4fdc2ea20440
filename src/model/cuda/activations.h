// What a call of a model on a GPU keeps: pieces of one allocation that calls of all sizes share. Internal to src/model.
#pragma once

#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "attention/attention_problem.h"
#include "gpu/cuda/work_stream.h"
#include "gpu/device_memory.h"
#include "model/cuda/device_layers.h"
#include "model/model.h"

namespace evenkeel::device {

inline constexpr int64_t kInputHeader = Carver::kAlignment / sizeof(int32_t);  // of input: the step, alone

// Of one sum over rows: its parts by blocks, until the end of the step.
struct LayerSums {
  float *ln1_gain, *ln1_bias, *qkv_bias, *q_gain, *k_gain, *sinks, *gate_bias, *proj_bias, *ln2_gain,
      *ln2_bias, *fc_bias, *out_bias;
};

// What a layer's forward pass keeps for its backward pass. `void*`: of the type of activations.
struct LayerMemory {
  float* x;                  // (N, C): the residual stream as it comes in
  void* ln1;                 // (N, C)
  float *mean1, *rstd1;      // (N); an RMS norm has no mean
  void* qkv;                 // (N, qkv width)
  void* qk;                  // (N, (H + G) D): q and k behind qk_norm and rotary positions
  float* qk_rstd;            // (N, H + G): qk_norm
  void* o;                   // (N, H D)
  float* lse;                // (B, H, T)
  int32_t* ties;             // (B, H, T), on request
  float *residual, *delta;   // (B, H, T), on request
  void *gate, *gated;        // (N, H D): gated_attention
  float* middle;             // (N, C): the residual stream behind attention
  void* ln2;                 // (N, C)
  float *mean2, *rstd2;      // (N)
  void *hidden, *activated;  // (N, fc width), (N, hidden width): what GELU or SwiGLU reads and gives
  LayerSums sums;
};

// All of a call's memory, for one B and T: pieces of one allocation that all sizes share.
struct Activations {
  std::vector<LayerMemory> layers;
  uint32_t* input;  // (1, N, N), the first in a piece of its own: step, tokens, targets
  int32_t *tokens, *targets;
  float* x;            // (N, C): the residual stream behind the last layer
  void* lnf;           // (N, C)
  float *mean, *rstd;  // (N)
  void* logits;        // (N, padded V)
  float* last_logits;  // (V)
  float* losses;       // (N)
  float* dx;           // (N, C): the gradient of the residual stream
  void* dx_operand;    // (N, C): the same in bf16; dx itself in fp32
  void* dnorm;         // (N, C): the gradient of what a norm gave
  float*
      wide;  // (N, hidden width) where GELU is not fused, (N, H D) with a gate: gradients in FP32 on their way
  void *d_o, *dgate;  // (N, H D)
  void* dqkv;         // (N, qkv width)
  void* dactivated;   // (N, hidden width): SwiGLU
  void* dhidden;      // (N, fc width)
  float *lnf_gain_sums, *lnf_bias_sums;
  int32_t* places;                 // (N): sorted by token
  TokenRun* runs;                  // (most_runs)
  TokenParts* token_parts;         // (most_parts)
  float* run_sums;                 // (most parts, C)
  int64_t qkv_stride, row_stride;  // from layer to layer, in elements: of qkv or qk, and of (B, H, T)
};

// What decides the sizes of a model's activations, besides B and T, and where its sums over rows end.
struct ActivationShape {
  const ModelConfig& config;
  const std::vector<LayerOffsets>& offsets;
  int64_t lnf_gain, lnf_bias;  // offsets; -1: no such tensor
  float* gradients;
  TensorType type;
  bool fused_gelu;  // products do GELU themselves

  size_t element_bytes() const { return type == TensorType::bf16 ? 2 : 4; }
};

// Columns of the rows in which attention's q and k lie: of qk, or of qkv.
int64_t attended_width(const ModelConfig& config);

class Arena {
 public:
  // Of one B and T: where everything lies, and the table of sums over rows.
  struct Sized {
    Activations activations;
    DeviceMemory sums;  // BlockSums
    int64_t sum_count, most_columns;
  };

  explicit Arena(const ActivationShape& shape) : shape_(shape) {}

  // Of a call of B sequences of T tokens. `before_move` is called where more memory is needed than there is: every
  // address so far becomes void.
  Sized& room_for(int64_t B, int64_t T, const WorkStream& stream, const std::function<void()>& before_move);

 private:
  Activations carve(int64_t B, int64_t T, Carver& carver, std::vector<BlockSums>& sums) const;

  const ActivationShape shape_;
  DeviceMemory memory_;
  std::map<std::pair<int64_t, int64_t>, Sized> sized_;
};

}  // namespace evenkeel::device
