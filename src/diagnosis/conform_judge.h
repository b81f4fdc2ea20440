// One kernel judged over the space of forms (conform_forms.h). Each output is compared with FP64 within the worst case of
// the plan's roundings. Also judged: memory, NaN, determinism, leak, forward against backward, errors of one sign.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "diagnosis/conform_forms.h"
#include "numerics/error_stats.h"

namespace evenkeel {

// What a kernel reads and writes: FormInputs' tensors, contiguous, numbers of the form's type stored as FP32.
struct FormTensors {
  const float *q = nullptr, *k = nullptr, *v = nullptr, *grad_output = nullptr;
  const float *sinks = nullptr, *grad_lse = nullptr;                // or null
  const uint8_t* visible = nullptr;                                 // or null
  const int32_t *query_starts = nullptr, *key_starts = nullptr;     // or null
  float *o = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;  // to be written wholly
  float *lse = nullptr,
        *grad_sinks = nullptr;  // to be written wholly or not at all; grad_sinks: null without sinks
};
enum class FormAnswer { done, not_offered };
// May throw: the form has the fault `error` then, with the exception's words.
using FormKernel = std::function<FormAnswer(const ConformForm& form, const FormTensors& tensors)>;

enum class Fault : uint8_t {
  error,              // the kernel threw
  outside,            // wrote outside of its outputs, or into its inputs
  not_written,        // left part of an output as it was
  zeros,              // every output is zero, which the definition's are not
  not_finite,         // NaN or Inf where the definition has none
  hidden,             // a number where the definition has NaN
  wrong,              // further from FP64 than roundings can take it
  disagrees,          // the backward pass has other probabilities than the forward
  biased,             // errors of one sign: an output is too small or too large throughout
  noisy,              // rows of dS do not sum to zero, by more than rounding dS leaves
  not_deterministic,  // other bits for the same inputs
};
inline constexpr std::array<std::string_view, 11> kFaultNames = {"ERROR",
                                                                 "OUTSIDE",
                                                                 "NOT WRITTEN",
                                                                 "ALL ZERO",
                                                                 "NOT FINITE",
                                                                 "NAN HIDDEN",
                                                                 "WRONG",
                                                                 "FORWARD AND BACKWARD DISAGREE",
                                                                 "BIASED",
                                                                 "NOISY",
                                                                 "NOT DETERMINISTIC"};
constexpr std::string_view name(Fault fault) { return kFaultNames[static_cast<size_t>(fault)]; }

struct FormFinding {
  Fault fault;
  std::string output;  // "dK"; empty: of none, or of all that must be written
  double over = 0;     // error over what is allowed, signed where the sign says something
  std::string words;   // where and how much
};

struct FormResult {
  ConformForm form;
  bool judged = false;  // false: not offered
  std::vector<FormFinding> findings;
  // Largest error over its bound; 0: not judged.
  double over_o = 0, over_lse = 0, over_dq = 0, over_dk = 0, over_dv = 0, over_sinks = 0;
  double leak = 0, leak_allowed = 0;  // root mean squares; 0: not judged
  bool passes() const { return judged && findings.empty(); }
};

struct JudgeOptions {
  PrecisionPlan plan;  // whose roundings are granted; bf16 stands for the form's type
  FormExtent extent = FormExtent::whole;
  uint64_t seed = 1;
  bool deterministic = true;  // judge determinism
  bool aligned = true;        // the last row is aligned with the last key; false: T is N where that matters
  bool judge_noise = true;    // false: the leak is judged elsewhere alone
  bool shrink = true;         // look for the smallest failing form: some fifty calls, each of another shape
};

// The tensors of a call with guards around each, and its outputs.
struct FormOutputs {
  std::vector<float> o, lse, dq, dk, dv, grad_sinks;
};

FormResult judge_form(const FormInputs& inputs, const FormKernel& kernel, const JudgeOptions& options,
                      FormOutputs* outputs = nullptr);

// A fault by its name: what explains the outputs of failing forms (conform_faults.h).
struct NamedFault {
  std::string words;
  int64_t forms = 0;  // failing forms that it explains, of `tried`
  int64_t tried = 0;
};

struct FormsReport {
  std::vector<std::string>
      not_judged;  // levels that the kernel does not offer, and forms that cross offered ones
  int64_t judged = 0;
  std::vector<FormResult> failures;
  std::optional<FormResult> smallest;  // the first failure; with `shrink` made as small as it stays one
  std::vector<NamedFault> named;       // the most telling first
  std::vector<std::string>
      public_bugs;          // those under whose conditions the kernel fails as they did (public_bugs)
  double largest_over = 0;  // of all outputs of all forms
  bool passes() const { return judged > 0 && failures.empty(); }
};
// progress(done, of): before the covering list is known, `of` is 0.
FormsReport judge_forms(const FormKernel& kernel, const JudgeOptions& options,
                        const std::function<void(int64_t, int64_t)>& progress = {});

// The form, as small as it stays a failure of the same kind.
FormResult smallest_failure(FormResult failure, const FormKernel& kernel, const JudgeOptions& options);

// attention_forward and attention_backward of the CPU with a plan. Not offered: sinks, packed sequences, the gradient
// of L, FP16; a soft cap where the plan does not take one.
FormKernel cpu_form_kernel(const PrecisionPlan& plan);
// The definition itself, rounded to the form's type at the end: nothing a kernel can do better. Offers everything.
FormKernel definition_form_kernel();

}  // namespace evenkeel
