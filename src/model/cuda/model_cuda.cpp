// A model on a GPU: what a call does around its two passes.
#include "model/cuda/model_cuda.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/sizes.h"
#include "gpu/device.h"
#include "model/cuda/device_facts.h"
#include "model/layers.h"

namespace evenkeel {
namespace device {
namespace {

// What a call returns: the loss, then from the alignment on the facts.
struct OutputHeader {
  double loss;
};
// These kinds have kernels. Others need some, or a refusal in the constructor: the last else takes any.
static_assert(std::size(kNormNames) == 2 && std::size(kPositionNames) == 5 && std::size(kMlpNames) == 2,
              "a new kind of block: ARCHITECTURE.md, \"A block\"");

size_t output_bytes(size_t heads) { return Carver::kAlignment + heads * sizeof(FactSums); }

// The kernels name a random number by its sequence's place in the call. Parts of a step draw others by a step number of
// their own (2^32 over the golden ratio apart). So here, other than on the CPU, the number of parts changes a stochastic
// plan's draws.
uint32_t random_step(const StepContext& context) {
  return context.step + static_cast<uint32_t>(context.first_sequence) * 0x9E3779B1u;
}

}  // namespace

ModelCuda::ModelCuda(const ModelConfig& config, uint64_t seed)
    : Model(config),
      type_((require_cuda_device(), config.tensor_type())),
      padded_V_(config.padded_vocabulary()),
      // Products with a GELU exist for BF16, with rows of whole 16 bytes.
      fused_gelu_(config.mlp == MlpKind::gelu && is_bf16() && config.hidden_width() % 8 == 0),
      stream_(/*preferred=*/fact_stream() == FactStream::low),
      products_(stream_),
      parameters_(at(table_.size()) * sizeof(float)),
      gradients_(at(table_.size()) * sizeof(float)),
      arena_({config_, offsets_, lnf_gain_, lnf_bias_, gradients_.as<float>(), type_, fused_gelu_}),
      attention_(*this, stream_),
      capture_rows_(config_, type_),
      token_runs_(config_.vocabulary),
      results_(output_bytes(facts_.size())),
      output_(output_bytes(facts_.size())) {
  AttentionProblem plain = attention_problem(0, 1, config_.context);
  plain.slopes = plain.sinks = {};      // whether kernels take them depends on the plan, which is to come
  choose_kernel(plain, cuda_device());  // throws where no kernels take it
  const int64_t most = config_.width % 4 == 0 ? 4 * kLargestWidth : kLargestWidth;
  require(config_.width <= most, "[model] expected a width up to {} on the GPU, got {}", most, config_.width);

  std::vector<float> initial(at(table_.size()));
  initialise(config_, table_, seed, initial);
  write(initial, parameters_);
  // Gaps between tensors stay zero from here on.
  check_cuda(cudaMemsetAsync(gradients_.data(), 0, gradients_.bytes(), stream_), "clearing gradients");
  if (config_.is_rotary())
    turns_ = DeviceMemory(rotary_turns(config_.rotary_base, config_.context, config_.head_size()));
  if (!slopes_.empty()) slopes_on_device_ = DeviceMemory(slopes_);
  std::vector<const float*> sinks;  // (L)
  for (const LayerOffsets& w : offsets_)
    if (config_.sinks) sinks.push_back(master(w.sinks));
  attention_.set_head_values({slopes_on_device_.as<float>(), slopes_.size()}, std::move(sinks));
  if (is_bf16()) operands_ = DeviceMemory(at(table_.size()) * sizeof(uint16_t));
  stream_.wait();
}

// --- Parameters

void ModelCuda::read(const DeviceMemory& from, std::span<float> to) const {
  require(to.size() * sizeof(float) == from.bytes(), "[model] expected {} values, got {}",
          from.bytes() / sizeof(float), to.size());
  stream_.copy_down(to.data(), from.data(), from.bytes());
  stream_.wait();
}

void ModelCuda::write(std::span<const float> from, DeviceMemory& to) {
  require(from.size() * sizeof(float) == to.bytes(), "[model] expected {} values, got {}",
          to.bytes() / sizeof(float), from.size());
  stream_.copy_up(to.data(), from.data(), to.bytes());
  stream_.wait();
}

void ModelCuda::clear_now() const {
  if (!std::exchange(cleared_, false)) return;
  check_cuda(cudaMemsetAsync(gradients_.data(), 0, gradients_.bytes(), stream_), "clearing gradients");
}

// What a pass adds to and nothing has written before: rows of wpe behind the sequences' end and of wte without a token get
// nothing at all. A tied wte is the output layer's, which writes it first.
void ModelCuda::clear_embeddings() {
  const auto clear = [&](int64_t offset, int64_t rows) {
    check_cuda(cudaMemsetAsync(gradient(offset), 0, at(rows * config_.width) * sizeof(float), stream_),
               "clearing gradients");
  };
  if (wpe_ >= 0) clear(wpe_, config_.context);
  if (wte_ != head_) clear(wte_, config_.vocabulary);
}

void ModelCuda::refresh_operands() {
  if (is_bf16() && !operands_fresh_) {
    stream_.phase("operands", 0, 6.0 * static_cast<double>(table_.size()));
    round_to_bf16(parameters_.as<float>(), table_.size(), operands_.data(), stream_);
  }
  operands_fresh_ = true;
}

// --- A call

void ModelCuda::start(const CallKind& kind) {
  B_ = kind.B, T_ = kind.T, N_ = B_ * T_;
  at_hand_ = &arena_.room_for(B_, T_, stream_, [&] { recorded_.clear(); });
  a_ = &at_hand_->activations;
  // The same piece of pinned memory serves all sizes.
  if (const size_t bytes = at(kInputHeader + 2 * N_) * sizeof(int32_t); input_.bytes() < bytes) {
    recorded_.clear();
    input_ = PinnedMemory(bytes);
  }
  attention_.start(kind, *a_);
  auto found = recorded_.find(kind);
  if (found == recorded_.end()) {
    AttentionLayers::Layout layout = attention_.layout();
    if (layout.bytes > attention_.bytes()) {
      stream_.wait();
      recorded_.clear();
      attention_.reserve(layout.bytes);
    }
    // Of an older plan there will be no more calls.
    std::erase_if(recorded_, [&](const auto& entry) { return entry.first.plan_version != plan_version_; });
    found = recorded_.emplace(kind, Recorded{}).first;
    found->second.attention = std::move(layout);
  }
  attention_.use(found->second.attention);
}

void ModelCuda::run(const CallKind& kind) {
  Recorded& recorded = recorded_.at(kind);
  if (stream_.clock || captures_now_ || !recorded.done_before) {
    enqueue(kind);
    recorded.done_before = true;
    return;
  }
  if (!recorded.graph) recorded.graph = Graph::record(stream_, [&] { enqueue(kind); });
  recorded.graph.launch(stream_);
}

void ModelCuda::stage(const Batch& batch, uint32_t step) {
  *input_.as<uint32_t>() = step;
  int32_t* tokens = input_.as<int32_t>() + kInputHeader;
  std::copy(batch.tokens.begin(), batch.tokens.end(), tokens);
  std::copy(batch.targets.begin(), batch.targets.end(), tokens + N_);
}

void ModelCuda::enqueue(const CallKind& kind) {
  stream_.phase("copies");
  stream_.copy_up(a_->input, input_.as<void>(), at(kInputHeader + 2 * N_) * sizeof(int32_t));
  forward();
  if (kind.backward) {
    writes_gradients_ = kind.writes_gradients;
    if (writes_gradients_) clear_embeddings();
    backward(kind.gradient_scale());
    write_facts(kind);
  } else {
    classify(/*gradients=*/false, 0);
  }
  stream_.phase("copies");
  stream_.copy_down(output_.as<void>(), results_.data(),
                    kind.has_facts() ? output_bytes(facts_.size()) : sizeof(OutputHeader));
}

// The rows of dwte, by runs. Sorted here while the device is at work.
void ModelCuda::token_backward(std::span<const int32_t> tokens) {
  token_runs_.sort(tokens);
  stream_.phase("copies");
  stream_.copy_up(a_->places, token_runs_.places, tokens.size() * sizeof(int32_t));
  stream_.copy_up(a_->runs, token_runs_.runs, at(token_runs_.run_count) * sizeof(TokenRun));
  if (token_runs_.split_count > 0)
    stream_.copy_up(a_->token_parts, token_runs_.parts, at(token_runs_.split_count) * sizeof(TokenParts));
  stream_.phase("embedding", 0, stream_bytes());
  device::token_backward(a_->dx, a_->places, a_->runs, token_runs_.run_count, a_->token_parts,
                         token_runs_.split_count, a_->run_sums, config_.width, gradient(wte_), stream_);
}

void ModelCuda::write_facts(const CallKind& kind) {
  if (!kind.has_facts()) return;
  attention_.join_facts();
  const LayerMemory& first = a_->layers[0];
  const PassInputs in = attention_.inputs(first);
  FactInputs facts{};
  facts.L = config_.layers, facts.B = B_, facts.H = config_.heads, facts.T = T_;
  facts.G = config_.key_head_count();
  facts.D = config_.head_size();
  facts.type = type_;
  facts.scale = 1 / std::sqrt(static_cast<float>(facts.D));
  facts.q = in.q.data;
  facts.k = in.k.data;
  facts.layer_stride = a_->qkv_stride;
  facts.row_stride = attended_width(config_);
  facts.row_layer_stride = a_->row_stride;
  facts.lse = first.lse;
  facts.largest_score = attention_.largest_scores();
  facts.largest_row_mean = attention_.largest_row_means();
  facts.fact_sequences = kind.fact_sequences;
  if (kind.tie_facts) facts.ties = first.ties;
  if (kind.residual_facts) facts.residual = first.residual, facts.delta = first.delta;
  const bool pass_over_keys = kind.score_facts && !facts.largest_score;
  stream_.phase("facts", pass_over_keys ? static_cast<double>(config_.layers) * static_cast<double>(N_) *
                                              static_cast<double>(T_ * config_.query_width())
                                        : 0);
  head_facts(facts, kind.score_facts, reinterpret_cast<FactSums*>(results_.as<char>() + Carver::kAlignment),
             stream_);
}

double ModelCuda::forward_backward(const Batch& batch, float loss_scale, const StepContext& asked) {
  check_batch(batch, /*with_targets=*/true);
  StepContext context = asked;
  // The kernels that return these facts take neither slopes nor sinks: the facts stay NaN.
  if (config_.sinks || !slopes_.empty()) context.tie_facts = context.residual_facts = false;
  CallKind kind{batch.B, batch.T, true, loss_scale};
  kind.score_facts = context.score_facts;
  kind.tie_facts = context.tie_facts;
  kind.residual_facts = context.residual_facts;
  if (kind.attention_has_facts())
    kind.fact_sequences = context.fact_sequences == 0 ? batch.B : std::min(batch.B, context.fact_sequences);
  kind.plan_version = plan_version_;
  kind.writes_gradients = cleared_;
  start(kind);
  stage(batch, random_step(context));
  refresh_operands();
  captures_now_ = context.capture_sequences > 0;
  if (captures_now_) {
    start_captures(batch, context);
    capture_rows_.start(captures_, T_);
  }
  cleared_ = false;
  run(kind);
  token_backward(batch.tokens);
  if (stream_.clock) stream_.clock->end();
  stream_.wait();
  if (std::exchange(captures_now_, false)) capture_rows_.unpack(captures_);
  const FactSums* sums = output_.as<FactSums>(Carver::kAlignment);
  for (size_t n = 0; n < facts_.size(); ++n) facts_[n] = facts_of(sums[n], context);
  return output_.as<OutputHeader>()->loss;
}

double ModelCuda::loss(const Batch& batch, const StepContext& context) {
  check_batch(batch, /*with_targets=*/true);
  CallKind kind{batch.B, batch.T, false, 1};
  kind.plan_version = plan_version_;
  start(kind);
  stage(batch, random_step(context));
  refresh_operands();
  run(kind);
  stream_.wait();
  return output_.as<OutputHeader>()->loss;
}

// Lengths are rounded up, so that few shapes of products occur: what follows a token changes nothing before it.
std::vector<float> ModelCuda::logits(std::span<const int32_t> tokens) {
  const int64_t count = static_cast<int64_t>(tokens.size()), C = config_.width, V = config_.vocabulary;
  check_batch({1, count, tokens, {}}, /*with_targets=*/false);
  int64_t T = 64;
  while (T < count) T *= 2;
  T = std::min(T, config_.context);
  std::vector<int32_t> padded(tokens.begin(), tokens.end());
  padded.resize(at(T));
  CallKind kind{1, T, false, 1};
  kind.plan_version = plan_version_;
  start(kind);
  stage({1, T, padded, {}}, 0);
  refresh_operands();
  stream_.copy_up(a_->input, input_.as<void>(), at(kInputHeader + N_) * sizeof(int32_t));
  forward();
  // The row goes to a place of its own, so that its alignment does not depend on the length.
  check_cuda(
      cudaMemcpyAsync(a_->dnorm, static_cast<const char*>(a_->lnf) + at((count - 1) * C) * element_bytes(),
                      at(C) * element_bytes(), cudaMemcpyDeviceToDevice, stream_),
      "copying a row");
  multiply("last logits",
           {1, V, C, type_, DeviceMatrix::rows_of(a_->dnorm, C), DeviceMatrix::transposed(operand(head_), C),
            a_->last_logits, padded_V_, TensorType::fp32});
  std::vector<float> out(at(V));
  stream_.copy_down(out.data(), a_->last_logits, out.size() * sizeof(float));
  stream_.wait();
  return out;
}

int64_t ModelCuda::apply_qk_clip() {
  const std::vector<float> factors = query_key_factors(config_, facts_);
  const int64_t clipped =
      static_cast<int64_t>(factors.size()) - std::count(factors.begin(), factors.end(), 1.0f);
  if (clipped == 0) return 0;
  const DeviceMemory on_device(factors.size() * sizeof(float));
  stream_.copy_up(on_device.data(), factors.data(), on_device.bytes());
  for (int64_t l = 0; l < config_.layers; ++l) {
    const LayerOffsets& w = offsets_[at(l)];
    scale_query_key(parameters() + w.qkv, w.qkv_bias < 0 ? nullptr : parameters() + w.qkv_bias,
                    on_device.as<float>() + l * config_.heads, config_.width, config_.heads,
                    config_.head_size(), stream_);
  }
  stream_.wait();
  parameters_changed();
  return clipped;
}

std::vector<PhaseTime> ModelCuda::time_phases(const Batch& batch, const StepContext& context, int repeats) {
  require(repeats >= 1, "[model] expected at least one repeat, got {}", repeats);
  forward_backward(batch, 1, context);  // chooses algorithms
  std::vector<PhaseTime> phases;
  for (int n = 0; n < repeats; ++n) {
    parameters_changed();  // as in a step
    zero_gradients();
    stream_.clock.emplace(stream_);
    try {
      forward_backward(batch, 1, context);
      stream_.clock->add_to(phases);
    } catch (...) {
      stream_.clock.reset();
      throw;
    }
    stream_.clock.reset();
  }
  for (PhaseTime& phase : phases) {
    phase.seconds /= repeats;
    phase.flops /= repeats;
    phase.bytes /= repeats;
    phase.launches /= repeats;
  }
  return phases;
}

}  // namespace device

std::unique_ptr<Model> make_model_cuda(const ModelConfig& config, uint64_t seed) {
  return std::make_unique<device::ModelCuda>(config, seed);
}

std::vector<PhaseTime> time_phases_cuda(Model& model, const Batch& batch, const StepContext& context,
                                        int repeats) {
  auto* const own = dynamic_cast<device::ModelCuda*>(&model);
  require(own != nullptr, "[model] expected a model on the GPU");
  return own->time_phases(batch, context, repeats);
}

}  // namespace evenkeel
