// A model on a GPU, as model_cpu.cpp defines it. Internal to src/model.
//
// A call copies its batch up, runs one recorded graph, and waits once, for the loss. The first call of its kind
// (sizes, scale, facts, plan) is not recorded: there the products' algorithms are chosen. The second one records.
//
// Besides products and attention, a step of `gpt2` at 64 x 1024 tokens in BF16 moves, with N C = 50 M values:
//   LayerNorm forward    25 x 6 N C bytes        7.5 GB
//   LayerNorm backward   25 x 16 N C            20.1 GB
//   cross-entropy        2 x 2 N V              13.2 GB
//   embedding            5 x 4 N C               1.0 GB
//   operands             6 P                     0.7 GB
// 43 GB in all, 11 ms at 4.0 TB/s. GELU goes along with the products before and behind it; alone it would be
// 24 GB more.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "gpu/cuda/graph.h"
#include "gpu/cuda/pinned_memory.h"
#include "gpu/cuda/work_stream.h"
#include "gpu/device_memory.h"
#include "model/cuda/activations.h"
#include "model/cuda/attention_layers.h"
#include "model/cuda/call_kind.h"
#include "model/cuda/capture_rows.h"
#include "model/cuda/token_runs.h"
#include "model/device_product.h"
#include "model/model.h"

namespace evenkeel::device {

class ModelCuda final : public Model {
 public:
  ModelCuda(const ModelConfig& config, uint64_t seed);
  ~ModelCuda() override { cudaStreamSynchronize(stream_); }

  float* parameters() override { return parameters_.as<float>(); }
  float* gradients() override {
    clear_now();
    return gradients_.as<float>();
  }
  void parameters_changed() override { operands_fresh_ = false; }
  void* stream() const override { return static_cast<cudaStream_t>(stream_); }
  void read_parameters(std::span<float> to) const override { read(parameters_, to); }
  void write_parameters(std::span<const float> from) override {
    write(from, parameters_);
    parameters_changed();
  }
  void read_gradients(std::span<float> to) const override {
    clear_now();
    read(gradients_, to);
  }
  void write_gradients(std::span<const float> from) override {
    write(from, gradients_);
    cleared_ = false;
  }
  // Nothing yet: the next forward_backward writes what it would add to zeros, and clears the rest.
  void zero_gradients() override { cleared_ = true; }
  std::shared_ptr<float> make_host_buffer() const override {
    const auto memory = std::make_shared<PinnedMemory>(parameters_.bytes());
    return {memory, memory->as<float>()};
  }

  double forward_backward(const Batch& batch, float loss_scale, const StepContext& context) override;
  double loss(const Batch& batch, const StepContext& context) override;
  std::vector<float> logits(std::span<const int32_t> tokens) override;
  int64_t apply_qk_clip() override;
  std::vector<PhaseTime> time_phases(const Batch& batch, const StepContext& context, int repeats);

 private:
  // --- Parameters
  bool is_bf16() const { return config_.precision == LinearPrecision::bf16; }
  size_t element_bytes() const { return is_bf16() ? 2 : 4; }
  void read(const DeviceMemory& from, std::span<float> to) const;
  void write(std::span<const float> from, DeviceMemory& to);
  void refresh_operands();
  const float* master(int64_t offset) const {
    return offset < 0 ? nullptr : parameters_.as<float>() + offset;
  }
  // The same as an operand, in the type of activations.
  const void* operand(int64_t offset) const {
    if (offset < 0 || !is_bf16()) return master(offset);
    return operands_.as<uint16_t>() + offset;
  }
  void clear_now() const;  // where zero_gradients() is still owed
  void clear_embeddings();
  float* gradient(int64_t offset) const { return offset < 0 ? nullptr : gradients_.as<float>() + offset; }

  // --- Products: layers.h has their definition. `y_type` of what is not FP32 is that of activations.
  void multiply(const char* phase, const DeviceProduct& product);
  void linear_forward(const char* phase, const void* x, int64_t w, int64_t bias, int64_t in, int64_t out,
                      void* y, TensorType y_type, const float* residual);
  void linear_backward(const char* phase, const void* dy, int64_t w, int64_t in, int64_t out, void* dx,
                       TensorType dx_type, const void* base = nullptr);
  void weight_backward(const char* phase, const void* dy, const void* x, int64_t w, int64_t in, int64_t out);
  void bias_backward(const void* dy, int64_t out, float* sums);

  // --- Both passes
  void forward();
  // A norm of the residual stream, as the configuration has it; backward, dx_in (nullptr: 0) and the gradient go to dx.
  void norm_forward(const float* x, int64_t gain, int64_t bias, void* y, float* mean, float* rstd);
  void norm_backward(const float* x, int64_t gain, const float* mean, const float* rstd, const float* dx_in,
                     void* dx_operand, float* gain_sums, float* bias_sums);
  void layer_forward(int64_t l, float* out);
  void query_key_forward(const LayerMemory& m, const LayerOffsets& w);
  void query_key_backward(const LayerMemory& m, const LayerOffsets& w);
  void mlp_forward(int64_t l, float* out);
  void classify(bool gradients, float gradient_scale);
  void backward(float gradient_scale);
  void mlp_backward(int64_t l);
  void attention_backward(int64_t l);
  double stream_bytes() const { return 4.0 * static_cast<double>(N_ * config_.width); }  // of (N, C) in FP32
  double activation_bytes(int64_t columns) const {
    return static_cast<double>(N_ * columns) * static_cast<double>(element_bytes());
  }

  // --- A call
  void start(const CallKind& kind);  // memory for it, and what is "of the call at hand"
  void stage(const Batch& batch, uint32_t step);
  void run(const CallKind& kind);
  void enqueue(const CallKind& kind);
  void token_backward(std::span<const int32_t> tokens);
  void write_facts(const CallKind& kind);

  const TensorType type_;   // of activations
  const int64_t padded_V_;  // of logits and of all products with the output layer
  const bool fused_gelu_;
  WorkStream stream_;
  DeviceProducts products_;
  DeviceMemory parameters_, gradients_, operands_;
  DeviceMemory turns_;             // (context, D / 2, 2): of rotary positions
  DeviceMemory slopes_on_device_;  // (H): of ALiBi
  bool operands_fresh_ = false;
  mutable bool cleared_ =
      false;  // zero_gradients() was called, and gradients_ still holds what was there before
  Arena arena_;
  AttentionLayers attention_;
  CaptureRows capture_rows_;
  TokenRuns token_runs_;
  DeviceMemory results_;  // OutputHeader, then FactSums (L, H)
  PinnedMemory input_, output_;

  struct Recorded {
    bool done_before = false;
    AttentionLayers::Layout attention;
    Graph graph;
  };
  std::map<CallKind, Recorded> recorded_;

  // Of the call at hand.
  int64_t B_ = 0, T_ = 0, N_ = 0;
  Arena::Sized* at_hand_ = nullptr;
  Activations* a_ = nullptr;
  bool captures_now_ = false;
  bool writes_gradients_ = false;  // other than adds to them
};

}  // namespace evenkeel::device
