// `evenkeel train`: a run, from its options to its last line. Every setting comes from run_settings().
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "base/threads.h"
#include "cli/options.h"
#include "diagnosis/guard.h"
#include "diagnosis/isolate.h"
#include "diagnosis/next_command.h"
#include "model/model_folder.h"
#include "training/replay.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

volatile std::sig_atomic_t stop_asked = 0;
void ask_to_stop(int) { stop_asked = 1; }

// --- The options

struct Assignment {
  std::string key, value;
};

struct TrainCommand {
  std::string config_file, out, resume, branch;
  std::vector<Assignment> settings;  // in the order in which they were given
  int64_t threads = 0;
  bool json = false;
};

// --set 'KEY = VALUE'
Assignment parse_assignment(const std::string& text) {
  const size_t equals = text.find('=');
  const auto trimmed = [](std::string part) {
    const size_t begin = std::min(part.find_first_not_of(" \t"), part.size());
    return part.substr(begin, part.find_last_not_of(" \t") + 1 - begin);
  };
  require(equals != std::string::npos && !trimmed(text.substr(0, equals)).empty(),
          "--set '{}': expected KEY=VALUE, as in optimizer.beta2=0.99", shown(text));
  return {trimmed(text.substr(0, equals)), trimmed(text.substr(equals + 1))};
}

// With what it may be, and the default.
std::string help_of(const Setting& setting) {
  std::string help = setting.help;
  if (setting.expected.starts_with("one of ")) help += fmt::format(": {}", setting.expected.substr(7));
  if (setting.repeats) return help + "; several allowed";
  if (setting.placeholder.empty() || setting.standard == "none") return help;
  return fmt::format("{} (default {})", help, setting.standard);
}

std::string notes() {
  std::string text = "settings, by --set KEY=VALUE or in a config.toml:\n";
  for (const Setting& setting : run_settings())
    text += fmt::format("  {:<28}{}; {} (default {})\n", setting.key, setting.help, setting.expected,
                        setting.standard);
  return text;
}

void declare(Options& options, TrainCommand& command) {
  options.value("--out", "RUN", "the run's folder, new or empty", command.out);
  options.once();
  options.value("--resume", "RUN", "continue a run from its newest checkpoint", command.resume);
  options.once();
  options.value("--branch", "RUN@STEP",
                "a new run from that checkpoint of another, with its settings where no option says otherwise",
                command.branch);
  options.once();
  options.value("--config", "FILE", "a config.toml", command.config_file);
  for (const Setting& setting : run_settings()) {
    if (setting.option.empty()) continue;
    options.add({.name = setting.option,
                 .placeholder = setting.placeholder,
                 .help = help_of(setting),
                 .set =
                     [&command, &setting](const std::string& value) {
                       command.settings.push_back({setting.key, value.empty() ? "true" : value});
                     },
                 .alone = setting.alone.empty() ? std::nullopt : std::optional(setting.alone)});
  }
  options.add(
      {.name = "--set",
       .placeholder = "KEY=VALUE",
       .help = "any setting of the list below, several allowed: optimizer.beta2=0.99",
       .set = [&command](const std::string& text) { command.settings.push_back(parse_assignment(text)); }});
  options.value("--threads", "N", "of the CPU; 0: all, or this rank's share of them", command.threads, 0,
                4096);
  options.flag("--json", "the outcome as JSON; no other line on standard output", command.json);
  options.notes(notes());
}

// What goes with --resume; everything else is in the run's own config.toml.
void check_resume(const std::vector<std::string>& given) {
  std::vector<std::string> allowed = {"--resume", "--threads", "--json"};
  for (const Setting& setting : run_settings())
    if (setting.resumable) allowed.push_back(setting.option);
  for (const std::string& option : given)
    require(
        std::find(allowed.begin(), allowed.end(), option) != allowed.end(),
        "{} does not go with --resume, which takes its settings from the run's config.toml: expected only {} "
        "(--branch makes a new run of a checkpoint, with other settings)",
        option, fmt::join(allowed, ", "));
}

// --- The run

std::unique_ptr<Trainer> resume_run(const TrainCommand& command, const std::shared_ptr<Ranks>& ranks) {
  RunConfig asked;
  std::optional<Backend> backend;
  std::optional<int64_t> steps;
  for (const auto& [key, value] : command.settings) {
    set_run_setting(asked, key, value);
    if (key == "run.backend") backend = asked.backend;
    if (key == "schedule.steps") steps = asked.schedule.steps;
  }
  return Trainer::resume(command.resume, backend, ranks, steps);
}

