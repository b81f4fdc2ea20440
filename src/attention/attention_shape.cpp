// What every implementation of attention shares: the check of a request, which keys a row sees by position,
// and the memory of a forward and backward. Computes nothing.
#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "base/error.h"

namespace evenkeel {
namespace {

using Shape = std::array<int64_t, 4>;

std::string text_of(const Shape& s) { return fmt::format("({}, {}, {}, {})", s[0], s[1], s[2], s[3]); }

void require_shape(const char* tensor, const char* axes, const Shape& found, const Shape& expected) {
  require(found == expected, "[attention] expected {} of shape {} = {}, got {}", tensor, axes,
          text_of(expected), text_of(found));
}

void require_lengths(const char* name, std::span<const int64_t> lengths, int64_t B, int64_t most) {
  if (lengths.empty()) return;
  const auto count = static_cast<int64_t>(lengths.size());
  require(count == B, "[attention] expected {} with one number for each of {} sequences, got {}", name, B,
          count);
  for (int64_t b = 0; b < B; ++b)
    require(lengths[b] >= 0 && lengths[b] <= most, "[attention] expected {}[{}] from 0 to {}, got {}", name,
            b, most, lengths[b]);
}

}  // namespace

template <class Real>
AttentionShape::AttentionShape(const AttentionConfig& config, const AttentionInputsOf<Real>& in)
    : B(in.q.shape[0]),
      H(in.q.shape[1]),
      G(in.k.shape[1]),
      T(in.q.shape[2]),
      N(in.k.shape[2]),
      D(in.q.shape[3]) {
  for (auto [tensor, view] : {std::pair{"q", &in.q}, {"k", &in.k}, {"v", &in.v}})
    require(view->present(), "[attention] expected a tensor {}, got none", tensor);
  require(D >= 1, "[attention] expected a head size of 1 or more, got head size {}", D);
  require(B >= 1 && H >= 1 && T >= 1, "[attention] expected q of shape (B, H, T, D), each 1 or more, got {}",
          text_of(in.q.shape));
  require(G >= 1 && N >= 1, "[attention] expected k of shape (B, G, N, D), each 1 or more, got {}",
          text_of(in.k.shape));
  require_shape("k", "(B, G, N, D)", in.k.shape, {B, G, N, D});
  require_shape("v", "(B, G, N, D)", in.v.shape, {B, G, N, D});
  require(H % G == 0,
          "[attention] expected query heads in whole groups for {} key/value heads, got {} query heads", G,
          H);

  const auto plans = static_cast<int64_t>(config.plans.size());
  require(plans == 1 || plans == H, "[attention] expected 1 plan or one for each of {} query heads, got {}",
          H, plans);
  require(std::isfinite(config.scale), "[attention] expected a finite scale, got {}", config.scale);
  require(std::isfinite(config.softcap) && config.softcap >= 0,
          "[attention] expected a finite softcap of 0 (off) or more, got {}", config.softcap);
  require(config.tile_rows >= 1, "[attention] expected tile_rows of 1 or more, got {}", config.tile_rows);
  require(config.tile_keys >= 0, "[attention] expected tile_keys of 0 (all keys) or more, got {}",
          config.tile_keys);

  require(config.first_sequence >= 0, "[attention] expected a first sequence of 0 or more, got {}",
          config.first_sequence);

  const AttentionMask& mask = config.mask;
  require_lengths("query_lengths", mask.query_lengths, B, T);
  require_lengths("key_lengths", mask.key_lengths, B, N);
  if (mask.visible.present()) require_shape("a mask", "(B, H, T, N)", mask.visible.shape, {B, H, T, N});

  scale = config.scale != 0 ? config.scale : static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
}
template AttentionShape::AttentionShape(const AttentionConfig&, const AttentionInputsOf<float>&);
template AttentionShape::AttentionShape(const AttentionConfig&, const AttentionInputsOf<double>&);

int64_t AttentionShape::rows(const AttentionMask& mask, int64_t b) const {
  return mask.query_lengths.empty() ? T : mask.query_lengths[static_cast<size_t>(b)];
}

int64_t AttentionShape::keys(const AttentionMask& mask, int64_t b) const {
  return mask.key_lengths.empty() ? N : mask.key_lengths[static_cast<size_t>(b)];
}

std::pair<int64_t, int64_t> AttentionShape::key_range(const AttentionMask& mask, int64_t b, int64_t i) const {
  const int64_t row_count = rows(mask, b), key_count = keys(mask, b);
  if (i >= row_count) return {0, 0};
  const int64_t position = i + key_count - row_count;  // < key_count; negative where rows outnumber keys
  int64_t first = 0, last = key_count;
  if (mask.causal) last = std::min(last, position + 1);
  // Compared before they are added: a window may be as wide as int64_t allows.
  if (mask.window_left >= 0 && mask.window_left < position) first = position - mask.window_left;
  if (mask.window_right >= 0 && mask.window_right < key_count - position)
    last = std::min(last, position + mask.window_right + 1);
  return {first, std::max(first, last)};
}

AttentionBuffers::AttentionBuffers(const AttentionInputs& in, bool with_facts) {
  const Shape per_feature = in.q.shape, per_key = in.k.shape;
  const Shape per_row = {per_feature[0], per_feature[1], per_feature[2], 1};
  for (Tensor<float>* t : {&o, &o_for_delta, &dq}) *t = Tensor<float>(per_feature);
  for (Tensor<float>* t : {&dk, &dv}) *t = Tensor<float>(per_key);
  for (Tensor<float>* t : {&lse, &row_max, &row_sum}) *t = Tensor<float>(per_row);
  if (!with_facts) return;
  delta = Tensor<float>(per_row);
  ties = Tensor<int32_t>(per_row);
  residual = residual_floor = Tensor<double>(per_row);
}

namespace {
template <class T>
View<T> view_if_any(Tensor<T>& tensor) {
  return tensor.values().empty() ? View<T>{} : tensor.view();
}
}  // namespace

AttentionForward AttentionBuffers::forward() {
  return {o.view(), lse.view(), o_for_delta.view(), row_max.view(), row_sum.view(), view_if_any(ties)};
}

AttentionBackward AttentionBuffers::backward() {
  return {dq.view(),
          dk.view(),
          dv.view(),
          view_if_any(delta),
          view_if_any(residual),
          view_if_any(residual_floor)};
}

}  // namespace evenkeel
