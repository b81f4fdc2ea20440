// `evenkeel bench attention --gpu --forms`: what each form of a problem costs on the kernels that are chosen for it, against
// the same work without it. One run has facts of scores, plans that differ by head, FP16, windows, soft caps, slopes, sinks.
#include <fmt/format.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/attention_on_device.h"
#include "cli/bench.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Shape {
  int64_t B, H, T, D;
};
constexpr Shape kShapes[] = {{64, 12, 1024, 64}, {8, 16, 4096, 64}, {8, 16, 4096, 128}};

// Numbers of each head on the device, for slopes and sinks.
struct HeadNumbers {
  DeviceMemory slopes, sinks;
  explicit HeadNumbers(int64_t H) {
    std::vector<float> slope, sink;
    for (int64_t h = 0; h < H; ++h) {
      slope.push_back(std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(H)));
      sink.push_back(static_cast<float>(h % 3));
    }
    slopes = DeviceMemory(slope);
    sinks = DeviceMemory(sink);
  }
};

struct FormCase {
  const char* name;
  double must;  // of the speed of "one plan", counted in pairs of a row and a key that it sees
  std::function<void(AttentionProblem&, const HeadNumbers&)> change;
  bool score_facts = false;
};

void set_plans(AttentionProblem& p, const std::function<const char*(int64_t)>& plan) {
  p.plans.clear();
  for (int64_t h = 0; h < p.H; ++h) p.plans.push_back(parse_plan(plan(h)));
}
constexpr const char *kRemedy = "flash2,stabiliser=wide_output", *kStrong = "flash2,stabiliser=consistent",
                     *kNone = "flash2",
                     *kInFp16 =
                         "flash2,stabiliser=wide_output,probs=fp16,output=fp16,probs_bwd=fp16,"
                         "dscores=fp16,dq=fp16,dk=fp16,dv=fp16";

const std::vector<FormCase>& form_cases() {
  static const std::vector<FormCase> cases = {
      {"one plan", 0, [](AttentionProblem&, const HeadNumbers&) {}},
      {"one plan again", 0, [](AttentionProblem&, const HeadNumbers&) {}},
      {"facts of scores", 0, [](AttentionProblem&, const HeadNumbers&) {}, /*score_facts=*/true},
      {"one head without a remedy", 0.98,
       [](AttentionProblem& p, const HeadNumbers&) {
         set_plans(p, [](int64_t h) { return h == 1 ? kNone : kRemedy; });
       }},
      {"one head consistent, with keel", 0.98,
       [](AttentionProblem& p, const HeadNumbers&) {
         set_plans(p, [](int64_t h) { return h == 1 ? kStrong : kRemedy; });
         p.plans[1].keel = 1e-4f;
       }},
      {"three plans in turn", 0,
       [](AttentionProblem& p, const HeadNumbers&) {
         set_plans(p, [](int64_t h) { return h % 3 == 0 ? kNone : h % 3 == 1 ? kStrong : kRemedy; });
       }},
      {"fp16", 0.98,
       [](AttentionProblem& p, const HeadNumbers&) {
         p.type = TensorType::fp16;
         p.plans = {parse_plan(kInFp16)};
       }},
      {"window of 256", 0.9, [](AttentionProblem& p, const HeadNumbers&) { p.mask.window_left = 255; }},
      {"window of half", 0.9, [](AttentionProblem& p, const HeadNumbers&) { p.mask.window_left = p.T / 2; }},
      {"soft cap", 0, [](AttentionProblem& p, const HeadNumbers&) { p.softcap = 30; }},
      {"slopes", 0,
       [](AttentionProblem& p, const HeadNumbers& numbers) {
         p.slopes = {numbers.slopes.as<const float>(), static_cast<size_t>(p.H)};
       }},
      {"sinks", 0,
       [](AttentionProblem& p, const HeadNumbers& numbers) {
         p.sinks = {numbers.sinks.as<const float>(), static_cast<size_t>(p.H)};
       }},
  };
  return cases;
}

// FLOPs of both passes: 4 D forward for each pair of a row and a key that it sees, 2.5 times that backward.
double forward_flops(const AttentionProblem& p) {
  double pairs = 0;
  for (int64_t i = 0; i < p.T; ++i) {
    const auto [first, last] = p.key_range(0, i);
    pairs += static_cast<double>(last - first);
  }
  return 4.0 * static_cast<double>(p.B * p.H * p.D) * pairs;
}

