// GPT-2 on a GPU: products, the forward pass, the backward pass in reverse. In the backward pass the product whose
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
            bytes(p.rows, p.columns, p.c_type) * (1 + (p.base != nullptr) + (p.end != ProductEnd::plain)));
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
  multiply(name, p);
}

void ModelCuda::bias_backward(const void* dy, int64_t out, float* sums) {
  if (!sums) return;
  stream_.phase("bias gradients", 0, activation_bytes(out));
  column_sums(dy, N_, out, type_, sums, stream_);
}

// --- Forward

void ModelCuda::forward() {
  const int64_t C = config_.width;
  stream_.phase("embedding", 0, 2 * stream_bytes());
  embedding_forward(a_->tokens, master(wte_), master(wpe_), N_, T_, C, a_->layers[0].x, stream_);
  for (int64_t l = 0; l < config_.layers; ++l)
    layer_forward(l, l + 1 < config_.layers ? a_->layers[at(l + 1)].x : a_->x);
  stream_.phase("layernorm forward", 0, stream_bytes() + activation_bytes(C));
  layernorm_forward(a_->x, master(lnf_gain_), master(lnf_bias_), N_, C, type_, a_->lnf, a_->mean, a_->rstd,
                    stream_);
}

void ModelCuda::layer_forward(int64_t l, float* out) {
  LayerMemory& m = a_->layers[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, H = config_.heads, D = config_.head_size();
  stream_.phase("layernorm forward", 0, stream_bytes() + activation_bytes(C));
  layernorm_forward(m.x, master(w.ln1_gain), master(w.ln1_bias), N_, C, type_, m.ln1, m.mean1, m.rstd1,
                    stream_);
  linear_forward("qkv", m.ln1, w.qkv, w.qkv_bias, C, 3 * C, m.qkv, type_, nullptr);
  if (config_.qk_norm) {
    stream_.phase("qk_norm", 0, 2 * activation_bytes(2 * C));
    rms_norm_forward(m.qkv, master(w.q_gain), master(w.k_gain), N_, H, D, type_, m.qk, m.qk_rstd, stream_);
  }
  stream_.phase("attention forward", 4.0 * static_cast<double>(N_) * static_cast<double>(T_ * C) / 2);
  attention_.forward(l);
  const void* attended = m.o;
  if (config_.gated_attention) {
    linear_forward("gate", m.ln1, w.gate, w.gate_bias, C, C, m.gate, type_, nullptr);
    stream_.phase("gate values", 0, 3 * activation_bytes(C));
    gate_forward(m.o, m.gate, N_ * C, type_, m.gated, stream_);
    attended = m.gated;
  }
  linear_forward("proj", attended, w.proj, w.proj_bias, C, C, m.middle, TensorType::fp32, m.x);
  mlp_forward(l, out);
}

void ModelCuda::mlp_forward(int64_t l, float* out) {
  LayerMemory& m = a_->layers[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width;
  stream_.phase("layernorm forward", 0, stream_bytes() + activation_bytes(C));
  layernorm_forward(m.middle, master(w.ln2_gain), master(w.ln2_bias), N_, C, type_, m.ln2, m.mean2, m.rstd2,
                    stream_);
  if (fused_gelu_) {
    DeviceProduct p{N_,
                    4 * C,
                    C,
                    type_,
                    DeviceMatrix::rows_of(m.ln2, C),
                    DeviceMatrix::rows_of(operand(w.fc), 4 * C),
                    m.activated,
                    4 * C,
                    type_};
    p.bias = operand(w.fc_bias);
    p.end = ProductEnd::gelu;
    p.aux = m.hidden;
    multiply("fc, gelu", p);
  } else {
    linear_forward("fc", m.ln2, w.fc, w.fc_bias, C, 4 * C, m.hidden, type_, nullptr);
    stream_.phase("gelu forward", 0, 2 * activation_bytes(4 * C));
    gelu_forward(m.hidden, N_ * 4 * C, type_, m.activated, stream_);
  }
  linear_forward("out", m.activated, w.out, w.out_bias, 4 * C, C, out, TensorType::fp32, m.middle);
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
  multiply("logits, weight gradient", head);
  multiply("logits, input gradient", {N_, C, padded_V_, type_, DeviceMatrix::rows_of(a_->logits, padded_V_),
                                      DeviceMatrix::rows_of(operand(head_), C), a_->dnorm, C, type_});
  void* const dx_operand = is_bf16() ? a_->dx_operand : nullptr;
  stream_.phase("layernorm backward", 0, 2 * stream_bytes() + 2 * activation_bytes(C));
  layernorm_backward(a_->dnorm, type_, a_->x, master(lnf_gain_), a_->mean, a_->rstd, N_, C, nullptr, a_->dx,
                     dx_operand, a_->lnf_gain_sums, a_->lnf_bias_sums, stream_);
  for (int64_t l = config_.layers; l-- > 0;) {
    mlp_backward(l);
    attention_backward(l);
  }
  stream_.phase("sums over rows");
  add_sums(at_hand_->sums.as<BlockSums>(), at_hand_->sum_count, at_hand_->most_columns, stream_);
  stream_.phase("embedding", 0, stream_bytes());
  position_backward(a_->dx, B_, T_, C, gradient(wpe_), stream_);
}

// dx comes in as the gradient of the layer's output and leaves as that of what the MLP adds to.
void ModelCuda::mlp_backward(int64_t l) {
  LayerMemory& m = a_->layers[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width;
  if (fused_gelu_) {
    DeviceProduct p{N_,
                    4 * C,
                    C,
                    type_,
                    DeviceMatrix::rows_of(a_->dx_operand, C),
                    DeviceMatrix::transposed(operand(w.out), C),
                    a_->dhidden,
                    4 * C,
                    type_};
    p.end = ProductEnd::gelu_slope;
    p.aux = m.hidden;
    multiply("out, input gradient, gelu", p);
  } else {
    linear_backward("out, input gradient", a_->dx_operand, w.out, 4 * C, C, a_->wide, TensorType::fp32);
    stream_.phase("gelu backward", 0, 4 * stream_bytes() + 2 * activation_bytes(4 * C));
    gelu_backward(a_->wide, m.hidden, N_ * 4 * C, type_, a_->dhidden, stream_);
  }
  weight_backward("out, weight gradient", a_->dx_operand, m.activated, w.out, 4 * C, C);
  bias_backward(a_->dx_operand, C, m.sums.out_bias);
  weight_backward("fc, weight gradient", a_->dhidden, m.ln2, w.fc, C, 4 * C);
  bias_backward(a_->dhidden, 4 * C, m.sums.fc_bias);
  linear_backward("fc, input gradient", a_->dhidden, w.fc, C, 4 * C, a_->dnorm, type_);
  stream_.phase("layernorm backward", 0, 3 * stream_bytes() + 2 * activation_bytes(C));
  layernorm_backward(a_->dnorm, type_, m.middle, master(w.ln2_gain), m.mean2, m.rstd2, N_, C, a_->dx, a_->dx,
                     is_bf16() ? a_->dx_operand : nullptr, m.sums.ln2_gain, m.sums.ln2_bias, stream_);
}

// dx comes in as the gradient of the residual stream behind attention and leaves as that of the layer's input.
void ModelCuda::attention_backward(int64_t l) {
  LayerMemory& m = a_->layers[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, H = config_.heads, D = config_.head_size();
  attention_.join_facts();  // they read the d_o of the layer before
  if (config_.gated_attention) {
    linear_backward("proj, input gradient", a_->dx_operand, w.proj, C, C, a_->wide, TensorType::fp32);
    weight_backward("proj, weight gradient", a_->dx_operand, m.gated, w.proj, C, C);
    stream_.phase("gate values", 0, stream_bytes() + 4 * activation_bytes(C));
    gate_backward(a_->wide, m.o, m.gate, N_ * C, type_, a_->d_o, a_->dgate, stream_);
  } else {
    linear_backward("proj, input gradient", a_->dx_operand, w.proj, C, C, a_->d_o, type_);
    weight_backward("proj, weight gradient", a_->dx_operand, m.o, w.proj, C, C);
  }
  bias_backward(a_->dx_operand, C, m.sums.proj_bias);
  attention_.compute_facts_separately(l);
  stream_.phase("attention backward", 10.0 * static_cast<double>(N_) * static_cast<double>(T_ * C) / 2);
  if (captures_now_ && !captures_[at(l)].x.values().empty()) {
    captures_[at(l)].plans = attention_.problem(l).plans;
    capture_rows_.copy(l, captures_[at(l)], m, a_->d_o, stream_);
  }
  attention_.backward(l);
  if (config_.qk_norm) {
    stream_.phase("qk_norm", 0, 3 * activation_bytes(2 * C));
    rms_norm_backward(a_->dqkv, m.qkv, master(w.q_gain), master(w.k_gain), m.qk_rstd, N_, H, D, type_,
                      m.sums.q_gain, m.sums.k_gain, stream_);
  }
  weight_backward("qkv, weight gradient", a_->dqkv, m.ln1, w.qkv, C, 3 * C);
  bias_backward(a_->dqkv, 3 * C, m.sums.qkv_bias);
  linear_backward("qkv, input gradient", a_->dqkv, w.qkv, C, 3 * C, a_->dnorm, type_);
  if (config_.gated_attention) {
    weight_backward("gate, weight gradient", a_->dgate, m.ln1, w.gate, C, C);
    bias_backward(a_->dgate, C, m.sums.gate_bias);
    linear_backward("gate, input gradient", a_->dgate, w.gate, C, C, a_->dnorm, type_, a_->dnorm);
  }
  stream_.phase("layernorm backward", 0, 3 * stream_bytes() + 2 * activation_bytes(C));
  layernorm_backward(a_->dnorm, type_, m.x, master(w.ln1_gain), m.mean1, m.rstd1, N_, C, a_->dx, a_->dx,
                     is_bf16() && l > 0 ? a_->dx_operand : nullptr, m.sums.ln1_gain, m.sums.ln1_bias,
                     stream_);
}

}  // namespace evenkeel::device
