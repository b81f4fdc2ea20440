#include "diagnosis/conform_judge.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "diagnosis/conform.h"
#include "diagnosis/conform_faults.h"
#include "diagnosis/covering.h"

namespace evenkeel {
namespace {

constexpr size_t kGuard = 64;                // numbers before and behind each tensor
constexpr uint32_t kGuardBits = 0xa5c3a5c3;  // a number that no attention makes
constexpr int64_t kHeadsForBias = 32;        // samples of the mean
constexpr double kFormBiasZ = 5;

// One tensor of a call: guarded on both sides, filled with a number or a copy.
class Guarded {
 public:
  Guarded(size_t count, uint32_t fill) : values_(count + 2 * kGuard, std::bit_cast<float>(fill)) { guard(); }
  explicit Guarded(const std::vector<float>& from) : values_(from.size() + 2 * kGuard), from_(&from) {
    std::copy(from.begin(), from.end(), data());
    guard();
  }
  float* data() { return values_.data() + kGuard; }
  const float* data() const { return values_.data() + kGuard; }
  size_t count() const { return values_.size() - 2 * kGuard; }
  std::vector<float> inner() const { return {data(), data() + count()}; }
  // Numbers around the tensor, or of an input, that are no longer what they were.
  int64_t changed() const {
    int64_t found = 0;
    for (size_t n = 0; n < kGuard; ++n)
      found += (bits(values_[n]) != kGuardBits) + (bits(values_[values_.size() - 1 - n]) != kGuardBits);
    for (size_t n = 0; from_ && n < count(); ++n) found += bits(data()[n]) != bits((*from_)[n]);
    return found;
  }
  static uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

 private:
  void guard() {
    for (size_t n = 0; n < kGuard; ++n)
      values_[n] = values_[values_.size() - 1 - n] = std::bit_cast<float>(kGuardBits);
  }
  std::vector<float> values_;
  const std::vector<float>* from_ = nullptr;
};

// One call of the kernel, in memory of its own.
class Call {
 public:
  explicit Call(const FormInputs& in)
      : in_(in),
        q_(in.q),
        k_(in.k),
        v_(in.v),
        d_o_(in.d_o),
        sinks_(in.sinks),
        grad_lse_(in.grad_lse),
        o_(in.d_o.size(), kUnwritten),
        lse_(static_cast<size_t>(in.form.batch() * in.form.H * in.form.all_rows()), kUnwritten),
        dq_(in.q.size(), kUnwritten),
        dk_(in.k.size(), kUnwritten),
        dv_(in.v.size(), kUnwritten),
        grad_sinks_(in.sinks.size(), kUnwritten) {}

  FormAnswer run(const FormKernel& kernel) {
    FormTensors t;
    t.q = q_.data(), t.k = k_.data(), t.v = v_.data(), t.grad_output = d_o_.data();
    t.sinks = in_.sinks.empty() ? nullptr : sinks_.data();
    t.grad_lse = in_.grad_lse.empty() ? nullptr : grad_lse_.data();
    t.visible = in_.visible.empty() ? nullptr : in_.visible.data();
    t.query_starts = in_.query_starts.empty() ? nullptr : in_.query_starts.data();
    t.key_starts = in_.key_starts.empty() ? nullptr : in_.key_starts.data();
    t.o = o_.data(), t.lse = lse_.data(), t.dq = dq_.data(), t.dk = dk_.data(), t.dv = dv_.data();
    t.grad_sinks = in_.sinks.empty() ? nullptr : grad_sinks_.data();
    return kernel(in_.form, t);
  }
  int64_t changed() const {
    int64_t found = 0;
    for (const Guarded* x :
         {&q_, &k_, &v_, &d_o_, &sinks_, &grad_lse_, &o_, &lse_, &dq_, &dk_, &dv_, &grad_sinks_})
      found += x->changed();
    return found;
  }
  FormOutputs outputs() const {
    return {o_.inner(), lse_.inner(), dq_.inner(), dk_.inner(), dv_.inner(), grad_sinks_.inner()};
  }

