// The problem of given tensors, and the memory of a forward and backward. Computes nothing.
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

void require_lengths(const char* name, std::span<const int32_t> lengths, int64_t most) {
  for (size_t b = 0; b < lengths.size(); ++b)
    require(lengths[b] >= 0 && lengths[b] <= most, "[attention] expected {}[{}] from 0 to {}, got {}", name,
            b, most, lengths[b]);
}

}  // namespace

template <class Real>
AttentionProblem problem_of(const AttentionProblem& asked, const AttentionInputsOf<Real>& in) {
  for (auto [tensor, view] : {std::pair{"q", &in.q}, {"k", &in.k}, {"v", &in.v}})
    require(view->present(), "[attention] expected a tensor {}, got none", tensor);
  AttentionProblem p = asked;
  p.B = in.q.shape[0], p.H = in.q.shape[1], p.T = in.q.shape[2], p.D = in.q.shape[3];
  p.G = in.k.shape[1], p.N = in.k.shape[2], p.Dv = in.v.shape[3];
  p = complete(std::move(p));
  require_shape("k", "(B, G, N, D)", in.k.shape, {p.B, p.G, p.N, p.D});
  require_shape("v", "(B, G, N, Dv)", in.v.shape, {p.B, p.G, p.N, p.Dv});
  require_lengths("query_lengths", p.mask.query_lengths, p.T);
  require_lengths("key_lengths", p.mask.key_lengths, p.N);
  return p;
}
template AttentionProblem problem_of(const AttentionProblem&, const AttentionInputsOf<float>&);
template AttentionProblem problem_of(const AttentionProblem&, const AttentionInputsOf<double>&);

AttentionBuffers::AttentionBuffers(const AttentionInputs& in, bool with_facts) {
  const auto [B, H, T, D] = in.q.shape;
  const Shape per_value = {B, H, T, in.v.shape[3]}, per_row = {B, H, T, 1};
  for (Tensor<float>* t : {&o, &o_for_delta}) *t = Tensor<float>(per_value);
  dq = Tensor<float>(in.q.shape);
  dk = Tensor<float>(in.k.shape);
  dv = Tensor<float>(in.v.shape);
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
