// `evenkeel conform`: the table of signed errors, and the verdict.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>

#include "base/error.h"
#include "base/progress.h"
#include "cli/options.h"
#include "diagnosis/conform.h"
#include "diagnosis/conform_gpu.h"
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

void print_summary(const std::vector<ConformPlan>& plans, bool colour) {
  fmt::print("\n{:<34} {:<8} {:<17} {:>9} {:>9} {:>9}   {}\n", "plan", "verdict", "most biased", "mean",
             "allowed", "z", "noisiest (rms / allowed)");
  for (const ConformPlan& plan : plans) {
    const ConformResult *biased = nullptr, *noisy = nullptr;
    // z alone says little: a mean within FP32's own arithmetic is allowed whatever its z.
    const auto bias = [](const ConformResult& r) { return std::fabs(r.residual.mean()) / r.bias_floor; };
    const auto noise = [](const ConformResult& r) { return r.residual.rms() / r.noise_bound(); };
    for (const ConformResult& r : plan.results) {
      if (r.rows >= kBiasRows && (!biased || bias(r) > bias(*biased))) biased = &r;
      if (!noisy || noise(r) > noise(*noisy)) noisy = &r;
    }
    fmt::print("{:<34} {} {:<45}  {}\n", plan.name,
               marked(fmt::format("{:<8}", plan.passes() ? "pass" : "FAIL"), plan.passes(), colour),
               biased ? fmt::format("{:<17} {:>+9.1e} {:>9.1e} {:>9}", biased->case_name,
                                    biased->residual.mean(), biased->bias_floor, z_text(biased->residual))
                      : fmt::format("{:<47}", "- (too few rows)"),
               noisy ? fmt::format("{} ({:.2f})", noisy->case_name, noise(*noisy)) : "-");
  }
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
                       {"what_to_fix", r.what_to_fix()}});
    out["plans"].push_back({{"plan", plan.name}, {"passes", plan.passes()}, {"cases", cases}});
  }
  return out;
}

std::vector<ConformPlan> plans_named(std::vector<std::string> texts,
                                     const std::vector<std::string>& stabilisers) {
  if (texts.empty() && !stabilisers.empty()) texts = {"flash2"};
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

std::vector<ConformCase> cases_named(const std::vector<std::string>& names) {
  if (names.empty()) return conform_cases();
  std::vector<ConformCase> cases;
  for (const std::string& name : names) {
    std::string known;
    for (const ConformCase& c : conform_cases()) {
      if (c.name == name) cases.push_back(c);
      known += (known.empty() ? "" : ", ") + std::string(c.name);
    }
    require(!cases.empty() && cases.back().name == name, "unknown case '{}': expected one of {}", name,
            known);
  }
  return cases;
}

void print_text(const std::vector<ConformPlan>& plans, bool summary,
                const std::set<std::string>& gpu_kernels) {
  const bool colour = use_colour();
  if (!summary)
    for (const ConformPlan& plan : plans) print_plan(plan, /*errors=*/true, colour);
  print_summary(plans, colour);
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

}  // namespace

int run_conform(int argc, char** argv) {
  std::vector<std::string> kernel, plan_texts, case_names, stabilisers;
  int64_t rows = kBiasRows, seed = 1;
  bool json = false, summary = false, gpu = false;
  Options options("conform [KERNEL] [options]",
                  "Judges attention by the sign of its errors on hard inputs: the leak, the sum of a row of "
                  "dS (which exact\n"
                  "arithmetic makes 0), and the bias of O, delta, dQ, dK, dV against FP64; all outputs must "
                  "be wholly written and\n"
                  "within the worst case of the plan's roundings. KERNEL is cpu. With --gpu the GPU's "
                  "kernels are judged: their\n"
                  "leak is read off dQ, at a feature that is the same in every key. Exit 1 if a plan fails.",
                  "conform --plan flash2 --stabiliser none --stabiliser zero_sum --case ties_2_tail");
  options.values("--plan", "PLAN", "a precision plan to judge, several allowed (default: a list)",
                 plan_texts);
  options.values("--stabiliser", "NAME", "judge every --plan with this stabiliser, several allowed",
                 stabilisers);
  options.values("--case", "NAME", "only this family of inputs, several allowed", case_names);
  options.value("--rows", "N", "rows a case (under 100000 none is judged for bias)", rows, 64, 100'000'000);
  options.value("--seed", "N", "of the inputs", seed, 0, 1'000'000'000);
  options.flag("--gpu", "judge the kernels that run on this machine's GPU", gpu);
  options.flag("--summary", "only the closing table", summary);
  options.flag("--json", "the result as JSON", json);
  options.words("KERNEL", kernel, 0, 1);
  if (!options.parse(argc, argv)) return 0;
  require(kernel.empty() || kernel[0] == "cpu", "unknown kernel '{}': expected cpu",
          kernel.empty() ? "" : kernel[0]);
  std::vector<ConformPlan> plans = plans_named(plan_texts, stabilisers);
  const std::vector<ConformCase> cases = cases_named(case_names);

  GpuConform on_gpu;
  if (gpu) {
    const CudaDevice device = cuda_device();
    require_data(device.present, "--gpu: no GPU: {}", device.why);
  }
  {
    Progress progress("conform", conform_work(plans.size(), cases, rows));
    const ConformKernel kernel_under_test = gpu ? on_gpu.kernel() : conform_cpu_kernel;
    conform(
        plans, cases, rows, static_cast<uint64_t>(seed), kernel_under_test, [&] { progress.advance(); }, gpu);
  }
  const bool passes = std::ranges::all_of(plans, [](const ConformPlan& plan) { return plan.passes(); });
  if (json) {
    Json out = to_json(plans);
    if (gpu) out["kernels"] = on_gpu.uses();
    fmt::print("{}\n", out.dump(2));
  } else {
    print_text(plans, summary, on_gpu.uses());
  }
  return passes ? 0 : 1;
}

}  // namespace evenkeel::cli
