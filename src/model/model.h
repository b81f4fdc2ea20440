// A model: one step, its facts and its captures. The same interface for every backend and every description
// (model_config.h); model_cpu.cpp is the CPU's, and the definition; cuda/model_cuda.cpp is the GPU's.
//
// One alphabet of sizes: B sequences of T tokens (N = B T), C width, H heads of D features, L layers,
// V vocabulary. Residual stream, norms and master weights are FP32; attention follows a precision plan
// per layer and head.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "attention/attention_problem.h"
#include "base/tensor.h"
#include "gpu/phase_time.h"
#include "model/model_config.h"

namespace evenkeel {

// Host memory, (B, T) each. Tokens and targets lie in [0, V).
struct Batch {
  int64_t B, T;
  std::span<const int32_t> tokens, targets;
};

// The input of a step besides its batch.
struct StepContext {
  uint32_t step = 0;            // of the random numbers of stochastic sites
  int64_t first_sequence = 0;   // the same: the batch's first sequence is this one of the step
  bool score_facts = false;     // HeadFacts' scores; log-sum-exps come with any of the facts
  bool tie_facts = false;       // its ties
  bool residual_facts = false;  // its zero-sum residual
  // Ties and residuals, which cost time, are of the first so many sequences of the batch; 0: of all. No fact that is asked
  // for changes a bit of the step.
  int64_t fact_sequences = 0;
  // Model::captured, of the first so many sequences of the batch (or all of them), of each the first so many rows (0: all;
  // as no row sees a later one, they are a whole attention of their own); of all layers, or of one.
  int64_t capture_sequences = 0, capture_rows = 0;
  int64_t capture_layer = -1;
};

// What one layer's attention read and wrote in one forward_backward, in host memory.
struct LayerCapture {
  Tensor<float> x;       // (B, 1, T, C): what W_Q, W_K and W_V met
  Tensor<float> q;       // (B, H, T, D): as attention read it, behind qk_norm and rotary positions
  Tensor<float> k, v;    // (B, G, T, D): the same
  Tensor<float> o, d_o;  // (B, H, T, D): O as the next product or the gate read it, and its gradient
  Tensor<float> lse;     // (B, H, T, 1)
  std::vector<PrecisionPlan> plans;  // (H): as they ran, keel times the scale of the gradients
};

// One head of one layer in the last forward_backward. NaN where it was not asked for.
struct HeadFacts {
  float largest_score;     // of a q.k, before softcap and roundings
  float largest_row_mean;  // largest |mean of a row's scores|: the part that softmax cannot see
  float mean_lse;          // of L
  float largest_lse;       // of |L|
  float key_share;         // |mean key|^2 over the mean |key|^2: how much of the keys they all share
  float tied_rows;  // share of rows where another score ties with the largest, by the plan's arithmetic
  // Of rho = sum_j dS_ij / a (attention.h): mean over rows, its standard error, root mean square; and
  // delta's.
  double residual_mean, residual_error, residual_rms, delta_rms;

  friend bool operator==(const HeadFacts&, const HeadFacts&) = default;
};
extern const HeadFacts kNoFacts;  // all NaN

// A sequence has a share of its own, and the mean is told: so few say enough, and cost next to nothing.
inline constexpr int64_t kKeySequences = 4;

// What HeadFacts are made of: sums over the rows of all sequences.
struct FactSums {
  float largest_score = -std::numeric_limits<float>::infinity(), largest_row_mean = 0, largest_lse = 0;
  int64_t rows = 0, tied = 0;
  int64_t sampled = 0;        // rows that ties and residuals are of; 0: all
  int64_t key_sequences = 0;  // that key_share is a sum over: the batch's first kKeySequences at most
  double lse = 0, key_share = 0, residual = 0, residual_squares = 0, delta_squares = 0;
};
HeadFacts facts_of(const FactSums& sums, const StepContext& context);  // what the context asks for

// Where a layer's tensors lie in the flat buffer; -1: no such tensor.
struct LayerOffsets {
  int64_t ln1_gain, ln1_bias, qkv, qkv_bias, q_gain, k_gain, sinks, gate, gate_bias, proj, proj_bias,
      ln2_gain, ln2_bias, fc, fc_bias, out, out_bias;
};

class Model {
 public:
  explicit Model(const ModelConfig& config);
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const { return config_; }
  const ParameterTable& table() const { return table_; }

  // Holds from the next step on. keel is the z of z L^2, a mean over tokens as the loss is. It acts on
  // gradients alone. Throws std::invalid_argument where it names layers or heads that are not there.
  void set_plan(const ScopedPlan& plan);
  const PrecisionPlan& plan(int64_t layer, int64_t head) const;
  // What a layer asks of attention for B sequences of T tokens: sizes, type, mask, plans, slopes. The call adds its own step,
  // facts and scale of keel, and the values of the sinks, which are 0 here. Slopes and sinks: in host memory.
  AttentionProblem attention_problem(int64_t layer, int64_t B, int64_t T) const;

