// `evenkeel bench train`: whole training steps, as `evenkeel train` does them, next to the same model in PyTorch
// (python/bench_train.py). Contestants take turns in one run; ratios are of medians.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "base/error.h"
#include "base/progress.h"
#include "base/threads.h"
#include "base/whole_file.h"
#include "cli/bench.h"
#include "cli/python_script.h"
#include "diagnosis/probe_recorder.h"
#include "gpu/device.h"
#include "model/device_product.h"
#include "numerics/cpu.h"
#include "numerics/random.h"
#include "training/trainer.h"

namespace evenkeel::cli {
// A namespace of its own: names as natural as the other benches have.
namespace train_bench {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

// --- What must be reached.
constexpr double kCpuRatio = 1.5;           // micro against PyTorch
constexpr double kGpuTokens = 640e3;        // gpt2, tokens a second on an H200
constexpr double kGpuRatio = 1.1;           // gpt2 and llama-124m against torch.compile
constexpr double kNanoSteps = 100;          // nano with bf16_all, steps a second on an H200
constexpr double kRotaryNanoSteps = 150;    // llama-nano with bf16_all, the same
constexpr double kRemedyPrice = 1.01;       // a stabiliser against none
constexpr double kHeadPrice = 1.02;         // heads' plans that differ against one for all
constexpr double kFactsPrice = 1.005;       // facts of scores at every step against none
constexpr double kLeakPrice = 1.01;         // the same with the leak of one sequence's rows
constexpr const char* kTargetGpu = "H200";  // where the two rates count

// What every step has to find besides: facts of all heads' scores; the leak, too.
enum class Facts { none, scores, leaks };

// One of ours (a plan) or one of the script's (a variant).
struct Contestant {
  std::string name, plan;
  std::vector<double> seconds = {};  // a step, one a round
  Facts facts = Facts::none;

  double step_seconds() const { return median(seconds); }
};

// How many times as long `one` takes as `other`: the median over rounds, so that what a round's clock does to both is
// out of it.
double paired(const Contestant& one, const Contestant& other) {
  std::vector<double> ratios;
  for (size_t n = 0; n < std::min(one.seconds.size(), other.seconds.size()); ++n)
    ratios.push_back(one.seconds[n] / other.seconds[n]);
  return median(std::move(ratios));
}

// A model, a batch, and who trains it.
struct Group {
  std::string preset;
  RunConfig config;
  int64_t rounds, steps;  // steps of each contestant in a round
  std::vector<Contestant> contestants;

  double tokens() const { return static_cast<double>(config.sequences * config.model.context); }
  const Contestant* find(std::string_view name) const {
    for (const Contestant& c : contestants)
      if (c.name == name) return &c;
    return nullptr;
  }
  // The fastest of the script's.
  const Contestant* rival() const {
    const Contestant* best = nullptr;
    for (const Contestant& c : contestants)
      if (c.plan.empty() && (!best || c.step_seconds() < best->step_seconds())) best = &c;
    return best;
  }
};

Group make_group(const std::string& preset, Backend backend, int64_t sequences, int64_t rounds,
                 int64_t steps) {
  return {preset, bench_run(preset, backend, sequences), rounds, steps, {}};
}

// Wants facts of every step, and reads them.
class FactsReader : public StepWatcher {
 public:
  explicit FactsReader(Facts wanted) : wanted_(wanted) {}
  void prepare(int64_t, StepContext& context) override {
    context.score_facts = true;
    if (wanted_ != Facts::leaks) return;
    context.residual_facts = true;
    context.fact_sequences = ProbeRecorder::kFactSequences;
  }
  void see(int64_t, double, Model& model, nlohmann::json&) override { model.facts(); }

