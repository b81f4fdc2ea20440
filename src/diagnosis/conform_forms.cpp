#include "diagnosis/conform_forms.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "diagnosis/conform.h"
#include "diagnosis/input_stream.h"
#include "numerics/round_array.h"

namespace evenkeel {
namespace {

// Features of the keys with a purpose. The last is constant, so that dQ there is the leak. The one before carries the
// offset, and the one before that a score that depends on the key's place.
constexpr int64_t kLeakFeature = 1, kOffsetFeature = 2, kPlaceFeature = 3;  // from the end
constexpr double kOffsetKey = 8, kPlaceKey = 4;

enum Tensors : uint32_t { kQ, kK, kV, kGradOutput, kSinks, kGradLse, kVisible };

int64_t sequence_length(int64_t longest, int64_t b) {
  return b == 0 ? longest : b == 1 ? longest / 2 + 1 : std::max<int64_t>(1, longest / 3);
}

// What is added to the score of key j of N.
double place_score(FormValues values, int64_t j, int64_t N) {
  const double place = static_cast<double>(j) / static_cast<double>(std::max<int64_t>(1, N - 1));
  switch (values) {
    case FormValues::rising:
      return 12 * place;
    case FormValues::falling:
      return -12 * place;
    case FormValues::sink:
      return j == 0 ? 9 : 0;
    case FormValues::far:
      return j % 2 == 1 ? -150 : 0;
    default:
      return 0;
  }
}

class Filler {
 public:
  Filler(const ConformForm& form, FormInputs& to)
      : form_(form), to_(to), rounding_(rounding_of(form.type)), a_(double{form.softmax_scale()}) {}

  void fill() {
    fill_queries();
    fill_keys();
    fill_values();
    fill_grad_output();
    for (std::vector<float>* x : {&to_.q, &to_.k, &to_.v, &to_.d_o}) round(*x);
    if (form_.sinks) {
      InputStream draw({form_.seed, 0, kSinks});
      for (int64_t h = 0; h < form_.H; ++h)
        to_.sinks.push_back(static_cast<float>(form_.offset + 1 + draw.bell()));
    }
    if (form_.grad_lse) {
      InputStream draw({form_.seed, 0, kGradLse});
      to_.grad_lse.resize(static_cast<size_t>(form_.batch() * form_.H * form_.all_rows()));
      for (float& x : to_.grad_lse) x = static_cast<float>(0.1 * form_.size * form_.size * draw.bell());
    }
  }

 private:
  void round(std::vector<float>& x) const { round_array(rounding_, x.data(), x.data(), x.size()); }

  void fill_queries() {
    InputStream draw({form_.seed, 0, kQ});
    const int64_t D = form_.D;
    // Scores of a standard deviation near 1.5, whatever the scale.
    const double size = 1.5 / (std::fabs(a_) * std::sqrt(static_cast<double>(D)));
    to_.q.resize(static_cast<size_t>(form_.batch() * form_.H * form_.all_rows() * D));
    for (size_t n = 0; n < to_.q.size(); ++n) {
      const auto from_end = D - static_cast<int64_t>(n) % D;
      to_.q[n] = static_cast<float>(from_end == kOffsetFeature  ? form_.offset / (a_ * kOffsetKey)
                                    : from_end == kPlaceFeature ? 1 / (a_ * kPlaceKey)
                                                                : size * draw.bell());
    }
  }

  void fill_keys() {
    InputStream draw({form_.seed, 0, kK});
    const int64_t D = form_.D, keys = form_.all_keys();
    to_.k.resize(static_cast<size_t>(form_.batch() * form_.G * keys * D));
    for (int64_t row = 0; row < form_.batch() * form_.G * keys; ++row) {
      float* const k = to_.k.data() + row * D;
      const auto [place, length] = place_of(row % keys);
      for (int64_t d = 0; d < D; ++d) k[d] = static_cast<float>(draw.bell());
      k[D - kLeakFeature] = kKeyConstant;
      k[D - kOffsetFeature] = static_cast<float>(kOffsetKey);
      k[D - kPlaceFeature] = static_cast<float>(kPlaceKey * place_score(form_.values, place, length));
      if (form_.values == FormValues::ties && place % 2 == 1) std::copy_n(k - D, D, k);
    }
  }