 private:
  const FormInputs& in_;
  Guarded q_, k_, v_, d_o_, sinks_, grad_lse_, o_, lse_, dq_, dk_, dv_, grad_sinks_;
};

struct Output {
  const char* name;
  const std::vector<float>* values;
  const Tensor<double>* exact;  // or null
  bool optional = false;
};
std::vector<Output> all_of(const FormOutputs& out, const AttentionTruth* truth = nullptr) {
  const auto exact = [&](Tensor<double> AttentionTruth::*of) { return truth ? &(truth->*of) : nullptr; };
  return {{"O", &out.o, exact(&AttentionTruth::o)},
          {"dQ", &out.dq, exact(&AttentionTruth::dq)},
          {"dK", &out.dk, exact(&AttentionTruth::dk)},
          {"dV", &out.dv, exact(&AttentionTruth::dv)},
          {"L", &out.lse, nullptr, true},
          {"the gradient of the sinks", &out.grad_sinks, nullptr, true}};
}
bool is_present(const std::vector<float>& values) { return !values.empty() && !is_unwritten(values[0]); }

// Judges one form's outputs.
class FormJudge {
 public:
  FormJudge(const FormInputs& in, const FormOutputs& found, const JudgeOptions& options, FormResult& result)
      : in_(in),
        f_(in.form),
        found_(found),
        plan_(plan_for(options.plan, in.form.type)),
        options_(options),
        result_(result) {}

  void judge() {
    if (!judge_written() || !judge_zeros()) return;
    if (f_.values == FormValues::nan) return judge_nan();
    truth_ = in_.truth(plan_);
    if (!judge_finite()) return;
    judge_errors();
    if (f_.values == FormValues::identity && shows_probabilities()) judge_agreement();
    const bool zero_sum =
        !in_.captured && !f_.sinks && !f_.grad_lse && f_.softcap == 0 && f_.values != FormValues::identity;
    if (zero_sum && options_.judge_noise) judge_leak();
    if (f_.B * f_.H >= kHeadsForBias && f_.values == FormValues::random) judge_bias();
  }

 private:
  void add(Fault fault, std::string output, double over, std::string words) {
    result_.findings.push_back({fault, std::move(output), over, std::move(words)});
  }

  // O, dQ, dK and dV, which every kernel writes.
  template <class Holds>
  bool all_values(const Holds& holds) const {
    return std::ranges::all_of(all_of(found_), [&](const Output& out) {
      return out.optional || std::ranges::all_of(*out.values, holds);
    });
  }

  bool judge_written() {
    if (all_values(is_unwritten)) {
      add(Fault::not_written, "", 0, "any value of O, dQ, dK and dV");
      return false;
    }
    const size_t before = result_.findings.size();
    for (const Output& out : all_of(found_)) {
      const auto missing = std::count_if(out.values->begin(), out.values->end(), is_unwritten);
      if (missing > 0 && !(out.optional && missing == static_cast<int64_t>(out.values->size())))
        add(Fault::not_written, out.name, 0, fmt::format("{} of {} values", missing, out.values->size()));
    }
    return result_.findings.size() == before;
  }

  // Bounds that grow with the scores may hold zeros; a kernel that made them computed nothing. Rows that see no key, and
  // values that the type does not hold, are zero by the definition.
  bool judge_zeros() {
    if (!all_values([](float x) { return x == 0; })) return true;
    if (f_.values != FormValues::nan) {
      const Rounding& r = rounding_of(f_.type);
      const AttentionTruth truth = in_.truth(plan_);
      if (std::ranges::all_of(truth.o.values(),
                              [&](double x) { return round_to(r, static_cast<float>(x)) == 0; }))
        return true;
    }
    add(Fault::zeros, "", 0, "every value of O, dQ, dK and dV");
    return false;
  }

