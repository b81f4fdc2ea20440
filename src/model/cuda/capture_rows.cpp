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
    r.qkv = take(3 * C);
    if (config_.qk_norm) r.qk = take(2 * C);
    r.o = take(C);
    r.d_o = take(C);
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
  const int64_t rows = row_count(asked), C = config_.width;
  const auto down = [&](void* target, const void* from, int64_t columns) {
    stream.copy_down(target, from, at(rows * columns) * element_bytes());
  };
  down(to.ln1, m.ln1, C);
  down(to.qkv, m.qkv, 3 * C);
  if (config_.qk_norm) down(to.qk, m.qk, 2 * C);
  down(to.o, m.o, C);
  down(to.d_o, d_o, C);
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
    const int64_t C = config_.width, qk_columns = (config_.qk_norm ? 2 : 3) * C;
    const void* const qk = config_.qk_norm ? from.qk : from.qkv;
    unpack(c.x, from.ln1, C, 0);
    unpack(c.q, qk, qk_columns, 0);
    unpack(c.k, qk, qk_columns, C);
    unpack(c.v, from.qkv, 3 * C, 2 * C);
    unpack(c.o, from.o, C, 0);
    unpack(c.d_o, from.d_o, C, 0);
    const auto [B, H, T, one] = c.lse.shape();
    for (int64_t n = 0; n < B * H; ++n) std::copy_n(from.lse + n * T_, T, c.lse.values().begin() + n * T);
  });
}

}  // namespace evenkeel::device