 private:
  Facts wanted_;
};

// Every round in another order.
void measure(Group& group, PythonScript* script, Progress& progress) {
  const ScratchFolder folder("evenkeel-bench-");
  RunConfig config = group.config;
  config.data = (folder.path() / "tokens.bin").string();
  write_bench_tokens(config.data, config.model.vocabulary);
  const auto first_plan = std::find_if(group.contestants.begin(), group.contestants.end(),
                                       [](const Contestant& c) { return !c.plan.empty(); });
  config.plan = first_plan->plan;
  const auto trainer = Trainer::start(folder.path() / "run", config);
  const bool several_plans = std::count_if(group.contestants.begin(), group.contestants.end(),
                                           [](const Contestant& c) { return !c.plan.empty(); }) > 1;
  constexpr int kWarm = 2;  // steps behind a change of plan
  for (int n = 0; n < kWarm; ++n) trainer->step();
  const auto seconds_of = [&](const Contestant& c) {
    if (c.plan.empty()) {
      const Json answer = script->ask({{"variant", c.name}, {"steps", group.steps}});
      require_data(!answer.contains("error"), "{}: {}", c.name, answer.value("error", ""));
      return answer.at("seconds").get<double>();
    }
    FactsReader reader(c.facts);
    std::optional<ScopedWatcher> watcher;
    if (c.facts != Facts::none) watcher.emplace(*trainer, reader);
    if (several_plans) {
      trainer->model().set_plan(ScopedPlan::parse(c.plan));
      for (int n = 0; n < kWarm; ++n) trainer->step();
    }
    const Clock::time_point began = Clock::now();
    for (int64_t n = 0; n < group.steps; ++n) trainer->step();
    return std::chrono::duration<double>(Clock::now() - began).count();
  };
  for (int64_t round = 0; round < group.rounds; ++round)
    for (size_t n = 0; n < group.contestants.size(); ++n) {
      Contestant& c = group.contestants[(n + static_cast<size_t>(round)) % group.contestants.size()];
      c.seconds.push_back(seconds_of(c) / static_cast<double>(group.steps));
      progress.advance();
    }
}

Json request_of(const Group& group) {
  const ModelConfig& m = group.config.model;
  return {{"device", group.config.backend == Backend::cuda ? "cuda" : "cpu"},
          {"threads", thread_count()},
          {"sequences", group.config.sequences},
          {"model",
           {{"layers", m.layers},
            {"heads", m.heads},
            {"width", m.width},
            {"context", m.context},
            {"vocabulary", m.vocabulary},
            {"norm_bias", m.norm_bias},
            {"key_heads", m.key_head_count()},
            {"hidden", m.hidden_width()},
            {"norm", kNormNames[static_cast<size_t>(m.norm)]},
            {"positions", kPositionNames[static_cast<size_t>(m.positions)]},
            {"mlp", kMlpNames[static_cast<size_t>(m.mlp)]},
            {"rotary_base", m.rotary_base}}}};
}

// What the optimiser alone takes: seconds a step.
double optimizer_seconds(const ModelConfig& config) {
  const std::unique_ptr<Model> model = make_model(Backend::cuda, config, 1);
  const std::unique_ptr<Optimizer> optimizer = make_optimizer(Backend::cuda, {}, model->table());
  model->zero_gradients();
  std::vector<double> seconds;
  for (int n = 0; n < 20; ++n) {
    const Clock::time_point began = Clock::now();
    optimizer->step(*model, 1e-4);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - began).count());
  }
  return median(seconds);
}

// A figure and what it must be.
struct Target {
  std::string what;
  double value, must;
  bool at_least;
  bool ok() const { return at_least ? value >= must : value <= must; }
};

struct Report {
  std::string title, rivals;
  std::vector<Group> groups;
  std::vector<Target> targets;
  std::vector<std::string> notes;
};

int print(const Report& report, bool check, bool json) {
  const bool ok =
      std::all_of(report.targets.begin(), report.targets.end(), [](const Target& t) { return t.ok(); });
  if (json) {
    Json out = {{"schema", 1},
                {"title", report.title},
                {"rivals", report.rivals},
                {"groups", Json::array()},
                {"targets", Json::array()},
                {"notes", report.notes}};
    for (const Group& group : report.groups) {
      Json list = Json::array();
      for (const Contestant& c : group.contestants)
        list.push_back({{"name", c.name}, {"plan", c.plan}, {"step_seconds", c.seconds}});
      out["groups"].push_back(
          {{"preset", group.preset}, {"tokens_a_step", group.tokens()}, {"contestants", list}});
    }
    for (const Target& t : report.targets)
      out["targets"].push_back({{"what", t.what}, {"value", t.value}, {"must", t.must}, {"ok", t.ok()}});
    fmt::print("{}\n", out.dump(2));
    return check && !ok ? 1 : 0;
  }
  fmt::print("{}; {}\n", report.title, report.rivals);
  for (const Group& group : report.groups) {
    fmt::print("\n{:<44}{:>10}{:>20}{:>10}{:>12}\n",
               fmt::format("{}, {} x {} tokens a step", group.preset, group.config.sequences,
                           group.config.model.context),
               "ms/step", "fastest..slowest", "steps/s", "tokens/s");
    for (const Contestant& c : group.contestants) {
      const auto [least, most] = std::minmax_element(c.seconds.begin(), c.seconds.end());
      fmt::print("  {:<42}{:>10.2f}{:>20}{:>10.1f}{:>12.0f}\n", c.name, c.step_seconds() * 1e3,
                 fmt::format("{:.2f}..{:.2f}", *least * 1e3, *most * 1e3), 1 / c.step_seconds(),
                 group.tokens() / c.step_seconds());
    }
  }
  for (const std::string& note : report.notes) fmt::print("\n{}\n", note);
  if (!report.targets.empty()) fmt::print("\n{:<52}{:>12}{:>14}\n", "", "value", "must");
  for (const Target& t : report.targets) {
    const int digits = t.must >= 100 ? 0 : 3;
    fmt::print("{:<52}{:>12.{}f}{:>14}  {}\n", t.what, t.value, digits,
               fmt::format("{} {:.{}f}", t.at_least ? ">=" : "<=", t.must, digits), t.ok() ? "ok" : "MISS");
  }
  return check && !ok ? 1 : 0;
}

