// The model on the CPU. Reads top to bottom: the forward pass, the backward pass in reverse, facts.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention/attention.h"
#include "base/error.h"
#include "base/sizes.h"
#include "base/threads.h"
#include "model/key_share.h"
#include "model/layers.h"
#include "model/matrix_product.h"
#include "model/model.h"

namespace evenkeel {
namespace {

// The code below decides by the kind, and its last else takes any.
static_assert(std::size(kNormNames) == 2 && std::size(kPositionNames) == 5 && std::size(kMlpNames) == 2,
              "a new kind of block: ARCHITECTURE.md, \"A block\"");

using Array = std::vector<float>;

StepContext of_part(StepContext context, int64_t first_sequence) {
  context.first_sequence += first_sequence;
  return context;
}

double mean(const Array& x) {
  return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
}

// Sequences [first, first + count) of what attention reads and writes.
template <class T>
View<T> sequences_of(View<T> view, int64_t first, int64_t count) {
  if (view.present()) view.data = view.at(first, 0, 0), view.shape[0] = count;
  return view;
}
AttentionInputs sequences_of(const AttentionInputs& in, int64_t first, int64_t count) {
  const auto part = [&](auto view) { return sequences_of(view, first, count); };
  return {part(in.q), part(in.k), part(in.v)};
}
AttentionForward sequences_of(const AttentionForward& x, int64_t first, int64_t count) {
  const auto part = [&](auto view) { return sequences_of(view, first, count); };
  return {part(x.o), part(x.lse), part(x.o_for_delta), part(x.row_max), part(x.row_sum), part(x.ties)};
}
AttentionBackward sequences_of(const AttentionBackward& x, int64_t first, int64_t count) {
  const auto part = [&](auto view) { return sequences_of(view, first, count); };
  return {part(x.dq), part(x.dk), part(x.dv), part(x.delta), part(x.residual), part(x.residual_floor)};
}

// What a layer's forward pass keeps for its backward pass.
struct LayerMemory {
  Array x;                      // (N, C): the residual stream as it comes in
  Array ln1, mean1, rstd1;      // (N, C), (N), (N); an RMS norm has no mean
  Array qkv;                    // (N, qkv width): q, k, v
  Array qk, q_rstd, k_rstd;     // (N, (H + G) D), (N, H), (N, G): q and k behind qk_norm and rotary positions
  Array o, o_for_delta;         // (N, H D)
  Array lse, row_max, row_sum;  // (B, H, T)
  Array gate, gated;            // (N, H D): gated_attention
  Array middle;                 // (N, C): the residual stream behind attention
  Array ln2, mean2, rstd2;      // (N, C), (N), (N)
  Array hidden;               // (N, fc width): the input of GELU, then its slope there; gate and up of SwiGLU
  Array activated;            // (N, hidden width): the output of either
  std::vector<int32_t> ties;  // (B, H, T), on request
  std::vector<double> residual;  // (B, H, T), on request
  Array delta;                   // (B, H, T), on request
};

class ModelCpu final : public Model {
 public:
  ModelCpu(const ModelConfig& config, uint64_t seed);

  float* parameters() override { return parameters_.data(); }
  float* gradients() override { return gradients_.data(); }
  void parameters_changed() override { operands_fresh_ = false; }
  void read_parameters(std::span<float> to) const override { copy(parameters_, to); }
  void write_parameters(std::span<const float> from) override {
    copy(from, parameters_);
    parameters_changed();
  }
  void read_gradients(std::span<float> to) const override { copy(gradients_, to); }
  void write_gradients(std::span<const float> from) override { copy(from, gradients_); }
  void zero_gradients() override { std::fill(gradients_.begin(), gradients_.end(), 0.0f); }

  double forward_backward(const Batch& batch, float loss_scale, const StepContext& context) override;
  double loss(const Batch& batch, const StepContext& context) override;
  std::vector<float> logits(std::span<const int32_t> tokens) override;
  int64_t apply_qk_clip() override {
    const int64_t clipped = clip_query_key(config_, table_, facts_, parameters_.data());
    if (clipped > 0) parameters_changed();
    return clipped;
  }

