// `evenkeel conform`: the table of signed errors, and the verdict.
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>

#include "base/error.h"
#include "base/progress.h"
#include "base/whole_file.h"
#include "cli/child_process.h"
#include "cli/options.h"
#include "diagnosis/conform.h"
#include "diagnosis/conform_gpu.h"
#include "diagnosis/conform_report.h"
#include "diagnosis/form_struct.h"
#include "evenkeel.h"
#include "gpu/device.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string marked(std::string text, bool good, bool colour) {
  return colour ? fmt::format("\033[{}m{}\033[0m", good ? 32 : 31, text) : text;
}

// z with three digits, and "inf" for an error without any spread.
std::string z_text(const ErrorStats& s) { return fmt::format("{:+.1f}", s.z()); }

void print_plan(const ConformPlan& plan, bool errors, bool colour) {
  fmt::print("\n{}\n", plan.name);
  fmt::print("  {:<17} {:>8} {:>10} {:>9} {:>9} {:>9} {:>9}  {}\n", "leak (zero sum)", "rows", "mean", "z",
             "allowed", "rms", "allowed", "verdict");
  for (const ConformResult& r : plan.results)
    fmt::print("  {:<17} {:>8} {:>+10.2e} {:>9} {:>9.2e} {:>9.2e} {:>9.2e}  {}\n", r.case_name, r.rows,
               r.residual.mean(), z_text(r.residual), r.bias_floor, r.residual.rms(), r.noise_bound(),
               marked(r.verdict(), r.passes(), colour));
  if (!errors) return;
  fmt::print("  {:<17} {:>19} {:>19} {:>19} {:>19} {:>19}   {}\n", "bias, ulps (z)", "O", "delta", "dQ", "dK",
             "dV", "largest error / bound of O, L, dQ, dK, dV");
  for (const ConformResult& r : plan.results) {
    fmt::print("  {:<17}", r.case_name);
    for (const ErrorStats* s : {&r.o, &r.delta, &r.dq, &r.dk, &r.dv})
      fmt::print(" {:>19}", fmt::format("{:+.4f} ({})", s->mean(), z_text(*s)));
    fmt::print("   {:.2g} {:.2g} {:.2g} {:.2g} {:.2g}\n", r.over_o, r.over_lse, r.over_dq, r.over_dk,
               r.over_dv);
  }
}

// The family that fails first, else the one whose mean is nearest to what is allowed.
const ConformResult* most_telling(const ConformPlan& plan) {
  const ConformResult* found = nullptr;
  const auto share = [](const ConformResult& r) { return std::fabs(r.residual.mean()) / r.bias_floor; };
  for (const ConformResult& r : plan.results)
    if (!found || (found->passes() && (!r.passes() || share(r) > share(*found)))) found = &r;
  return found;
}

// judgements: of the same plans over forms; none where forms were not judged.
void print_summary(const std::vector<ConformPlan>& plans, const std::vector<KernelJudgement>& judgements,
                   bool colour) {
  fmt::print("\n{:<34} {:<8} {:<17} {:>9} {:>9} {:>9}   {}\n", "plan", "verdict", "most biased", "mean",
             "allowed", "z", "noisiest (rms / allowed)");
  for (size_t n = 0; n < plans.size(); ++n) {
    const ConformPlan& plan = plans[n];
    const bool passes = plan.passes() && (judgements.empty() || judgements[n].passes());
    const ConformResult *biased = nullptr, *noisy = nullptr;
    // z alone says little: a mean within FP32's own arithmetic is allowed whatever its z.
    const auto bias = [](const ConformResult& r) { return std::fabs(r.residual.mean()) / r.bias_floor; };
    const auto noise = [](const ConformResult& r) { return r.residual.rms() / r.noise_bound(); };
    for (const ConformResult& r : plan.results) {
      if (r.rows >= kBiasRows && (!biased || bias(r) > bias(*biased))) biased = &r;
      if (!noisy || noise(r) > noise(*noisy)) noisy = &r;
    }
    fmt::print("{:<34} {} {:<45}  {}\n", plan.name,
               marked(fmt::format("{:<8}", passes ? "pass" : "FAIL"), passes, colour),
               biased ? fmt::format("{:<17} {:>+9.1e} {:>9.1e} {:>9}", biased->case_name,
                                    biased->residual.mean(), biased->bias_floor, z_text(biased->residual))
                      : fmt::format("{:<47}", "- (too few rows)"),
               noisy ? fmt::format("{} ({:.2f})", noisy->case_name, noise(*noisy)) : "-");
  }
  for (size_t n = 0; n < judgements.size(); ++n)
    if (plans[n].passes() && !judgements[n].passes())
      fmt::print("\n{}: every family above passes; forms fail, see below\n", plans[n].name);
  // Each piece of advice once, with the plans that it is for.
  std::map<std::string, std::string> advice;
  for (const ConformPlan& plan : plans) {
    const ConformResult* const worst = most_telling(plan);
    if (!worst || worst->passes()) continue;
    std::string& of = advice[worst->what_to_fix()];
    of += fmt::format("{}{} ({}: {})", of.empty() ? "" : "; ", plan.name, worst->case_name, worst->verdict());
  }
  for (const auto& [words, of] : advice) fmt::print("\nto fix {}:\n  {}\n", of, words);
}