  // Beyond the range of the type: what a kernel writes there says nothing.
  bool is_beyond(double exact) const {
    return f_.type == FormType::fp16 && std::fabs(exact) > 0.9 * double{max_finite(kFp16)};
  }

  // The definition's outputs are finite but for L in rows that see nothing.
  bool judge_finite() {
    const size_t before = result_.findings.size();
    for (const Output& out : all_of(found_, &truth_)) {
      if (out.optional && !is_present(*out.values)) continue;
      int64_t bad = 0, first = -1;
      for (size_t n = 0; n < out.values->size(); ++n) {
        const bool is_lse = out.values == &found_.lse;
        if (is_lse && !std::isfinite(truth_.lse.values()[n])) {
          if (!std::isnan((*out.values)[n])) continue;
        } else if (std::isfinite((*out.values)[n]) || is_beyond(out.exact ? out.exact->values()[n] : 0)) {
          continue;
        }
        if (bad++ == 0) first = static_cast<int64_t>(n);
      }
      if (bad > 0)
        add(Fault::not_finite, out.name, 0,
            fmt::format("{} of {} values, the first at {}", bad, out.values->size(), first));
    }
    if (result_.findings.size() > before && nothing_is_finite()) {
      result_.findings.erase(result_.findings.begin() + static_cast<int64_t>(before), result_.findings.end());
      add_nothing_finite();
    }
    return result_.findings.size() == before;
  }

  bool nothing_is_finite() const {
    return all_values([](float x) { return !std::isfinite(x); });
  }
  void add_nothing_finite() { add(Fault::not_finite, "", 0, "every value of O, dQ, dK and dV"); }

  // V has a NaN at key 0, feature 0 of the first head: O has it there in every row that sees the key, and nowhere else.
  void judge_nan() {
    if (nothing_is_finite()) return add_nothing_finite();
    int64_t hidden = 0, spread = 0;
    const int64_t group = f_.H / f_.G;
    for (size_t n = 0; n < found_.o.size(); ++n) {
      const auto at = static_cast<int64_t>(n);
      const int64_t d = at % f_.Dv, h = at / (f_.Dv * f_.T) % f_.H, b = at / (f_.Dv * f_.T * f_.H);
      const bool expected = d == 0 && b == 0 && h < group;
      hidden += expected && std::isfinite(found_.o[n]);
      spread += !expected && !std::isfinite(found_.o[n]);
    }
    if (hidden > 0)
      add(Fault::hidden, "O", 0, fmt::format("{} values of O are numbers where V is NaN", hidden));
    if (spread > 0)
      add(Fault::not_finite, "O", 0, fmt::format("{} values of O are NaN where no V that counts is", spread));
  }

  struct Worst {
    double over = 0;
    int64_t head = 0, row = 0, feature = 0;
    double found = 0, exact = 0;
  };
  // allowed(b, h, n): of element n of the tensor.
  template <class Allowed>
  Worst worst_of(const std::vector<float>& found, const Tensor<double>& exact, int64_t heads, int64_t rows,
                 bool of_keys, const Allowed& allowed) const {
    Worst worst;
    const int64_t width = exact.shape()[3];
    for (int64_t b = 0; b < f_.B; ++b) {
      const int64_t first = !f_.packed ? 0
                            : of_keys  ? in_.key_starts[static_cast<size_t>(b)]
                                       : in_.query_starts[static_cast<size_t>(b)];
      const int64_t count = of_keys ? f_.keys(b) : f_.rows(b);
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < count; ++i)
          for (int64_t d = 0; d < width; ++d) {
            const auto n =
                static_cast<size_t>((((f_.packed ? 0 : b) * heads + h) * rows + first + i) * width + d);
            const double error = std::fabs(double{found[n]} - exact.values()[n]);
            if (!(error > 0) || is_beyond(exact.values()[n])) continue;
            const double over = error / allowed(b, h, n);
            if (over > worst.over) worst = {over, h, i, d, found[n], exact.values()[n]};
          }
    }
    return worst;
  }
  void take(const char* name, const Worst& worst, double& to) {
    to = std::max(to, worst.over);
    if (worst.over > 1)
      add(Fault::wrong, name, worst.over,
          fmt::format(
              "{:.6g} instead of {:.6g} at head {}, row {}, feature {}: {:.3g} times what roundings allow",
              worst.found, worst.exact, worst.head, worst.row, worst.feature, worst.over));
  }

