#include "model/cuda/activations.h"

#include <algorithm>

#include "base/sizes.h"

namespace evenkeel::device {
namespace {

// Hands out a call's pieces in the units they come in.
class Pieces {
 public:
  Pieces(const ActivationShape& shape, int64_t rows, Carver& carver, std::vector<BlockSums>& sums)
      : shape_(shape), rows_(rows), blocks_(sum_blocks(rows)), carver_(carver), sums_(sums) {}

  void* activation(int64_t columns) {
    return carver_.take_bytes(at(rows_ * columns) * shape_.element_bytes());
  }
  float* stream(int64_t columns) { return carver_.take<float>(rows_ * columns); }
  // Parts of the gradient at `offset`; nullptr where there is no such tensor.
  float* sum(int64_t offset, int64_t columns) { return sum_of(blocks_, offset, columns); }
  // The same where there is one part alone.
  float* whole_sum(int64_t offset, int64_t columns) { return sum_of(1, offset, columns); }

 private:
  float* sum_of(int64_t blocks, int64_t offset, int64_t columns) {
    if (offset < 0) return nullptr;
    float* parts = carver_.take<float>(blocks * columns);
    sums_.push_back(
        {parts, shape_.gradients + offset, static_cast<int32_t>(blocks), static_cast<int32_t>(columns)});
    return parts;
  }

