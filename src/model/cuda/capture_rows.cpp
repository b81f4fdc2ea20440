#include "model/cuda/capture_rows.h"

#include <algorithm>
#include <bit>

#include "base/sizes.h"
#include "base/threads.h"
#include "gpu/device_memory.h"

namespace evenkeel::device {
namespace {

bool is_asked_for(const LayerCapture& c) { return !c.x.values().empty(); }

}  // namespace

size_t CaptureRows::lay_out(const std::vector<LayerCapture>& asked, void* memory) {
  const int64_t C = config_.width;
  Carver carver(memory);
  layers_.clear();
  for (const LayerCapture& c : asked) {
    Rows& r = layers_.emplace_back();
    if (!is_asked_for(c)) continue;
    const auto take = [&](int64_t columns) {
      return carver.take_bytes(at(row_count(c) * columns) * element_bytes());
    };
    r.ln1 = take(C);
    r.qkv = take(config_.qkv_width());
    if (config_.has_own_qk()) r.qk = take(attended_width(config_));
    r.o = take(config_.query_width());
    r.d_o = take(config_.query_width());
    r.lse = carver.take<float>(c.lse.shape()[0] * config_.heads * T_);
  }
  return carver.used();
}

void CaptureRows::start(const std::vector<LayerCapture>& asked, int64_t T) {
  T_ = T;
  if (const size_t bytes = lay_out(asked, nullptr); memory_.bytes() < bytes) memory_ = PinnedMemory(bytes);
  lay_out(asked, memory_.as<void>());
}

void CaptureRows::copy(int64_t layer, const LayerCapture& asked, const LayerMemory& m, const void* d_o,
                       const WorkStream& stream) const {
  const Rows& to = layers_[at(layer)];
  const int64_t rows = row_count(asked), Q = config_.query_width();
  const auto down = [&](void* target, const void* from, int64_t columns) {
    stream.copy_down(target, from, at(rows * columns) * element_bytes());
  };
  down(to.ln1, m.ln1, config_.width);
  down(to.qkv, m.qkv, config_.qkv_width());
  if (config_.has_own_qk()) down(to.qk, m.qk, attended_width(config_));
  down(to.o, m.o, Q);
  down(to.d_o, d_o, Q);
  stream.copy_down(to.lse, m.lse, at(asked.lse.shape()[0] * config_.heads * T_) * sizeof(float));
}

void CaptureRows::unpack(Tensor<float>& to, const void* from, int64_t columns, int64_t first) const {
  const View<float> all = to.view();
  const auto [B, H, T, D] = all.shape;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < T; ++t) {
        const int64_t row = (b * T_ + t) * columns + first + h * D;
        if (type_ == TensorType::bf16)
          std::transform(static_cast<const uint16_t*>(from) + row,
                         static_cast<const uint16_t*>(from) + row + D, all.at(b, h, t), [](uint16_t bits) {
                           return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
                         });
        else
          std::copy_n(static_cast<const float*>(from) + row, D, all.at(b, h, t));
      }
}

void CaptureRows::unpack(std::vector<LayerCapture>& captures) const {
  parallel_for(config_.layers, [&](int64_t l, int) {
    LayerCapture& c = captures[at(l)];
    if (!is_asked_for(c)) return;
    const Rows& from = layers_[at(l)];
    const int64_t Q = config_.query_width(), own = attended_width(config_);
    const void* const qk = config_.has_own_qk() ? from.qk : from.qkv;
    unpack(c.x, from.ln1, config_.width, 0);
    unpack(c.q, qk, own, 0);
    unpack(c.k, qk, own, Q);
    unpack(c.v, from.qkv, config_.qkv_width(), Q + config_.key_width());
    unpack(c.o, from.o, Q, 0);
    unpack(c.d_o, from.d_o, Q, 0);
    const auto [B, H, T, one] = c.lse.shape();
    for (int64_t n = 0; n < B * H; ++n) std::copy_n(from.lse + n * T_, T, c.lse.values().begin() + n * T);
  });
}

}  // namespace evenkeel::device