// over: largest error over its bound; none for what has no bound.
Json stats_json(const ErrorStats& s, double max_error, std::optional<double> over = {}) {
  Json json = {{"bias_ulps", s.mean()},   {"z", s.z()},
               {"sign_z", s.sign_z()},    {"rms_ulps", s.rms()},
               {"max_ulps", s.max_ulp()}, {"max_error", max_error}};
  if (over) json["error_over_bound"] = *over;
  return json;
}

Json to_json(const std::vector<ConformPlan>& plans) {
  Json out = {
      {"schema", 1}, {"bias_z", kBiasZ}, {"bias_rows", kBiasRows}, {"noise_variance", kNoiseVariance}};
  out["plans"] = Json::array();
  for (const ConformPlan& plan : plans) {
    Json cases = Json::array();
    for (const ConformResult& r : plan.results)
      cases.push_back({{"case", r.case_name},
                       {"rows", r.rows},
                       {"verdict", r.verdict()},
                       {"residual",
                        {{"mean", r.residual.mean()},
                         {"standard_error", r.residual.standard_error()},
                         {"z", r.residual.z()},
                         {"sign_z", r.residual.sign_z()},
                         {"rms", r.residual.rms()},
                         {"bound", r.noise_bound()},
                         {"forced_rms", r.forced_rms},
                         {"arithmetic_rms", r.arithmetic_rms},
                         {"bias_floor", r.bias_floor},
                         {"delta_rms", r.delta_rms}}},
                       {"o", stats_json(r.o, r.max_o, r.over_o)},
                       {"delta", stats_json(r.delta, r.max_delta)},
                       {"dq", stats_json(r.dq, r.max_dq, r.over_dq)},
                       {"dk", stats_json(r.dk, r.max_dk, r.over_dk)},
                       {"dv", stats_json(r.dv, r.max_dv, r.over_dv)},
                       {"lse", {{"error_over_bound", r.over_lse}}},
                       {"nonfinite", r.nonfinite},
                       {"unwritten", r.unwritten},
                       {"one_key_rows", r.one_key_rows},
                       {"what_to_fix", r.what_to_fix()}});
    out["plans"].push_back({{"plan", plan.name}, {"passes", plan.passes()}, {"cases", cases}});
  }
  return out;
}

std::vector<ConformPlan> plans_named(std::vector<std::string> texts,
                                     const std::vector<std::string>& stabilisers, bool quick) {
  if (texts.empty() && !stabilisers.empty()) texts = {"flash2"};
  if (texts.empty() && quick)
    texts = {"bf16_all", "flash2", "flash2,stabiliser=wide_output", "flash2,stabiliser=consistent",
             "flash2,stabiliser=zero_sum"};
  if (texts.empty()) texts = default_conform_plans();
  std::vector<ConformPlan> plans;
  for (const std::string& text : texts) {
    if (stabilisers.empty()) plans.push_back({text, parse_plan(text), {}});
    for (const std::string& stabiliser : stabilisers) {
      const std::string whole = text + ",stabiliser=" + stabiliser;
      plans.push_back({whole, parse_plan(whole), {}});
    }
  }
  return plans;
}

