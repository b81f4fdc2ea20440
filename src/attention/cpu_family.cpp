// The CPU as a family of kernels: passes over tensors without a type become calls of attention.h. FP32 tensors run any
// plan; FP64 tensors run the definition, which saves nothing: backward computes everything again.
#include <algorithm>

#include "attention/attention.h"
#include "attention/family_calls.h"
#include "base/error.h"

namespace evenkeel {
namespace {

size_t row_count(const AttentionProblem& p) { return static_cast<size_t>(p.B * p.H * p.T); }

template <class T>
View<T> view(const DeviceTensor& t, const std::array<int64_t, 4>& sizes) {
  return {static_cast<T*>(t.data), sizes, t.stride};
}
// Of q and k, or with p.Dv of o and v; of their gradients.
template <class T>
View<T> query(const AttentionProblem& p, const DeviceTensor& t, int64_t size) {
  return view<T>(t, {p.B, p.H, p.T, size});
}
template <class T>
View<T> key(const AttentionProblem& p, const DeviceTensor& t, int64_t size) {
  return view<T>(t, {p.B, p.G, p.N, size});
}
template <class T>
View<T> rows(const AttentionProblem& p, T* data) {
  return data ? contiguous_view(data, {p.B, p.H, p.T, 1}) : View<T>{};
}
template <class Real>
AttentionInputsOf<Real> inputs(const AttentionProblem& p, const PassInputs& in) {
  return {query<const Real>(p, in.q, p.D), key<const Real>(p, in.k, p.D), key<const Real>(p, in.v, p.Dv)};
}

// `saved` is o_for_delta (B, H, T, Dv), row_max and row_sum (B, H, T).
AttentionForward forward_views(const AttentionProblem& p, const ForwardPass& pass) {
  auto* floats = static_cast<float*>(pass.saved);
  const size_t features = row_count(p) * static_cast<size_t>(p.Dv);
  AttentionForward out{};
  out.o = query<float>(p, pass.o, p.Dv);
  out.lse = rows(p, pass.lse);
  out.o_for_delta = contiguous_view(floats, {p.B, p.H, p.T, p.Dv});
  out.row_max = rows(p, floats + features);
  out.row_sum = rows(p, floats + features + row_count(p));
  out.ties = rows(p, pass.ties);
  return out;
}

void copy(const Tensor<double>& from, View<double> to) {
  const auto [B, H, rows, D] = to.shape;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < D; ++d) *to.at(b, h, i, d) = *from.view().at(b, h, i, d);
}
void narrow(const std::vector<double>& from, float* to) {
  std::transform(from.begin(), from.end(), to, [](double x) { return static_cast<float>(x); });
}

void forward_definition(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out) {
  require(out.ties == nullptr, "[attention] expected no ties with fp64 tensors, which round nothing");
  const AttentionReference exact = attention_reference(p, inputs<double>(p, in));
  copy(exact.o, query<double>(p, out.o, p.Dv));
  narrow(exact.lse.values(), out.lse);
}

void backward_definition(const AttentionProblem& p, const PassInputs& in, const DeviceTensor& grad_output,
                         const BackwardPass& out) {
  require(!out.residual && !out.residual_floor,
          "[attention] expected no residual and no residual_floor with fp64 tensors, which round nothing");
  const std::vector<double> grad_lse(out.grad_lse, out.grad_lse ? out.grad_lse + row_count(p) : nullptr);
  const AttentionReference exact =
      attention_reference(p, inputs<double>(p, in), query<const double>(p, grad_output, p.Dv),
                          grad_lse.empty() ? View<const double>{} : rows<const double>(p, grad_lse.data()));
  copy(exact.dq, query<double>(p, out.dq, p.D));
  copy(exact.dk, key<double>(p, out.dk, p.D));
  copy(exact.dv, key<double>(p, out.dv, p.Dv));
  if (out.delta) narrow(exact.delta.values(), out.delta);
  if (out.dsinks) narrow(exact.dsinks.values(), out.dsinks);
}

}  // namespace

std::shared_ptr<const FamilyPlan> cpu_prepare(const AttentionProblem& p) {
  auto plan = std::make_shared<FamilyPlan>();
  if (p.type != TensorType::fp64)
    plan->sizes.saved = row_count(p) * static_cast<size_t>(p.Dv + 2) * sizeof(float);
  return plan;
}

void cpu_forward(const AttentionProblem& p, const FamilyPlan&, const PassInputs& in, const ForwardPass& out,
                 void*, void*) {
  if (p.type == TensorType::fp64) return forward_definition(p, in, out);
  attention_forward(p, inputs<float>(p, in), forward_views(p, out));
}

void cpu_backward(const AttentionProblem& p, const FamilyPlan&, const PassInputs& in,
                  const DeviceTensor& grad_output, const ForwardPass& saved, const BackwardPass& pass, void*,
                  void*) {
  require(pass.delta_error == nullptr, "[attention] expected no delta_error, which only a GPU gives");
  if (p.type == TensorType::fp64) return backward_definition(p, in, grad_output, pass);
  AttentionBackward out{};
  out.dq = query<float>(p, pass.dq, p.D);
  out.dk = key<float>(p, pass.dk, p.D);
  out.dv = key<float>(p, pass.dv, p.Dv);
  // dsinks is a sum over delta.
  std::vector<float> delta(pass.dsinks && !pass.delta ? row_count(p) : 0);
  out.delta = rows(p, delta.empty() ? pass.delta : delta.data());
  out.grad_lse = rows(p, pass.grad_lse);
  if (pass.dsinks) out.dsinks = contiguous_view(pass.dsinks, {1, p.H, 1, 1});
  // The CPU's residuals are FP64.
  std::vector<double> residual(pass.residual ? row_count(p) : 0),
      floor(pass.residual_floor ? row_count(p) : 0);
  if (pass.residual) out.residual = rows(p, residual.data());
  if (pass.residual_floor) out.residual_floor = rows(p, floor.data());
  attention_backward(p, inputs<float>(p, in), query<const float>(p, grad_output, p.Dv),
                     forward_views(p, saved), out);
  narrow(residual, pass.residual);
  narrow(floor, pass.residual_floor);
}

}  // namespace evenkeel
