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
  float* sum(int64_t offset, int64_t columns) {
    if (offset < 0) return nullptr;
    float* parts = carver_.take<float>(blocks_ * columns);
    sums_.push_back(
        {parts, shape_.gradients + offset, static_cast<int32_t>(blocks_), static_cast<int32_t>(columns)});
    return parts;
  }

 private:
  const ActivationShape& shape_;
  const int64_t rows_, blocks_;
  Carver& carver_;
  std::vector<BlockSums>& sums_;
};

LayerSums take_sums(Pieces& pieces, const ModelConfig& config, const LayerOffsets& w) {
  const int64_t C = config.width, D = config.head_size();
  // In the order of the braces.
  return {pieces.sum(w.ln1_gain, C),    pieces.sum(w.ln1_bias, C), pieces.sum(w.qkv_bias, 3 * C),
          pieces.sum(w.q_gain, D),      pieces.sum(w.k_gain, D),   pieces.sum(w.gate_bias, C),
          pieces.sum(w.proj_bias, C),   pieces.sum(w.ln2_gain, C), pieces.sum(w.ln2_bias, C),
          pieces.sum(w.fc_bias, 4 * C), pieces.sum(w.out_bias, C)};
}

// qkv: what attention reads; rows: of this layer, a.row_stride apart for each of the four kinds of all layers.
LayerMemory take_layer(Pieces& pieces, const ModelConfig& config, const LayerOffsets& w, void* qkv,
                       float* rows, int64_t kind_stride) {
  const int64_t C = config.width;
  LayerMemory m{};
  m.x = pieces.stream(C);
  m.ln1 = pieces.activation(C);
  m.mean1 = pieces.stream(1), m.rstd1 = pieces.stream(1);
  m.qkv = config.qk_norm ? pieces.activation(3 * C) : qkv;
  if (config.qk_norm) {
    m.qk = qkv;
    m.qk_rstd = pieces.stream(2 * config.heads);
  }
  m.o = pieces.activation(C);
  m.lse = rows;
  m.ties = reinterpret_cast<int32_t*>(rows + kind_stride);
  m.residual = rows + 2 * kind_stride;
  m.delta = rows + 3 * kind_stride;
  if (config.gated_attention) m.gate = pieces.activation(C), m.gated = pieces.activation(C);
  m.middle = pieces.stream(C);
  m.ln2 = pieces.activation(C);
  m.mean2 = pieces.stream(1), m.rstd2 = pieces.stream(1);
  m.hidden = pieces.activation(4 * C), m.activated = pieces.activation(4 * C);
  m.sums = take_sums(pieces, config, w);
  return m;
}

}  // namespace

Activations Arena::carve(int64_t B, int64_t T, Carver& carver, std::vector<BlockSums>& sums) const {
  const ModelConfig& config = shape_.config;
  const int64_t N = B * T, C = config.width, H = config.heads, L = config.layers;
  Pieces pieces(shape_, N, carver, sums);
  Activations a{};
  a.input = carver.take<uint32_t>(kInputHeader + 2 * N);
  a.tokens = reinterpret_cast<int32_t*>(a.input) + kInputHeader;
  a.targets = a.tokens + N;
  // What all layers' facts are read from lies at even distances.
  constexpr auto kStep = static_cast<int64_t>(Carver::kAlignment);
  a.qkv_stride = round_up(N * (config.qk_norm ? 2 : 3) * C, kStep);
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
  a.wide = pieces.stream(!shape_.fused_gelu ? 4 * C : config.gated_attention ? C : 0);
  a.d_o = pieces.activation(C);
  if (config.gated_attention) a.dgate = pieces.activation(C);
  a.dqkv = pieces.activation(3 * C);
  a.dhidden = pieces.activation(4 * C);
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