void print_text(const std::vector<ConformPlan>& plans, const std::vector<KernelJudgement>& judgements,
                bool summary, const std::set<std::string>& gpu_kernels) {
  const bool colour = use_colour();
  if (!summary)
    for (const ConformPlan& plan : plans) print_plan(plan, /*errors=*/true, colour);
  print_summary(plans, judgements, colour);
  if (!gpu_kernels.empty()) fmt::print("\nkernels that ran on the GPU\n");
  for (const std::string& use : gpu_kernels) fmt::print("  {}\n", use);
  fmt::print(
      "\nThe leak is the row's sum of dS / a, which exact arithmetic makes 0, in units of delta's root mean "
      "square.\n"
      "BIASED: |z| >= {} on at least {} rows, and a mean above what is allowed: FP32's own arithmetic.\n"
      "NOISY: rms above what is allowed: sqrt({} x the variance that rounding dS to its own format must "
      "leave +\n"
      "FP32's arithmetic). WRONG: an output is further from FP64 than the plan's roundings can take it. "
      "docs/numerics.md\n"
      "derives the bounds. Biases of O, delta, dQ, dK, dV are in BF16 ulps of the row's largest true "
      "value.\n",
      kBiasZ, kBiasRows, kNoiseVariance);
}

// What is written besides the answer, each where it was asked for.
struct Files {
  std::string junit, badge, failing;

