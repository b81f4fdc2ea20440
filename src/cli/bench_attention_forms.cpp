// `evenkeel bench attention --gpu --forms`: what each form of a problem costs on the kernels that are chosen for it, against
// the same work without it. One run has facts of scores, stabilisers, plans that differ by head, FP16, windows, soft caps,
// slopes, sinks; with head size 256 windows and a soft cap. Each form is timed beside the problem without forms, in turns: what
// the GPU's clock does meets both. Windows also stand beside PyTorch's FlexAttention (python/bench_windows.py). Decoding comes
// last (bench_decoding.cpp).
#include <fmt/format.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/attention_on_device.h"
#include "cli/bench.h"
#include "cli/python_script.h"

namespace evenkeel::cli {
// A namespace of its own: names as natural as the other benches have.
namespace forms_bench {
namespace {

using Json = nlohmann::ordered_json;

struct Shape {
  int64_t B, H, T, D;
};
constexpr Shape kShapes[] = {{64, 12, 1024, 64}, {8, 16, 4096, 64}, {8, 16, 4096, 128}, {4, 16, 4096, 256}};

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

// Head sizes with which a form is timed.
enum class Heads { up_to_128, above_128, any };
struct FormCase {
  const char* name;
  // Of the speed of "one plan", counted in pairs of a row and a key that it sees; up to head size 128.
  double must;
  std::function<void(AttentionProblem&, const HeadNumbers&)> change;
  bool score_facts = false;
  Heads heads = Heads::up_to_128;