  const ActivationShape& shape_;
  const int64_t rows_, blocks_;
  Carver& carver_;
  std::vector<BlockSums>& sums_;
};

LayerSums take_sums(Pieces& pieces, const ModelConfig& config, const LayerOffsets& w) {
  const int64_t C = config.width, D = config.head_size();
  // In the order of the braces.
  return {pieces.sum(w.ln1_gain, C),
          pieces.sum(w.ln1_bias, C),
          pieces.sum(w.qkv_bias, config.qkv_width()),
          pieces.sum(w.q_gain, D),
          pieces.sum(w.k_gain, D),
          pieces.whole_sum(w.sinks, config.heads),
          pieces.sum(w.gate_bias, config.query_width()),
          pieces.sum(w.proj_bias, C),
          pieces.sum(w.ln2_gain, C),
          pieces.sum(w.ln2_bias, C),
          pieces.sum(w.fc_bias, config.fc_width()),
          pieces.sum(w.out_bias, C)};
}

// qkv: what attention reads; rows: of this layer, a.row_stride apart for each of the four kinds of all layers.
LayerMemory take_layer(Pieces& pieces, const ModelConfig& config, const LayerOffsets& w, void* qkv,
                       float* rows, int64_t kind_stride) {
  const int64_t C = config.width, Q = config.query_width();
  LayerMemory m{};
  m.x = pieces.stream(C);
  m.ln1 = pieces.activation(C);
  m.mean1 = pieces.stream(1), m.rstd1 = pieces.stream(1);
  m.qkv = config.has_own_qk() ? pieces.activation(config.qkv_width()) : qkv;
  if (config.has_own_qk()) m.qk = qkv;
  if (config.qk_norm) m.qk_rstd = pieces.stream(config.heads + config.key_head_count());
  m.o = pieces.activation(Q);
  m.lse = rows;
  m.ties = reinterpret_cast<int32_t*>(rows + kind_stride);
  m.residual = rows + 2 * kind_stride;
  m.delta = rows + 3 * kind_stride;
  if (config.gated_attention) m.gate = pieces.activation(Q), m.gated = pieces.activation(Q);
  m.middle = pieces.stream(C);
  m.ln2 = pieces.activation(C);
  m.mean2 = pieces.stream(1), m.rstd2 = pieces.stream(1);
  m.hidden = pieces.activation(config.fc_width()), m.activated = pieces.activation(config.hidden_width());
  m.sums = take_sums(pieces, config, w);
  return m;
}

}  // namespace

int64_t attended_width(const ModelConfig& config) {
  return config.has_own_qk() ? config.query_width() + config.key_width() : config.qkv_width();
}

Activations Arena::carve(int64_t B, int64_t T, Carver& carver, std::vector<BlockSums>& sums) const {
  const ModelConfig& config = shape_.config;
  const int64_t N = B * T, C = config.width, H = config.heads, L = config.layers, Q = config.query_width();
  Pieces pieces(shape_, N, carver, sums);
  Activations a{};
  a.input = carver.take<uint32_t>(kInputHeader + 2 * N);
  a.tokens = reinterpret_cast<int32_t*>(a.input) + kInputHeader;
  a.targets = a.tokens + N;
  // What all layers' facts are read from lies at even distances.
  constexpr auto kStep = static_cast<int64_t>(Carver::kAlignment);
  a.qkv_stride = round_up(N * attended_width(config), kStep);
  a.row_stride = round_up(N * H, kStep);
  auto* qkv = static_cast<char*>(carver.take_bytes(at(L * a.qkv_stride) * shape_.element_bytes()));
  auto* rows = carver.take<float>(4 * L * a.row_stride);
  for (int64_t l = 0; l < L; ++l)
    a.layers.push_back(take_layer(pieces, config, shape_.offsets[at(l)],
                                  qkv + at(l * a.qkv_stride) * shape_.element_bytes(),
                                  rows + l * a.row_stride, L * a.row_stride));
  a.x = pieces.stream(C);
  a.lnf = pieces.activation(C);
  a.mean = pieces.stream(1), a.rstd = pieces.stream(1);
  a.lnf_gain_sums = pieces.sum(shape_.lnf_gain, C), a.lnf_bias_sums = pieces.sum(shape_.lnf_bias, C);
  a.logits = pieces.activation(config.padded_vocabulary());
  a.last_logits = carver.take<float>(config.padded_vocabulary());
  a.losses = pieces.stream(1);
  a.dx = pieces.stream(C);
  a.dx_operand = shape_.type == TensorType::bf16 ? pieces.activation(C) : a.dx;
  a.dnorm = pieces.activation(C);
  const bool swiglu = config.mlp == MlpKind::swiglu;
  a.wide = pieces.stream(
      std::max(shape_.fused_gelu || swiglu ? 0 : config.hidden_width(), config.gated_attention ? Q : 0));
  a.d_o = pieces.activation(Q);
  if (config.gated_attention) a.dgate = pieces.activation(Q);
  a.dqkv = pieces.activation(config.qkv_width());
  if (swiglu) a.dactivated = pieces.activation(config.hidden_width());
  a.dhidden = pieces.activation(config.fc_width());
  // A token of p places has p / kRunPlaces runs, rounded up; only one of more than kRunPlaces has parts.
  const int64_t most_parts = 2 * N / kRunPlaces + 1;
  a.places = carver.take<int32_t>(N);
  a.runs = carver.take<TokenRun>(most_runs(N, config.vocabulary));
  a.token_parts = carver.take<TokenParts>(most_split_tokens(N));
  a.run_sums = carver.take<float>(most_parts * C);
  return a;
}

Arena::Sized& Arena::room_for(int64_t B, int64_t T, const WorkStream& stream,
                              const std::function<void()>& before_move) {
  if (const auto known = sized_.find({B, T}); known != sized_.end()) return known->second;
  Carver count(nullptr);
  std::vector<BlockSums> sums;
  carve(B, T, count, sums);
  if (count.used() > memory_.bytes()) {
    stream.wait();
    before_move();
    sized_.clear();
    memory_ = {};  // the old one goes before the new one comes
    memory_ = DeviceMemory(count.used());
  }
  Carver carver(memory_.data());
  sums.clear();
  Sized made;
  made.activations = carve(B, T, carver, sums);
  made.sums = DeviceMemory(sums.size() * sizeof(BlockSums));
  made.sum_count = static_cast<int64_t>(sums.size());
  made.most_columns = 0;
  for (const BlockSums& s : sums) made.most_columns = std::max<int64_t>(made.most_columns, s.columns);
  stream.copy_up(made.sums.data(), sums.data(), made.sums.bytes());
  stream.wait();
  return sized_.emplace(std::pair(B, T), std::move(made)).first->second;
}

}  // namespace evenkeel::device
