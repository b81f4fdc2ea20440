// `evenkeel isolate`: from a run that went wrong to the rounding that did it. `evenkeel verdict`: what is known so far.
#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_lines.h"
#include "base/json_text.h"
#include "base/text.h"
#include "base/threads.h"
#include "cli/options.h"
#include "diagnosis/isolate.h"
#include "records/metrics.h"
#include "records/schema.h"

namespace evenkeel::cli {
namespace {

namespace fs = std::filesystem;

// One line on a terminal's standard error: which replay it is, how far, and how long all that the budget allows would take.
class ReplayLine {
 public:
  explicit ReplayLine(int64_t budget) : budget_(budget), visible_(isatty(STDERR_FILENO) != 0) {}
  ~ReplayLine() { clear(); }

  void show(const TrialSetup& setup, int64_t step, const Window& window) {
    const auto now = Clock::now();
    ++steps_;
    if (!visible_ || now - shown_ < std::chrono::milliseconds(200)) return;
    shown_ = now;
    const double rate = static_cast<double>(steps_) / std::chrono::duration<double>(now - start_).count();
    const int64_t trials = std::max<int64_t>(0, budget_ - done - 1), length = window.end - window.begin;
    const double left = static_cast<double>(window.end - step - 1 + trials * length) / rate;
    fmt::print(stderr,
               "\r\033[Kreplay {} of at most {}: {}: step {} of {} ({:.0f} steps/s, at most {:.0f} s left)",
               done + 1, budget_, setup.what, step - window.begin + 1, length, rate, left);
    std::fflush(stderr);
  }
  void clear() const {
    if (visible_) fmt::print(stderr, "\r\033[K");
  }
  int64_t done = 0;  // replays before this one

 private:
  using Clock = std::chrono::steady_clock;
  const int64_t budget_;
  const bool visible_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point shown_{};
  int64_t steps_ = 0;
};

// --- --ask: another trainer makes the replays. One JSON object a line. Out go {"tell": words}, {"replay": ...} and last
// {"result": ...}. After a replay was asked for, its steps come in with the names of metrics.jsonl. Then comes
// {"done": true} or {"error": words}.

void say(const nlohmann::json& line) {
  fmt::print("{}\n", json_with_words(line).dump());
  std::fflush(stdout);
}

std::vector<TrialStep> ask_for_replay(const TrialSetup& setup, const Window& window, const std::string& plan,
                                      HeadShape shape) {
  say({{"replay",
        {{"what", setup.what},
         {"plan", plan},
         {"clauses", setup.clauses},
         {"lr_factor", setup.lr_factor},
         {"begin", window.begin},
         {"end", window.end}}}});
  std::string text;
  for (std::string line;;) {
    require_data(static_cast<bool>(std::getline(std::cin, line)),
                 "expected the steps of a replay on standard input, found its end");
    const auto object = try_parse_json(line);
    require_data(object.is_object(), "expected a JSON object a line on standard input, found '{}'",
                 shown(line, 80));
    if (object.contains("done")) break;
    if (const auto error = object.find("error"); error != object.end())
      throw DataError(fmt::format("the replay failed: {}",
                                  error->is_string() ? error->get<std::string>() : error->dump()));
    text += line + "\n";
  }
  const Metrics metrics = parse_metrics(text, shape);
  std::vector<TrialStep> steps;
  for (size_t n = 0; n < metrics.steps.size(); ++n) {
    const auto number = [&](const Series& series) {
      const auto found = series.of_line(n);
      return found.empty() ? std::numeric_limits<double>::quiet_NaN() : found[0];
    };
    const auto heads = [&](HeadFact fact) {
      const auto found = metrics.of(fact).of_line(n);
      return std::vector<double>(found.begin(), found.end());
    };
    TrialStep step{metrics.steps[n],
                   number(metrics.loss),
                   number(metrics.gradient_norm),
                   heads(HeadFact::offset),
                   heads(HeadFact::largest_lse),
                   heads(HeadFact::leak_mean),
                   heads(HeadFact::leak_error),
                   heads(HeadFact::leak_rms),
                   heads(HeadFact::delta_rms)};
    if (step.lse.empty()) step.offset.clear();
    if (step.leak_mean.empty() || step.leak_error.empty() || step.delta_rms.empty()) step.leak_rms.clear();
    steps.push_back(std::move(step));
  }
  return steps;
}

std::vector<int64_t> parse_steps(const std::string& text) {
  std::vector<int64_t> steps;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    int64_t step = -1;
    const auto [stop, error] = std::from_chars(text.data() + start, text.data() + end, step);
    require(error == std::errc() && stop == text.data() + end && step >= 0 &&
                (steps.empty() || step > steps.back()),
            "--checkpoints: expected steps in ascending order, as in 0,100,200, got '{}'", text);
    steps.push_back(step);
    start = end + 1;
  }
  return steps;
}

void print_text(const Isolation& found, const Replays& replays, bool colour) {
  const auto bold = [&](const std::string& text) { return colour ? "\033[1m" + text + "\033[0m" : text; };
  for (const std::string& link : found.verdict.evidence) fmt::print("- {}\n", link);
  if (found.bits)
    fmt::print("\nthe addition there whose rounding errs most, bit by bit\n{}\n",
               to_text(*found.bits, colour));
  fmt::print("{}\n{}\n", bold(fmt::format("verdict: {}", name(found.verdict.cause))), found.verdict.words);
  fmt::print("how sure: {}\n", found.verdict.certainty);
  if (!found.verdict.next_command.empty()) fmt::print("next: {}\n", bold(found.verdict.next_command));
  if (!replays.trials().empty())
    fmt::print("{} replays of at most {} steps, {} of them now; kept in {}\n", replays.trials().size(),
               found.evidence.window.end - found.evidence.window.begin, replays.fresh_trials(),
               record_path(replays.run(), RecordFile::isolate).string());
}

// Kept beside the replays, where the report finds it; then printed.
void tell(const Isolation& found, const Replays& replays, bool json) {
  try {
    write_verdict(found, replays);
  } catch (const DataError& error) {  // a folder that may only be read still has a verdict
    fmt::print(stderr, "the report will not know of this: {}\n", error.what());
  }
  if (json)
    fmt::print("{}\n", to_json(found, replays).dump(2));
  else
    print_text(found, replays, use_colour());
}

}  // namespace