// A preset or a model's folder, then --config, then the other settings in their order.
void apply_settings(const TrainCommand& command, RunConfig& config) {
  const auto is_preset = [](const Assignment& a) {
    return a.key == "model.preset" || a.key == "model.weights";
  };
  for (const Assignment& a : command.settings) {
    if (!is_preset(a)) continue;
    set_run_setting(config, a.key, a.value);
    if (a.key == "model.weights") config.model = read_model_folder(config.weights);
  }
  if (!command.config_file.empty()) read_run_config(std::filesystem::path(command.config_file), config);
  for (const Assignment& a : command.settings)
    if (!is_preset(a)) set_run_setting(config, a.key, a.value);
}

std::unique_ptr<Trainer> start_run(const TrainCommand& command, const std::shared_ptr<Ranks>& ranks) {
  require(!command.out.empty(), "expected --out RUN or --resume RUN, got neither");
  RunConfig config;
  if (command.branch.empty()) {
    apply_settings(command, config);
    return Trainer::start(command.out, config, ranks);
  }
  require(
      command.config_file.empty() && ranks->size() == 1 &&
          std::none_of(command.settings.begin(), command.settings.end(),
                       [](const Assignment& a) { return a.key == "model.preset"; }),
      "--branch takes its settings from RUN's config.toml, on one rank: expected no --preset or --config");
  const auto from = parse_run_step(command.branch);
  require(from.has_value(), "--branch '{}': expected RUN@STEP, as in runs/a@3000", command.branch);
  config = config_of_own_run(from->run);
  apply_settings(command, config);
  require(from->step < config.schedule.steps,
          "--branch {}: expected a step before the run's end, {}, found one at it: nothing is left to train; "
          "--steps N "
          "makes the new run longer",
          command.branch, config.schedule.steps);
  branch_run(from->run, from->step, command.out, config);
  return Trainer::resume(command.out);
}

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(seconds);
  if (s >= 3600) return fmt::format("{} h {:02} min", s / 3600, s / 60 % 60);
  return s >= 60 ? fmt::format("{} min {:02} s", s / 60, s % 60) : fmt::format("{} s", s);
}

// One line for the terminal, rewritten every now and then; elsewhere a line every so many steps, unless it is quiet.
class TrainLine {
 public:
  // peak: operations a second that the machine could do, if known.
  TrainLine(const RunConfig& config, int64_t first_step, std::optional<double> peak, bool quiet)
      : config_(config),
        first_step_(first_step),
        peak_(peak),
        terminal_(isatty(STDERR_FILENO) != 0),
        quiet_(quiet) {}
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
    else if (!quiet_)
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
  const bool terminal_, quiet_;
  const Clock::time_point start_ = Clock::now();
  double shown_ = -1, loss_ = 0, offset_ = 0;
};

// All of the machine's threads, or this rank's share of them.
void share_threads(const Launch& launch) {
  cpu_set_t allowed;
  const int own = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : thread_count();
  if (launch.local_size > 1) set_thread_count(std::min(own, std::max(1, thread_count() / launch.local_size)));
}

// What is said before the first step.
void print_start(const std::string& folder, Trainer& trainer, const Ranks& ranks, const CudaDevice& device) {
  const RunConfig& config = trainer.config();
  fmt::print("{}: {} layers, {} heads, width {}, {:.1f} M parameters; {} x {} tokens a step; plan {}\n",
             folder, config.model.layers, config.model.heads, config.model.width,
             static_cast<double>(trainer.model().table().parameter_count()) * 1e-6, config.sequences,
             config.model.context, config.plan_at(trainer.next_step()));
  fmt::print("backend {}: {}\n{}\n", name(config.backend), trainer.backend_why(),
             attention_kernels_in_words(config.backend, device, trainer.model(),
                                        config.sequences / config.accumulate));
  if (ranks.size() > 1)
    fmt::print("{} ranks, {} of the {} parts of a step each; sums {}{}\n", ranks.size(),
               config.accumulate / ranks.size(), config.accumulate, trainer.way_of_sums(),
               config.shard_optimizer ? "; optimiser states sharded" : "");
  if (trainer.next_step() > 0) fmt::print("going on at step {}\n", trainer.next_step());
  for (const std::string& note : trainer.notes()) fmt::print("note: {}\n", note);
  if (const std::string lack = isolate_will_lack(config); !lack.empty()) fmt::print("note: {}\n", lack);
}

// Steps until the run is over or somebody asks to stop; what the guard does is said as it happens. Returns the last loss,
// smoothed.
double run_steps(GuardedRun& run, const RunConfig& config, std::optional<double> peak, bool quiet) {
  TrainLine line(config, run.trainer().next_step(), peak, quiet);
  bool stop = false;
  size_t told = 0;
  while (!run.trainer().done() && !stop) {
    const StepReport report = run.step(stop_asked);
    stop = report.stop;
    line.show(report, run.trainer().model().facts(),
              config.facts_every > 0 && report.step % config.facts_every == 0);
    for (; told < run.events().size(); ++told) {
      if (quiet) continue;
      line.clear();
      fmt::print("guard, {} at step {}: {}\n", name(run.events()[told].kind), run.events()[told].step,
                 run.events()[told].words);
      if (const std::string& next = run.events()[told].next_command; !next.empty())
        fmt::print("next: {}\n", next);
      std::fflush(stdout);
    }
  }
  return line.loss();
}