  void judge_errors() {
    const AttentionInputs in = in_.inputs();
    const AttentionProblem problem = problem_of(in_.problem(plan_), AttentionInputs{in.q, in.k, in.k});
    std::vector<OutputBounds> bounds;
    for (int64_t n = 0; n < f_.B * f_.H; ++n) bounds.push_back(output_bounds(problem, truth_.scales, n));
    const auto of = [&](int64_t b, int64_t h) -> const OutputBounds& {
      return bounds[static_cast<size_t>(b * f_.H + h)];
    };
    const int64_t group = f_.H / f_.G;
    // A key head has the gradients of its group: the largest of their bounds.
    const auto of_group = [&](int64_t b, int64_t g, auto value) {
      double most = 0;
      for (int64_t h = g * group; h < (g + 1) * group; ++h) most = std::max(most, value(of(b, h)));
      return most;
    };
    const OutputScales& s = truth_.scales;
    take("O",
         worst_of(found_.o, truth_.o, f_.H, f_.all_rows(), false,
                  [&](int64_t b, int64_t h, size_t n) {
                    return of(b, h).o.relative * s.o.values()[n] + of(b, h).o.absolute;
                  }),
         result_.over_o);
    take("dQ",
         worst_of(found_.dq, truth_.dq, f_.H, f_.all_rows(), false,
                  [&](int64_t b, int64_t h, size_t n) {
                    double sum = of(b, h).dq.absolute;
                    for (size_t part = 0; part < 3; ++part)
                      sum += of(b, h).dq.relative[part] * s.dq[part].values()[n];
                    return sum;
                  }),
         result_.over_dq);
    take("dK",
         worst_of(found_.dk, truth_.dk, f_.G, f_.all_keys(), true,
                  [&](int64_t b, int64_t g, size_t n) {
                    double sum = of_group(b, g, [](const OutputBounds& x) { return x.dk.absolute; });
                    for (size_t part = 0; part < 3; ++part)
                      sum += of_group(b, g, [&](const OutputBounds& x) { return x.dk.relative[part]; }) *
                             s.dk[part].values()[n];
                    return sum;
                  }),
         result_.over_dk);
    take("dV",
         worst_of(found_.dv, truth_.dv, f_.G, f_.all_keys(), true,
                  [&](int64_t b, int64_t g, size_t n) {
                    return of_group(b, g, [](const OutputBounds& x) { return x.dv.relative; }) *
                               s.dv.values()[n] +
                           of_group(b, g, [](const OutputBounds& x) { return x.dv.absolute; });
                  }),
         result_.over_dv);
    if (is_present(found_.lse)) judge_lse(of);
    if (is_present(found_.grad_sinks)) judge_sinks(of);
  }