  // Flat buffers of table().size() floats in the backend's own memory (host or device), for its optimiser.
  // Whoever writes to parameters() calls parameters_changed() before the next pass.
  virtual float* parameters() = 0;
  virtual float* gradients() = 0;
  virtual void parameters_changed() = 0;
  // The cudaStream_t in whose order the backend works, so that a device optimiser can queue behind it; nullptr
  // on the CPU.
  virtual void* stream() const { return nullptr; }
  // The same by copy, for the host; all of table().size() floats.
  virtual void read_parameters(std::span<float> to) const = 0;
  virtual void write_parameters(std::span<const float> from) = 0;
  virtual void read_gradients(std::span<float> to) const = 0;
  virtual void write_gradients(std::span<const float> from) = 0;
  virtual void zero_gradients() = 0;
  // Host memory of table().size() floats, of the kind that read_parameters fills fastest.
  virtual std::shared_ptr<float> make_host_buffer() const;

  // Adds loss_scale times the gradient of the mean cross-entropy to the gradients (1 / n for the n parts of
  // an accumulated step) and returns the mean cross-entropy itself.
  virtual double forward_backward(const Batch& batch, float loss_scale, const StepContext& context) = 0;
  virtual double loss(const Batch& batch, const StepContext& context = {}) = 0;
  // Logits (V) of the token that follows these, 1 to `context` of them.
  virtual std::vector<float> logits(std::span<const int32_t> tokens) = 0;

  const std::vector<HeadFacts>& facts() const { return facts_; }  // (L, H)
  // Of a step in several parts: what facts() and apply_qk_clip go by until the next forward_backward.
  void set_facts(std::vector<HeadFacts> facts) { facts_ = std::move(facts); }
  // Of the last forward_backward that was asked for captures, until the next one. DataError where this layer's was not
  // asked for.
  const LayerCapture& captured(int64_t layer) const;
  // All of them (L), not copied: the model's memory for the next ones is what `other` was before.
  void swap_captures(std::vector<LayerCapture>& other);
  // To be called after the optimiser: a head whose largest score s was above config().qk_clip has its W_Q and
  // W_K (and biases) scaled by sqrt(qk_clip / s) each. REQUIRES: the last step had score_facts. Returns how
  // many heads.
  virtual int64_t apply_qk_clip() = 0;

 protected:
  void check_batch(const Batch& batch, bool with_targets) const;
  // Room in captures_ for what the context asks for; of any content.
  void start_captures(const Batch& batch, const StepContext& context);

  const ModelConfig config_;
  const ParameterTable table_;
  std::vector<LayerOffsets> offsets_;               // (L)
  int64_t wte_, wpe_, lnf_gain_, lnf_bias_, head_;  // the same of the rest; head_ is wte_ where it is tied
  std::vector<HeadFacts> facts_;                    // (L, H)
  std::vector<LayerCapture> captures_;              // (L); empty tensors where not asked for
  uint64_t plan_version_ = 0;                       // counts set_plan
  const std::vector<float> slopes_;                 // (H), of ALiBi; else empty

 private:
  std::vector<std::vector<PrecisionPlan>> plans_;  // (L, H)
  const std::vector<float> no_sinks_;              // (H) zeros where heads have sinks; else empty
};

// What apply_qk_clip multiplies W_Q and W_K with: (L, H), 1 for a head that is left alone.
std::vector<float> query_key_factors(const ModelConfig& config, std::span<const HeadFacts> facts);
// apply_qk_clip on parameters in host memory.
int64_t clip_query_key(const ModelConfig& config, const ParameterTable& table,
                       std::span<const HeadFacts> facts, float* parameters);

// Parameters as initialise leaves them.
std::unique_ptr<Model> make_model_cpu(const ModelConfig& config, uint64_t seed);
// The same on the current GPU. DataError where there is none, or no CUDA in this build, or no cuBLASLt.
std::unique_ptr<Model> make_model_cuda(const ModelConfig& config, uint64_t seed);

// Where the time of forward_backward goes on the GPU (the mean of `repeats`), in the order of the first appearance.
// Without graphs, and with a mark of the device's clock before each phase, so that the sum is a little above a real
// step's time. REQUIRES: the model is make_model_cuda's. Adds to its gradients.
std::vector<PhaseTime> time_phases_cuda(Model& model, const Batch& batch, const StepContext& context,
                                        int repeats);

}  // namespace evenkeel
