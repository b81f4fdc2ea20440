// A whole judgement of one kernel: forms and families, what they mean for training, and how that is written down.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "diagnosis/conform.h"
#include "diagnosis/conform_judge.h"
#include "diagnosis/risk.h"

namespace evenkeel {

struct KernelRequest {
  std::string name;                   // of the kernel
  std::string plan = "flash2";        // whose roundings are granted
  std::vector<std::string> families;  // empty: quick_families() or all
  FormType type = FormType::bf16;     // of the families' tensors
  FormExtent extent = FormExtent::whole;
  int64_t rows = kBiasRows;  // of a family
  uint64_t seed = 1;
  bool deterministic = true, aligned = true;
  bool with_families = true;
  bool shrink = true;  // look for the smallest failing form
  std::function<void(std::string_view)>
      before_family;  // called with its name before the kernel runs on it; or null
};
// The families that tell most: --quick.
std::vector<std::string> quick_families();

struct KernelJudgement {
  std::string name, plan;
  FormsReport forms;
  std::optional<ConformPlan> families;
  std::vector<std::string> families_not_judged;
  std::vector<std::string> families_raised;  // "sink: out of memory": the kernel threw
  std::optional<Risk> risk;                  // of loss_feedback, where that was judged
  bool passes() const {
    return forms.passes() && (!families || families->passes()) && families_raised.empty();
  }
  bool raised() const;  // somewhere the kernel threw
  std::string verdict()
      const;  // "pass", "FAIL: dS overflows FP16", "ERROR: the kernel raised: out of memory"
};
// progress(what, done, of).
KernelJudgement judge_kernel(const FormKernel& kernel, const KernelRequest& request,
                             const std::function<void(const char*, int64_t, int64_t)>& progress = {});
// The kernel on the inputs of one file: a form that write_failing_form wrote, or a capture of a run, rounded to
// request.type. DataError where the file is neither.
KernelJudgement judge_file(const FormKernel& kernel, const KernelRequest& request,
                           const std::filesystem::path& file);
// The kernel on families' inputs, for conform with its constant feature: one batch, no groups.
ConformKernel family_kernel(const FormKernel& kernel, FormType type);

nlohmann::ordered_json result_json(const FormResult& result);
nlohmann::ordered_json judgement_json(const KernelJudgement& judgement);
std::string judgement_text(const KernelJudgement& judgement);
// One test case a dimension, a family and a failing form, in JUnit's XML.
std::string judgement_junit(const KernelJudgement& judgement);
// An SVG of two words: "evenkeel | safe to train with".
std::string judgement_badge(const KernelJudgement& judgement);
// The form with its tensors and what FP64 makes of them, as safetensors; its metadata has the form as JSON under "form".
void write_failing_form(const std::filesystem::path& file, const ConformForm& form, const std::string& plan);
// From such a file. DataError, std::invalid_argument.
ConformForm read_form(const std::filesystem::path& file);

}  // namespace evenkeel