  template <class Of>
  void judge_lse(const Of& of) {
    Tensor<double> exact = truth_.lse;
    std::vector<float> found = found_.lse;
    for (size_t n = 0; n < found.size(); ++n)  // rows that see nothing: any infinity
      if (!std::isfinite(exact.values()[n])) exact.values()[n] = found[n] = 0;
    take("L",
         worst_of(found, exact, f_.H, f_.all_rows(), false,
                  [&](int64_t b, int64_t h, size_t n) {
                    return of(b, h).lse.relative * std::fabs(exact.values()[n]) + of(b, h).lse.absolute;
                  }),
         result_.over_lse);
  }
  // The sum over rows of P_sink (dL - delta): as far off as the worst row's delta.
  template <class Of>
  void judge_sinks(const Of& of) {
    for (int64_t h = 0; h < f_.H; ++h) {
      double allowed = 0, exact = *truth_.grad_sink.view().at(0, h, 0);
      for (int64_t b = 0; b < f_.B; ++b) {
        const double rows = static_cast<double>(f_.rows(b)),
                     of_head = of(b, h).dv.relative + of(b, h).dq.relative[2];
        const double most = truth_.scales.largest[2] * truth_.scales.largest[3] * static_cast<double>(f_.Dv);
        double of_lse = 0;
        for (float x : in_.grad_lse) of_lse = std::max(of_lse, std::fabs(double{x}));
        allowed += rows * (of_head + 0x1p-20) * (most + of_lse);
      }
      const double over = std::fabs(double{found_.grad_sinks[static_cast<size_t>(h)]} - exact) / allowed;
      take("the gradient of the sinks", {over, h, 0, 0, found_.grad_sinks[static_cast<size_t>(h)], exact},
           result_.over_sinks);
    }
  }

  // Do O and dV hold all of P? Forms made smaller may have fewer features than keys.
  bool shows_probabilities() const {
    return f_.B == 1 && !f_.packed && f_.G == f_.H && f_.Dv >= f_.N && f_.Dv >= f_.T;
  }

  // Sums over a row of O = P and of dV^T = P': what their roundings leave is independent from key to key.
  void judge_agreement() {
    if (!is_identity(plan_.at(Site::scores)) || !is_identity(plan_.at(Site::shifted))) return;
    const auto u = [&](Site site) {
      const Rounding& r = plan_.at(site);
      return is_identity(r)
                 ? 0.0
                 : std::ldexp(r.mode == RoundingMode::nearest_even ? 0.5 : 1.0, -r.format.significand_bits);
    };
    double errors = 0, allowed = 0, mean = 0, rows = 0;
    double variance = 0;
    for (Site site : {Site::output, Site::probs, Site::pv, Site::probs_bwd, Site::dv, Site::row_sum})
      variance += u(site) * u(site) / 3;
    for (int64_t h = 0; h < f_.H; ++h)
      for (int64_t i = 0; i < f_.T; ++i) {
        double forward = 0, backward = 0, squares = 0;
        for (int64_t j = 0; j < f_.N; ++j) {
          const double p = found_.o[static_cast<size_t>((h * f_.T + i) * f_.Dv + j)];
          forward += p, squares += p * p;
          backward += found_.dv[static_cast<size_t>((h * f_.N + j) * f_.Dv + i)];
        }
        const double L = *truth_.lse.view().at(0, h, i), arithmetic = 0x1p-23 * (32 + std::fabs(L));
        errors += (backward - forward) * (backward - forward);
        mean += backward - forward;
        allowed += 2 * variance * squares + arithmetic * arithmetic;
        ++rows;
      }
    // Twice the root mean square of independent errors.
    const double over = std::sqrt(errors / allowed) / 2;
    if (!(over <= 1))
      add(Fault::disagrees, "P", std::copysign(over, mean),
          fmt::format(
              "rows of P sum to {:+.2e} more in the backward pass than in the forward, {:.3g} times what "
              "roundings leave",
              mean / rows, over));
  }