  // Where a key lies in its sequence, and how many there are.
  std::pair<int64_t, int64_t> place_of(int64_t key) const {
    if (!form_.packed) return {key, form_.N};
    int64_t b = 0;
    while (key >= form_.keys(b)) key -= form_.keys(b++);
    return {key, form_.keys(b)};
  }

  void fill_values() {
    fill_outer(to_.v, kV, form_.G, form_.all_keys(), [&](double x) {
      return is_one_signed() ? -form_.size * (1.5 + 0.6 * std::fabs(x)) : form_.size * x;
    });
    if (form_.values == FormValues::nan) to_.v[0] = std::numeric_limits<float>::quiet_NaN();
  }

  void fill_grad_output() {
    fill_outer(to_.d_o, kGradOutput, form_.H, form_.all_rows(), [&](double x) {
      const double value = 0.1 * form_.size * x;
      return is_one_signed() ? -std::fabs(value) : value;
    });
  }

  // (batch, heads, places, Dv): ones on the diagonal, or value(x) of drawn numbers.
  template <class Value>
  void fill_outer(std::vector<float>& to, uint32_t stream, int64_t heads, int64_t places, Value value) {
    InputStream draw({form_.seed, 0, stream});
    const int64_t Dv = form_.Dv;
    to.resize(static_cast<size_t>(form_.batch() * heads * places * Dv));
    for (size_t n = 0; n < to.size(); ++n) {
      const auto d = static_cast<int64_t>(n) % Dv, place = static_cast<int64_t>(n) / Dv % places;
      const double drawn = value(draw.bell());
      to[n] = static_cast<float>(form_.values == FormValues::identity ? (d == place ? 1 : 0) : drawn);
    }
  }

  bool is_one_signed() const {
    return form_.values == FormValues::one_signed || form_.values == FormValues::ties ||
           form_.values == FormValues::sink;
  }

