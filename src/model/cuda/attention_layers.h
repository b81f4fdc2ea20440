// Attention of all layers of a model on a GPU: its problems, its memory, its facts. Internal to src/model.
//
// Facts change no bit of a step. The any-plan kernels return them beside their outputs. The Hopper kernels have a pass of
// their own for them, behind the other two. Where a family has neither (or the Hopper kernels not for this problem), the
// any-plan kernels compute attention of their layers a second time; these facts are then of the plan's arithmetic, not of the
// kernels that train. Either runs on a stream of its own, of the sequences that are asked for, and nothing waits for it. The
// log-sum-exps, and the largest scores and row means, are those of the kernels that train.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "attention/attention_call.h"
#include "gpu/cuda/stream_mark.h"
#include "gpu/cuda/work_stream.h"
#include "gpu/device_memory.h"
#include "model/cuda/activations.h"
#include "model/cuda/call_kind.h"
#include "model/model.h"

namespace evenkeel::device {

// Where facts that are computed separately run: $EVENKEEL_FACT_STREAM, `second` (the default), `low` or `main`. Second: on a
// stream of their own. Low: there, and the kernels of the main stream come first. Main: on the main stream.
enum class FactStream { second, low, main };
FactStream fact_stream();

class AttentionLayers {
 public:
  AttentionLayers(const Model& model, WorkStream& stream)
      : model_(model),
        config_(model.config()),
        stream_(stream),
        scores_(static_cast<size_t>(2 * config_.layers * config_.heads) * sizeof(float)) {}
  ~AttentionLayers() { cudaStreamSynchronize(second_stream_); }
  // In device memory: slopes (H), or empty; the sinks of each layer, (L) pointers to (H), or empty.
  void set_head_values(std::span<const float> slopes, std::vector<const float*> sinks) {
    slopes_ = slopes, sinks_ = std::move(sinks);
  }

  // What runs in one layer. A second pass computes the facts that the kernels which train do not return.
  struct LayerCalls {
    AttentionCall train;
    std::optional<AttentionCall> facts;
  };
  // --- What a kind of call runs, resolved once, and its memory: `saved` bytes for each layer, the workspace, and from
  // `second_pass` on what facts that are computed separately need.
  struct Layout {
    std::vector<LayerCalls> calls;  // (L)
    size_t saved = 0, second_pass = 0, bytes = 0;
  };
  void start(const CallKind& kind, const Activations& activations) { kind_ = kind, a_ = &activations; }
  Layout layout() const;  // of the call that was started
  size_t bytes() const { return memory_.bytes(); }
  void reserve(size_t bytes);  // every address so far becomes void
  // The layout must outlive the call.
  void use(const Layout& layout) { layout_ = &layout, facts_run_aside_ = false; }

  // --- The call that was started
  void forward(int64_t layer);
  void backward(int64_t layer);  // d_o to dqkv
  // Queues the facts that the layer's own kernels do not return. REQUIRES: its d_o is there.
  void compute_facts_separately(int64_t layer);
  // What follows on the stream waits for the facts that are computed separately.
  void join_facts();

  // (L, H) each, found by the forward passes, or null: they were not asked for, or not all layers' kernels find them.
  const float* largest_scores() const { return finds_scores() ? scores_.as<float>() : nullptr; }
  const float* largest_row_means() const {
    return finds_scores() ? scores_.as<float>() + config_.layers * config_.heads : nullptr;
  }

  PassInputs inputs(const LayerMemory& m) const;
  AttentionProblem problem(int64_t layer) const;  // as the call runs it, with a plan for each head

 private:
  // A second pass, for facts alone: nobody reads its other outputs.
  struct SecondPass {
    ForwardPass forward;
    BackwardPass backward;
    void* workspace;
  };

  DeviceTensor heads_of(void* data, int64_t first, int64_t row_stride) const;
  LayerCalls resolve_layer(int64_t layer) const;
  ForwardPass outputs(int64_t layer, const LayerMemory& m, bool ties) const;
  void* workspace() const {
    return memory_.as<char>() + static_cast<size_t>(config_.layers) * layout_->saved;
  }
  bool finds_scores() const {
    return kind_.score_facts && std::all_of(layout_->calls.begin(), layout_->calls.end(),
                                            [](const LayerCalls& c) { return c.train.gives_score_facts(); });
  }
  const LayerCalls& calls(int64_t layer) const { return layout_->calls[static_cast<size_t>(layer)]; }
  // Where facts go on from here, beside the main stream or on it; and their end, for join_facts.
  const WorkStream& fork();
  void facts_end();
  SecondPass carve_second_pass(const AttentionCall& call, Carver& carver) const;

  const Model& model_;
  const ModelConfig& config_;
  const FactStream fact_stream_ = fact_stream();
  WorkStream& stream_;
  WorkStream second_stream_;
  std::span<const float> slopes_;
  std::vector<const float*> sinks_;
  StreamMark forked_, joined_;
  DeviceMemory memory_;
  DeviceMemory scores_;  // largest scores, largest row means: (L, H) each

  // Of the call at hand.
  CallKind kind_{};
  const Activations* a_ = nullptr;
  const Layout* layout_ = nullptr;
  bool facts_run_aside_ = false;
};

}  // namespace evenkeel::device