  void judge_leak() {
    const double unit = double{kKeyConstant} * std::fabs(double{f_.softmax_scale()});
    const Rounding& of_dq = plan_.at(Site::dq);
    const double step = is_identity(of_dq) ? 0x1p-126 : double{min_subnormal(of_dq.format)};
    double v_norm = 0;
    for (size_t row = 0; row * static_cast<size_t>(f_.Dv) < in_.v.size(); ++row)
      v_norm = std::max(v_norm, norm_of(in_.v, row));
    double squares = 0, allowed = 0, rows = 0;
    for (size_t row = 0; row < truth_.lse.values().size(); ++row) {
      const double L = truth_.lse.values()[row];
      if (!std::isfinite(L)) continue;
      const auto n = (row + 1) * static_cast<size_t>(f_.D) - 1;
      const double leak = (double{found_.dq[n]} - truth_.dq.values()[n]) / unit;
      const double arithmetic = 0x1p-24 * (16 + std::fabs(L) + std::sqrt(static_cast<double>(f_.N))) *
                                norm_of(in_.d_o, row) * v_norm;
      const double forced = truth_.forced.values()[row];
      squares += leak * leak;
      allowed += kNoiseVariance * forced * forced + arithmetic * arithmetic + step * step / (unit * unit);
      ++rows;
    }
    if (rows == 0) return;
    result_.leak = std::sqrt(squares / rows);
    // Few rows: four standard errors of a mean square.
    result_.leak_allowed = std::sqrt(allowed / rows * (1 + 4 * std::sqrt(2 / rows)));
    if (result_.leak > result_.leak_allowed)
      add(Fault::noisy, "dS", result_.leak / result_.leak_allowed,
          fmt::format("rows of dS sum to {:.2e} (root mean square), rounding dS leaves at most {:.2e}",
                      result_.leak, result_.leak_allowed));
  }
  double norm_of(const std::vector<float>& x, size_t row) const {
    double squares = 0;
    for (size_t d = 0; d < static_cast<size_t>(f_.Dv); ++d) {
      const double value = x[row * static_cast<size_t>(f_.Dv) + d];
      squares += value * value;
    }
    return std::sqrt(squares);
  }

  // By head: sum of error x truth over sum of truth^2, how much too large the output is. Rounding to nearest leaves its
  // square there, FP32 an ulp a term.
  void judge_bias() {
    const double fp32 = 0x1p-23 * static_cast<double>(f_.D + f_.N);
    const struct {
      const char* name;
      const std::vector<float>& found;
      const Tensor<double>& exact;
      Site site;
    } outputs[] = {{"O", found_.o, truth_.o, Site::output},
                   {"dQ", found_.dq, truth_.dq, Site::dq},
                   {"dK", found_.dk, truth_.dk, Site::dk},
                   {"dV", found_.dv, truth_.dv, Site::dv}};
    for (const auto& out : outputs) {
      ErrorStats stats;
      const auto heads = static_cast<size_t>(out.exact.shape()[0] * out.exact.shape()[1]);
      const size_t each = out.exact.values().size() / heads;
      for (size_t head = 0; head < heads; ++head) {
        double products = 0, squares = 0;
        for (size_t n = head * each; n < (head + 1) * each; ++n) {
          const double truth = out.exact.values()[n];
          products += (out.found[n] - truth) * truth, squares += truth * truth;
        }
        stats.add(products / squares);
      }
      const Rounding& r = plan_.at(out.site);
      const double u = is_identity(r) ? 0 : std::ldexp(1.0, -r.format.significand_bits);
      const double floor = 4 * u * u + fp32;
      if (std::fabs(stats.mean()) > floor && std::fabs(stats.z()) >= kFormBiasZ)
        add(Fault::biased, out.name, stats.mean() / floor,
            fmt::format(
                "too {} by a factor of 1 {} {:.2e} throughout (z {:+.0f}); rounding to nearest leaves {:.1e}",
                stats.mean() > 0 ? "large" : "small", stats.mean() > 0 ? "+" : "-", std::fabs(stats.mean()),
                stats.z(), floor));
    }
  }

  const FormInputs& in_;
  const ConformForm& f_;
  const FormOutputs& found_;
  const PrecisionPlan plan_;
  const JudgeOptions& options_;
  FormResult& result_;
  AttentionTruth truth_;
};

void compare_calls(const FormOutputs& first, const FormOutputs& second, FormResult& result) {
  const auto one = all_of(first), two = all_of(second);
  for (size_t n = 0; n < one.size(); ++n) {
    const std::vector<float>&a = *one[n].values, &b = *two[n].values;
    int64_t differ = 0;
    for (size_t i = 0; i < a.size(); ++i)
      differ += std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i]);
    if (differ > 0)
      result.findings.push_back({Fault::not_deterministic, one[n].name, 0,
                                 fmt::format("{} of {} values differ in a second call", differ, a.size())});
  }
}

}  // namespace