  const ConformForm& form_;
  FormInputs& to_;
  const Rounding rounding_;
  const double a_;
};

}  // namespace

Rounding rounding_of(FormType type) {
  return type == FormType::bf16 ? Rounding{kBf16} : type == FormType::fp16 ? Rounding{kFp16} : Rounding{};
}

PrecisionPlan plan_for(const PrecisionPlan& plan, FormType type) {
  PrecisionPlan out = plan;
  for (Rounding& r : out.rounding)
    if (r.format == kBf16) r.format = type == FormType::bf16 ? kBf16 : type == FormType::fp16 ? kFp16 : kFp32;
  return out;
}

float ConformForm::softmax_scale() const {
  return scale != 0 ? scale : static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
}
int64_t ConformForm::rows(int64_t b) const { return packed ? std::min(sequence_length(N, b), T) : T; }
int64_t ConformForm::keys(int64_t b) const { return packed ? sequence_length(N, b) : N; }
int64_t ConformForm::all_rows() const {
  int64_t sum = 0;
  for (int64_t b = 0; packed && b < B; ++b) sum += rows(b);
  return packed ? sum : T;
}
int64_t ConformForm::all_keys() const {
  int64_t sum = 0;
  for (int64_t b = 0; packed && b < B; ++b) sum += keys(b);
  return packed ? sum : N;
}

std::string ConformForm::text() const {
  std::string out = fmt::format("B {}, H {}/{}, T {}, N {}, D {}", B, H, G, T, N, D);
  if (Dv != D) out += fmt::format("/{}", Dv);
  if (packed) out += ", packed";
  if (causal) out += ", causal";
  if (window_left >= 0 || window_right >= 0) out += fmt::format(", window {} {}", window_left, window_right);
  if (mask != FormMask::none) out += fmt::format(", {} hidden", kFormMaskNames[static_cast<size_t>(mask)]);
  if (scale != 0) out += fmt::format(", scale {}", scale);
  if (softcap != 0) out += fmt::format(", softcap {}", softcap);
  if (sinks) out += ", sinks";
  if (grad_lse) out += ", gradient of L";
  out += fmt::format(", {}", kFormTypeNames[static_cast<size_t>(type)]);
  if (offset != 0) out += fmt::format(", offset {}", offset);
  if (size != 1) out += fmt::format(", size {}", size);
  return out + fmt::format(", {}", kFormValuesNames[static_cast<size_t>(values)]);
}

FormInputs::FormInputs(const ConformForm& of) : form(of) {
  set_starts();
  Filler(form, *this).fill();
  if (form.mask != FormMask::none) {
    InputStream draw({form.seed, 0, kVisible});
    visible.resize(static_cast<size_t>(form.B * form.H * form.T * form.N));
    for (size_t n = 0; n < visible.size(); ++n) {
      const auto i = static_cast<int64_t>(n) / form.N % form.T;
      const bool hidden = draw.below(3) == 0;
      visible[n] = !(hidden || (form.mask == FormMask::rows && i % 5 == 2));
    }
  }
}

FormInputs::FormInputs(const ConformForm& of, const AttentionInputs& captured, View<const float> grad)
    : form(of), captured(true) {
  form.B = captured.q.shape[0], form.H = captured.q.shape[1], form.T = captured.q.shape[2];
  form.G = captured.k.shape[1], form.N = captured.k.shape[2];
  form.D = form.Dv = captured.q.shape[3];
  const auto copy = [&](View<const float> x, std::vector<float>& to) {
    for (int64_t b = 0; b < x.shape[0]; ++b)
      for (int64_t h = 0; h < x.shape[1]; ++h)
        for (int64_t i = 0; i < x.shape[2]; ++i)
          for (int64_t d = 0; d < x.shape[3]; ++d)
            to.push_back(round_to(rounding_of(form.type), *x.at(b, h, i, d)));
  };
  copy(captured.q, q), copy(captured.k, k), copy(captured.v, v), copy(grad, d_o);
}

void FormInputs::set_starts() {
  if (!form.packed) return;
  query_starts = key_starts = {0};
  for (int64_t b = 0; b < form.B; ++b) {
    query_lengths.push_back(static_cast<int32_t>(form.rows(b)));
    key_lengths.push_back(static_cast<int32_t>(form.keys(b)));
    query_starts.push_back(query_starts.back() + query_lengths.back());
    key_starts.push_back(key_starts.back() + key_lengths.back());
  }
}

AttentionProblem FormInputs::problem(const PrecisionPlan& plan) const {
  AttentionProblem p;
  p.plans = {plan};
  p.scale = form.scale, p.softcap = form.softcap;
  p.mask.causal = form.causal;
  p.mask.window_left = form.window_left, p.mask.window_right = form.window_right;
  p.tile_keys = 64;
  p.allow_nonfinite = form.values == FormValues::nan;
  if (!visible.empty()) p.mask.visible = contiguous_view(visible.data(), {form.B, form.H, form.T, form.N});
  if (form.packed) {
    p.mask.query_lengths = query_lengths, p.mask.key_lengths = key_lengths;
    p.mask.query_offsets = std::span(query_starts).first(query_lengths.size());
    p.mask.key_offsets = std::span(key_starts).first(key_lengths.size());
    p.mask.query_rows = form.all_rows(), p.mask.key_rows = form.all_keys();
  }
  return p;
}

namespace {
// Packed tensors: every sequence starts at the tensor's own beginning, and the problem says where it lies.
View<const float> form_view(const ConformForm& form, const std::vector<float>& x, int64_t heads, int64_t rows,
                            int64_t longest, int64_t width) {
  View<const float> view = contiguous_view(x.data(), {form.batch(), heads, rows, width});
  if (form.packed) view.shape = {form.B, heads, longest, width}, view.stride[0] = 0;
  return view;
}
}  // namespace

AttentionInputs FormInputs::inputs() const {
  const int64_t keys = form.all_keys();
  return {form_view(form, q, form.H, form.all_rows(), form.T, form.D),
          form_view(form, k, form.G, keys, form.N, form.D),
          form_view(form, v, form.G, keys, form.N, form.Dv)};
}
View<const float> FormInputs::grad_output() const {
  return form_view(form, d_o, form.H, form.all_rows(), form.T, form.Dv);
}
TruthOptions FormInputs::options(const PrecisionPlan& plan) const {
  TruthOptions out;
  out.sinks = sinks;
  out.dscores = plan.at(Site::dscores);
  if (!grad_lse.empty())
    out.grad_lse = contiguous_view(grad_lse.data(), {form.batch(), form.H, form.all_rows(), 1});
  return out;
}

}  // namespace evenkeel