// Starts the rival and adds its variants.
PythonScript::Start add_rivals(Group& group, Report& report) {
  PythonScript::Start start = PythonScript::start("bench_train.py", {request_of(group).dump()});
  if (!start.script) {
    report.rivals = "no rival: " + start.why_not;
    return start;
  }
  report.rivals = fmt::format("PyTorch {}", start.greeting.value("torch", "?"));
  for (const Json& name : start.greeting.at("variants"))
    group.contestants.push_back({name.get<std::string>(), "", {}});
  for (const auto& [name, why] : start.greeting.at("failed").items())
    report.notes.push_back(fmt::format("{}: {}", name, why.get<std::string>()));
  return start;
}

}  // namespace
}  // namespace train_bench

RunConfig bench_run(const std::string& preset, Backend backend, int64_t sequences) {
  RunConfig c;
  c.model = model_preset(preset);
  c.backend = backend;
  c.sequences = sequences;
  c.schedule.peak = 1e-4;
  c.schedule.steps = int64_t{1} << 30;  // no end comes: the bench stops
  c.checkpoint_every = 0;
  c.facts_every = 0;
  c.divergence = 0;
  return c;
}

void write_bench_tokens(const std::filesystem::path& file, int64_t vocabulary) {
  constexpr size_t kTokens = 1 << 20;
  std::vector<uint16_t> tokens(kTokens);
  for (size_t n = 0; n < kTokens; ++n)
    tokens[n] = static_cast<uint16_t>(random_bits({1, 0, 0}, n) % static_cast<uint32_t>(vocabulary));
  std::ofstream out(file, std::ios::binary);
  out.write(reinterpret_cast<const char*>(tokens.data()),
            static_cast<std::streamsize>(kTokens * sizeof tokens[0]));
  require_data(out.good(), "{}: cannot be written", file.string());
}

int bench_train(bool check, bool json) {
  using namespace train_bench;
  Report report;
  report.title = fmt::format("training on the CPU: FP32, {} thread{}, {} kernels", thread_count(),
                             thread_count() == 1 ? "" : "s", name(cpu_target()));
  Group micro = make_group("micro", Backend::cpu, 16, /*rounds=*/9, /*steps=*/5);
  micro.contestants.push_back({"evenkeel", "fp32", {}});
  PythonScript::Start rival = add_rivals(micro, report);
  {
    Progress progress("bench train", micro.rounds * static_cast<int64_t>(micro.contestants.size()));
    measure(micro, rival.script.get(), progress);
  }
  if (const Contestant* best = micro.rival())
    report.targets.push_back({"micro against PyTorch",
                              best->step_seconds() / micro.find("evenkeel")->step_seconds(), kCpuRatio,
                              true});
  report.groups.push_back(std::move(micro));
  return print(report, check, json);
}

