// `evenkeel conform`: the table of signed errors, and the verdict.
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
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
  fmt::print("  {:<17}{:>8} {:>11} {:>9} {:>10} {:>10}  {}\n", "zero-sum residual", "rows", "mean", "z",
             "rms", "bound", "verdict");
  for (const ConformResult& r : plan.results)
    fmt::print("  {:<17}{:>8} {:>+11.2e} {:>9} {:>10.2e} {:>10.2e}  {}\n", r.case_name, r.rows,
               r.residual.mean(), z_text(r.residual), r.residual.rms(), r.noise_bound(),
               marked(r.verdict(), r.passes(), colour));
  if (!errors) return;
  fmt::print("  {:<17}{:>16}{:>16}{:>16}{:>16}{:>16}   {}\n", "bias, ulps (z)", "O", "delta", "dQ", "dK",
             "dV", "largest error of O, delta, dQ, dK, dV");
  for (const ConformResult& r : plan.results) {
    fmt::print("  {:<17}", r.case_name);
    for (const ErrorStats* s : {&r.o, &r.delta, &r.dq, &r.dk, &r.dv})
      fmt::print("{:>16}", fmt::format("{:+.4f} ({})", s->mean(), z_text(*s)));
    fmt::print("   {:.1e} {:.1e} {:.1e} {:.1e} {:.1e}\n", r.max_o, r.max_delta, r.max_dq, r.max_dk, r.max_dv);
  }
}

void print_summary(const std::vector<ConformPlan>& plans, bool colour) {
  fmt::print("\n{:<34} {:<8} {:<34} {}\n", "plan", "verdict", "most biased (z)", "noisiest (rms / bound)");
  for (const ConformPlan& plan : plans) {
    const ConformResult *biased = nullptr, *noisy = nullptr;
    for (const ConformResult& r : plan.results) {
      if (r.rows >= kBiasRows && (!biased || std::fabs(r.residual.z()) > std::fabs(biased->residual.z())))
        biased = &r;
      const auto ratio = [](const ConformResult& x) { return x.residual.rms() / x.noise_bound(); };
      if (!noisy || ratio(r) > ratio(*noisy)) noisy = &r;
    }
    fmt::print(
        "{:<34} {} {:<34} {}\n", plan.name,
        marked(fmt::format("{:<8}", plan.passes() ? "pass" : "FAIL"), plan.passes(), colour),
        biased ? fmt::format("{} ({})", biased->case_name, z_text(biased->residual)) : "-",
        noisy ? fmt::format("{} ({:.2f})", noisy->case_name, noisy->residual.rms() / noisy->noise_bound())
              : "-");
  }
}

Json stats_json(const ErrorStats& s, double max_error) {
  return {{"bias_ulps", s.mean()},   {"z", s.z()},
          {"sign_z", s.sign_z()},    {"rms_ulps", s.rms()},
          {"max_ulps", s.max_ulp()}, {"max_error", max_error}};
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
                       {"o", stats_json(r.o, r.max_o)},
                       {"delta", stats_json(r.delta, r.max_delta)},
                       {"dq", stats_json(r.dq, r.max_dq)},
                       {"dk", stats_json(r.dk, r.max_dk)},
                       {"dv", stats_json(r.dv, r.max_dv)},
                       {"nonfinite", r.nonfinite}});
    out["plans"].push_back({{"plan", plan.name}, {"passes", plan.passes()}, {"cases", cases}});
  }
  return out;
}

}  // namespace

int run_conform(int argc, char** argv) {
  std::vector<std::string> kernel, plan_texts, case_names, stabilisers;
  int64_t rows = kBiasRows, seed = 1;
  bool json = false, summary = false, gpu = false;
  Options options(
      "conform [KERNEL] [options]",
      "Judges attention by the sign of its errors on hard inputs: the zero-sum residual of dS (which exact\n"
      "arithmetic makes 0 in every row), and the bias of O, delta, dQ, dK, dV against FP64.\n"
      "KERNEL is cpu. With --gpu the GPU's kernels are judged: their residual is read off dQ, at a feature "
      "that is\n"
      "the same in every key. Exit 1 if a residual is biased or too noisy.",
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

  if (plan_texts.empty() && !stabilisers.empty()) plan_texts = {"flash2"};
  if (plan_texts.empty()) plan_texts = default_conform_plans();
  std::vector<ConformPlan> plans;
  for (const std::string& text : plan_texts) {
    if (stabilisers.empty()) plans.push_back({text, parse_plan(text), {}});
    for (const std::string& stabiliser : stabilisers) {
      const std::string whole = text + ",stabiliser=" + stabiliser;
      plans.push_back({whole, parse_plan(whole), {}});
    }
  }
  std::vector<ConformCase> cases;
  for (const std::string& name : case_names) {
    std::string known;
    for (const ConformCase& c : conform_cases()) {
      if (c.name == name) cases.push_back(c);
      known += (known.empty() ? "" : ", ") + std::string(c.name);
    }
    require(!cases.empty() && cases.back().name == name, "unknown case '{}': expected one of {}", name,
            known);
  }
  if (cases.empty()) cases = conform_cases();

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
  bool passes = true;
  for (const ConformPlan& plan : plans) passes &= plan.passes();
  if (json) {
    Json out = to_json(plans);
    if (gpu) out["kernels"] = on_gpu.uses();
    fmt::print("{}\n", out.dump(2));
    return passes ? 0 : 1;
  }
  const bool colour = use_colour();
  if (!summary)
    for (const ConformPlan& plan : plans) print_plan(plan, /*errors=*/true, colour);
  print_summary(plans, colour);
  if (gpu) fmt::print("\nkernels that ran on the GPU\n");
  for (const std::string& use : on_gpu.uses()) fmt::print("  {}\n", use);
  fmt::print(
      "\nA residual is the row's sum of dS / a, in units of delta's root mean square. BIASED: |z| >= {} on "
      "at\n"
      "least {} rows, and a mean above what FP32 arithmetic itself leaves. NOISY: rms above the bound, which "
      "is\n"
      "sqrt({} x the variance that rounding dS to its own format must leave + FP32's arithmetic). "
      "docs/numerics.md\n"
      "derives both. Errors of O, delta, dQ, dK, dV are in BF16 ulps of the row's largest true value.\n",
      kBiasZ, kBiasRows, kNoiseVariance);
  return passes ? 0 : 1;
}

}  // namespace evenkeel::cli