void print_end(const std::string& folder, const Trainer& last) {
  if (const auto& finding = last.finding())
    fmt::print("{}: {}. The newest checkpoints are in {}/checkpoints.\nnext: {}\n", finding->kind,
               finding->words, folder, isolate_command(folder));
  else if (!last.done())
    fmt::print("stopped after step {}; continue with: evenkeel train --resume {}\n", last.next_step(),
               folder);
  else
    fmt::print("done: {} steps in {}\n", last.next_step(), folder);
}

void print_json(const std::string& folder, GuardedRun& run, int64_t first_step, double loss) {
  const Trainer& last = run.trainer();
  Json events = Json::array();
  for (const GuardEvent& event : run.events())
    events.push_back({{"kind", name(event.kind)}, {"step", event.step}, {"words", event.words}});
  Json out = {{"schema", 1},
              {"run", folder},
              {"outcome", last.finding() ? "finding"
                          : last.done()  ? "done"
                                         : "stopped"},
              {"first_step", first_step},
              {"steps", last.next_step()},
              {"loss", loss},
              {"backend", name(last.config().backend)},
              {"guard", events},
              {"finding", nullptr}};
  if (const auto& finding = last.finding())
    out["finding"] = {{"step", finding->step}, {"kind", finding->kind}, {"words", finding->words}};
  fmt::print("{}\n", out.dump(2));
}

int train_here(const TrainCommand& command, const std::shared_ptr<Ranks>& ranks) {
  std::unique_ptr<Trainer> trainer =
      command.resume.empty() ? start_run(command, ranks) : resume_run(command, ranks);
  const std::string folder = command.resume.empty() ? command.out : command.resume;
  const RunConfig config = trainer->config();  // a copy: a guard may put another trainer in this one's place
  require(config.guard == GuardMode::off || ranks->size() == 1, "--guard: expected one rank, got {}",
          ranks->size());
  std::signal(SIGINT, ask_to_stop);
  std::signal(SIGTERM, ask_to_stop);
  if (!ranks->first()) {  // rank 0 prints for all
    bool stop = false;
    while (!trainer->done() && !stop) stop = trainer->step(stop_asked).stop;
    trainer->save();
    return trainer->finding() ? 1 : 0;
  }
  const CudaDevice device = cuda_device();
  if (!command.json) print_start(folder, *trainer, *ranks, device);
  const int64_t first_step = trainer->next_step();
  std::optional<double> peak = peak_flops(config.backend, device, config.model.precision);
  if (peak) *peak *= ranks->size();  // each rank has as much as this one
  GuardedRun run(folder, std::move(trainer));
  const double loss = run_steps(run, config, peak, command.json);
  run.trainer().save();
  if (command.json)
    print_json(folder, run, first_step, loss);
  else
    print_end(folder, run.trainer());
  return run.trainer().finding() ? 1 : 0;
}

}  // namespace

int run_train(int argc, char** argv) {
  TrainCommand command;
  Options options(
      "train --preset NAME --data PATH --out RUN [options] | train --resume RUN | train --branch RUN@STEP "
      "--out NEW [options]",
      "Trains a model with a precision plan for attention, and records everything needed to repeat any "
      "step.\n"
      "Settings come from the preset, then --config, then the other options in their order; RUN/config.toml\n"
      "holds them all. With --resume, --steps makes the run longer or shorter, if no learning rate of a "
      "step\n"
      "already done would change by that. Under mpirun, torchrun-style variables or srun, the processes "
      "train\n"
      "together: a number of ranks that is a power of two and divides --accumulate changes no bit (fewer "
      "parts\n"
      "than ranks become as many).",
      "train --preset micro --data docs --plan fp32,row_sum=e5m2 --steps 1600 --lr 6e-3 --warmup 100 --out "
      "runs/a");
  declare(options, command);
  if (!options.parse(argc, argv)) return 0;
  if (!command.resume.empty()) check_resume(options.given());
  if (command.threads > 0) set_thread_count(static_cast<int>(command.threads));
  const Launch launch = find_launch([](const char* name) { return std::getenv(name); });
  if (command.threads == 0) share_threads(launch);
  const std::shared_ptr<Ranks> ranks = Ranks::join(launch, EVENKEEL_VERSION);
  try {
    return train_here(command, ranks);
  } catch (const std::exception& error) {  // a rank that fails sends its reason to the others
    if (ranks->size() == 1) throw;
    const int code = print_error(fmt::format("evenkeel train: rank {}", ranks->rank()), error,
                                 command.json && ranks->first());
    ranks->abort(error.what(), code);
    return code;
  }
}

}  // namespace evenkeel::cli
