// `evenkeel demo --story`: the mechanism in the small, from one addition to one head that drifts and is cured.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/json_text.h"
#include "base/progress.h"
#include "base/threads.h"
#include "cli/demo.h"
#include "cli/options.h"
#include "diagnosis/conform.h"
#include "diagnosis/conform_gpu.h"
#include "diagnosis/drift.h"
#include "gpu/device.h"
#include "numerics/explain.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Plan {
  const char *text, *words;
};

Explanation addition() {
  ExplainOptions options;
  options.to = Rounding{kBf16};
  return explain(parse_expression("-2.4071154594421387 + -2.296875"), options);
}

void show_addition(bool colour) {
  heading("1. One addition", colour);
  fmt::print(
      "Two probabilities of 1, two values of V of the same sign: their sum carries out of the significand, "
      "the bit\n"
      "that falls off is 1, small terms set the sticky bit, and BF16 rounds away from zero: always to the "
      "same side.\n\n");
  fmt::print("{}\n", to_text(addition(), colour));
}

// What rounding leaves of the sum that must be zero.
void judge(std::vector<ConformPlan>& plans, const ConformKernel& kernel, bool constant_feature) {
  std::vector<ConformCase> cases;
  for (const ConformCase& c : conform_cases())
    if (c.name == "ties_2_tail" || c.name == "sink") cases.push_back(c);
  Progress progress("rows", conform_work(plans.size(), cases, kBiasRows));
  conform(
      plans, cases, kBiasRows, 1, kernel, [&] { progress.advance(); }, constant_feature);
}

// A line a plan.
void print_residuals(const std::vector<ConformPlan>& plans) {
  fmt::print("  {:<30}{:>12}{:>8}{:>8}   {:>10}{:>8}{:>8}\n", "", "ties: mean", "z", "noise", "sink: mean",
             "z", "noise");
  for (const ConformPlan& plan : plans) {
    fmt::print("  {:<30}", plan.name);
    for (const ConformResult& r : plan.results)
      fmt::print("{:>12.1e}{:>8.0f}{:>8.1f} ", r.residual.mean(), r.residual.z(),
                 r.residual.rms() / r.noise_bound());
    fmt::print("  {}\n", plan.passes() ? "pass" : "FAIL");
  }
}

Json sums_json(const std::vector<ConformPlan>& plans) {
  Json out = Json::array();
  for (const ConformPlan& plan : plans) {
    Json cases = Json::array();
    for (const ConformResult& r : plan.results)
      cases.push_back({{"case", r.case_name},
                       {"mean", r.residual.mean()},
                       {"z", r.residual.z()},
                       {"noise", r.residual.rms() / r.noise_bound()}});
    out.push_back({{"plan", plan.name}, {"passes", plan.passes()}, {"cases", cases}});
  }
  return out;
}

std::vector<ConformPlan> judged_on_cpu() {
  std::vector<ConformPlan> plans;
  for (const char* text : {"bf16_all", "flash2,row_sum=bf16", "flash2", "flash2,stabiliser=consistent",
                           "flash2,stabiliser=zero_sum"})
    plans.push_back({text, parse_plan(text), {}});
  judge(plans, conform_cpu_kernel, /*constant_feature=*/false);
  return plans;
}

void show_residual(bool colour) {
  heading("2. A sum that must be zero", colour);
  fmt::print(
      "Softmax cannot see a constant added to a row of scores, so the row's gradient dS must sum to zero. "
      "Here is\n"
      "what rounding leaves of that, on 100,000 rows: the mean in units of delta, with its z, and the noise "
      "as a\n"
      "multiple of the bound that rounding dS itself sets (more than 1 is a leak).\n\n");
  print_residuals(judged_on_cpu());
  fmt::print("\n");
}

// One head, trained with each plan: (plans) courses of the offset.
struct DriftRun {
  Plan plan;
  std::vector<DriftPoint> points;

  std::vector<double> offsets() const {
    std::vector<double> values;
    for (const DriftPoint& point : points) values.push_back(point.offset);
    return values;
  }
};

