// `evenkeel train`: a run, from its options to its last line. `evenkeel sample`: text from a checkpoint.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/threads.h"
#include "cli/options.h"
#include "diagnosis/guard.h"
#include "numerics/random.h"
#include "training/replay.h"
#include "training/tokenizer.h"

namespace evenkeel::cli {
namespace {

volatile std::sig_atomic_t stop_asked = 0;
void ask_to_stop(int) { stop_asked = 1; }

// --at "3000 layer 1: stabiliser=zero_sum"
PlanChange parse_change(const std::string& text) {
  size_t digits = 0;
  while (digits < text.size() && digits < 18 && text[digits] >= '0' && text[digits] <= '9') ++digits;
  const size_t clauses = text.find_first_not_of(' ', digits);
  require(
      digits > 0 && clauses != std::string::npos && clauses > digits,
      "--at '{}': expected a step, a space and clauses of a plan, as in '3000 layer 1: stabiliser=zero_sum'",
      text);
  return {std::stoll(text.substr(0, digits)), text.substr(clauses)};
}

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(seconds);
  if (s >= 3600) return fmt::format("{} h {:02} min", s / 3600, s / 60 % 60);
  return s >= 60 ? fmt::format("{} min {:02} s", s / 60, s % 60) : fmt::format("{} s", s);
}

// One line for the terminal, rewritten every now and then; elsewhere a line every so many steps.
class TrainLine {
 public:
  // peak: operations a second that the machine could do, if known.
  TrainLine(const RunConfig& config, int64_t first_step, std::optional<double> peak)
      : config_(config), first_step_(first_step), peak_(peak), terminal_(isatty(STDERR_FILENO) != 0) {}
  ~TrainLine() { clear(); }

  void show(const StepReport& report, const std::vector<HeadFacts>& facts, bool has_facts) {
    loss_ = smoothed(loss_, report.loss);
    if (has_facts) {
      offset_ = 0;
      for (const HeadFacts& f : facts) offset_ = std::max(offset_, static_cast<double>(f.largest_row_mean));
    }
    const int64_t done = report.step + 1, steps = config_.schedule.steps;
    const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
    const bool last = done == steps;
    if (terminal_ ? elapsed - shown_ < 0.2 && !last : done % std::max<int64_t>(1, steps / 20) != 0 && !last)
      return;
    shown_ = elapsed;
    const double rate = static_cast<double>(done - first_step_) / elapsed;
    const double tokens = rate * static_cast<double>(config_.sequences * config_.model.context);
    const double flops = tokens * flops_per_token(config_.model, config_.model.context);
    // Model FLOP utilisation: what the model needs by definition, over what the machine could do.
    const std::string use = peak_ ? fmt::format("MFU {:.1f} %", 100 * flops / *peak_)
                                  : fmt::format("{:.1f} GFLOP/s", flops * 1e-9);
    const std::string line = fmt::format(
        "step {}/{}  loss {:.4f}  gradient {:.3g}  offset {:.3g}  {:.1f} steps/s  {:.0f} tokens/s  {}  left "
        "{}",
        done, steps, loss_, report.gradient_norm, offset_, rate, tokens, use,
        duration(static_cast<double>(steps - done) / rate));
    if (terminal_)
      fmt::print(stderr, "\r{}\033[K", line);
    else
      fmt::print("{}\n", line);
    std::fflush(stdout);
  }
  void clear() {
    if (terminal_) fmt::print(stderr, "\r\033[K");
  }
  double loss() const { return loss_; }

 private:
  using Clock = std::chrono::steady_clock;
  static double smoothed(double before, double now) { return before == 0 ? now : 0.95 * before + 0.05 * now; }