 private:
  // A batch goes through in parts of whole sequences, small enough for the caches. The parts change no bit,
  // so their size may depend on the number of threads.
  int64_t sequences_of_part(int64_t B, int64_t T) const;
  void refresh_operands();
  void start_part(int64_t B, int64_t T);
  View<float> heads_of(float* data, int64_t heads, int64_t row_stride) const {
    const int64_t D = config_.head_size();
    return {data, {B_, heads, T_, D}, {T_ * row_stride, D, row_stride, 1}};
  }
  View<float> query_heads(float* data, int64_t row_stride) const {
    return heads_of(data, config_.heads, row_stride);
  }
  View<float> key_heads(float* data, int64_t row_stride) const {
    return heads_of(data, config_.key_head_count(), row_stride);
  }
  template <class T>
  View<T> per_row(std::vector<T>& values) const {
    return contiguous_view(values.data(), {B_, config_.heads, T_, 1});
  }
  AttentionProblem attention_problem(int64_t layer, const StepContext& context, float keel_scale) const;
  AttentionInputs attention_inputs(LayerMemory& m) const;
  AttentionForward attention_memory(LayerMemory& m, bool ties) const;
  // Sequences of the part at hand whose ties and residuals are wanted: its first so many.
  int64_t fact_sequences(const StepContext& context) const {
    return context.fact_sequences == 0 ? B_ : std::clamp<int64_t>(context.fact_sequences - first_, 0, B_);
  }
  // attend(first sequence, how many, with facts?) for those with facts and for the others. Attention knows sequences by
  // their numbers in the step, so that this changes no bit.
  template <class Attend>
  void with_facts(const StepContext& context, Attend attend) const {
    const int64_t some = context.tie_facts || context.residual_facts ? fact_sequences(context) : 0;
    if (some > 0) attend(0, some, true);
    if (some < B_) attend(some, B_ - some, false);
  }

  // Masters for vectors and lookups; the same, rounded, as operands of products.
  const float* master(int64_t offset) const { return offset < 0 ? nullptr : parameters_.data() + offset; }
  const float* operand(int64_t offset) const {
    return (config_.precision == LinearPrecision::fp32 ? parameters_ : operands_).data() + offset;
  }
  float* gradient(int64_t offset) { return offset < 0 ? nullptr : gradients_.data() + offset; }
  void round(Array& x) const { round_operand(rounding_, x.data(), static_cast<int64_t>(x.size())); }
  // The gradient of the residual stream as an operand.
  const float* stream_operand();

  // Norms of the residual stream: (N, C) to (N, C), as the configuration has them.
  void norm_forward(const Array& x, int64_t gain, int64_t bias, Array& y, Array& mean, Array& rstd) const;
  void norm_backward(const Array& x, int64_t gain, int64_t bias, const Array& mean, const Array& rstd);

  void forward(const int32_t* tokens, const StepContext& context);
  void attention_forward_layer(int64_t l, const StepContext& context);
  void query_key_forward(LayerMemory& m, const LayerOffsets& w) const;
  void mlp_forward(int64_t l, float* out);
  void mlp_backward(int64_t l);
  void attention_backward_layer(int64_t l, const StepContext& context, float keel_scale);
  void query_key_backward(const LayerMemory& m, const LayerOffsets& w);
  Classifier output_layer(const int32_t* targets, float* losses) const;

  // Of a layer's backward pass: delta of every row is there.
  void add_sink_gradients(int64_t layer);
  void add_facts(const StepContext& context);  // of the part at hand
  void add_score_facts(int64_t layer);
  void add_key_share(int64_t layer);
  void write_facts(const StepContext& context);
  // The part at hand, as far as it is wanted, between attention's passes.
  void capture(int64_t layer, const std::vector<PrecisionPlan>& plans);
  static void copy(std::span<const float> from, std::span<float> to) {
    require(from.size() == to.size(), "[model] expected {} values, got {}", to.size(), from.size());
    std::copy(from.begin(), from.end(), to.begin());
  }

  const Rounding rounding_;  // of operands
  const Array turns_;        // (context, D / 2, 2): of rotary positions
  Array parameters_, gradients_, operands_;
  bool operands_fresh_ = false;