// extra: outlives what is returned.
std::vector<DriftRun> drift_runs(const std::vector<std::string>& extra, const DriftSettings& settings) {
  std::vector<DriftRun> runs = {
      {{"fp32", "nothing rounded"}, {}},
      {{"fp32,row_sum=e5m2", "one rounding a row"}, {}},
      {{"fp32,row_sum=e5m2,stabiliser=zero_sum", "the same, the sum restored"}, {}},
      {{"fp32,row_sum=e5m2,keel=1e-3", "the same, with a restoring force"}, {}},
      {{"fp32,output=e8m2", "O rounded, as in every flash kernel"}, {}},
      {{"fp32,output=e8m2/stochastic", "O rounded without bias: worse"}, {}},
      {{"fp32,output=e8m2,stabiliser=wide_output", "the loss sees the error, delta does not"}, {}},
      {{"fp32,output_for_delta=e8m2", "delta sees the error, the loss does not"}, {}}};
  for (const std::string& text : extra) runs.push_back({{text.c_str(), "as asked"}, {}});
  Progress progress("runs", static_cast<int64_t>(runs.size()));
  parallel_for(static_cast<int64_t>(runs.size()), [&](int64_t n, int) {
    DriftRun& run = runs[static_cast<size_t>(n)];
    run.points = run_drift(parse_plan(run.plan.text), settings);
    progress.advance();
  });
  return runs;
}

void show_drift(const std::vector<std::string>& extra, bool colour) {
  heading("3. What nothing pulls back", colour);
  const DriftSettings settings;
  fmt::print(
      "One attention head, trained for {} steps to imitate another. Each plan keeps one number a row in two\n"
      "bits, to make in seconds what BF16 makes in thousands of steps. The offset is the constant that "
      "softmax\n"
      "cannot see; bars show its size from 1 to 100,000, on a logarithmic scale.\n\n",
      settings.steps);
  for (const DriftRun& run : drift_runs(extra, settings))
    fmt::print("  {:<40} {}\n  {}  offset {:>8.0f}  loss {:.3f}\n", run.plan.text, run.plan.words,
               sparkline(run.offsets()), run.points.back().offset, run.points.back().loss);
  fmt::print(
      "\nThe rounding needs no bias. An error of O that the loss has seen comes back in dO with its own "
      "sign, so\n"
      "delta = dO . O is wrong in one direction, step after step. In delta alone, or in the loss alone, the "
      "same\n"
      "error is harmless.\n\n");
}

// The second part again, on the kernels of this machine's GPU.
std::vector<ConformPlan> judged_on_gpu(GpuConform& gpu) {
  std::vector<ConformPlan> plans;
  for (const char* text :
       {"bf16_all", "flash2", "flash2,stabiliser=wide_output", "flash2,stabiliser=consistent"})
    plans.push_back({text, parse_plan(text), {}});
  judge(plans, gpu.kernel(), /*constant_feature=*/true);
  return plans;
}

void show_gpu(bool colour) {
  heading("4. On a GPU", colour);
  const CudaDevice device = cuda_device();
  if (!device.present) {
    fmt::print(
        "None to be used ({}). Where there is one, the second part is repeated on its kernels, and\n"
        "`evenkeel bench attention --gpu` times them next to FlashAttention-2 and cuDNN.\n\n",
        device.why);
    return;
  }
  fmt::print("{}: what its kernels leave of the sum, read off their dQ.\n\n", device.name);
  GpuConform gpu;
  print_residuals(judged_on_gpu(gpu));
  for (const std::string& use : gpu.uses()) fmt::print("  {}\n", use);
  fmt::print("\n");
}

void print_story_json(const std::vector<std::string>& plans) {
  Json drift = Json::array();
  for (const DriftRun& run : drift_runs(plans, DriftSettings()))
    drift.push_back({{"plan", run.plan.text}, {"offsets", run.offsets()}, {"loss", run.points.back().loss}});
  Json out = {{"schema", 1},
              {"addition", parse_json(evenkeel::to_json(addition()))},
              {"sums", sums_json(judged_on_cpu())},
              {"drift", drift},
              {"gpu", nullptr}};
  if (cuda_device().present) {
    GpuConform gpu;
    out["gpu"] = sums_json(judged_on_gpu(gpu));
  }
  fmt::print("{}\n", out.dump(2));
}

}  // namespace

void heading(const char* text, bool colour) {
  fmt::print("{}{}{}\n\n", colour ? "\033[1m" : "", text, colour ? "\033[0m" : "");
}

std::string sparkline(const std::vector<double>& offsets) {
  static constexpr const char* kBars[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::string line;
  for (double offset : offsets) {
    const double height = std::isfinite(offset) ? std::log10(std::max(1.0, offset)) / 5 * 8 : 7;
    line += kBars[std::clamp(static_cast<int>(height), 0, 7)];
  }
  return line;
}

void tell_story(const std::vector<std::string>& plans, bool json) {
  if (json) {
    print_story_json(plans);
    return;
  }
  const bool colour = use_colour();
  show_addition(colour);
  show_residual(colour);
  show_drift(plans, colour);
  show_gpu(colour);
  fmt::print(
      "`evenkeel conform` judges every plan on every kind of row; `evenkeel explain A + B` explains any "
      "operation.\nnext: evenkeel demo\n");
}

}  // namespace evenkeel::cli
