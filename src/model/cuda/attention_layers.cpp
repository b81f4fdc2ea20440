#include "model/cuda/attention_layers.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/sizes.h"
#include "gpu/cuda/check.h"
#include "gpu/device.h"

namespace evenkeel::device {

FactStream fact_stream() {
  constexpr const char* kVariable = "EVENKEEL_FACT_STREAM";
  const char* const set = std::getenv(kVariable);
  const std::string_view name = set && *set ? set : "second";
  if (name == "second") return FactStream::second;
  if (name == "low") return FactStream::low;
  require(name == "main", "{}: expected second, low or main, got '{}'", kVariable, name);
  return FactStream::main;
}

DeviceTensor AttentionLayers::heads_of(void* data, int64_t first, int64_t row_stride) const {
  return {static_cast<char*>(data) + at(first) * element_bytes(config_.tensor_type()),
          {kind_.T * row_stride, config_.head_size(), row_stride, 1}};
}

AttentionProblem AttentionLayers::problem(int64_t layer) const {
  AttentionProblem problem = model_.attention_problem(layer, kind_.B, kind_.T);
  for (PrecisionPlan& plan : problem.plans) plan.keel *= kind_.gradient_scale();
  problem.slopes = slopes_;
  if (!sinks_.empty()) problem.sinks = {sinks_[at(layer)], at(config_.heads)};
  problem.fact_sequences = kind_.fact_sequences;
  problem.device_step = a_->input;
  problem.aligned = config_.head_size() % 8 == 0;
  return problem;
}

AttentionLayers::LayerCalls AttentionLayers::resolve_layer(int64_t layer) const {
  const CudaDevice device = cuda_device();
  AttentionProblem asked = problem(layer);
  LayerCalls calls{resolve(asked, device), {}};
  if (!kind_.attention_has_facts()) return calls;
  asked.with_facts = true;
  if (calls.train.could_give_facts()) {
    calls.train = resolve(asked, device);
  } else if (!calls.train.has_fact_pass()) {
    // The batch's first sequences, so that their random numbers are the same.
    asked.B = kind_.fact_sequences;
    calls.facts = resolve(asked, device);
  }
  return calls;
}

PassInputs AttentionLayers::inputs(const LayerMemory& m) const {
  const int64_t Q = config_.query_width(), own = attended_width(config_);
  const DeviceTensor v = heads_of(m.qkv, Q + config_.key_width(), config_.qkv_width());
  void* const qk = config_.has_own_qk() ? m.qk : m.qkv;
  return {heads_of(qk, 0, own), heads_of(qk, Q, own), v};
}

ForwardPass AttentionLayers::outputs(int64_t layer, const LayerMemory& m, bool ties) const {
  ForwardPass out;
  out.o = heads_of(m.o, 0, config_.query_width());
  out.lse = m.lse;
  out.saved = memory_.as<char>() + at(layer) * layout_->saved;
  if (ties) out.ties = m.ties;
  return out;
}

// --- Memory

AttentionLayers::Layout AttentionLayers::layout() const {
  Layout layout;
  size_t saved = 0, workspace = 0, second_pass = 0;
  for (int64_t l = 0; l < config_.layers; ++l) {
    const LayerCalls& layer = layout.calls.emplace_back(resolve_layer(l));
    const PassSizes& sizes = layer.train.sizes();
    saved = std::max(saved, sizes.saved), workspace = std::max(workspace, sizes.workspace);
    if (!layer.facts) continue;
    Carver count(nullptr);
    carve_second_pass(*layer.facts, count);
    second_pass = std::max(second_pass, count.used());
  }
  layout.saved = round_up(saved, Carver::kAlignment);
  layout.second_pass = round_up(layout.saved * at(config_.layers) + workspace, Carver::kAlignment);
  layout.bytes = layout.second_pass + second_pass;
  return layout;
}

void AttentionLayers::reserve(size_t bytes) {
  memory_ = {};  // the old one goes before the new one comes
  memory_ = DeviceMemory(bytes);
}

// --- Both passes

void AttentionLayers::forward(int64_t layer) {
  const LayerMemory& m = a_->layers[at(layer)];
  const AttentionCall& call = calls(layer).train;
  ForwardPass out = outputs(layer, m, call.problem().with_facts && kind_.tie_facts);
  if (finds_scores()) {
    if (layer == 0)
      check_cuda(cudaMemsetAsync(scores_.data(), 0xff, scores_.bytes(), stream_), "clearing facts of scores");
    out.largest_score = scores_.as<float>() + layer * config_.heads;
    out.largest_row_mean = out.largest_score + config_.layers * config_.heads;
  }
  call.forward(inputs(m), out, workspace(), stream_);
}

void AttentionLayers::backward(int64_t layer) {
  const LayerMemory& m = a_->layers[at(layer)];
  const AttentionCall& call = calls(layer).train;
  const int64_t Q = config_.query_width(), K = config_.key_width(), all = config_.qkv_width();
  BackwardPass out;
  out.dq = heads_of(a_->dqkv, 0, all);
  out.dk = heads_of(a_->dqkv, Q, all);
  out.dv = heads_of(a_->dqkv, Q + K, all);
  out.dsinks = m.sums.sinks;
  if (call.problem().with_facts && kind_.residual_facts) {
    out.residual = m.residual;
    out.delta = m.delta;
  }
  const bool fact_pass = kind_.attention_has_facts() && call.has_fact_pass();
  if (fact_pass) out.delta = m.delta;
  const DeviceTensor d_o = heads_of(a_->d_o, 0, Q);
  const ForwardPass saved = outputs(layer, m, false);
  call.backward(inputs(m), d_o, saved, out, workspace(), stream_);
  if (!fact_pass) return;
  call.facts(inputs(m), d_o, saved, {m.delta, m.residual, kind_.tie_facts ? m.ties : nullptr}, fork());
  facts_end();
}

// --- Facts aside: by the kernels that train, or by a second pass of others

const WorkStream& AttentionLayers::fork() {
  if (fact_stream_ == FactStream::main) return stream_;
  forked_.set(stream_);
  forked_.wait_in(second_stream_);
  facts_run_aside_ = true;
  return second_stream_;
}

void AttentionLayers::facts_end() {
  if (facts_run_aside_) joined_.set(second_stream_);
}

AttentionLayers::SecondPass AttentionLayers::carve_second_pass(const AttentionCall& call,
                                                               Carver& carver) const {
  const AttentionProblem& problem = call.problem();
  const PassSizes& sizes = call.sizes();
  const int64_t Q = config_.query_width(), rows = problem.B * problem.T;
  const auto heads = [&] {
    return heads_of(carver.take_bytes(at(rows * Q) * element_bytes(problem.type)), 0, Q);
  };
  SecondPass second{};
  second.forward.o = heads();
  second.forward.lse = carver.take<float>(rows * problem.H);
  second.forward.saved = carver.take_bytes(sizes.saved);
  second.backward.dq = heads();
  second.workspace = carver.take_bytes(sizes.workspace);
  return second;
}

void AttentionLayers::compute_facts_separately(int64_t layer) {
  if (!calls(layer).facts) return;
  const LayerMemory& m = a_->layers[at(layer)];
  const AttentionCall& call = *calls(layer).facts;
  Carver carver(memory_.as<char>() + layout_->second_pass);
  SecondPass second = carve_second_pass(call, carver);
  const WorkStream& stream = fork();
  if (kind_.tie_facts) second.forward.ties = m.ties;
  call.forward(inputs(m), second.forward, second.workspace, stream);
  if (kind_.residual_facts) {
    second.backward.residual = m.residual;
    second.backward.delta = m.delta;
    call.backward(inputs(m), heads_of(a_->d_o, 0, config_.query_width()), second.forward, second.backward,
                  second.workspace, stream);
  }
  facts_end();
}

void AttentionLayers::join_facts() {
  if (std::exchange(facts_run_aside_, false)) joined_.wait_in(stream_);
}

}  // namespace evenkeel::device