int run_isolate(int argc, char** argv) {
  std::vector<std::string> words;
  std::string backend;
  int64_t budget = 40, steps = kReplaySteps, begin = -1, threads = 0;
  bool json = false, ask = false, inexact = false;
  std::string checkpoints;
  Options options("isolate RUN [options]",
                  "Finds the smallest change that heals a failing run: which layer, which heads, which "
                  "rounding. It replays "
                  "a\n"
                  "stretch of the run on its own batches, with parts of attention in FP32, and compares with "
                  "the same stretch "
                  "all\n"
                  "in FP32. Then it proves the answer in both directions, with a sham control. It writes two "
                  "files in the "
                  "run's\n"
                  "folder: isolate.json keeps every replay, so a second call continues where the first "
                  "stopped; the report "
                  "shows\n"
                  "verdict.json.",
                  "isolate runs/a --steps 100");
  options.words("RUN", words, 1, 1);
  options.value("--budget", "N", "replays at most, those kept from before among them", budget, 0, 100000);
  options.value("--steps", "N", "of a replay at most", steps, 4, int64_t{1} << 32);
  options.value("--from", "STEP", "replay from this checkpoint (default: the earliest that shows it grow)",
                begin, 0, int64_t{1} << 40);
  options.value("--backend", "NAME", "replay on cpu or cuda (default: where the run ran)", backend);
  options.value("--threads", "N", "of the CPU; 0: all", threads, 0, 4096);
  options.flag("--ask",
               "ask for each replay on standard output and read it from standard input: for runs of another "
               "trainer (python -m evenkeel isolate)",
               ask);
  options.value("--checkpoints", "STEPS", "with --ask: where replays can start, as in 100,200", checkpoints);
  options.flag("--inexact", "with --ask: replays need not repeat losses to the bit", inexact);
  options.flag("--json", "the result as JSON, with every replay", json);
  if (!options.parse(argc, argv)) return 0;
  if (threads > 0) set_thread_count(static_cast<int>(threads));

  ReplayLine line(budget);
  Replays::Options of_replays;
  if (!backend.empty()) of_replays.backend = parse_backend(backend);
  of_replays.budget = budget;
  of_replays.keep = true;
  require(ask || (checkpoints.empty() && !inexact), "--checkpoints, --inexact: expected --ask beside them");
  if (ask) {
    const RunConfig config = config_of_run(words[0]);
    of_replays.checkpoints = parse_steps(checkpoints);
    of_replays.exact = !inexact;
    of_replays.elsewhere = [&, shape = HeadShape{config.model.layers, config.model.heads}](
                               const TrialSetup& setup, const Window& window, const std::string& plan) {
      return ask_for_replay(setup, window, plan, shape);
    };
  }
  of_replays.progress = [&](const TrialSetup& setup, int64_t step, const Window& window) {
    line.show(setup, step, window);
  };
  Replays replays(words[0], of_replays);
  IsolateOptions of_search;
  of_search.steps = steps;
  of_search.begin = begin;
  of_search.tell = [&](const std::string& link) {
    line.clear();
    line.done = static_cast<int64_t>(replays.trials().size());
    if (ask)
      say({{"tell", link}});
    else if (!json)
      fmt::print("  {}\n", link);
    std::fflush(stdout);
  };
  const Isolation found = isolate(replays, of_search);
  line.clear();
  if (ask) {
    write_verdict(found, replays);
    say({{"result", to_json(found, replays)}});
  } else {
    tell(found, replays, json);
  }
  return found.verdict.cause == Cause::healthy ? 0 : 1;
}

int run_verdict(int argc, char** argv) {
  std::vector<std::string> words;
  bool json = false;
  Options options(
      "verdict RUN [--json]",
      "What is wrong with a run, from its records and from the replays that `evenkeel isolate` has kept. It "
      "makes no\n"
      "replay of its own. The verdict goes to RUN/verdict.json, which the report shows.",
      "verdict runs/a");
  options.words("RUN", words, 1, 1);
  options.flag("--json", "the result as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  Replays::Options of_replays;
  of_replays.budget = 0;
  of_replays.keep = true;
  Replays replays(words[0], of_replays);
  IsolateOptions of_search;
  // The stretch that was searched (the last one looked at), not the one that would be chosen now.
  if (!replays.trials().empty()) {
    const Window& window = replays.trials().back().window;
    of_search.steps = window.end - window.begin;
    if (window.begin > 0) of_search.begin = window.begin;
  }
  const Isolation found = isolate(replays, of_search);
  tell(found, replays, json);
  return found.verdict.cause == Cause::healthy ? 0 : 1;
}

}  // namespace evenkeel::cli
