#include "model/cuda/attention_layers.h"

#include <algorithm>
#include <utility>

#include "base/sizes.h"
#include "gpu/device.h"

namespace evenkeel::device {

DeviceTensor AttentionLayers::heads_of(void* data, int64_t first, int64_t row_stride) const {
  return {static_cast<char*>(data) + at(first) * element_bytes(),
          {kind_.T * row_stride, config_.head_size(), row_stride, 1}};
}

std::vector<PrecisionPlan> AttentionLayers::plans(int64_t layer, float keel_scale) const {
  std::vector<PrecisionPlan> plans = plans_of_(layer);
  for (PrecisionPlan& plan : plans) plan.keel *= keel_scale;
  return plans;
}

CudaAttention AttentionLayers::problem(int64_t layer, float keel_scale) const {
  CudaAttention problem;
  problem.B = kind_.B, problem.T = problem.N = kind_.T;
  problem.H = problem.G = config_.heads;
  problem.D = config_.head_size();
  problem.type = type_;
  problem.plans = plans(layer, keel_scale);
  problem.softcap = config_.softcap;
  problem.causal = true;
  problem.tile_keys = config_.tile_keys;
  problem.fact_sequences = kind_.fact_sequences;
  problem.layer = static_cast<uint32_t>(layer);
  problem.device_step = a_->input;
  problem.aligned = config_.head_size() % 8 == 0;
  return problem;
}

CudaInputs AttentionLayers::inputs(const LayerMemory& m) const {
  const int64_t C = config_.width;
  const DeviceTensor v = heads_of(m.qkv, 2 * C, 3 * C);
  if (config_.qk_norm) return {heads_of(m.qk, 0, 2 * C), heads_of(m.qk, C, 2 * C), v};
  return {heads_of(m.qkv, 0, 3 * C), heads_of(m.qkv, C, 3 * C), v};
}

CudaForward AttentionLayers::outputs(int64_t layer, const LayerMemory& m, bool ties) const {
  CudaForward out;
  out.o = heads_of(m.o, 0, config_.width);
  out.lse = m.lse;
  out.saved = memory_.as<char>() + at(layer) * layout_.saved;
  if (ties) out.ties = m.ties;
  return out;
}

// --- Memory

AttentionLayers::Layout AttentionLayers::layout() const {
  size_t saved = 0, workspace = 0, second_pass = 0;
  for (int64_t l = 0; l < config_.layers; ++l) {
    const CudaSizes sizes = cuda_attention_sizes(problem(l, 1), returns_facts(l));
    saved = std::max(saved, sizes.saved), workspace = std::max(workspace, sizes.workspace);
    if (!facts_need_second_pass(l)) continue;
    Carver count(nullptr);
    carve_second_pass(second_problem(l, 1), count);
    second_pass = std::max(second_pass, count.used());
  }
  Layout layout;
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
  const bool with_facts = returns_facts(layer);
  attention_forward_cuda(problem(layer, 1), inputs(m), outputs(layer, m, with_facts && kind_.tie_facts),
                         with_facts, workspace(), stream_);
}

void AttentionLayers::backward(int64_t layer, float keel_scale) {
  const LayerMemory& m = a_->layers[at(layer)];
  const int64_t C = config_.width;
  const bool with_facts = returns_facts(layer);
  CudaBackward out;
  out.dq = heads_of(a_->dqkv, 0, 3 * C);
  out.dk = heads_of(a_->dqkv, C, 3 * C);
  out.dv = heads_of(a_->dqkv, 2 * C, 3 * C);
  if (with_facts && kind_.residual_facts) {
    out.residual = m.residual;
    out.delta = m.delta;
  }
  attention_backward_cuda(problem(layer, keel_scale), inputs(m), heads_of(a_->d_o, 0, C),
                          outputs(layer, m, false), out, with_facts, workspace(), stream_);
}

// --- Facts by a second pass

bool AttentionLayers::facts_need_second_pass(int64_t layer) const {
  return kind_.attention_has_facts() &&
         choose_kernel(cuda_device(), problem(layer, 1), /*with_facts=*/false).kernel ==
             AttentionKernel::hopper;
}

// The sequences that are asked for alone. They are the batch's first ones, so that their random numbers are the same.
CudaAttention AttentionLayers::second_problem(int64_t layer, float keel_scale) const {
  CudaAttention second = problem(layer, keel_scale);
  second.B = kind_.fact_sequences;
  return second;
}

AttentionLayers::SecondPass AttentionLayers::carve_second_pass(const CudaAttention& problem,
                                                               Carver& carver) const {
  const CudaSizes sizes = cuda_attention_sizes(problem, /*with_facts=*/true);
  const int64_t C = config_.width, rows = problem.B * problem.T;
  const auto heads = [&] { return heads_of(carver.take_bytes(at(rows * C) * element_bytes()), 0, C); };
  SecondPass second{};
  second.forward.o = heads();
  second.forward.lse = carver.take<float>(rows * problem.H);
  second.forward.saved = carver.take_bytes(sizes.saved);
  second.backward.dq = heads();
  second.workspace = carver.take_bytes(sizes.workspace);
  return second;
}

void AttentionLayers::compute_facts_separately(int64_t layer, float keel_scale) {
  if (!facts_need_second_pass(layer)) return;
  const LayerMemory& m = a_->layers[at(layer)];
  const CudaAttention problem = second_problem(layer, keel_scale);
  Carver carver(memory_.as<char>() + layout_.second_pass);
  SecondPass second = carve_second_pass(problem, carver);
  forked_.set(stream_);
  forked_.wait_in(second_stream_);
  second_pass_runs_ = true;
  if (kind_.tie_facts) second.forward.ties = m.ties;
  attention_forward_cuda(problem, inputs(m), second.forward, true, second.workspace, second_stream_);
  if (kind_.residual_facts) {
    second.backward.residual = m.residual;
    second.backward.delta = m.delta;
    attention_backward_cuda(problem, inputs(m), heads_of(a_->d_o, 0, config_.width), second.forward,
                            second.backward, true, second.workspace, second_stream_);
  }
  joined_.set(second_stream_);
}

void AttentionLayers::join_facts() {
  if (std::exchange(second_pass_runs_, false)) joined_.wait_in(stream_);
}

}  // namespace evenkeel::device