  int64_t B_ = 0, T_ = 0, N_ = 0;  // of the part at hand
  std::vector<LayerMemory> layers_;
  Array x_, lnf_, mean_, rstd_;         // (N, C), (N, C), (N), (N)
  Array rounded_, dln_, do_, dgate_;    // (N, C), (N, C), (N, H D), (N, H D)
  Array dqkv_, dactivated_, dhidden_;   // as what they are gradients of; dactivated_: SwiGLU's
  Array losses_, batch_dx_;             // (B T), (B T, C): of the whole batch
  float* dx_ = nullptr;                 // the part's rows of batch_dx_
  std::vector<FactSums> fact_sums_;     // (L, H): added up in the order of the batch
  std::vector<double> sink_gradients_;  // (L, H): likewise
  int64_t first_ = 0;                   // the part's first sequence in the batch
};

ModelCpu::ModelCpu(const ModelConfig& config, uint64_t seed)
    : Model(config),
      rounding_{config.precision == LinearPrecision::bf16 ? kBf16 : kFp32},
      turns_(config.is_rotary() ? rotary_turns(config.rotary_base, config.context, config.head_size())
                                : Array()),
      parameters_(at(table_.size())),
      gradients_(at(table_.size())),
      layers_(at(config.layers)) {
  initialise(config_, table_, seed, parameters_);
}

// --- Sizes and views

// As few as make whole blocks of every sum over rows (layers.h), and 512 tokens for each thread; or all.
int64_t ModelCpu::sequences_of_part(int64_t B, int64_t T) const {
  constexpr int64_t kTokens = 512;
  const int64_t whole = kProductBlock / std::gcd(kProductBlock, T);
  return std::min(B, (kTokens * thread_count() + whole * T - 1) / (whole * T) * whole);
}

void ModelCpu::refresh_operands() {
  if (config_.precision == LinearPrecision::bf16 && !operands_fresh_) {
    operands_.resize(parameters_.size());
    round_operand(rounding_, operands_.data(), parameters_.data(), table_.size());
  }
  operands_fresh_ = true;
}

void ModelCpu::start_part(int64_t B, int64_t T) {
  if (B == B_ && T == T_) return;
  B_ = B, T_ = T, N_ = B * T;
  const int64_t C = config_.width, H = config_.heads, Q = config_.query_width(), K = config_.key_width();
  const int64_t F = config_.hidden_width(), fc = config_.fc_width();
  const auto size = [](int64_t count, auto&... arrays) { (arrays.resize(at(count)), ...); };
  for (LayerMemory& m : layers_) {
    size(N_ * C, m.x, m.ln1, m.middle, m.ln2);
    size(N_, m.mean1, m.rstd1, m.mean2, m.rstd2);
    size(N_ * (Q + 2 * K), m.qkv);
    size(N_ * Q, m.o, m.o_for_delta);
    size(N_ * fc, m.hidden);
    size(N_ * F, m.activated);
    size(N_ * H, m.lse, m.row_max, m.row_sum);
    if (config_.has_own_qk()) size(N_ * (Q + K), m.qk);
    if (config_.qk_norm) size(N_ * H, m.q_rstd), size(N_ * config_.key_head_count(), m.k_rstd);
    if (config_.gated_attention) size(N_ * Q, m.gate, m.gated);
  }
  size(N_ * C, x_, lnf_, dln_);
  size(N_, mean_, rstd_);
  size(N_ * Q, do_);
  size(N_ * (Q + 2 * K), dqkv_);
  size(N_ * fc, dhidden_);
  if (config_.mlp == MlpKind::swiglu) size(N_ * F, dactivated_);
  if (config_.gated_attention) size(N_ * Q, dgate_);
}

AttentionProblem ModelCpu::attention_problem(int64_t layer, const StepContext& context,
                                             float keel_scale) const {
  AttentionProblem problem = Model::attention_problem(layer, B_, T_);
  for (PrecisionPlan& plan : problem.plans) plan.keel *= keel_scale;
  if (config_.sinks) problem.sinks = {master(offsets_[at(layer)].sinks), at(config_.heads)};
  problem.step = context.step;
  problem.first_sequence = context.first_sequence;
  problem.allow_nonfinite = true;  // a run that diverges is a finding of those above
  return problem;
}

AttentionInputs ModelCpu::attention_inputs(LayerMemory& m) const {
  const int64_t Q = config_.query_width(), K = config_.key_width(), all = Q + 2 * K;
  const View<float> v = key_heads(m.qkv.data() + Q + K, all);
  if (config_.has_own_qk()) return {query_heads(m.qk.data(), Q + K), key_heads(m.qk.data() + Q, Q + K), v};
  return {query_heads(m.qkv.data(), all), key_heads(m.qkv.data() + Q, all), v};
}

AttentionForward ModelCpu::attention_memory(LayerMemory& m, bool ties) const {
  AttentionForward out;
  out.o = query_heads(m.o.data(), config_.query_width());
  out.o_for_delta = query_heads(m.o_for_delta.data(), config_.query_width());
  out.lse = per_row(m.lse);
  out.row_max = per_row(m.row_max);
  out.row_sum = per_row(m.row_sum);
  if (ties) out.ties = per_row(m.ties);
  return out;
}

// --- Forward

void ModelCpu::norm_forward(const Array& x, int64_t gain, int64_t bias, Array& y, Array& mean,
                            Array& rstd) const {
  const int64_t C = config_.width;
  if (config_.norm == NormKind::rms_norm)
    rms_norm_forward(x.data(), master(gain), config_.norm_epsilon, N_, C, y.data(), rstd.data());
  else
    layernorm_forward(x.data(), master(gain), master(bias), N_, C, y.data(), mean.data(), rstd.data());
  round(y);
}

void ModelCpu::forward(const int32_t* tokens, const StepContext& context) {
  const int64_t C = config_.width;
  embedding_forward(tokens, master(wte_), master(wpe_), B_, T_, C, layers_[0].x.data());
  for (int64_t l = 0; l < config_.layers; ++l) {
    attention_forward_layer(l, context);
    mlp_forward(l, l + 1 < config_.layers ? layers_[at(l + 1)].x.data() : x_.data());
  }
  norm_forward(x_, lnf_gain_, lnf_bias_, lnf_, mean_, rstd_);
}

// From the residual stream as it comes in to that behind attention.
void ModelCpu::attention_forward_layer(int64_t l, const StepContext& context) {
  LayerMemory& m = layers_[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, H = config_.heads, Q = config_.query_width();
  norm_forward(m.x, w.ln1_gain, w.ln1_bias, m.ln1, m.mean1, m.rstd1);
  linear_forward(m.ln1.data(), operand(w.qkv), master(w.qkv_bias), nullptr, N_, C, config_.qkv_width(),
                 m.qkv.data());
  round(m.qkv);
  query_key_forward(m, w);
  if (context.tie_facts) m.ties.resize(at(N_ * H));
  with_facts(context, [&](int64_t first, int64_t count, bool facts) {
    AttentionProblem part = attention_problem(l, context, 1);
    part.first_sequence += first;
    attention_forward(part, sequences_of(attention_inputs(m), first, count),
                      sequences_of(attention_memory(m, facts && context.tie_facts), first, count));
  });
  if (config_.gated_attention) {
    linear_forward(m.ln1.data(), operand(w.gate), master(w.gate_bias), nullptr, N_, C, Q, m.gate.data());
    round(m.gate);
    gate_forward(m.o.data(), m.gate.data(), m.gated.data(), N_ * Q);
    round(m.gated);
  } else {
    round(m.o);
  }
  const Array& attended = config_.gated_attention ? m.gated : m.o;
  linear_forward(attended.data(), operand(w.proj), master(w.proj_bias), m.x.data(), N_, Q, C,
                 m.middle.data());
}

// What lies between qkv and attention: the norm of each head, then its turn.
void ModelCpu::query_key_forward(LayerMemory& m, const LayerOffsets& w) const {
  if (!config_.has_own_qk()) return;
  const int64_t H = config_.heads, G = config_.key_head_count(), D = config_.head_size(), Q = H * D,
                all = config_.qkv_width(), own = Q + G * D;
  float *q = m.qk.data(), *k = q + Q;
  if (config_.qk_norm) {
    const float epsilon = config_.norm_epsilon;
    head_norm_forward(m.qkv.data(), all, master(w.q_gain), epsilon, N_, H, D, q, own, m.q_rstd.data());
    head_norm_forward(m.qkv.data() + Q, all, master(w.k_gain), epsilon, N_, G, D, k, own, m.k_rstd.data());
    round(m.qk);
  }
  if (!config_.is_rotary()) return;
  // q and k lie side by side in both arrays, so that they are one array of H + G heads.
  const bool neighbours = config_.positions == Positions::rotary_pairs;
  const float* from = config_.qk_norm ? m.qk.data() : m.qkv.data();
  rotary_forward(from, config_.qk_norm ? own : all, turns_.data(), neighbours, N_, T_, H + G, D, q, own);
  round(m.qk);
}

void ModelCpu::mlp_forward(int64_t l, float* out) {
  LayerMemory& m = layers_[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, F = config_.hidden_width();
  norm_forward(m.middle, w.ln2_gain, w.ln2_bias, m.ln2, m.mean2, m.rstd2);
  linear_forward(m.ln2.data(), operand(w.fc), master(w.fc_bias), nullptr, N_, C, config_.fc_width(),
                 m.hidden.data());
  round(m.hidden);
  if (config_.mlp == MlpKind::swiglu)
    swiglu_forward(m.hidden.data(), N_, F, m.activated.data());
  else
    gelu_forward(m.hidden.data(), m.activated.data(), m.hidden.data(), N_ * F);
  round(m.activated);
  linear_forward(m.activated.data(), operand(w.out), master(w.out_bias), m.middle.data(), N_, F, C, out);
}

Classifier ModelCpu::output_layer(const int32_t* targets, float* losses) const {
  return {lnf_.data(), operand(head_), targets, losses,   N_, config_.width, config_.vocabulary,
          1,           nullptr,        nullptr, rounding_};
}

double ModelCpu::loss(const Batch& batch, const StepContext& context) {
  check_batch(batch, /*with_targets=*/true);
  refresh_operands();
  losses_.resize(at(batch.B * batch.T));
  const int64_t part = sequences_of_part(batch.B, batch.T);
  for (int64_t b = 0; b < batch.B; b += part) {
    start_part(std::min(part, batch.B - b), batch.T);
    forward(batch.tokens.data() + b * T_, of_part(context, b));
    classifier(output_layer(batch.targets.data() + b * T_, losses_.data() + b * T_));
  }
  return mean(losses_);
}

std::vector<float> ModelCpu::logits(std::span<const int32_t> tokens) {
  const Batch batch{1, static_cast<int64_t>(tokens.size()), tokens, {}};
  check_batch(batch, /*with_targets=*/false);
  refresh_operands();
  start_part(batch.B, batch.T);
  forward(tokens.data(), {});
  const int64_t C = config_.width, V = config_.vocabulary;
  std::vector<float> out(at(V));
  multiply({1, V, C, Matrix::rows_of(lnf_.data() + (N_ - 1) * C, C), Matrix::transposed(operand(head_), C),
            out.data(), V});
  return out;
}

// --- Backward

double ModelCpu::forward_backward(const Batch& batch, float loss_scale, const StepContext& context) {
  check_batch(batch, /*with_targets=*/true);
  refresh_operands();
  const int64_t C = config_.width, rows = batch.B * batch.T;
  losses_.resize(at(rows));
  batch_dx_.assign(at(rows * C), 0.0f);
  fact_sums_.assign(facts_.size(), {});
  sink_gradients_.assign(config_.sinks ? facts_.size() : 0, 0.0);
  if (context.capture_sequences > 0) start_captures(batch, context);
  // The loss is a mean over tokens, and so is the z-loss of keel.
  const float gradient_scale = loss_scale / static_cast<float>(rows);
  const int64_t part = sequences_of_part(batch.B, batch.T);
  for (int64_t b = 0; b < batch.B; b += part) {
    start_part(std::min(part, batch.B - b), batch.T);
    const int64_t first = b * T_;
    const StepContext part_context = of_part(context, b);
    dx_ = batch_dx_.data() + first * C;
    first_ = b;
    forward(batch.tokens.data() + first, part_context);
    Classifier head = output_layer(batch.targets.data() + first, losses_.data() + first);
    head.gradient_scale = gradient_scale;
    head.dx = dln_.data();
    head.dw = gradient(head_);
    classifier(head);
    round(dln_);
    norm_backward(x_, lnf_gain_, lnf_bias_, mean_, rstd_);
    for (int64_t l = config_.layers; l-- > 0;) {
      mlp_backward(l);
      attention_backward_layer(l, part_context, gradient_scale);
    }
    add_facts(context);
  }
  for (size_t n = 0; n < sink_gradients_.size(); ++n)
    gradient(offsets_[n / at(config_.heads)].sinks)[n % at(config_.heads)] +=
        static_cast<float>(sink_gradients_[n]);
  embedding_backward(batch.tokens.data(), batch_dx_.data(), batch.B, batch.T, C, config_.vocabulary,
                     gradient(wte_), gradient(wpe_));
  write_facts(context);
  return mean(losses_);
}

const float* ModelCpu::stream_operand() {
  if (config_.precision == LinearPrecision::fp32) return dx_;
  rounded_.resize(at(N_ * config_.width));
  round_operand(rounding_, rounded_.data(), dx_, N_ * config_.width);
  return rounded_.data();
}

// dln_ is the gradient of what the norm gave; its input's is added to dx_.
void ModelCpu::norm_backward(const Array& x, int64_t gain, int64_t bias, const Array& mean,
                             const Array& rstd) {
  const int64_t C = config_.width;
  if (config_.norm == NormKind::rms_norm)
    rms_norm_backward(dln_.data(), x.data(), master(gain), rstd.data(), N_, C, dx_, gradient(gain));
  else
    layernorm_backward(dln_.data(), x.data(), master(gain), mean.data(), rstd.data(), N_, C, dx_,
                       gradient(gain), gradient(bias));
}

// dx_ comes in as the gradient of the layer's output and leaves as that of the stream behind attention.
void ModelCpu::mlp_backward(int64_t l) {
  LayerMemory& m = layers_[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, F = config_.hidden_width();
  const bool swiglu = config_.mlp == MlpKind::swiglu;
  linear_backward(stream_operand(), m.activated.data(), operand(w.out), N_, F, C,
                  (swiglu ? dactivated_ : dhidden_).data(), gradient(w.out), gradient(w.out_bias));
  if (swiglu) {
    round(dactivated_);
    swiglu_backward(m.hidden.data(), dactivated_.data(), N_, F, dhidden_.data());
  } else {
    gelu_backward(m.hidden.data(), dhidden_.data(), N_ * F);
  }
  round(dhidden_);
  linear_backward(dhidden_.data(), m.ln2.data(), operand(w.fc), N_, C, config_.fc_width(), dln_.data(),
                  gradient(w.fc), gradient(w.fc_bias));
  round(dln_);
  norm_backward(m.middle, w.ln2_gain, w.ln2_bias, m.mean2, m.rstd2);
}

// dx_ comes in as the gradient of the stream behind attention and leaves as that of the layer's input.
void ModelCpu::attention_backward_layer(int64_t l, const StepContext& context, float keel_scale) {
  LayerMemory& m = layers_[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, H = config_.heads, Q = config_.query_width(), K = config_.key_width(),
                all = Q + 2 * K;
  const Array& attended = config_.gated_attention ? m.gated : m.o;
  linear_backward(stream_operand(), attended.data(), operand(w.proj), N_, Q, C, do_.data(), gradient(w.proj),
                  gradient(w.proj_bias));
  if (config_.gated_attention) {
    gate_backward(m.o.data(), m.gate.data(), do_.data(), do_.data(), dgate_.data(), N_ * Q);
    round(dgate_);
  }
  round(do_);
  AttentionBackward out;
  out.dq = query_heads(dqkv_.data(), all);
  out.dk = key_heads(dqkv_.data() + Q, all);
  out.dv = key_heads(dqkv_.data() + Q + K, all);
  if (context.residual_facts) {
    m.residual.resize(at(N_ * H));
    out.residual = per_row(m.residual);
  }
  if (context.residual_facts || config_.sinks) {
    m.delta.resize(at(N_ * H));
    out.delta = per_row(m.delta);
  }
  const AttentionProblem attention = attention_problem(l, context, keel_scale);
  if (context.capture_sequences > 0) capture(l, attention.plans);
  with_facts(context, [&](int64_t first, int64_t count, bool facts) {
    AttentionProblem part = attention;
    part.first_sequence += first;
    AttentionBackward to = sequences_of(out, first, count);
    if (!facts) to.residual = {};
    if (!facts && !config_.sinks) to.delta = {};
    attention_backward(part, sequences_of(attention_inputs(m), first, count),
                       sequences_of(query_heads(do_.data(), Q), first, count),
                       sequences_of(attention_memory(m, false), first, count), to);
  });
  if (config_.sinks) add_sink_gradients(l);
  query_key_backward(m, w);
  round(dqkv_);
  linear_backward(dqkv_.data(), m.ln1.data(), operand(w.qkv), N_, C, all, dln_.data(), gradient(w.qkv),
                  gradient(w.qkv_bias));
  round(dln_);
  if (config_.gated_attention) {
    linear_backward(dgate_.data(), m.ln1.data(), operand(w.gate), N_, C, Q, dln_.data(), gradient(w.gate),
                    gradient(w.gate_bias), /*add_dx=*/true);
    round(dln_);
  }
  norm_backward(m.x, w.ln1_gain, w.ln1_bias, m.mean1, m.rstd1);
}

// A sink's gradient is that of a score without a value: - P delta, over all rows. One after another in FP64, so that the
// parts of a batch change no bit.
void ModelCpu::add_sink_gradients(int64_t layer) {
  const LayerMemory& m = layers_[at(layer)];
  const int64_t H = config_.heads;
  const float* const sinks = master(offsets_[at(layer)].sinks);
  for (int64_t h = 0; h < H; ++h) {
    double& sum = sink_gradients_[at(layer * H + h)];
    for (int64_t b = 0; b < B_; ++b)
      for (size_t n = at((b * H + h) * T_), end = n + at(T_); n < end; ++n)
        sum -= std::exp(double{sinks[h]} - double{m.lse[n]}) * double{m.delta[n]};
  }
}

// query_key_forward in reverse, on dqkv_.
void ModelCpu::query_key_backward(const LayerMemory& m, const LayerOffsets& w) {
  const int64_t H = config_.heads, G = config_.key_head_count(), D = config_.head_size(), Q = H * D,
                all = config_.qkv_width();
  if (config_.is_rotary())
    rotary_backward(dqkv_.data(), all, turns_.data(), config_.positions == Positions::rotary_pairs, N_, T_,
                    H + G, D);
  if (!config_.qk_norm) return;
  head_norm_backward(dqkv_.data(), all, m.qkv.data(), all, master(w.q_gain), m.q_rstd.data(), N_, H, D,
                     dqkv_.data(), all, gradient(w.q_gain));
  head_norm_backward(dqkv_.data() + Q, all, m.qkv.data() + Q, all, master(w.k_gain), m.k_rstd.data(), N_, G,
                     D, dqkv_.data() + Q, all, gradient(w.k_gain));
}

// --- Facts

void ModelCpu::add_facts(const StepContext& context) {
  const int64_t H = config_.heads;
  for (int64_t l = 0; l < config_.layers; ++l) {
    if (context.score_facts) add_score_facts(l), add_key_share(l);
    const LayerMemory& m = layers_[at(l)];
    for (int64_t h = 0; h < H; ++h) {
      FactSums& sums = fact_sums_[at(l * H + h)];
      for (int64_t b = 0; b < B_; ++b)
        for (size_t n = at((b * H + h) * T_), end = n + at(T_); n < end; ++n) {
          ++sums.rows;
          sums.lse += m.lse[n];
          sums.largest_lse = std::max(sums.largest_lse, std::fabs(m.lse[n]));
          if (b >= fact_sequences(context)) continue;
          ++sums.sampled;
          if (context.tie_facts) sums.tied += m.ties[n] > 1;
          if (!context.residual_facts) continue;
          sums.residual += m.residual[n];
          sums.residual_squares += m.residual[n] * m.residual[n];
          sums.delta_squares += static_cast<double>(m.delta[n]) * m.delta[n];
        }
    }
  }
}

void ModelCpu::write_facts(const StepContext& context) {
  for (size_t n = 0; n < facts_.size(); ++n) facts_[n] = facts_of(fact_sums_[n], context);
}

// Scores again, in FP32 and by rows of 64: cheaper than to have attention keep them, and independent of the
// plan.
void ModelCpu::add_score_facts(int64_t layer) {
  constexpr int64_t kRows = 64;
  const int64_t H = config_.heads, D = config_.head_size();
  const AttentionInputs in = attention_inputs(layers_[at(layer)]);
  const float scale = 1 / std::sqrt(static_cast<float>(D));
  struct Largest {
    float score = -std::numeric_limits<float>::infinity(), row_mean = 0;
  };
  std::vector<Largest> found(at(B_ * H));
  parallel_for(B_ * H, [&](int64_t item, int) {
    const int64_t b = item / H, h = item % H, g = h / (H / config_.key_head_count());
    const Matrix k{in.k.at(b, g, 0), 1, in.k.stride[2]};  // (D, T)
    Array scores(at(kRows * T_));
    Largest& largest = found[at(item)];
    for (int64_t row = 0; row < T_; row += kRows) {
      const int64_t rows = std::min(kRows, T_ - row), keys = row + rows;
      multiply({rows, keys, D, {in.q.at(b, h, row), in.q.stride[2], 1}, k, scores.data(), T_});
      for (int64_t i = 0; i < rows; ++i) {
        const float* s = scores.data() + i * T_;
        double sum = 0;
        for (int64_t j = 0; j <= row + i; ++j) {
          largest.score = std::max(largest.score, s[j] * scale);
          sum += s[j];
        }
        const double mean = sum * scale / static_cast<double>(row + i + 1);
        largest.row_mean = std::max(largest.row_mean, static_cast<float>(std::fabs(mean)));
      }
    }
  });
  for (int64_t item = 0; item < B_ * H; ++item) {
    FactSums& sums = fact_sums_[at(layer * H + item % H)];
    sums.largest_score = std::max(sums.largest_score, found[at(item)].score);
    sums.largest_row_mean = std::max(sums.largest_row_mean, found[at(item)].row_mean);
  }
}

void ModelCpu::add_key_share(int64_t layer) {
  const int64_t H = config_.heads, group = H / config_.key_head_count();
  const auto k = attention_inputs(layers_[at(layer)]).k;
  for (int64_t b = 0; b < std::min(B_, kKeySequences - first_); ++b)
    for (int64_t g = 0; g < config_.key_head_count(); ++g) {
      const double share = key_share(k.at(b, g, 0), T_, config_.head_size(), k.stride[2]);
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        FactSums& sums = fact_sums_[at(layer * H + h)];
        sums.key_share += share;
        ++sums.key_sequences;
      }
    }
}

// --- Captures

void ModelCpu::capture(int64_t layer, const std::vector<PrecisionPlan>& plans) {
  LayerCapture& c = captures_[at(layer)];
  const int64_t sequences = std::min(B_, c.x.shape()[0] - first_), C = config_.width;
  if (sequences <= 0) return;
  c.plans = plans;
  LayerMemory& m = layers_[at(layer)];
  const auto keep = [&](Tensor<float>& to, View<const float> from) {
    const View<float> all = to.view();
    for (int64_t b = 0; b < sequences; ++b)
      for (int64_t h = 0; h < all.shape[1]; ++h)
        for (int64_t t = 0; t < all.shape[2]; ++t)
          std::copy_n(from.at(b, h, t), all.shape[3], all.at(first_ + b, h, t));
  };
  const AttentionInputs in = attention_inputs(m);
  keep(c.x, contiguous_view(m.ln1.data(), {B_, 1, T_, C}));
  keep(c.q, in.q);
  keep(c.k, in.k);
  keep(c.v, in.v);
  keep(c.o, query_heads(m.o.data(), config_.query_width()));
  keep(c.d_o, query_heads(do_.data(), config_.query_width()));
  keep(c.lse, per_row(m.lse));
}

}  // namespace

std::unique_ptr<Model> make_model_cpu(const ModelConfig& config, uint64_t seed) {
  return std::make_unique<ModelCpu>(config, seed);
}

}  // namespace evenkeel