struct Measured {
  std::string name, kernel, error;
  double forward = 0, backward = 0, both = 0;  // TFLOP/s
  double ratio = 0, must = 0;
};

std::vector<Measured> measure(const Shape& shape, int64_t rounds) {
  const HeadNumbers numbers(shape.H);
  std::vector<Measured> results;
  std::vector<std::unique_ptr<AttentionOnDevice>> running;
  std::vector<double> flops;
  std::vector<std::vector<double>> forward, backward, both;
  for (const FormCase& form : form_cases()) {
    AttentionProblem p = causal_problem(shape.B, shape.H, shape.T, shape.D);
    p.plans = {parse_plan(kRemedy)};
    form.change(p, numbers);
    Measured& result = results.emplace_back();
    result.name = form.name;
    result.must = form.must;
    flops.push_back(forward_flops(p));
    running.push_back(nullptr);
    try {
      running.back() = std::make_unique<AttentionOnDevice>(p, form.score_facts);
      result.kernel = running.back()->choice().kernel;
      running.back()->forward(nullptr);
      running.back()->backward(nullptr);
      device_wait();
    } catch (const std::exception& error) {
      result.error = error.what();
    }
  }
  forward.resize(results.size()), backward.resize(results.size()), both.resize(results.size());
  for (int64_t round = 0; round < rounds; ++round)
    for (size_t n = 0; n < results.size(); ++n) {
      if (!results[n].error.empty()) continue;
      forward[n].push_back(forward_seconds(*running[n]));
      backward[n].push_back(backward_seconds(*running[n]));
      both[n].push_back(forward[n].back() + backward[n].back());
    }
  for (size_t n = 0; n < results.size(); ++n) {
    if (both[n].empty()) continue;
    results[n].forward = flops[n] / median(forward[n]) * 1e-12;
    results[n].backward = 2.5 * flops[n] / median(backward[n]) * 1e-12;
    results[n].both = 3.5 * flops[n] / median(both[n]) * 1e-12;
    results[n].ratio = results[n].both / results[0].both;
  }
  return results;
}

}  // namespace

int bench_attention_forms(const GpuBenchOptions& options) {
  const int64_t rounds = options.rounds > 0 ? options.rounds : 9;
  bool ok = true;
  Json json = Json::array();
  if (!options.json)
    fmt::print("forms of attention on {}: causal, with {}; TFLOP/s of what rows see (medians of {} rounds)\n",
               cuda_device().name, kRemedy, rounds);
  for (const Shape& shape : kShapes) {
    if (!options.json)
      fmt::print("\n{:<34}{:>8}{:>10}{:>8}{:>8}{:>8}  kernel\n",
                 fmt::format("{},{},{},{}", shape.B, shape.H, shape.T, shape.D), "forward", "backward",
                 "both", "ratio", "must");
    Json list = Json::array();
    for (const Measured& m : measure(shape, rounds)) {
      const bool good = m.error.empty() && m.ratio >= m.must;
      ok &= good;
      list.push_back({{"name", m.name},
                      {"kernel", m.kernel},
                      {"error", m.error},
                      {"forward_tflops", m.forward},
                      {"backward_tflops", m.backward},
                      {"both_tflops", m.both},
                      {"ratio", m.ratio},
                      {"must", m.must}});
      if (options.json) continue;
      if (!m.error.empty())
        fmt::print("  {:<32}failed: {}\n", m.name, m.error);
      else
        fmt::print("  {:<32}{:>8.0f}{:>10.0f}{:>8.0f}{:>8.3f}{:>8}  {}{}\n", m.name, m.forward, m.backward,
                   m.both, m.ratio, m.must > 0 ? fmt::format("{:.2f}", m.must) : "-", m.kernel,
                   good ? "" : "  MISS");
    }
    json.push_back({{"shape", {shape.B, shape.H, shape.T, shape.D}}, {"forms", list}});
  }
  if (options.json) fmt::print("{}\n", Json{{"schema", 1}, {"shapes", json}}.dump(2));
  return options.check && !ok ? 1 : 0;
}

}  // namespace evenkeel::cli
