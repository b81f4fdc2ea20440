// A model on a GPU: products, the forward pass, the backward pass in reverse. In the backward pass the product whose
// result a LayerNorm reads comes last before it.
#include "base/sizes.h"
#include "model/cuda/model_cuda.h"

namespace evenkeel::device {

// --- Products

void ModelCuda::multiply(const char* name, const DeviceProduct& p) {
  if (stream_.clock) {
    const auto bytes = [](int64_t rows, int64_t columns, TensorType type) {
      return static_cast<double>(rows * columns * (type == TensorType::bf16 ? 2 : 4));
    };
    stream_.phase(
        name,
        2.0 * static_cast<double>(p.rows) * static_cast<double>(p.columns) * static_cast<double>(p.depth),
        bytes(p.rows, p.depth, p.type) + bytes(p.depth, p.columns, p.type) +
            bytes(p.rows, p.columns, p.c_type) *
                (1 + (p.base && p.base_scale != 0) + (p.end != ProductEnd::plain)));
  }
  products_.multiply(p);
}

void ModelCuda::linear_forward(const char* name, const void* x, int64_t w, int64_t bias, int64_t in,
                               int64_t out, void* y, TensorType y_type, const float* residual) {
  DeviceProduct p{N_, out, in,    type_, DeviceMatrix::rows_of(x, in), DeviceMatrix::rows_of(operand(w), out),
                  y,  out, y_type};
  p.base = residual;
  // cuBLASLt wants the bias in the type of the result: in BF16 it is rounded, as weights are.
  p.bias = y_type == TensorType::fp32 ? master(bias) : operand(bias);
  multiply(name, p);
}

void ModelCuda::linear_backward(const char* name, const void* dy, int64_t w, int64_t in, int64_t out,
                                void* dx, TensorType dx_type, const void* base) {
  DeviceProduct p{
      N_, in, out,    type_, DeviceMatrix::rows_of(dy, out), DeviceMatrix::transposed(operand(w), out),
      dx, in, dx_type};
  p.base = base;
  multiply(name, p);
}

void ModelCuda::weight_backward(const char* name, const void* dy, const void* x, int64_t w, int64_t in,
                                int64_t out) {
  DeviceProduct p{in,
                  out,
                  N_,
                  type_,
                  DeviceMatrix::transposed(x, in),
                  DeviceMatrix::rows_of(dy, out),
                  gradient(w),
                  out,
                  TensorType::fp32};
  p.base = p.c;
  p.base_scale = writes_gradients_ ? 0 : 1;
  multiply(name, p);
}

void ModelCuda::bias_backward(const void* dy, int64_t out, float* sums) {
  if (!sums) return;
  stream_.phase("bias gradients", 0, activation_bytes(out));
  column_sums(dy, N_, out, type_, sums, stream_);
}

// --- Forward

void ModelCuda::norm_forward(const float* x, int64_t gain, int64_t bias, void* y, float* mean, float* rstd) {
  const int64_t C = config_.width;
  stream_.phase("norm forward", 0, stream_bytes() + activation_bytes(C));
  if (config_.norm == NormKind::rms_norm)
    rms_norm_forward(x, master(gain), config_.norm_epsilon, N_, C, type_, y, rstd, stream_);
  else
    layernorm_forward(x, master(gain), master(bias), N_, C, type_, y, mean, rstd, stream_);
}

void ModelCuda::forward() {
  const int64_t C = config_.width;
  stream_.phase("embedding", 0, 2 * stream_bytes());
  embedding_forward(a_->tokens, master(wte_), master(wpe_), N_, T_, C, a_->layers[0].x, stream_);
  for (int64_t l = 0; l < config_.layers; ++l)
    layer_forward(l, l + 1 < config_.layers ? a_->layers[at(l + 1)].x : a_->x);
  norm_forward(a_->x, lnf_gain_, lnf_bias_, a_->lnf, a_->mean, a_->rstd);
}

void ModelCuda::layer_forward(int64_t l, float* out) {
  LayerMemory& m = a_->layers[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, Q = config_.query_width();
  norm_forward(m.x, w.ln1_gain, w.ln1_bias, m.ln1, m.mean1, m.rstd1);
  linear_forward("qkv", m.ln1, w.qkv, w.qkv_bias, C, config_.qkv_width(), m.qkv, type_, nullptr);
  query_key_forward(m, w);
  stream_.phase("attention forward", 4.0 * static_cast<double>(N_) * static_cast<double>(T_ * Q) / 2);
  attention_.forward(l);
  const void* attended = m.o;
  if (config_.gated_attention) {
    linear_forward("gate", m.ln1, w.gate, w.gate_bias, C, Q, m.gate, type_, nullptr);
    stream_.phase("gate values", 0, 3 * activation_bytes(Q));
    gate_forward(m.o, m.gate, N_ * Q, type_, m.gated, stream_);
    attended = m.gated;
  }
  linear_forward("proj", attended, w.proj, w.proj_bias, Q, C, m.middle, TensorType::fp32, m.x);
  mlp_forward(l, out);
}

// What lies between qkv and attention: the norm of each head, then its turn.
void ModelCuda::query_key_forward(const LayerMemory& m, const LayerOffsets& w) {
  const int64_t H = config_.heads, G = config_.key_head_count(), D = config_.head_size(),
                own = attended_width(config_);
  if (config_.qk_norm) {
    stream_.phase("qk_norm", 0, 2 * activation_bytes(own));
    head_norm_forward(m.qkv, master(w.q_gain), master(w.k_gain), config_.norm_epsilon, N_, H, G, D, type_,
                      m.qk, m.qk_rstd, stream_);
  }
  if (!config_.is_rotary()) return;
  stream_.phase("rotary", 0, 2 * activation_bytes(own));
  const void* const from = config_.qk_norm ? m.qk : m.qkv;
  rotary(from, config_.qk_norm ? own : config_.qkv_width(), turns_.as<float>(),
         config_.positions == Positions::rotary_pairs, /*back=*/false, N_, T_, H + G, D, type_, m.qk, own,
         stream_);
}

void ModelCuda::mlp_forward(int64_t l, float* out) {
  LayerMemory& m = a_->layers[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, F = config_.hidden_width();
  norm_forward(m.middle, w.ln2_gain, w.ln2_bias, m.ln2, m.mean2, m.rstd2);
  if (fused_gelu_) {
    DeviceProduct p{
        N_,          F, C,    type_, DeviceMatrix::rows_of(m.ln2, C), DeviceMatrix::rows_of(operand(w.fc), F),
        m.activated, F, type_};
    p.bias = operand(w.fc_bias);
    p.end = ProductEnd::gelu;
    p.aux = m.hidden;
    multiply("fc, gelu", p);
  } else {
    linear_forward("fc", m.ln2, w.fc, w.fc_bias, C, config_.fc_width(), m.hidden, type_, nullptr);
    stream_.phase("activation forward", 0, activation_bytes(config_.fc_width()) + activation_bytes(F));
    if (config_.mlp == MlpKind::swiglu)
      swiglu_forward(m.hidden, N_, F, type_, m.activated, stream_);
    else
      gelu_forward(m.hidden, N_ * F, type_, m.activated, stream_);
  }
  linear_forward("out", m.activated, w.out, w.out_bias, F, C, out, TensorType::fp32, m.middle);
}

// Logits and losses; with gradients, dlogits in their place.
void ModelCuda::classify(bool gradients, float gradient_scale) {
  const int64_t C = config_.width;
  multiply("logits", {N_, padded_V_, C, type_, DeviceMatrix::rows_of(a_->lnf, C),
                      DeviceMatrix::transposed(operand(head_), C), a_->logits, padded_V_, type_});
  stream_.phase("cross-entropy", 0, (gradients ? 2 : 1) * activation_bytes(config_.vocabulary));
  cross_entropy(a_->logits, a_->targets, N_, config_.vocabulary, padded_V_, type_, gradients, gradient_scale,
                a_->losses, stream_);
  mean_loss(a_->losses, N_, results_.as<double>(), stream_);
}

// --- Backward

void ModelCuda::backward(float gradient_scale) {
  const int64_t C = config_.width;
  classify(/*gradients=*/true, gradient_scale);
  // Columns of dlogits from V on are zero, and so are the rows behind the gradient of the output layer.
  DeviceProduct head{padded_V_,
                     C,
                     N_,
                     type_,
                     DeviceMatrix::transposed(a_->logits, padded_V_),
                     DeviceMatrix::rows_of(a_->lnf, C),
                     gradient(head_),
                     C,
                     TensorType::fp32};
  head.base = head.c;
  head.base_scale = writes_gradients_ ? 0 : 1;
  multiply("logits, weight gradient", head);
  multiply("logits, input gradient", {N_, C, padded_V_, type_, DeviceMatrix::rows_of(a_->logits, padded_V_),
                                      DeviceMatrix::rows_of(operand(head_), C), a_->dnorm, C, type_});
  norm_backward(a_->x, lnf_gain_, a_->mean, a_->rstd, nullptr, is_bf16() ? a_->dx_operand : nullptr,
                a_->lnf_gain_sums, a_->lnf_bias_sums);
  for (int64_t l = config_.layers; l-- > 0;) {
    mlp_backward(l);
    attention_backward(l);
  }
  stream_.phase("sums over rows");
  add_sums(at_hand_->sums.as<BlockSums>(), at_hand_->sum_count, at_hand_->most_columns, !writes_gradients_,
           stream_);
  if (wpe_ < 0) return;
  stream_.phase("embedding", 0, stream_bytes());
  position_backward(a_->dx, B_, T_, C, gradient(wpe_), stream_);
}

// dnorm is the gradient of what the norm gave.
void ModelCuda::norm_backward(const float* x, int64_t gain, const float* mean, const float* rstd,
                              const float* dx_in, void* dx_operand, float* gain_sums, float* bias_sums) {
  const int64_t C = config_.width;
  stream_.phase("norm backward", 0, (dx_in ? 3 : 2) * stream_bytes() + 2 * activation_bytes(C));
  if (config_.norm == NormKind::rms_norm)
    rms_norm_backward(a_->dnorm, type_, x, master(gain), rstd, N_, C, dx_in, a_->dx, dx_operand, gain_sums,
                      stream_);
  else
    layernorm_backward(a_->dnorm, type_, x, master(gain), mean, rstd, N_, C, dx_in, a_->dx, dx_operand,
                       gain_sums, bias_sums, stream_);
}

// dx comes in as the gradient of the layer's output and leaves as that of what the MLP adds to.
void ModelCuda::mlp_backward(int64_t l) {
  LayerMemory& m = a_->layers[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, F = config_.hidden_width(), fc = config_.fc_width();
  if (fused_gelu_) {
    DeviceProduct p{N_,
                    F,
                    C,
                    type_,
                    DeviceMatrix::rows_of(a_->dx_operand, C),
                    DeviceMatrix::transposed(operand(w.out), C),
                    a_->dhidden,
                    F,
                    type_};
    p.end = ProductEnd::gelu_slope;
    p.aux = m.hidden;
    multiply("out, input gradient, gelu", p);
  } else if (config_.mlp == MlpKind::swiglu) {
    linear_backward("out, input gradient", a_->dx_operand, w.out, F, C, a_->dactivated, type_);
    stream_.phase("activation backward", 0, activation_bytes(F) + 2 * activation_bytes(fc));
    swiglu_backward(m.hidden, a_->dactivated, N_, F, type_, a_->dhidden, stream_);
  } else {
    linear_backward("out, input gradient", a_->dx_operand, w.out, F, C, a_->wide, TensorType::fp32);
    stream_.phase("activation backward", 0, 4.0 * static_cast<double>(N_ * F) + 2 * activation_bytes(F));
    gelu_backward(a_->wide, m.hidden, N_ * F, type_, a_->dhidden, stream_);
  }
  weight_backward("out, weight gradient", a_->dx_operand, m.activated, w.out, F, C);
  bias_backward(a_->dx_operand, C, m.sums.out_bias);
  weight_backward("fc, weight gradient", a_->dhidden, m.ln2, w.fc, C, fc);
  bias_backward(a_->dhidden, fc, m.sums.fc_bias);
  linear_backward("fc, input gradient", a_->dhidden, w.fc, C, fc, a_->dnorm, type_);
  norm_backward(m.middle, w.ln2_gain, m.mean2, m.rstd2, a_->dx, is_bf16() ? a_->dx_operand : nullptr,
                m.sums.ln2_gain, m.sums.ln2_bias);
}

// dx comes in as the gradient of the residual stream behind attention and leaves as that of the layer's input.
void ModelCuda::attention_backward(int64_t l) {
  LayerMemory& m = a_->layers[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, Q = config_.query_width(), all = config_.qkv_width();
  attention_.join_facts();  // they read the d_o of the layer before
  if (config_.gated_attention) {
    linear_backward("proj, input gradient", a_->dx_operand, w.proj, Q, C, a_->wide, TensorType::fp32);
    weight_backward("proj, weight gradient", a_->dx_operand, m.gated, w.proj, Q, C);
    stream_.phase("gate values", 0, 4.0 * static_cast<double>(N_ * Q) + 4 * activation_bytes(Q));
    gate_backward(a_->wide, m.o, m.gate, N_ * Q, type_, a_->d_o, a_->dgate, stream_);
  } else {
    linear_backward("proj, input gradient", a_->dx_operand, w.proj, Q, C, a_->d_o, type_);
    weight_backward("proj, weight gradient", a_->dx_operand, m.o, w.proj, Q, C);
  }
  bias_backward(a_->dx_operand, C, m.sums.proj_bias);
  attention_.compute_facts_separately(l);
  stream_.phase("attention backward", 10.0 * static_cast<double>(N_) * static_cast<double>(T_ * Q) / 2);
  if (captures_now_ && !captures_[at(l)].x.values().empty()) {
    captures_[at(l)].plans = attention_.problem(l).plans;
    capture_rows_.copy(l, captures_[at(l)], m, a_->d_o, stream_);
  }
  attention_.backward(l);
  query_key_backward(m, w);
  weight_backward("qkv, weight gradient", a_->dqkv, m.ln1, w.qkv, C, all);
  bias_backward(a_->dqkv, all, m.sums.qkv_bias);
  linear_backward("qkv, input gradient", a_->dqkv, w.qkv, C, all, a_->dnorm, type_);
  if (config_.gated_attention) {
    weight_backward("gate, weight gradient", a_->dgate, m.ln1, w.gate, C, Q);
    bias_backward(a_->dgate, Q, m.sums.gate_bias);
    linear_backward("gate, input gradient", a_->dgate, w.gate, C, Q, a_->dnorm, type_, a_->dnorm);
  }
  norm_backward(m.x, w.ln1_gain, m.mean1, m.rstd1, a_->dx, is_bf16() && l > 0 ? a_->dx_operand : nullptr,
                m.sums.ln1_gain, m.sums.ln1_bias);
}

// query_key_forward in reverse, on dqkv.
void ModelCuda::query_key_backward(const LayerMemory& m, const LayerOffsets& w) {
  const int64_t H = config_.heads, G = config_.key_head_count(), D = config_.head_size(),
                all = config_.qkv_width(), own = attended_width(config_);
  if (config_.is_rotary()) {
    stream_.phase("rotary", 0, 2 * activation_bytes(own));
    rotary(a_->dqkv, all, turns_.as<float>(), config_.positions == Positions::rotary_pairs, /*back=*/true, N_,
           T_, H + G, D, type_, a_->dqkv, all, stream_);
  }
  if (!config_.qk_norm) return;
  stream_.phase("qk_norm", 0, 3 * activation_bytes(own));
  head_norm_backward(a_->dqkv, m.qkv, master(w.q_gain), master(w.k_gain), m.qk_rstd, N_, H, G, D, type_,
                     m.sums.q_gain, m.sums.k_gain, stream_);
}

}  // namespace evenkeel::device
