// `evenkeel bench probes`: what probes add to a step of `micro` on one thread, steps with and without in turn. With --gpu,
// what they add to training `nano` as `evenkeel train` does it, stretches with and without in turn.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/progress.h"
#include "base/threads.h"
#include "base/whole_file.h"
#include "cli/bench.h"
#include "diagnosis/probe_recorder.h"
#include "gpu/device.h"
#include "numerics/random.h"
#include "training/backend.h"
#include "training/trainer.h"

namespace evenkeel::cli {
// A namespace of its own: names as natural as the other benches have.
namespace probes_bench {
namespace {

constexpr int kRounds = 60, kGpuRounds = 20;
constexpr int64_t kEvery = 50;                         // steps between full sets, in the figure below
constexpr double kMostCheap = 0.01, kMostFull = 0.05;  // of a step's time

// Random tokens: what is computed does not depend on them.
struct RandomBatch {
  RandomBatch(int64_t B, const ModelConfig& c)
      : tokens(static_cast<size_t>(B * c.context)), targets(tokens.size()) {
    RandomStream draw({1, 0, 0});
    for (std::vector<int32_t>* list : {&tokens, &targets})
      for (int32_t& token : *list) token = static_cast<int32_t>(draw.below(c.vocabulary));
    batch = {B, c.context, tokens, targets};
  }
  std::vector<int32_t> tokens, targets;
  Batch batch{};
};

// What probes add to a step, as shares of its time, one a round; and the most that the median may be, where something is asked
// (0: nothing is).
struct Figure {
  std::string name;
  double most;
  std::vector<double> shares = {};
  bool ok() const { return most == 0 || quantile(shares, 0.5) <= most; }
};

// head: what JSON has before the results; title: a line instead of it.
int print(const std::vector<Figure>& figures, nlohmann::ordered_json head, const std::string& title,
          bool check, bool json) {
  const bool ok = std::all_of(figures.begin(), figures.end(), [](const Figure& f) { return f.ok(); });
  if (json) {
    head["ok"] = ok;
    for (const Figure& f : figures)
      head["results"].push_back({{"probes", f.name},
                                 {"share", quantile(f.shares, 0.5)},
                                 {"share_quartiles", {quantile(f.shares, 0.25), quantile(f.shares, 0.75)}},
                                 {"most", f.most},
                                 {"ok", f.ok()}});
    fmt::print("{}\n", head.dump(2));
  } else {
    fmt::print("{}; in brackets quartiles\n\n", title);
    for (const Figure& f : figures)
      fmt::print(
          "{:<48}{:>+7.2f} %  ({:+.2f}..{:+.2f})   {}\n", f.name, 100 * quantile(f.shares, 0.5),
          100 * quantile(f.shares, 0.25), 100 * quantile(f.shares, 0.75),
          f.most == 0 ? "" : fmt::format("at most {:.0f} %  {}", 100 * f.most, f.ok() ? "ok" : "MISS"));
  }
  return check && !ok ? 1 : 0;
}

}  // namespace
}  // namespace probes_bench

int bench_probes(bool check, bool json) {
  using namespace probes_bench;
  const int threads_before = thread_count();
  set_thread_count(1);
  const ModelConfig config = model_preset("micro");
  const auto model = make_model_cpu(config, 1);
  model->set_plan(ScopedPlan::parse("fp32,row_sum=e5m2"));
  const auto optimizer = make_optimizer(Backend::cpu, {}, model->table());
  const RandomBatch random(16, config);
  RunConfig run;
  run.model = config;
  run.probe_every = kEvery;
  ProbeRecorder recorder(run, "", 0);

  enum Kind { plain, cheap, full };
  const auto step = [&](Kind kind) {
    const auto began = std::chrono::steady_clock::now();
    const int64_t number = kind == full ? 0 : 1;  // of a step that gets the full set, or not
    StepContext context;
    if (kind != plain) recorder.prepare(number, context);
    model->zero_gradients();
    const double loss = model->forward_backward(random.batch, 1, context);
    if (kind != plain) {
      nlohmann::json line;
      recorder.see(number, loss, *model, line);
      recorder.tell(number, line);
      line.dump();
    }
    optimizer->step(*model, /*lr=*/0);  // the same weights again
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  };
  std::vector<double> times;
  Figure cheap_figure{"cheap set, every step", kMostCheap},
      full_figure{"full set, every 50th step", kMostFull};
  for (int round = -1; round < kRounds; ++round) {
    // Which comes first changes from round to round, so that neither always follows the full set.
    const Kind first = round % 2 == 0 ? plain : cheap;
    const double one = step(first), other = step(first == plain ? cheap : plain);
    const double without = first == plain ? one : other, with = first == plain ? other : one;
    const double whole = step(full);
    step(plain);              // the caches as they were
    if (round < 0) continue;  // warms up
    times.push_back(without);
    cheap_figure.shares.push_back(with / without - 1);
    full_figure.shares.push_back((whole / without - 1) / kEvery);
  }
  set_thread_count(threads_before);
  const double milliseconds = 1e3 * quantile(times, 0.5);
  return print({cheap_figure, full_figure},
               {{"bench", "probes"}, {"threads", 1}, {"rounds", kRounds}, {"step_ms", milliseconds}},
               fmt::format("micro, 16 x 128 tokens, one thread: {:.1f} ms a step; medians of {} pairs",
                           milliseconds, kRounds),
               check, json);
}

namespace probes_bench {
namespace {

// Training `nano` with a plan, with facts where $EVENKEEL_FACT_STREAM has them.
class GpuRun {
 public:
  GpuRun(const std::string& plan, const char* fact_stream)
      : config_(run_config(plan, folder_.path())),
        full_(probed(config_, kEvery), "", 0),
        cheap_(probed(config_, config_.schedule.steps), "",
               0) {  // never but at step 0, which has no probes here
    write_bench_tokens(config_.data, config_.model.vocabulary);
    if (*fact_stream) setenv(kVariable, fact_stream, 1);
    trainer_ = Trainer::start(folder_.path() / "run", config_);
    if (*fact_stream) unsetenv(kVariable);
    const std::string name = *fact_stream ? fmt::format("{}, facts on {}", plan, fact_stream) : plan;
    const double limit = *fact_stream ? 0 : 1;
    figures = {{fmt::format("{}: cheap set, every step", name), limit * kMostCheap},
               {fmt::format("{}: and full set, every {}th", name, kEvery), limit * kMostFull}};
  }