  const RunConfig& config_;
  const int64_t first_step_;
  const std::optional<double> peak_;
  const bool terminal_;
  const Clock::time_point start_ = Clock::now();
  double shown_ = -1, loss_ = 0, offset_ = 0;
};

// All of the machine's threads, or this rank's share of them.
void share_threads(const Launch& launch) {
  cpu_set_t allowed;
  const int own = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : thread_count();
  if (launch.local_size > 1) set_thread_count(std::min(own, std::max(1, thread_count() / launch.local_size)));
}

// Sets `ranks` once it has joined them.
int train(int argc, char** argv, std::shared_ptr<Ranks>& ranks) {
  std::string preset, config_file, data, validation, batches, out, resume, branch, plan, schedule, optimizer,
      lr, backend, guard;
  std::vector<std::string> changes, settings;
  int64_t steps = -1, warmup = -1, sequences = -1, accumulate = -1, seed = -1, checkpoint_every = -1,
          facts_every = -1, validate_every = -1, probe_every = -1, keel_ramp = -1, threads = 0;
  bool shard_optimizer = false;
  constexpr int64_t kMany = int64_t{1} << 40;
  Options options(
      "train --preset NAME --data PATH --out RUN [options] | train --resume RUN | train --branch RUN@STEP "
      "--out "
      "NEW [options]",
      "Trains GPT-2 with a precision plan for attention, and records everything needed to repeat any step.\n"
      "Settings come from the preset, then --config, then the options; RUN/config.toml holds them all.\n"
      "Under mpirun, torchrun-style variables or srun, the processes train together: a number of ranks that "
      "is\n"
      "a power of two and divides --accumulate changes no bit (fewer parts than ranks become as many).",
      "train --preset micro --data docs --plan fp32,row_sum=e5m2 --steps 1600 --lr 6e-3 --warmup 100 --out "
      "runs/a");
  options.value("--preset", "NAME", "micro, nano, gpt2 or gpt2-medium", preset);
  options.value("--config", "FILE", "a config.toml", config_file);
  options.value("--data", "PATH", "token file, shards, text file or folder of text", data);
  options.value("--validation", "PATH", "the same for validation", validation);
  options.value("--batches", "FILE", "another run's batches.bin: the same batches again", batches);
  options.value("--out", "RUN", "the run's folder, new or empty", out);
  options.value("--resume", "RUN", "go on with a run from its newest checkpoint", resume);
  options.value("--branch", "RUN@STEP",
                "a new run from that checkpoint of another, with its settings where no option says otherwise",
                branch);
  options.value("--plan", "PLAN", "precision plan, by layer and head if wanted", plan);
  options.values("--at", "'STEP CLAUSES'",
                 "from this step on, several allowed: '3000 layer 1: stabiliser=zero_sum'", changes);
  options.value("--keel-ramp", "N", "steps over which keel rises to what the plan says; 0: at once",
                keel_ramp, 0, kMany);
  options.value("--backend", "NAME",
                "auto (default: the GPU, if there is one), cpu or cuda; --resume: to change it", backend);
  options.value("--steps", "N", "of the whole run", steps, 1, kMany);
  options.value("--lr", "RATE", "largest learning rate", lr);
  options.value("--warmup", "N", "steps of the warm-up", warmup, 0, kMany);
  options.value("--schedule", "COURSE", "constant, cosine, linear or wsd", schedule);
  options.value("--optimizer", "NAME", "adamw or muon", optimizer);
  options.value("--sequences", "N", "sequences a step", sequences, 1, kMany);
  options.value("--accumulate", "N", "parts in which a step is computed, by all ranks together", accumulate,
                1, kMany);
  options.value("--seed", "N", "of weights and batches", seed, 0, kMany);
  options.value("--checkpoint-every", "N", "steps; 0: only at the end", checkpoint_every, 0, kMany);
  options.value("--facts-every", "N", "steps between records of scores by head; 0: never", facts_every, 0,
                kMany);
  options.value("--probe-every", "N",
                "steps between full sets of probes; the cheap ones are then of every step; 0: none",
                probe_every, 0, kMany);
  options.value_or(
      "--guard", "[=act|warn]", "act",
      "watch for drift of the scores' common part; act: mend the heads that drift, warn: only tell", guard);
  options.value("--validate-every", "N", "steps; 0: never", validate_every, 0, kMany);
  options.values("--set", "'TABLE.KEY = VALUE'",
                 "any setting of config.toml, several allowed: 'optimizer.beta2 = 0.99'", settings);
  options.flag("--shard-optimizer",
               "each rank holds its slice of the optimiser's states alone (ZeRO-1; AdamW)", shard_optimizer);
  options.value("--threads", "N", "of the CPU; 0: all, or this rank's share of them", threads, 0, 4096);
  if (!options.parse(argc, argv)) return 0;
  if (threads > 0) set_thread_count(static_cast<int>(threads));
  const Launch launch = find_launch([](const char* name) { return std::getenv(name); });
  if (threads == 0) share_threads(launch);
  ranks = Ranks::join(launch, EVENKEEL_VERSION);

  std::unique_ptr<Trainer> trainer;
  if (!resume.empty()) {
    require(
        out.empty() && preset.empty() && data.empty() && plan.empty() && guard.empty() && branch.empty(),
        "--resume takes its settings from the run's own config.toml: expected no --out, --preset, --data, "
        "--plan, --guard or --branch (which makes a new run of a checkpoint, with other settings)");
    trainer = Trainer::resume(resume, backend.empty() ? std::nullopt : std::optional(parse_backend(backend)),
                              ranks);
    out = resume;
  } else {
    require(!out.empty(), "expected --out RUN or --resume RUN, got neither");
    RunConfig config;
    config.schedule.steps = 1000;
    std::optional<RunStep> from;
    if (!branch.empty()) {
      require(preset.empty() && config_file.empty() && ranks->size() == 1,
              "--branch takes its settings from RUN's config.toml, on one rank: expected no --preset or "
              "--config");
      from = parse_run_step(branch);
      require(from.has_value(), "--branch '{}': expected RUN@STEP, as in runs/a@3000", branch);
      config = config_of_run(from->run);
    }
    if (!preset.empty()) config.model = gpt2_preset(preset);
    if (!config_file.empty()) read_run_config(std::filesystem::path(config_file), config);
    for (const std::string& setting : settings) read_run_config(parse_toml(setting, "--set"), config);
    const auto take = [](auto& to, const auto& value, bool given) {
      if (given) to = static_cast<std::remove_reference_t<decltype(to)>>(value);
    };
    take(config.data, data, !data.empty());
    if (!data.empty()) config.data_digest.clear();  // which is of other data
    take(config.validation, validation, !validation.empty());
    take(config.batches, batches, !batches.empty());
    take(config.plan, plan, !plan.empty());
    take(config.schedule.steps, steps, steps >= 0);
    take(config.schedule.warmup, warmup, warmup >= 0);
    take(config.sequences, sequences, sequences >= 0);
    take(config.accumulate, accumulate, accumulate >= 0);
    take(config.seed, seed, seed >= 0);
    take(config.checkpoint_every, checkpoint_every, checkpoint_every >= 0);
    take(config.facts_every, facts_every, facts_every >= 0);
    take(config.validate_every, validate_every, validate_every >= 0);
    take(config.probe_every, probe_every, probe_every >= 0);
    take(config.keel_ramp, keel_ramp, keel_ramp >= 0);
    if (!guard.empty()) config.guard = parse_guard_mode(guard);
    if (!backend.empty()) config.backend = parse_backend(backend);
    take(config.shard_optimizer, true, shard_optimizer);
    if (!lr.empty()) read_run_config(parse_toml("schedule.lr = " + lr, "--lr"), config);
    if (!schedule.empty()) config.schedule.course = parse_course(schedule);
    if (!optimizer.empty()) config.optimizer.kind = parse_optimizer(optimizer);
    for (const std::string& change : changes) config.changes.push_back(parse_change(change));
    if (from) {
      std::stable_sort(config.changes.begin(), config.changes.end(),
                       [](const PlanChange& a, const PlanChange& b) { return a.step < b.step; });
      branch_run(from->run, from->step, out, config);
      trainer = Trainer::resume(out);
    } else {
      trainer = Trainer::start(out, config, ranks);
    }
  }

  const RunConfig config = trainer->config();  // a copy: a guard may put another trainer in this one's place
  require(config.guard == GuardMode::off || ranks->size() == 1, "--guard: expected one rank, got {}",
          ranks->size());
  std::signal(SIGINT, ask_to_stop);
  std::signal(SIGTERM, ask_to_stop);
  if (!ranks->first()) {  // rank 0 speaks for all
    bool stop = false;
    while (!trainer->done() && !stop) stop = trainer->step(stop_asked).stop;
    trainer->save();
    return trainer->finding() ? 1 : 0;
  }
  fmt::print("{}: {} layers, {} heads, width {}, {:.1f} M parameters; {} x {} tokens a step; plan {}\n", out,
             config.model.layers, config.model.heads, config.model.width,
             static_cast<double>(trainer->model().table().parameter_count()) * 1e-6, config.sequences,
             config.model.context, config.plan_at(trainer->next_step()));
  const CudaDevice device = cuda_device();
  fmt::print("backend {}: {}\n{}\n", name(config.backend), trainer->backend_why(),
             attention_kernels_in_words(config.backend, device, trainer->model(),
                                        config.sequences / config.accumulate));
  if (ranks->size() > 1)
    fmt::print("{} ranks, {} of the {} parts of a step each; sums {}{}\n", ranks->size(),
               config.accumulate / ranks->size(), config.accumulate, trainer->way_of_sums(),
               config.shard_optimizer ? "; optimiser states sharded" : "");
  if (trainer->next_step() > 0) fmt::print("going on at step {}\n", trainer->next_step());
  for (const std::string& note : trainer->notes()) fmt::print("note: {}\n", note);
  GuardedRun run(out, std::move(trainer));
  {
    std::optional<double> peak = peak_flops(config.backend, device, config.model.precision);
    if (peak) *peak *= ranks->size();  // each rank has as much as this one
    TrainLine line(config, run.trainer().next_step(), peak);
    bool stop = false;
    size_t told = 0;
    while (!run.trainer().done() && !stop) {
      const StepReport report = run.step(stop_asked);
      stop = report.stop;
      line.show(report, run.trainer().model().facts(),
                config.facts_every > 0 && report.step % config.facts_every == 0);
      for (; told < run.events().size(); ++told) {
        line.clear();
        fmt::print("guard, {} at step {}: {}\n", name(run.events()[told].kind), run.events()[told].step,
                   run.events()[told].words);
        std::fflush(stdout);
      }
    }
  }
  Trainer& last = run.trainer();
  last.save();
  if (const auto& finding = last.finding()) {
    fmt::print("{}: {}. The newest checkpoints are in {}/checkpoints.\n", finding->kind, finding->words, out);
    return 1;
  }
  if (!last.done())
    fmt::print("stopped after step {}; go on with: evenkeel train --resume {}\n", last.next_step(), out);
  else
    fmt::print("done: {} steps in {}\n", last.next_step(), out);
  return 0;
}

}  // namespace