FormResult judge_form(const FormInputs& inputs, const FormKernel& kernel, const JudgeOptions& options,
                      FormOutputs* outputs) {
  FormResult result;
  result.form = inputs.form;
  Call call(inputs);
  try {
    if (call.run(kernel) == FormAnswer::not_offered) return result;
    result.judged = true;
    if (const int64_t changed = call.changed(); changed > 0)
      result.findings.push_back(
          {Fault::outside, "", 0, fmt::format("{} numbers beside the outputs were changed", changed)});
    const FormOutputs found = call.outputs();
    if (outputs) *outputs = found;
    FormJudge(inputs, found, options, result).judge();
    if (options.deterministic && inputs.form.values != FormValues::nan) {
      Call again(inputs);
      again.run(kernel);
      compare_calls(found, again.outputs(), result);
    }
  } catch (const std::exception& error) {
    result.judged = true;
    result.findings.push_back({Fault::error, "", 0, error.what()});
  }
  return result;
}

namespace {

// Which levels the kernel offers, each alone on the plain form; the others go.
void keep_offered(std::vector<FormFactor>& factors, const FormKernel& kernel, const JudgeOptions& options,
                  FormsReport& report) {
  // The type first: without BF16 the plain form is of another.
  std::vector<size_t> order(factors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_partition(order.begin(), order.end(), [&](size_t f) { return factors[f].name == "type"; });
  for (const size_t f : order) {
    std::vector<FormLevel> kept;
    for (size_t n = 0; n < factors[f].levels.size(); ++n) {
      std::vector<int> levels(factors.size(), 0);
      levels[f] = static_cast<int>(n);
      ConformForm form = settled_form(factors, levels, options.aligned, options.extent, options.seed);
      if (options.aligned) form.T = std::min<int64_t>(form.T, 4);  // the answer is wanted, not the numbers
      const FormInputs inputs(form);
      bool offered = true;
      try {
        offered = Call(inputs).run(kernel) == FormAnswer::done;
      } catch (const std::exception&) {  // judged, and reported, with the others
      }
      if (offered)
        kept.push_back(factors[f].levels[n]);
      else
        report.not_judged.push_back(fmt::format("{}: {}", factors[f].name, factors[f].levels[n].name));
    }
    // The plain form's own level: a kernel without it is judged without plain forms.
    if (!kept.empty()) factors[f].levels = kept;
  }
}

// Single forms of every type that is left, and the covering rows.
std::vector<ConformForm> forms_of(const std::vector<FormFactor>& factors, const JudgeOptions& options) {
  std::vector<ConformForm> forms;
  for (const FormLevel& level : std::ranges::find(factors, "type", &FormFactor::name)->levels) {
    ConformForm of_type;
    level.apply(of_type);
    for (const ConformForm& form : single_forms(of_type.type, options.seed)) forms.push_back(form);
  }
  std::vector<int> counts;
  for (const FormFactor& f : factors) counts.push_back(static_cast<int>(f.levels.size()));
  uint64_t number = 0;
  for (const std::vector<int>& row : covering_rows(counts, options.seed))
    forms.push_back(
        settled_form(factors, row, options.aligned, options.extent, options.seed * 1000 + number++));
  return forms;
}

}  // namespace

FormsReport judge_forms(const FormKernel& kernel, const JudgeOptions& options,
                        const std::function<void(int64_t, int64_t)>& progress) {
  FormsReport report;
  std::vector<FormFactor> factors = form_factors(options.extent);
  keep_offered(factors, kernel, options, report);
  const std::vector<ConformForm> forms = forms_of(factors, options);
  int64_t done = 0, crossed = 0;
  for (const ConformForm& form : forms) {
    FormResult result = judge_form(FormInputs(form), kernel, options);
    if (result.judged) {
      ++report.judged;
      for (double over : {result.over_o, result.over_lse, result.over_dq, result.over_dk, result.over_dv})
        report.largest_over = std::max(report.largest_over, over);
      if (!result.passes()) report.failures.push_back(std::move(result));
    } else if (const std::string bug = public_bug_words(form); bug.empty()) {
      ++crossed;
    } else if (std::ranges::find(report.not_judged, bug) == report.not_judged.end()) {
      report.not_judged.push_back(bug);
    }
    if (progress) progress(++done, static_cast<int64_t>(forms.size()));
  }
  if (crossed > 0)
    report.not_judged.push_back(
        fmt::format("{} of {} forms, which cross what is offered alone", crossed, forms.size()));
  if (!report.failures.empty()) {
    report.smallest =
        options.shrink ? smallest_failure(report.failures.front(), kernel, options) : report.failures.front();
    report.named = name_faults(report, kernel, options);
    report.public_bugs = public_bugs_met(report);
  }
  return report;
}

FormResult smallest_failure(FormResult failure, const FormKernel& kernel, const JudgeOptions& options) {
  using Change = std::function<void(ConformForm&)>;
  const Change changes[] = {
      [](ConformForm& f) { f.B = 1; },
      [](ConformForm& f) { f.H = f.G = 1; },
      [](ConformForm& f) { f.H = 2, f.G = 1; },
      [](ConformForm& f) { f.packed = false; },
      [](ConformForm& f) { f.sinks = false; },
      [](ConformForm& f) { f.grad_lse = false; },
      [](ConformForm& f) { f.softcap = 0; },
      [](ConformForm& f) { f.mask = FormMask::none; },
      [](ConformForm& f) { f.window_left = f.window_right = -1; },
      [](ConformForm& f) { f.causal = false; },
      [](ConformForm& f) { f.offset = 0; },
      [](ConformForm& f) { f.size = 1; },
      [](ConformForm& f) { f.scale = 0; },
      [](ConformForm& f) { f.Dv = f.D; },
      [](ConformForm& f) { f.D = f.Dv = 32; },
      [](ConformForm& f) { f.T = 1; },
      [](ConformForm& f) { f.T = std::max<int64_t>(1, f.T / 2); },
      [](ConformForm& f) { f.N = std::max<int64_t>(1, f.N / 2); },
      [](ConformForm& f) { f.N = std::max<int64_t>(1, f.N - 16); },
      [](ConformForm& f) { f.N = std::max<int64_t>(1, f.N - 1), f.T = std::min(f.T, f.N); },
      [](ConformForm& f) { f.T = f.N = std::max<int64_t>(1, f.N / 2); },
      [](ConformForm& f) { f.values = FormValues::random; },
  };
  constexpr int kRounds = 3;
  const Fault fault = failure.findings.front().fault;
  const std::string output = failure.findings.front().output;
  const bool needs_heads = fault == Fault::biased;
  JudgeOptions once = options;
  once.deterministic = fault == Fault::not_deterministic;
  for (int round = 0, changed = 1; round < kRounds && changed; ++round) {
    changed = 0;
    for (const Change& change : changes) {
      ConformForm form = failure.form;
      change(form);
      const bool unaligned =
          (form.causal || form.window_left >= 0 || form.window_right >= 0) && form.T != form.N;
      if (form == failure.form || (unaligned && !options.aligned) || form.T > form.N * 64 || needs_heads)
        continue;
      FormResult smaller = judge_form(FormInputs(form), kernel, once);
      const auto same = [&](const FormFinding& x) { return x.fault == fault && x.output == output; };
      if (smaller.judged && std::ranges::any_of(smaller.findings, same)) {
        failure = std::move(smaller);
        changed = 1;
      }
    }
  }
  return failure;
}

}  // namespace evenkeel