  // Three stretches of kEvery steps: without probes, with the cheap set, and with both sets as a run has them. In the last the
  // full set is at the first step and its record at the last. Every round has another order; round 0 warms up.
  void run(size_t round) {
    StepWatcher* const kinds[] = {nullptr, &cheap_, &full_};
    double seconds[3];
    for (size_t n = 0; n < 3; ++n) seconds[(n + round) % 3] = seconds_of(kinds[(n + round) % 3]);
    if (round == 0) return;
    times.push_back(seconds[0] / static_cast<double>(kEvery));
    for (size_t n = 0; n < 2; ++n) figures[n].shares.push_back(seconds[n + 1] / seconds[0] - 1);
  }

  std::vector<double> times;  // of a step without probes
  std::vector<Figure> figures;

 private:
  static constexpr const char* kVariable = "EVENKEEL_FACT_STREAM";

  static RunConfig run_config(const std::string& plan, const std::filesystem::path& folder) {
    RunConfig config = bench_run("nano", Backend::cuda, 32);
    config.plan = plan;
    config.data = (folder / "tokens.bin").string();
    return config;
  }
  static RunConfig probed(RunConfig config, int64_t every) {
    config.probe_every = every;
    return config;
  }
  double seconds_of(StepWatcher* watcher) {
    trainer_->set_watcher(watcher);
    const auto began = std::chrono::steady_clock::now();
    for (int64_t n = 0; n < kEvery; ++n) trainer_->step();
    trainer_->set_watcher(nullptr);  // when its last record is written
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }

  const ScratchFolder folder_{"evenkeel-bench-"};
  const RunConfig config_;
  ProbeRecorder full_, cheap_;
  std::unique_ptr<Trainer> trainer_;
};

}  // namespace
}  // namespace probes_bench

// The two plans of `nano`, and for the one whose facts are a pass of their own the other streams for it, in turns.
int bench_probes_gpu(bool check, bool json) {
  using namespace probes_bench;
  const CudaDevice device = cuda_device();
  require_data(device.present, "--gpu: no GPU: {}", device.why);
  std::vector<Figure> figures;
  nlohmann::ordered_json head = {
      {"bench", "probes"}, {"device", device.name}, {"rounds", kGpuRounds}, {"step_ms", {}}};
  std::string title = fmt::format("nano, 32 x 512 tokens on {}: medians of {} rounds of {} steps",
                                  device.name, kGpuRounds, kEvery);
  const std::pair<const char*, std::vector<const char*>> plans[] = {{"bf16_all", {""}},
                                                                    {"flash2", {"", "low", "main"}}};
  Progress progress("bench probes", std::size(plans) * (kGpuRounds + 1));
  for (const auto& [plan, streams] : plans) {
    std::vector<std::unique_ptr<GpuRun>> runs;
    for (const char* stream : streams) runs.push_back(std::make_unique<GpuRun>(plan, stream));
    for (size_t round = 0; round <= kGpuRounds; ++round) {
      for (const auto& run : runs) run->run(round);
      progress.advance();
    }
    const double milliseconds = 1e3 * quantile(runs[0]->times, 0.5);
    head["step_ms"][plan] = milliseconds;
    title += fmt::format("; {} {:.3f} ms a step", plan, milliseconds);
    for (const auto& run : runs) figures.insert(figures.end(), run->figures.begin(), run->figures.end());
  }
  return print(figures, std::move(head), title, check, json);
}

}  // namespace evenkeel::cli