  void write(const std::vector<KernelJudgement>& judgements) const {
    const auto save = [](const std::string& file, const std::string& content) {
      WholeFileWriter writer(file);
      writer.append(content);
      writer.commit();
    };
    if (!junit.empty()) {
      std::string suites;
      for (const KernelJudgement& j : judgements) {
        const std::string one = judgement_junit(j);
        suites += one.substr(one.find('\n') + 1);  // one XML declaration for all
      }
      save(junit, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n" + suites + "</testsuites>\n");
    }
    if (!badge.empty()) save(badge, judgement_badge(judgements.front()));
    for (const KernelJudgement& j : judgements)
      if (!failing.empty() && j.forms.smallest)
        return write_failing_form(failing, j.forms.smallest->form, j.plan);
  }
};

// A kernel of others: a function of evenkeel.h's evenkeel_form_kernel in a shared library.
FormKernel library_kernel(const std::string& library, const std::string& symbol) {
  // Without a slash dlopen searches the system's folders.
  const std::string path = library.find('/') == std::string::npos ? "./" + library : library;
  open_regular_file(path);  // refuses what dlopen would wait for, a pipe without a writer
  doing("load " + path);
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  require_data(handle != nullptr, "--library {}: cannot be loaded: {}", library, handle ? "" : dlerror());
  void* const found = dlsym(handle, symbol.c_str());
  require_data(found != nullptr,
               "--library {}: expected a function {} (evenkeel_form_kernel of evenkeel.h), found none",
               library, symbol);
  return kernel_by_struct(reinterpret_cast<evenkeel_form_kernel>(found), nullptr, EVENKEEL_BF16,
                          EVENKEEL_FP16, EVENKEEL_FP32, EVENKEEL_NOT_OFFERED);
}

struct ConformOptions {
  std::vector<std::string> kernel, plan_texts, case_names, stabilisers;
  int64_t rows = kBiasRows, seed = 1;
  bool json = false, summary = false, gpu = false, quick = false;
  std::string library, symbol = "evenkeel_kernel", replay;
  Files files;
};

Options declare(ConformOptions& o) {
  Options options(
      "conform [KERNEL] [options]",
      "Judges attention by the sign of its errors on hard inputs. Families of inputs measure the leak (the "
      "sum "
      "of a\n"
      "row of dS, 0 in exact arithmetic) and the bias of O, delta, dQ, dK and dV against FP64. Forms cross "
      "every "
      "feature\n"
      "that a kernel may offer: batches, groups, masks, windows, packed sequences, sinks, offsets, types. "
      "All "
      "outputs\n"
      "must be wholly written and within the worst case of the plan's roundings. KERNEL is cpu. With --gpu "
      "the "
      "GPU's\n"
      "kernels are judged; their leak is read off dQ, at a feature that is the same in every key. With "
      "--library, the\n"
      "kernel of a shared library is judged. Exit code 1: a kernel fails.",
      "conform --plan flash2 --stabiliser none --stabiliser zero_sum --case ties_2_tail");
  options.values("--plan", "PLAN",
                 "a precision plan to judge, several allowed (default: a list); with --library the "
                 "roundings that are granted (default: flash2)",
                 o.plan_texts);
  options.values("--stabiliser", "NAME", "judge every --plan with this stabiliser, several allowed",
                 o.stabilisers);
  options.values("--case", "NAME", "only this family of inputs and no forms, several allowed", o.case_names);
  options.value("--rows", "N", "rows a case (under 100000 none is judged for bias)", o.rows, 64, 100'000'000);
  options.value("--seed", "N", "of the inputs", o.seed, 0, 1'000'000'000);
  options.flag("--quick", "four families, fewer forms, five plans: a first verdict in seconds", o.quick);
  options.flag("--gpu", "judge the kernels that run on this machine's GPU", o.gpu);
  options.value("--library", "FILE",
                "judge the kernel of a shared library: a function as evenkeel.h's "
                "evenkeel_form_kernel",
                o.library);
  options.value("--symbol", "NAME", "the function in --library", o.symbol);
  options.value("--replay", "FILE",
                "with --library: only the form of this file, as --failing writes it, or a capture", o.replay);
  options.value("--failing", "FILE",
                "write the smallest failing form there: tensors and exact results, safetensors",
                o.files.failing);
  options.value("--junit", "FILE", "write the result there for a test runner (JUnit's XML)", o.files.junit);
  options.value("--badge", "FILE", "write a badge there (SVG)", o.files.badge);
  options.flag("--summary", "only the closing table", o.summary);
  options.flag("--json", "the result as JSON", o.json);
  options.words("KERNEL", o.kernel, 0, 1);
  return options;
}

int judge_library(const ConformOptions& o) {
  require(o.plan_texts.size() <= 1 && o.stabilisers.empty() && !o.gpu,
          "--library: expected at most one --plan, no --stabiliser and no --gpu");
  std::string family;  // none yet: forms
  const FormKernel kernel = [&, theirs = library_kernel(o.library, o.symbol)](const ConformForm& form,
                                                                              const FormTensors& tensors) {
    doing(fmt::format("run {} on {}", o.symbol,
                      family.empty() ? "the form " + form.text() : "the family " + family));
    return theirs(form, tensors);
  };
  KernelRequest request;
  request.before_family = [&](std::string_view name) { family = name; };
  request.name = o.symbol;
  if (!o.plan_texts.empty()) request.plan = o.plan_texts[0];
  request.families = o.case_names;
  request.extent = o.quick ? FormExtent::quick : FormExtent::whole;
  request.rows = o.rows, request.seed = static_cast<uint64_t>(o.seed);
  KernelJudgement found;
  if (!o.replay.empty()) {
    found = judge_file(kernel, request, o.replay);
  } else {
    std::unique_ptr<Progress> progress;
    const char* shown = nullptr;
    found = judge_kernel(kernel, request, [&](const char* what, int64_t, int64_t of) {
      if (what != shown) progress.reset(), progress = std::make_unique<Progress>(shown = what, of);
      progress->advance();
    });
  }
  o.files.write({found});
  fmt::print("{}", o.json ? judgement_json(found).dump(2) + "\n" : judgement_text(found));
  return found.passes() ? 0 : 1;
}

// Our own kernels over forms, plan by plan.
std::vector<KernelJudgement> judge_plans_forms(const std::vector<ConformPlan>& plans,
                                               const ConformOptions& o) {
  std::vector<KernelJudgement> out;
  // Several plans are compared on the families; the whole space of forms is for one.
  const bool whole = !o.quick && plans.size() == 1;
  Progress progress("forms", static_cast<int64_t>(plans.size()));
  for (const ConformPlan& plan : plans) {
    KernelJudgement j;
    j.name = j.plan = plan.name;
    JudgeOptions options;
    options.plan = plan.plan, options.seed = static_cast<uint64_t>(o.seed);
    options.extent = whole ? FormExtent::whole : FormExtent::quick;
    j.forms = judge_forms(cpu_form_kernel(plan.plan), options);
    j.families = plan;
    j.risk = risk_of(plan);
    out.push_back(std::move(j));
    progress.advance();
  }
  return out;
}

void print_forms(const std::vector<KernelJudgement>& judgements) {
  fmt::print("\nforms (problems that cross the features of a kernel)\n");
  for (const KernelJudgement& j : judgements) {
    fmt::print("  {:<34} {:>4} judged, {:>3} failed{}\n", j.name, j.forms.judged, j.forms.failures.size(),
               j.forms.named.empty() ? "" : ": " + j.forms.named.front().words);
    if (j.risk) fmt::print("  {:<34} {}\n", "", in_words(*j.risk));
  }
  // Of every plan, then what only some of them do not take.
  const auto of_all = [&](const std::string& what) {
    return std::ranges::all_of(judgements, [&](const KernelJudgement& j) {
      return std::ranges::find(j.forms.not_judged, what) != j.forms.not_judged.end();
    });
  };
  const auto print_not_judged = [&](const KernelJudgement& j, bool wanted, const std::string& whose) {
    std::string words;
    for (const std::string& what : j.forms.not_judged)
      if (of_all(what) == wanted) words += (words.empty() ? "" : ", ") + what;
    if (!words.empty())
      fmt::print("  not judged{}, since the CPU's kernels do not offer it: {}\n", whose, words);
  };
  if (!judgements.empty()) print_not_judged(judgements.front(), true, "");
  for (const KernelJudgement& j : judgements) print_not_judged(j, false, " of " + j.name);
}

}  // namespace

int run_conform(int argc, char** argv) {
  ConformOptions o;
  Options options = declare(o);
  if (!options.parse(argc, argv)) return 0;
  require(o.kernel.empty() || o.kernel[0] == "cpu", "unknown kernel '{}': expected cpu",
          o.kernel.empty() ? "" : o.kernel[0]);
  require(o.replay.empty() || !o.library.empty(), "--replay: expected --library too");
  if (!o.library.empty()) return in_child_process([&] { return judge_library(o); });
  std::vector<ConformPlan> plans = plans_named(o.plan_texts, o.stabilisers, o.quick);
  const bool some = !o.case_names.empty();
  const std::vector<ConformCase> cases = some      ? cases_named(o.case_names)
                                         : o.quick ? cases_named(quick_families())
                                                   : conform_cases();

  GpuConform on_gpu;
  if (o.gpu) {
    const CudaDevice device = cuda_device();
    require_data(device.present, "--gpu: no GPU: {}", device.why);
  }
  {
    Progress progress("conform", conform_work(plans.size(), cases, o.rows));
    const ConformKernel kernel_under_test = o.gpu ? on_gpu.kernel() : conform_cpu_kernel;
    conform(
        plans, cases, o.rows, static_cast<uint64_t>(o.seed), kernel_under_test, [&] { progress.advance(); },
        o.gpu);
  }
  std::vector<KernelJudgement> judgements;
  if (!some && !o.gpu) judgements = judge_plans_forms(plans, o);
  bool passes = std::ranges::all_of(plans, [](const ConformPlan& plan) { return plan.passes(); });
  for (const KernelJudgement& j : judgements) passes &= j.passes();
  require(!judgements.empty() || (o.files.junit + o.files.badge + o.files.failing).empty(),
          "--junit, --badge and --failing need forms: expected neither --case nor --gpu");
  if (!judgements.empty()) o.files.write(judgements);
  if (o.json) {
    Json out = to_json(plans);
    if (o.gpu) out["kernels"] = on_gpu.uses();
    for (size_t n = 0; n < judgements.size(); ++n) {
      const Json whole = judgement_json(judgements[n]);
      out["plans"][n]["passes"] = judgements[n].passes();
      out["plans"][n]["forms"] = whole["forms"];
      if (whole.contains("risk")) out["plans"][n]["risk"] = whole["risk"];
    }
    fmt::print("{}\n", out.dump(2));
  } else {
    print_text(plans, judgements, o.summary, on_gpu.uses());
    if (!judgements.empty()) print_forms(judgements);
  }
  return passes ? 0 : 1;
}

}  // namespace evenkeel::cli
