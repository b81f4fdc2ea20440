#include "diagnosis/conform_faults.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <optional>

#include "base/error.h"
#include "diagnosis/attention_truth.h"
#include "diagnosis/conform.h"

namespace evenkeel {
namespace {

constexpr int64_t kTiles[] = {16, 32, 48, 64, 80, 96, 128, 256};

// What a faulty kernel would have written. Empty: not said.
struct Explained {
  Tensor<double> o, lse, dq, dk, dv;
};
struct Hypothesis {
  std::string words;
  // Not every form can show a fault; without it the outputs are the definition's.
  std::function<Explained(const FormInputs&, const AttentionTruth&)> outputs;
};

Explained all_of(AttentionTruth truth) {
  return {std::move(truth.o), std::move(truth.lse), std::move(truth.dq), std::move(truth.dk),
          std::move(truth.dv)};
}

// The definition with another problem or other options.
template <class Change>
Hypothesis changed(std::string words, Change change) {
  return {std::move(words), [change](const FormInputs& in, const AttentionTruth& truth) {
            AttentionProblem problem = in.problem(PrecisionPlan{});
            TruthOptions options = in.options(PrecisionPlan{});
            std::vector<float> numbers;  // for options that need memory
            change(in, truth, problem, options, numbers);
            return all_of(attention_truth(problem, in.inputs(), in.grad_output(), options));
          }};
}

// Another set of visible keys. sees(problem, b, i, j, [first, last) by causal and window): does row i see key j?
template <class Sees>
Hypothesis seen(std::string words, Sees sees) {
  return {
      std::move(words), [sees](const FormInputs& in, const AttentionTruth&) {
        const ConformForm& f = in.form;
        AttentionProblem problem = in.problem(PrecisionPlan{});
        const View<const uint8_t> before = problem.mask.visible;
        AttentionProblem sized = problem;
        sized.B = f.B, sized.H = f.H, sized.G = f.G, sized.T = f.T, sized.N = f.N, sized.D = f.D;
        std::vector<uint8_t> visible(static_cast<size_t>(f.B * f.H * f.T * f.N));
        size_t n = 0;
        for (int64_t b = 0; b < f.B; ++b)
          for (int64_t h = 0; h < f.H; ++h)
            for (int64_t i = 0; i < f.T; ++i) {
              const auto [first, last] = sized.key_range(b, i);
              for (int64_t j = 0; j < f.N; ++j, ++n)
                visible[n] = j < f.keys(b) && (!before.present() || *before.at(b, h, i, j) != 0) &&
                             sees(in, b, i, j, first, last);
            }
        problem.mask.causal = false;
        problem.mask.window_left = problem.mask.window_right = -1;
        problem.mask.visible = contiguous_view<const uint8_t>(visible.data(), {f.B, f.H, f.T, f.N});
        return all_of(attention_truth(problem, in.inputs(), in.grad_output(), in.options(PrecisionPlan{})));
      }};
}

// delta of row i of head h replaced: dS = a P (dP - delta') is the definition's with a gradient of L of delta - delta'.
template <class Other>
Hypothesis other_delta(std::string words, Other other) {
  return changed(
      std::move(words), [other](const FormInputs& in, const AttentionTruth& truth, AttentionProblem&,
                                TruthOptions& options, std::vector<float>& numbers) {
        const auto [B, H, T, one] = truth.delta.shape();
        numbers.resize(truth.delta.values().size());
        size_t n = 0;
        for (int64_t b = 0; b < B; ++b)
          for (int64_t h = 0; h < H; ++h)
            for (int64_t i = 0; i < T; ++i, ++n)
              numbers[n] = static_cast<float>(*truth.delta.view().at(b, h, i) - other(truth.delta, b, h, i)) +
                           (in.grad_lse.empty() ? 0.0f : in.grad_lse[n]);
        options.grad_lse = contiguous_view<const float>(numbers.data(), {B, H, T, 1});
      });
}

// --- Tiles: the running sums of one row, with a fault.
enum class Rescale { late, not_of_output, not_of_row_sum };

void tiled_row(const std::vector<double>& scores, const FormInputs& in, int64_t first_value, int64_t tile,
               Rescale fault, double sink, double* o, double& lse) {
  const int64_t Dv = in.form.Dv, N = static_cast<int64_t>(scores.size());
  double m = sink, l = sink == kNoScore ? 0 : 1;
  for (int64_t begin = 0; begin < N; begin += tile) {
    const int64_t end = std::min(N, begin + tile);
    double next = m;
    for (int64_t j = begin; j < end; ++j) next = std::max(next, scores[static_cast<size_t>(j)]);
    if (next == kNoScore) continue;
    const double alpha = m == kNoScore ? 0 : std::exp(m - next);
    if (fault != Rescale::not_of_row_sum || m == kNoScore) l *= alpha;
    if (fault != Rescale::not_of_output && fault != Rescale::late)
      for (int64_t d = 0; d < Dv; ++d) o[d] *= alpha;
    for (int64_t j = begin; j < end; ++j) {
      const double p = std::exp(scores[static_cast<size_t>(j)] - next);
      l += p;
      for (int64_t d = 0; d < Dv; ++d) o[d] += p * in.v[static_cast<size_t>((first_value + j) * Dv + d)];
    }
    if (fault == Rescale::late && m != kNoScore)
      for (int64_t d = 0; d < Dv; ++d) o[d] *= alpha;
    m = next;
  }
  if (l == 0) return;
  for (int64_t d = 0; d < Dv; ++d) o[d] /= l;
  lse = m + std::log(l);
}

Explained tiled_outputs(const FormInputs& in, const AttentionTruth& truth, int64_t tile, Rescale fault) {
  const ConformForm& f = in.form;
  Explained out;
  out.o = Tensor<double>(truth.o.shape());
  out.lse = truth.lse;
  AttentionProblem p = in.problem(PrecisionPlan{});
  p.B = f.B, p.H = f.H, p.G = f.G, p.T = f.T, p.N = f.N, p.D = f.D;
  const AttentionInputs x = in.inputs();
  const double a = f.softmax_scale();
  for (int64_t b = 0; b < f.B; ++b)
    for (int64_t h = 0; h < f.H; ++h)
      for (int64_t i = 0; i < f.rows(b); ++i) {
        const int64_t g = h / (f.H / f.G), batch = f.packed ? 0 : b;
        const int64_t first_row = f.packed ? in.query_starts[static_cast<size_t>(b)] : 0,
                      first_key = f.packed ? in.key_starts[static_cast<size_t>(b)] : 0;
        const auto [first, last] = p.key_range(b, i);
        std::vector<double> scores(static_cast<size_t>(f.keys(b)), kNoScore);
        for (int64_t j = first; j < last; ++j) {
          if (p.mask.visible.present() && *p.mask.visible.at(b, h, i, j) == 0) continue;
          double sum = 0;
          for (int64_t d = 0; d < f.D; ++d)
            sum += double{*x.q.at(batch, h, first_row + i, d)} * *x.k.at(batch, g, first_key + j, d);
          sum *= a;
          scores[static_cast<size_t>(j)] = f.softcap > 0 ? f.softcap * std::tanh(sum / f.softcap) : sum;
        }
        const double sink = in.sinks.empty() ? kNoScore : double{in.sinks[static_cast<size_t>(h)]};
        tiled_row(scores, in, (batch * f.G + g) * f.all_keys() + first_key, tile, fault, sink,
                  out.o.view().at(batch, h, first_row + i), *out.lse.view().at(batch, h, first_row + i));
      }
  return out;
}

// --- The list

void add_masks(std::vector<Hypothesis>& out) {
  using P = AttentionProblem;
  const auto with_window = [&](const char* words, int64_t P::*, int64_t left, int64_t right) {
    out.push_back(changed(words, [left, right](const FormInputs& in, const AttentionTruth&, P& p,
                                               TruthOptions&, std::vector<float>&) {
      if (in.form.window_left >= 0) p.mask.window_left = std::max<int64_t>(0, in.form.window_left + left);
      if (in.form.window_right >= 0) p.mask.window_right = std::max<int64_t>(0, in.form.window_right + right);
    }));
  };
  with_window("the window is one key too wide (left)", nullptr, 1, 0);
  with_window("the window is one key too narrow (left)", nullptr, -1, 0);
  with_window("the window is one key too wide (right)", nullptr, 0, 1);
  with_window("the window is one key too narrow (right)", nullptr, 0, -1);
  with_window("the window is one key too wide on both sides", nullptr, 1, 1);
  using In = const FormInputs&;
  for (int64_t tile : kTiles) {
    out.push_back(seen(fmt::format("the last partial tile of {} keys is dropped", tile),
                       [tile](In in, int64_t b, int64_t, int64_t j, int64_t first, int64_t last) {
                         return j >= first && j < last && j < in.form.keys(b) / tile * tile;
                       }));
    out.push_back(
        seen(fmt::format("the mask is off by one at the edges of tiles of {} keys: the first key of the "
                         "next tile is seen",
                         tile),
             [tile](In, int64_t, int64_t, int64_t j, int64_t first, int64_t last) {
               return j >= first && (j < last || (j == last && j % tile == 0));
             }));
    out.push_back(
        seen(fmt::format("the mask is off by one at the edges of tiles of {} keys: the last key of a "
                         "tile is hidden",
                         tile),
             [tile](In, int64_t, int64_t, int64_t j, int64_t first, int64_t last) {
               return j >= first && j < last && !(j == last - 1 && (j + 1) % tile == 0);
             }));
  }
  out.push_back(seen("the causal mask shows one key too many",
                     [](In in, int64_t, int64_t, int64_t j, int64_t first, int64_t last) {
                       return j >= first && j < last + (in.form.causal ? 1 : 0);
                     }));
  out.push_back(seen("the causal mask hides one key too many",
                     [](In in, int64_t, int64_t, int64_t j, int64_t first, int64_t last) {
                       return j >= first && j < last - (in.form.causal ? 1 : 0);
                     }));
  out.push_back(seen("causal masks and windows are aligned with the first key, not with the last",
                     [](In in, int64_t b, int64_t i, int64_t j, int64_t, int64_t) {
                       const ConformForm& f = in.form;
                       return (!f.causal || j <= i) && (f.window_left < 0 || j >= i - f.window_left) &&
                              (f.window_right < 0 || j <= i + f.window_right) && j < f.keys(b);
                     }));
}

// Sequences that start or end one key off. shift: of the starts but the first; longer: of the lengths.
Hypothesis packed_off(std::string words, int32_t shift, int32_t longer) {
  return {
      std::move(words), [shift, longer](const FormInputs& in, const AttentionTruth&) {
        AttentionProblem problem = in.problem(PrecisionPlan{});
        std::vector<int32_t> starts(problem.mask.key_offsets.begin(), problem.mask.key_offsets.end());
        std::vector<int32_t> lengths = in.key_lengths;
        const auto all = static_cast<int32_t>(in.form.all_keys());
        for (size_t b = 0; b < starts.size(); ++b) {
          if (b > 0) starts[b] = std::min(all, starts[b] + shift);
          lengths[b] =
              std::clamp(lengths[b] + longer, 0, std::min(all - starts[b], static_cast<int32_t>(in.form.N)));
        }
        problem.mask.key_offsets = starts;
        problem.mask.key_lengths = lengths;
        return all_of(attention_truth(problem, in.inputs(), in.grad_output(), in.options(PrecisionPlan{})));
      }};
}

void add_packed(std::vector<Hypothesis>& out) {
  out.push_back(packed_off("cu_seqlens is off by one: sequences start one key late", 1, 0));
  out.push_back(packed_off("cu_seqlens is off by one: sequences start one key early", -1, 0));
  out.push_back(packed_off("cu_seqlens is off by one: the last key of each sequence is dropped", 0, -1));
  out.push_back(packed_off("cu_seqlens is off by one: each sequence sees the first key of the next", 0, 1));
}

void add_options(std::vector<Hypothesis>& out) {
  using P = AttentionProblem;
  using Numbers = std::vector<float>;
  out.push_back(
      changed("sinks are left out of the softmax",
              [](const FormInputs&, const AttentionTruth&, P&, TruthOptions& o, Numbers&) { o.sinks = {}; }));
  out.push_back(
      {"sinks are left out of the log-sum-exp", [](const FormInputs& in, const AttentionTruth& truth) {
         TruthOptions options = in.options(PrecisionPlan{});
         options.sinks = {};
         Explained out_of;
         out_of.o = truth.o;
         out_of.lse =
             attention_truth(in.problem(PrecisionPlan{}), in.inputs(), in.grad_output(), options).lse;
         return out_of;
       }});
  out.push_back(changed("the soft cap is left out", [](const FormInputs&, const AttentionTruth&, P& p,
                                                       TruthOptions&, Numbers&) { p.softcap = 0; }));
  out.push_back(changed("the given scale is ignored", [](const FormInputs&, const AttentionTruth&, P& p,
                                                         TruthOptions&, Numbers&) { p.scale = 0; }));
  out.push_back(changed("the scale is left out", [](const FormInputs&, const AttentionTruth&, P& p,
                                                    TruthOptions&, Numbers&) { p.scale = 1; }));
  out.push_back(changed("the mask is ignored", [](const FormInputs&, const AttentionTruth&, P& p,
                                                  TruthOptions&, Numbers&) { p.mask.visible = {}; }));
  out.push_back(changed("the gradient of L is ignored", [](const FormInputs&, const AttentionTruth&, P&,
                                                           TruthOptions& o, Numbers&) { o.grad_lse = {}; }));
  out.push_back({"L is a logarithm to the base 2", [](const FormInputs&, const AttentionTruth& truth) {
                   Explained out_of;
                   out_of.o = truth.o;
                   out_of.lse = truth.lse;
                   for (double& L : out_of.lse.values()) L /= std::log(2.0);
                   return out_of;
                 }});
  using Delta = const Tensor<double>&;
  out.push_back(other_delta("delta is that of the next head", [](Delta x, int64_t b, int64_t h, int64_t i) {
    return *x.view().at(b, (h + 1) % x.shape()[1], i);
  }));
  out.push_back(other_delta("delta is that of the head before", [](Delta x, int64_t b, int64_t h, int64_t i) {
    return *x.view().at(b, (h + x.shape()[1] - 1) % x.shape()[1], i);
  }));
  out.push_back(other_delta("delta is that of the first head",
                            [](Delta x, int64_t b, int64_t, int64_t i) { return *x.view().at(b, 0, i); }));
  out.push_back(
      other_delta("delta is left out", [](Delta, int64_t, int64_t, int64_t, int64_t = 0) { return 0.0; }));
}

std::vector<Hypothesis> hypotheses() {
  std::vector<Hypothesis> out;
  add_options(out);
  add_packed(out);
  add_masks(out);
  for (int64_t tile : kTiles)
    for (const auto& [fault, words] :
         {std::pair{Rescale::late, "O is rescaled late, behind the sum of the new tile"},
          {Rescale::not_of_output, "O is not rescaled after a new maximum"},
          {Rescale::not_of_row_sum, "the row sum l is not rescaled after a new maximum"}})
      out.push_back({fmt::format("{} (tiles of {} keys)", words, tile),
                     [tile, fault = fault](const FormInputs& in, const AttentionTruth& truth) {
                       return tiled_outputs(in, truth, tile, fault);
                     }});
  return out;
}

// --- Does it explain?

// Distance in units of what roundings do to the tensor at most: of its largest values.
double distance(const std::vector<float>& found, const Tensor<double>& expected) {
  double largest = 0, most = 0;
  for (double x : expected.values())
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  for (size_t n = 0; n < found.size(); ++n) {
    const double x = expected.values()[n];
    if (!std::isfinite(x)) continue;
    if (!std::isfinite(found[n])) return HUGE_VAL;
    most = std::max(most, std::fabs(found[n] - x));
  }
  return largest > 0 ? most / largest : most > 0 ? HUGE_VAL : 0;
}

// A failing form with what the kernel wrote there.
struct FailingForm {
  FormInputs inputs;
  AttentionTruth truth;
  FormOutputs found;
  std::vector<std::string> wrong;  // outputs