namespace train_bench {
namespace {

constexpr const char* kNone = "evenkeel, no remedy";
constexpr const char* kWide = "evenkeel, wide_output";
constexpr const char* kScores = "evenkeel, wide_output, facts of scores";
constexpr const char* kLeaks = "evenkeel, wide_output, scores and leak";
constexpr const char* kOneNone = "evenkeel, one head of each layer without";
constexpr const char* kOneConsistent = "evenkeel, one head of each consistent";

// A model of GPT-2's size next to PyTorch's.
void measure_large(Report& report, const std::string& preset, int64_t rounds, bool counts) {
  Group group = make_group(preset, Backend::cuda, 64, rounds > 0 ? rounds : 9, /*steps=*/4);
  const std::string wide = "flash2,stabiliser=wide_output";
  group.contestants = {{kWide, wide},
                       {kNone, "flash2"},
                       {kScores, wide, {}, Facts::scores},
                       {kLeaks, wide, {}, Facts::leaks},
                       {kOneNone, wide + "; head 1: stabiliser=none"},
                       {kOneConsistent, wide + "; head 1: stabiliser=consistent"}};
  {
    PythonScript::Start rival = add_rivals(group, report);
    Progress progress("bench train", group.rounds * static_cast<int64_t>(group.contestants.size()));
    measure(group, rival.script.get(), progress);
  }
  const double seconds = group.find(kWide)->step_seconds();
  if (counts && preset == "gpt2")
    report.targets.push_back({"gpt2, tokens/s", group.tokens() / seconds, kGpuTokens, true});
  if (const Contestant* best = group.rival())
    report.targets.push_back(
        {fmt::format("{} against {}", preset, best->name), best->step_seconds() / seconds, kGpuRatio, true});
  report.targets.push_back({preset + ", the price of wide_output",
                            paired(*group.find(kWide), *group.find(kNone)), kRemedyPrice, false});
  for (const auto& [name, what, most] : {std::tuple{kScores, "facts of scores", kFactsPrice},
                                         {kLeaks, "facts of scores and the leak", kLeakPrice},
                                         {kOneNone, "one head without a remedy", kHeadPrice},
                                         {kOneConsistent, "one head consistent", kHeadPrice}})
    report.targets.push_back({fmt::format("{}, the price of {}", preset, what),
                              paired(*group.find(name), *group.find(kWide)), most, false});
  report.groups.push_back(std::move(group));
}

// A small model by itself, with a plan and, where one is given, with a stabiliser. least: steps/s that are asked for; 0: none.
void measure_small(Report& report, const std::string& preset, const std::string& plan,
                   const std::string& stabiliser, int64_t rounds, double least) {
  Group group = make_group(preset, Backend::cuda, 32, rounds > 0 ? rounds : 21, /*steps=*/50);
  group.preset = fmt::format("{}, {}", preset, plan);
  group.contestants = {{kNone, plan, {}}};
  const std::string remedied = "evenkeel, " + stabiliser;
  if (!stabiliser.empty())
    group.contestants.push_back({remedied, fmt::format("{},stabiliser={}", plan, stabiliser), {}});
  {
    Progress progress("bench train", group.rounds * static_cast<int64_t>(group.contestants.size()));
    measure(group, nullptr, progress);
  }
  if (least > 0)
    report.targets.push_back({fmt::format("{} with {}, steps/s", preset, plan),
                              1 / group.find(kNone)->step_seconds(), least, true});
  if (!stabiliser.empty())
    report.targets.push_back({fmt::format("{} with {}, the price of {}", preset, plan, stabiliser),
                              paired(*group.find(remedied), *group.find(kNone)), kRemedyPrice, false});
  report.groups.push_back(std::move(group));
}

void note_optimizer(Report& report) {
  const ModelConfig config = model_preset("gpt2");
  const ParameterTable table(config);
  const double adamw = optimizer_seconds(config);
  constexpr double kBytes =
      32;  // a parameter: the norm reads g; then w, m, v and g are read, w, m, v written
  report.notes.push_back(
      fmt::format("norm, clipping and AdamW of {:.1f} M parameters: {:.2f} ms, {:.2f} TB/s",
                  static_cast<double>(table.parameter_count()) * 1e-6, adamw * 1e3,
                  kBytes * static_cast<double>(table.parameter_count()) / adamw * 1e-12));
}

}  // namespace
}  // namespace train_bench

int bench_train_gpu(const GpuBenchOptions& options) {
  using namespace train_bench;
  constexpr std::string_view kMeasured[] = {"gpt2", "nano", "llama-124m", "llama-nano"};
  for (const std::string& preset : options.presets)
    require(std::ranges::find(kMeasured, preset) != std::end(kMeasured), "--preset: expected {}, got '{}'",
            fmt::join(kMeasured, ", "), preset);
  const CudaDevice device = cuda_device();
  require_data(device.present, "--gpu: no GPU: {}", device.why);
  const auto wanted = [&](const char* preset) {
    return options.presets.empty() || std::ranges::find(options.presets, preset) != options.presets.end();
  };
  Report report;
  report.title = fmt::format("training on {}: BF16, wall-clock medians", device.name);
  const bool counts = device.name.find(kTargetGpu) != std::string::npos;
  if (wanted("gpt2")) {
    measure_large(report, "gpt2", options.rounds, counts);
    note_optimizer(report);
  }
  if (wanted("nano")) {
    measure_small(report, "nano", "bf16_all", "zero_sum", options.rounds, counts ? kNanoSteps : 0);
    measure_small(report, "nano", "flash2", "wide_output", options.rounds, 0);
  }
  if (wanted("llama-124m")) measure_large(report, "llama-124m", options.rounds, counts);
  if (wanted("llama-nano"))
    measure_small(report, "llama-nano", "bf16_all", "", options.rounds, counts ? kRotaryNanoSteps : 0);
  const ProductChoices choices = product_choices();
  report.notes.push_back(
      fmt::format("choosing algorithms for products, before the first steps: {} shapes timed in {:.2f} s; "
                  "others were known from earlier calls",
                  choices.count, choices.seconds));
  return print(report, options.check, options.json);
}

}  // namespace evenkeel::cli
