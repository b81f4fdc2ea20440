// Attention of all layers of GPT-2 on a GPU: its problems, its memory, its facts. Internal to src/model.
//
// Facts change no bit of a step. The any-plan kernels return them beside their outputs; the Hopper kernels return none,
// so that for their layers the any-plan kernels compute attention a second time, of the sequences that are asked for,
// on a stream of their own (a thirty-second of the batch costs half a percent of a step of `nano`, and nothing waits
// for it). The facts are then those of the plan's arithmetic, not of the order in which the Hopper kernels add; the
// log-sum-exps are the Hopper kernels' own.
#pragma once

#include <functional>
#include <vector>

#include "attention/attention_cuda.h"
#include "gpu/cuda/stream_mark.h"
#include "gpu/cuda/work_stream.h"
#include "gpu/device_memory.h"
#include "model/cuda/activations.h"
#include "model/cuda/call_kind.h"
#include "model/gpt2.h"

namespace evenkeel::device {

class AttentionLayers {
 public:
  using PlansOf = std::function<const std::vector<PrecisionPlan>&(int64_t layer)>;

  AttentionLayers(const Gpt2Config& config, TensorType type, WorkStream& stream, PlansOf plans_of)
      : config_(config), type_(type), stream_(stream), plans_of_(std::move(plans_of)) {}
  ~AttentionLayers() { cudaStreamSynchronize(second_stream_); }

  // --- Memory. A call's is laid out by its kind: `saved` bytes for each layer, the workspace, and from `second_pass` on
  // what facts that are computed separately need.
  struct Layout {
    size_t saved = 0, second_pass = 0, bytes = 0;
  };
  void start(const CallKind& kind, const Activations& activations) { kind_ = kind, a_ = &activations; }
  Layout layout() const;  // of the call that was started
  size_t bytes() const { return memory_.bytes(); }
  void reserve(size_t bytes);  // every address so far becomes void
  void use(const Layout& layout) { layout_ = layout, second_pass_runs_ = false; }

  // --- The call that was started. keel_scale: of the gradients, which keel's gradient has as well
  void forward(int64_t layer);
  void backward(int64_t layer, float keel_scale);  // d_o to dqkv
  // Queues the facts that the layer's own kernels do not return. REQUIRES: its d_o is there.
  void compute_facts_separately(int64_t layer, float keel_scale);
  // What follows on the stream waits for the facts that are computed separately.
  void join_facts();

  CudaInputs inputs(const LayerMemory& m) const;
  std::vector<PrecisionPlan> plans(int64_t layer, float keel_scale) const;  // as they run

 private:
  // A second pass, for facts alone: nobody reads its other outputs.
  struct SecondPass {
    CudaForward forward;
    CudaBackward backward;
    void* workspace;
  };

  size_t element_bytes() const { return type_ == TensorType::bf16 ? 2 : 4; }
  DeviceTensor heads_of(void* data, int64_t first, int64_t row_stride) const;
  CudaAttention problem(int64_t layer, float keel_scale) const;
  CudaForward outputs(int64_t layer, const LayerMemory& m, bool ties) const;
  void* workspace() const { return memory_.as<char>() + static_cast<size_t>(config_.layers) * layout_.saved; }
  // Are facts asked for that the kernels which train this layer do not return?
  bool facts_need_second_pass(int64_t layer) const;
  bool returns_facts(int64_t layer) const {
    return kind_.attention_has_facts() && !facts_need_second_pass(layer);
  }
  CudaAttention second_problem(int64_t layer, float keel_scale) const;
  SecondPass carve_second_pass(const CudaAttention& problem, Carver& carver) const;

  const Gpt2Config& config_;
  const TensorType type_;
  WorkStream& stream_;
  const PlansOf plans_of_;
  WorkStream second_stream_;
  StreamMark forked_, joined_;
  DeviceMemory memory_;

  // Of the call at hand.
  CallKind kind_{};
  const Activations* a_ = nullptr;
  Layout layout_;
  bool second_pass_runs_ = false;
};

}  // namespace evenkeel::device