  bool is_timed_with(const Shape& shape) const {
    return heads == Heads::any || (heads == Heads::above_128) == (shape.D > 128);
  }
};

void set_plans(AttentionProblem& p, const std::function<const char*(int64_t)>& plan) {
  p.plans.clear();
  for (int64_t h = 0; h < p.H; ++h) p.plans.push_back(parse_plan(plan(h)));
}
constexpr const char *kRemedy = "flash2,stabiliser=wide_output", *kStrong = "flash2,stabiliser=consistent",
                     *kExact = "flash2,stabiliser=zero_sum", *kNone = "flash2",
                     *kInFp16 =
                         "flash2,stabiliser=wide_output,probs=fp16,output=fp16,probs_bwd=fp16,"
                         "dscores=fp16,dq=fp16,dk=fp16,dv=fp16";

const std::vector<FormCase>& form_cases() {
  static const std::vector<FormCase> cases = {
      {"one plan", 0, [](AttentionProblem&, const HeadNumbers&) {}, false, Heads::any},
      {"one plan again", 0, [](AttentionProblem&, const HeadNumbers&) {}},
      {"consistent", 0, [](AttentionProblem& p, const HeadNumbers&) { p.plans = {parse_plan(kStrong)}; }},
      {"zero_sum", 0, [](AttentionProblem& p, const HeadNumbers&) { p.plans = {parse_plan(kExact)}; }},
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
      {"window of 1024", 0, [](AttentionProblem& p, const HeadNumbers&) { p.mask.window_left = 1023; }, false,
       Heads::above_128},
      {"window of half", 0.9, [](AttentionProblem& p, const HeadNumbers&) { p.mask.window_left = p.T / 2; },
       false, Heads::any},
      {"soft cap", 0, [](AttentionProblem& p, const HeadNumbers&) { p.softcap = 30; }, false, Heads::any},
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

// Seconds of the passes, a round each.
struct Seconds {
  std::vector<double> forward, backward;
  std::vector<double> both() const {
    std::vector<double> sums;
    for (size_t n = 0; n < forward.size(); ++n) sums.push_back(forward[n] + backward[n]);
    return sums;
  }
};

struct Contestant {
  std::string name, kernel, error;
  double flops = 0, must = 0;
  std::function<void(Seconds&)> run;  // adds a round; empty where there is an error
  Seconds own, control;               // control: one plan without forms, timed beside it
  const Contestant* rival = nullptr;  // that it must not be slower than

  double tflops(const std::vector<double>& seconds, double work) const {
    return seconds.empty() ? 0 : work * flops / median(seconds) * 1e-12;
  }
  double both() const { return tflops(own.both(), 3.5); }
  // To the control's speed: the median over rounds.
  double ratio(const std::vector<double>& mine, const std::vector<double>& others,
               double others_flops) const {
    std::vector<double> ratios;
    for (size_t n = 0; n < mine.size(); ++n) ratios.push_back(flops / others_flops * others[n] / mine[n]);
    return ratios.empty() ? 0 : median(std::move(ratios));
  }
};

using Contestants = std::vector<std::unique_ptr<Contestant>>;

// PyTorch's FlexAttention with the window of `p`.
std::unique_ptr<Contestant> window_rival(const AttentionProblem& p, PythonScript& script) {
  auto rival = std::make_unique<Contestant>();
  rival->kernel = "PyTorch's FlexAttention";
  rival->name = fmt::format("  FlexAttention, window of {}", p.mask.window_left + 1);
  rival->flops = forward_flops(p);
  const Json question = {{"shape", {p.B, p.H, p.T, p.D}}, {"left", p.mask.window_left}};
  const Json first = script.ask(question);
  if (first.contains("error"))
    rival->error = first["error"].get<std::string>();
  else
    rival->run = [&script, question, &error = rival->error](Seconds& seconds) {
      if (!error.empty()) return;  // it failed in an earlier round
      const Json answer = script.ask(question);
      error = answer.value("error", "");
      if (!error.empty()) return;
      seconds.forward.push_back(answer.at("forward").get<double>());
      seconds.backward.push_back(answer.at("backward").get<double>());
    };
  return rival;
}

// Every form on the device, "one plan" first. script: of rivals, or null.
Contestants contestants_for(const Shape& shape, const HeadNumbers& numbers, PythonScript* script) {
  Contestants list;
  for (const FormCase& form : form_cases()) {
    if (!form.is_timed_with(shape)) continue;
    AttentionProblem p = causal_problem(shape.B, shape.H, shape.T, shape.D);
    p.plans = {parse_plan(kRemedy)};
    form.change(p, numbers);
    Contestant& ours = *list.emplace_back(std::make_unique<Contestant>());
    ours.name = form.name;
    ours.must = shape.D > 128 ? 0 : form.must;
    ours.flops = forward_flops(p);
    try {
      const auto attention = std::make_shared<AttentionOnDevice>(p, form.score_facts);
      ours.kernel = attention->choice().kernel;
      attention->forward(nullptr);
      attention->backward(nullptr);
      device_wait();
      ours.run = [attention](Seconds& seconds) {
        seconds.forward.push_back(forward_seconds(*attention));
        seconds.backward.push_back(backward_seconds(*attention));
      };
    } catch (const std::exception& error) {
      ours.error = error.what();
    }
    if (script && p.mask.window_left >= 0) {
      list.push_back(window_rival(p, *script));
      ours.rival = list.back().get();
    }
  }
  return list;
}

Contestants measure(const Shape& shape, int64_t rounds, PythonScript* script) {
  const HeadNumbers numbers(shape.H);
  Contestants list = contestants_for(shape, numbers, script);
  const Contestant& one_plan = *list.front();
  if (!one_plan.run) return list;
  for (int64_t round = 0; round < rounds; ++round)
    for (const auto& c : list) {
      if (!c->run) continue;
      if (round % 2 == 0) one_plan.run(c->control);
      c->run(c->own);
      if (round % 2 != 0) one_plan.run(c->control);
    }
  return list;
}

}  // namespace
}  // namespace forms_bench

int bench_attention_forms(const GpuBenchOptions& options) {
  using namespace forms_bench;
  const int64_t rounds = options.rounds > 0 ? options.rounds : 9;
  bool ok = true;
  Json json = Json::array();
  const PythonScript::Start rival = PythonScript::start("bench_windows.py", {});
  const std::string rivals = rival.script ? fmt::format("PyTorch {}", rival.greeting.value("torch", "?"))
                                          : "no rival: " + rival.why_not;
  if (!options.json)
    fmt::print(
        "forms of attention on {}: causal, with {}; {}\nTFLOP/s of what rows see, and ratios to one plan "
        "that is "
        "timed beside it (medians of {} rounds)\n",
        cuda_device().name, kRemedy, rivals, rounds);
  for (const Shape& shape : kShapes) {
    if (!options.json)
      fmt::print("\n{:<34}{:>8}{:>10}{:>8}{:>9}{:>10}{:>8}{:>8}  kernel\n",
                 fmt::format("{},{},{},{}", shape.B, shape.H, shape.T, shape.D), "forward", "backward",
                 "both", "forward", "backward", "both", "must");
    Json list = Json::array();
    const Contestants measured = measure(shape, rounds, rival.script.get());
    for (const auto& c : measured) {
      const double forward = c->tflops(c->own.forward, 1), backward = c->tflops(c->own.backward, 2.5);
      const double work = measured.front()->flops;
      const double forward_ratio = c->ratio(c->own.forward, c->control.forward, work),
                   backward_ratio = c->ratio(c->own.backward, c->control.backward, work),
                   ratio = c->ratio(c->own.both(), c->control.both(), work);
      const bool good = c->error.empty() && ratio >= c->must && (!c->rival || c->both() >= c->rival->both());
      ok &= good;
      list.push_back({{"name", c->name},
                      {"kernel", c->kernel},
                      {"error", c->error},
                      {"forward_tflops", forward},
                      {"backward_tflops", backward},
                      {"both_tflops", c->both()},
                      {"forward_ratio", forward_ratio},
                      {"backward_ratio", backward_ratio},
                      {"ratio", ratio},
                      {"must", c->must}});
      if (options.json) continue;
      if (!c->error.empty())
        fmt::print("  {:<32}failed: {}\n", c->name, c->error);
      else
        fmt::print("  {:<32}{:>8.0f}{:>10.0f}{:>8.0f}{:>9.3f}{:>10.3f}{:>8.3f}{:>8}  {}{}\n", c->name,
                   forward, backward, c->both(), forward_ratio, backward_ratio, ratio,
                   c->must > 0 ? fmt::format("{:.2f}", c->must) : "-", c->kernel, good ? "" : "  MISS");
    }
    json.push_back({{"shape", {shape.B, shape.H, shape.T, shape.D}}, {"forms", list}});
  }
  const Json decoding = bench_decoding(rounds, /*quiet=*/options.json);
  if (options.json)
    fmt::print("{}\n",
               Json{{"schema", 1}, {"rivals", rivals}, {"shapes", json}, {"decoding", decoding}}.dump(2));
  return options.check && !ok ? 1 : 0;
}

}  // namespace evenkeel::cli