// A rank that fails says why, and the others are told.
int run_train(int argc, char** argv) {
  std::shared_ptr<Ranks> ranks;
  try {
    return train(argc, argv, ranks);
  } catch (const std::exception& error) {
    if (!ranks || ranks->size() == 1) throw;
    const int code = dynamic_cast<const std::invalid_argument*>(&error) ? 2 : 3;
    fmt::print(stderr, "evenkeel train: rank {}: {}\n", ranks->rank(), error.what());
    std::fflush(stderr);
    ranks->abort(error.what(), code);
    return code;
  }
}

int run_sample(int argc, char** argv) {
  std::vector<std::string> words;
  std::string prompt, tokenizer_file, temperature_text = "0.8";
  int64_t count = 200, seed = 1, top = 0;
  Options options("sample RUN [options]", "Generates text from the newest checkpoint of a run.",
                  "sample runs/a --prompt 'int main' --tokens 100");
  options.words("RUN", words, 1, 1);
  options.value("--prompt", "TEXT", "what the text begins with", prompt);
  options.value("--tokens", "N", "how many to generate", count, 1, 1 << 20);
  options.value("--temperature", "T", "0: always the likeliest", temperature_text);
  options.value("--top", "N", "only from the N likeliest; 0: from all", top, 0, 1 << 20);
  options.value("--seed", "N", "of the choice", seed, 0, int64_t{1} << 40);
  options.value("--tokenizer", "FILE",
                "tokenizer.json or vocab.bpe (default: beside the data; bytes for text)", tokenizer_file);
  if (!options.parse(argc, argv)) return 0;
  char* end = nullptr;
  const double temperature = std::strtod(temperature_text.c_str(), &end);
  require(end != temperature_text.c_str() && *end == 0 && temperature >= 0 && std::isfinite(temperature),
          "--temperature '{}': expected a number of 0 or more", temperature_text);

  namespace fs = std::filesystem;
  const fs::path folder = words[0];
  const RunConfig config = config_of_run(folder);
  const std::vector<Checkpoint> checkpoints = find_checkpoints(folder / "checkpoints");
  require_data(!checkpoints.empty(), "{}: expected a checkpoint, found none",
               (folder / "checkpoints").string());
  const std::unique_ptr<Gpt2> model = make_gpt2_cpu(config.model, config.seed);
  if (!load_weights(checkpoints.back().folder / "model.safetensors", *model))
    fmt::print(stderr, "note: the checkpoint has no checksums (an older version wrote it): not verified\n");
  model->set_plan(ScopedPlan::parse(config.plan_at(checkpoints.back().step)));

  std::optional<Tokenizer> tokenizer;
  if (tokenizer_file.empty()) {
    const fs::path data = config.data,
                   beside = (fs::is_directory(data) ? data : data.parent_path()) / "tokenizer.json";
    std::error_code error;
    if (config.model.vocabulary > 256 && fs::exists(beside, error)) tokenizer_file = beside.string();
  }
  if (!tokenizer_file.empty()) tokenizer = Tokenizer::load(tokenizer_file);
  require_data(tokenizer || config.model.vocabulary <= 256,
               "expected a tokenizer for a vocabulary of {} (--tokenizer FILE), found none beside {}",
               config.model.vocabulary, config.data);
  std::vector<int32_t> tokens;
  if (tokenizer)
    tokens = tokenizer->encode(prompt);
  else
    for (unsigned char byte : prompt) tokens.push_back(byte);
  if (tokens.empty()) tokens.push_back(tokenizer ? tokenizer->end_of_text() : '\n');

  fmt::print("{}", prompt);
  RandomStream draw({static_cast<uint64_t>(seed), 0, 0});
  for (int64_t n = 0; n < count; ++n) {
    const auto seen = std::min(tokens.size(), static_cast<size_t>(config.model.context));
    const std::vector<float> logits = model->logits(std::span(tokens).last(seen));
    std::vector<int32_t> order(logits.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    if (top > 0) order.resize(std::min(order.size(), static_cast<size_t>(top)));
    size_t chosen = 0;
    if (temperature > 0) {
      std::vector<double> weight(order.size());
      double sum = 0;
      for (size_t i = 0; i < order.size(); ++i)
        sum += weight[i] = std::exp(
            (logits[static_cast<size_t>(order[i])] - logits[static_cast<size_t>(order[0])]) / temperature);
      double left = draw.unit() * sum;
      while (chosen + 1 < order.size() && (left -= weight[chosen]) > 0) ++chosen;
    }
    const int32_t token = order[chosen];
    tokens.push_back(token);
    const std::string text =
        tokenizer ? tokenizer->decode(std::span(&token, 1)) : std::string(1, static_cast<char>(token));
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }
  fmt::print("\n");
  return 0;
}

}  // namespace evenkeel::cli