  bool is_wrong(const char* output) const { return std::ranges::find(wrong, output) != wrong.end(); }
};

// All outputs of the forward pass are as the fault says, or all gradients where the forward pass is right (a wrong forward
// pass spoils the gradients in its own way). Those that are wrong are far nearer to what the fault says than to the definition.
bool explains(const Hypothesis& fault, const FailingForm& e) {
  const Explained outputs = fault.outputs(e.inputs, e.truth);
  const struct {
    const char* name;
    const std::vector<float>& found;
    const Tensor<double>&as_said, &exact;
    bool forward;
  } all[] = {{"O", e.found.o, outputs.o, e.truth.o, true},
             {"L", e.found.lse, outputs.lse, e.truth.lse, true},
             {"dQ", e.found.dq, outputs.dq, e.truth.dq, false},
             {"dK", e.found.dk, outputs.dk, e.truth.dk, false},
             {"dV", e.found.dv, outputs.dv, e.truth.dv, false}};
  const bool forward_wrong = e.is_wrong("O") || e.is_wrong("L");
  bool any = false;
  for (const auto& out : all) {
    if (out.forward != forward_wrong) continue;
    const bool written = !out.found.empty() && std::bit_cast<uint32_t>(out.found[0]) != kUnwritten;
    if (!written && !e.is_wrong(out.name)) continue;
    if (out.as_said.values().empty()) return false;
    const double said = distance(out.found, out.as_said);
    if (!(said <= 0.03)) return false;
    if (e.is_wrong(out.name) && !(said < distance(out.found, out.exact) / 4)) return false;
    any |= e.is_wrong(out.name);
  }
  return any;
}

// Of O, dQ, dK and dV together: such a finding names no output.
constexpr std::pair<Fault, const char*> kOfAllOutputs[] = {
    {Fault::zeros, "all outputs are zero"},
    {Fault::not_written, "no output is written"},
    {Fault::not_finite, "all outputs are NaN or infinite"}};

// One of these in most forms, passing ones among them: a kernel that computes nothing. Not in all: a sink may leave nothing
// to the keys, so that zeros are right but for L. An underflow has such forms, too, but few of all.
std::vector<NamedFault> fault_of_all_outputs(const FormsReport& report) {
  for (const auto& all : kOfAllOutputs) {
    const auto is_it = [&](const FormFinding& x) { return x.fault == all.first && x.output.empty(); };
    const int64_t forms = std::ranges::count_if(report.failures, [&](const FormResult& failure) {
      return std::ranges::any_of(failure.findings, is_it);
    });
    if (4 * forms > 3 * report.judged)
      return {{all.second, forms, static_cast<int64_t>(report.failures.size())}};
  }
  return {};
}

// Faults that are seen in the findings themselves.
std::string words_for(const FormFinding& finding, const FormInputs& in, const AttentionTruth& truth) {
  switch (finding.fault) {
    case Fault::not_deterministic:
      return fmt::format("{} is not deterministic: the order of its sums differs from call to call",
                         finding.output);
    case Fault::biased:
      return fmt::format("{} is biased: {}", finding.output, finding.words);
    case Fault::noisy:
      return "rows of dS do not sum to zero: delta does not fit the probabilities of the backward pass";
    case Fault::disagrees:
      return "the backward pass has other probabilities than the forward pass";
    case Fault::hidden:
      return "a NaN of V is hidden";
    case Fault::outside:
      return "memory outside of the outputs is written";
    case Fault::error:
      return fmt::format("the kernel raised: {}", finding.words);
    case Fault::not_written:
      return finding.output.empty() ? "no output is written"
                                    : fmt::format("{} is not wholly written", finding.output);
    default:
      break;
  }
  const bool of_gradient = finding.output == "dQ" || finding.output == "dK";
  if (finding.fault == Fault::not_finite && in.form.type == FormType::fp16 && of_gradient &&
      truth.largest_ds > double{max_finite(kFp16)})
    return "dS overflows FP16";
  return "";
}

// Rows whose O or L is wrong or not finite, against those whose log-sum-exp is beyond what exp of FP32 can hold.
bool is_underflow(const FailingForm& e) {
  constexpr double kLowest = -87;  // log of FP32's smallest normal number is -87.3
  int64_t wrong_low = 0, wrong_other = 0, right_low = 0, lost_low = 0;
  const int64_t Dv = e.inputs.form.Dv;
  for (size_t row = 0; row < e.truth.lse.values().size(); ++row) {
    const double L = e.truth.lse.values()[row];
    if (!std::isfinite(L)) continue;
    bool wrong = false, nothing = true;  // nothing: zeros, NaN or Inf
    for (int64_t d = 0; d < Dv; ++d) {
      const auto n = row * static_cast<size_t>(Dv) + static_cast<size_t>(d);
      const double x = e.found.o[n], exact = e.truth.o.values()[n];
      wrong |= !(std::fabs(x - exact) <= 0.5 * std::fabs(exact));
      nothing &= x == 0 || !std::isfinite(x);
    }
    wrong_low += wrong && L < kLowest;
    lost_low += nothing && L < kLowest;
    wrong_other += wrong && L >= kLowest;
    right_low += !wrong && L < kLowest - 20;
  }
  return wrong_low > 0 && 2 * lost_low >= wrong_low && wrong_other <= wrong_low / 8 &&
         right_low <= wrong_low / 8;
}

}  // namespace

std::vector<NamedFault> name_faults(const FormsReport& report, const FormKernel& kernel,
                                    const JudgeOptions& options) {
  constexpr size_t kMostForms = 8;
  constexpr int64_t kMostWork = int64_t{1} << 20;
  if (std::vector<NamedFault> one = fault_of_all_outputs(report); !one.empty()) return one;
  std::map<std::pair<Fault, std::string>, NamedFault> seen_in_findings;  // in the order of Fault
  std::vector<FailingForm> evidence;
  for (const FormResult& failure : report.failures) {
    FormInputs inputs(failure.form);
    const bool needs_numbers = std::ranges::any_of(failure.findings, [](const FormFinding& x) {
      return x.fault == Fault::wrong || x.fault == Fault::not_finite || x.fault == Fault::zeros;
    });
    AttentionTruth truth;
    const bool small = failure.form.work() <= kMostWork && failure.form.values != FormValues::nan;
    if (needs_numbers && small && evidence.size() < kMostForms) truth = inputs.truth(options.plan);
    FailingForm e{std::move(inputs), std::move(truth), {}, {}};
    for (const FormFinding& finding : failure.findings) {
      const std::string words = words_for(finding, e.inputs, e.truth);
      if (!words.empty()) {
        NamedFault& named = seen_in_findings[{finding.fault, words}];
        named.words = words, ++named.forms, ++named.tried;
      } else if (finding.output.empty()) {
        e.wrong.insert(e.wrong.end(), {"O", "dQ", "dK", "dV"});
      } else {
        e.wrong.push_back(finding.output);
      }
    }
    if (e.wrong.empty() || e.truth.o.values().empty()) continue;
    JudgeOptions once = options;
    once.deterministic = false;
    judge_form(e.inputs, kernel, once, &e.found);
    if (!e.found.o.empty()) evidence.push_back(std::move(e));
  }
  std::vector<NamedFault> named;
  const auto count = [&](const std::string& words, auto holds) {
    NamedFault fault{words, 0, static_cast<int64_t>(evidence.size())};
    for (const FailingForm& e : evidence) fault.forms += holds(e);
    if (fault.forms > 0) named.push_back(fault);
  };
  count("exp underflows: a row whose log-sum-exp is below -87 is lost", is_underflow);
  for (const Hypothesis& fault : hypotheses()) {
    if (!named.empty() && named.back().forms == named.back().tried) break;  // nothing is left to explain
    count(fault.words, [&](const FailingForm& e) { return explains(fault, e); });
  }
  std::ranges::stable_sort(named, std::greater{}, &NamedFault::forms);
  // What explains less than half of the failures stands behind what is seen.
  const auto few = std::ranges::find_if(named, [](const NamedFault& x) { return 2 * x.forms < x.tried; });
  std::vector<NamedFault> seen_ones;
  for (const auto& [words, fault] : seen_in_findings) seen_ones.push_back(fault);
  named.insert(few, seen_ones.begin(), seen_ones.end());
  if (named.empty() && !report.failures.empty()) {
    const FormFinding& first = report.failures.front().findings.front();
    const std::vector<std::string> bugs = public_bugs_met(report);
    named.push_back({bugs.empty() ? fmt::format("no known fault: {} {}, {}",
                                                first.output.empty() ? "an output is" : first.output + " is",
                                                name(first.fault), first.words)
                                  : "fails under " + bugs.front(),
                     0, static_cast<int64_t>(evidence.size())});
  }
  return named;
}

namespace {
std::optional<PublicBug> public_bug_of(const ConformForm& form) {
  for (const PublicBug& bug : public_bugs(form.type, form.seed))
    if (bug.form == form) return bug;
  return {};
}
}  // namespace

std::string public_bug_words(const ConformForm& form) {
  const std::optional<PublicBug> bug = public_bug_of(form);
  return bug ? fmt::format("the conditions of {} ({})", bug->report, bug->condition) : "";
}

std::vector<std::string> public_bugs_met(const FormsReport& report) {
  std::vector<std::string> out;
  for (const FormResult& failure : report.failures) {
    const std::optional<PublicBug> bug = public_bug_of(failure.form);
    if (!bug) continue;
    // Those that do not leak had a right forward pass, and gradients that were NaN or wrong.
    bool forward_wrong = false, gradients_wrong = false, noisy = false;
    for (const FormFinding& x : failure.findings) {
      const bool wrong = x.fault == Fault::not_finite || x.fault == Fault::wrong;
      const bool of_forward = x.output == "O" || x.output == "L";
      forward_wrong |= wrong && of_forward;
      gradients_wrong |= wrong && !of_forward;
      noisy |= x.fault == Fault::noisy;
    }
    if (!(bug->leaks ? noisy : gradients_wrong && !forward_wrong)) continue;
    const std::string words = public_bug_words(failure.form);
    if (std::ranges::find(out, words) == out.end()) out.push_back(words);
  }
  return out;
}

}  // namespace evenkeel
