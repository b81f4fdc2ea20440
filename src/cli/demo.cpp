// `evenkeel demo`: the whole job on this machine, nothing staged. Three trainings side by side, the one that drifts taken
// apart by replays down to the bits of one addition, a real BF16 step of a GPU, and the report.
#include "cli/demo.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/whole_file.h"
#include "cli/options.h"
#include "diagnosis/guard.h"
#include "diagnosis/head_analysis.h"
#include "diagnosis/isolate.h"
#include "diagnosis/probes.h"
#include "numerics/explain.h"
#include "report/page.h"
#include "training/synth.h"
#include "training/token_file.h"
#include "training/trainer.h"

namespace evenkeel::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// How much is done. Sizes are such that the drift is well past doubt at the end.
struct Scale {
  RunConfig config;          // of all three runs, but for the plan
  bool synthetic = false;    // text, unless another is asked for
  int64_t replay_steps = 0;  // of a replay
};

Scale full_scale() {
  Scale scale;
  scale.config.model = gpt2_preset("micro");
  scale.config.sequences = 16;
  scale.config.schedule.peak = 9e-3;
  scale.config.schedule.warmup = 100;
  scale.config.schedule.steps = 401;  // the facts of step 400 are the last
  scale.replay_steps = 100;
  return scale;
}

// So small a model drifts on some texts only, and later on others: it has one on which it is known to.
Scale quick_scale() {
  Scale scale;
  scale.synthetic = true;
  scale.config.seed = 3;
  scale.config.model = gpt2_preset("micro");
  scale.config.model.heads = 2;
  scale.config.model.width = 64;
  scale.config.model.context = 64;
  scale.config.sequences = 8;
  scale.config.schedule.peak = 6e-3;
  scale.config.schedule.warmup = 50;
  scale.config.schedule.steps = 401;
  scale.replay_steps = 100;
  return scale;
}

void complete(RunConfig& config, const std::string& data) {
  config.data = data;
  config.backend = Backend::cpu;
  config.facts_every = 10;
  config.probe_every = 50;
  config.checkpoints_kept = 20;
  config.divergence = 0;  // what goes wrong shall go on
}

// --- the text

// The project's own sources and documents, in one file: what is edited meanwhile does not change the runs' batches.
// Synthetic text where that is wanted, or where the sources are not here.
std::string own_text(const fs::path& folder, bool synthetic) {
  const fs::path root = EVENKEEL_SOURCE_DIR, file = folder / "text.txt";
  WholeFileWriter writer(file);
  if (synthetic || !fs::exists(root / "src")) {
    writer.append(synthetic_text(/*seed=*/1, /*bytes=*/400'000));
    fmt::print("text: synthetic\n");
  } else {
    std::vector<std::string> paths = {(root / "README.md").string(), (root / "src").string()};
    for (const fs::directory_entry& entry :
         fs::directory_iterator(root / "docs"))  // tables and pages lie there, too
      if (entry.path().extension() == ".md") paths.push_back(entry.path().string());
    std::sort(paths.begin(), paths.end());
    for (const TextFile& text : find_text_files(paths).files) writer.append(MappedFile(text.path).text());
    fmt::print("text: the project's own sources and documents\n");
  }
  writer.commit();
  return file.string();
}

// --- the runs

struct Run {
  const char *name, *plan, *words;
  fs::path folder = {};
  std::unique_ptr<GuardedRun> run = {};
  std::vector<double> offsets = {};  // at every facts_every-th step: the largest of the heads'
  double loss = 0;                   // smoothed
};

std::string line_of(const Run& run) {
  return fmt::format("  {:<38} {}  offset {:>6.0f}  loss {:.3f}", run.words, sparkline(run.offsets),
                     run.offsets.empty() ? 0.0 : run.offsets.back(), run.loss);
}

// A line each, rewritten in place on a terminal; elsewhere every now and then.
class RunLines {
 public:
  explicit RunLines(const std::vector<Run>& runs) : runs_(runs), terminal_(isatty(STDERR_FILENO) != 0) {}

  void show(int64_t step, int64_t steps) {
    if (!terminal_) {
      if (step > 0 && step % 100 == 0) {
        fmt::print("  step {:>4}: offsets", step);
        for (const Run& run : runs_) fmt::print(" {:>8.0f}", run.offsets.back());
        fmt::print(", losses");
        for (const Run& run : runs_) fmt::print(" {:.3f}", run.loss);
        fmt::print("\n");
        std::fflush(stdout);
      }
      return;
    }
    if (seconds_since(shown_) < 0.2 && step + 1 < steps) return;
    shown_ = Clock::now();
    clear();
    for (const Run& run : runs_) fmt::print(stderr, "{}\n", line_of(run));
    const double rate = static_cast<double>(step + 1) / seconds_since(start_);
    fmt::print(stderr, "  step {} of {}, {:.0f} s left\n", step, steps - 1,
               static_cast<double>(steps - step - 1) / rate);
    drawn_ = true;
  }
  void clear() {
    if (drawn_) fmt::print(stderr, "\033[{}A\033[J", runs_.size() + 1);
    drawn_ = false;
  }

 private:
  const std::vector<Run>& runs_;
  const bool terminal_;
  bool drawn_ = false;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point shown_{};
};

// Step by step in turn, each with all threads: the lines grow side by side on any number of cores.
void train_side_by_side(std::vector<Run>& runs, const RunConfig& config) {
  RunLines lines(runs);
  for (int64_t step = 0; step < config.schedule.steps; ++step) {
    for (Run& run : runs) {
      const StepReport report = run.run->step();
      run.loss = step == 0 ? report.loss : 0.95 * run.loss + 0.05 * report.loss;
      if (step % config.facts_every != 0) continue;
      double offset = 0;
      for (const HeadFacts& facts : run.run->trainer().model().facts())
        offset = std::max(offset, static_cast<double>(facts.largest_row_mean));
      run.offsets.push_back(offset);
    }
    lines.show(step, config.schedule.steps);
  }
  lines.clear();
  for (Run& run : runs) {
    run.run->trainer().save();
    run.run.reset();
    fmt::print("{}\n", line_of(run));
  }
}

// --- a step of a GPU's run

// The captures that the source tree brings along.
std::vector<fs::path> shipped_captures() {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator at(fs::path(EVENKEEL_SOURCE_DIR) / "docs/captures", error), end;
       !error && at != end; at.increment(error))
    if (at->path().extension() == ".safetensors") files.push_back(at->path());
  std::sort(files.begin(), files.end());
  return files;
}

// The worst head of a capture, replayed on the CPU; in words.
std::string show_capture(const fs::path& file, bool colour) {
  const Capture capture = read_capture(file);
  const std::vector<HeadProbe> probes = probe(capture);
  const int64_t worst = worst_head(probes);
  require_data(worst >= 0, "{}: expected a head, found none", file.string());
  const auto n = static_cast<size_t>(worst);
  const std::string words =
      in_words(probes[n], fmt::format("layer {} head {}", capture.layer, capture.heads[n]));
  fmt::print("{} at step {} ({}; plan {}): {}\n", capture.source, capture.step, capture.model,
             to_string(capture.plans[n]), words);
  const HeadAnalysis analysis = analyse_head(capture, worst);
  if (analysis.trace && !analysis.trace->guilty.empty())
    fmt::print("\nits worst addition, bit by bit\n{}\n",
               to_text(analysis.trace->guilty[0].explanation, colour));
  fmt::print("all of it: evenkeel probe {}\n\n", file.string());
  return words;
}

// ---

// Where nothing is yet: evenkeel-demo, evenkeel-demo-2, ...
fs::path fresh_folder() {
  fs::path folder = "evenkeel-demo";
  for (int n = 2; fs::exists(folder); ++n) folder = fmt::format("evenkeel-demo-{}", n);
  return folder;
}

int show_all(const Scale& scale, const std::string& text, const fs::path& out) {
  const auto start = Clock::now();
  const bool colour = use_colour();
  RunConfig config = scale.config;
  fs::create_directories(out);
  heading("1. Three trainings, the same batches", colour);
  complete(config, text.empty() ? own_text(out, scale.synthetic) : text);
  std::vector<Run> runs;
  runs.push_back({"row_sum-e5m2", "fp32,row_sum=e5m2", "softmax row sum in 8 bits (e5m2)"});
  runs.push_back({"zero_sum", "fp32,row_sum=e5m2,stabiliser=zero_sum", "the same, with zero_sum"});
  runs.push_back({"fp32", "fp32", "FP32"});
  fmt::print(
      "A GPT-2 of {} layers and {} heads, {} steps. The offset is the part of the scores that softmax cannot "
      "see; bars "
      "are its\nsize from 1 to 100,000, on a logarithmic scale.\n\n",
      config.model.layers, config.model.heads, config.schedule.steps - 1);
  for (Run& run : runs) {
    config.plan = run.plan;
    config.checkpoint_every = &run == &runs[0] ? 100 : 0;  // replays start from them
    run.folder = out / run.name;
    run.run = std::make_unique<GuardedRun>(run.folder, Trainer::start(run.folder, config));
  }
  train_side_by_side(runs, config);
  const double trained = seconds_since(start);

  heading("\n2. Which rounding did it", colour);
  fmt::print("$ evenkeel isolate {} --steps {}\n", runs[0].folder.string(), scale.replay_steps);
  Replays::Options of_replays;
  of_replays.keep = true;
  Replays replays(runs[0].folder, of_replays);
  IsolateOptions of_search;
  of_search.steps = scale.replay_steps;
  of_search.tell = [](const std::string& link) {
    fmt::print("  {}\n", link);
    std::fflush(stdout);
  };
  const Isolation found = isolate(replays, of_search);
  const Evidence& e = found.evidence;
  write_verdict(found, replays);  // for the report
  const double isolated = seconds_since(start) - trained;

  if (found.bits) {
    heading("\n3. Its worst addition there, bit by bit", colour);
    fmt::print("{}\n", to_text(*found.bits, colour));
  }
  if (!e.guilty.empty()) {  // for the page's panels
    const std::string at = fmt::format("{}@{}", runs[0].folder.string(), config.schedule.steps - 1);
    const std::string layer = std::to_string(e.guilty[0] / config.model.heads);
    const std::string file = (runs[0].folder / "worst.safetensors").string();
    std::vector<std::string> words = {"capture", at, "--layer", layer, "-o", file};
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    run_capture(static_cast<int>(arguments.size()), arguments.data());
  }

  heading("\n4. A step of a GPU's BF16 run, replayed here", colour);
  std::string of_gpu;
  for (const fs::path& file : shipped_captures()) of_gpu = show_capture(file, colour);
  if (of_gpu.empty())
    fmt::print("No capture lies in {}: `evenkeel capture` makes one where there is a GPU.\n\n",
               (fs::path(EVENKEEL_SOURCE_DIR) / "docs/captures").string());

  const fs::path report = out / "report.html";
  std::vector<fs::path> folders;
  for (const Run& run : runs) folders.push_back(run.folder);
  write_whole_file(report, page(folders));

  heading("What came out", colour);
  for (const Run& run : runs)
    fmt::print("{:<34} offset {:>6.0f}, loss {:.3f}\n", run.words, run.offsets.back(), run.loss);
  fmt::print("symptom: {}\n", e.symptom.words.empty() ? "none" : e.symptom.words);
  fmt::print("guilty:  {}{}\n",
             e.guilty.empty() ? "no heads found" : heads_in_words(e.guilty, config.model.heads),
             e.sites.empty() ? "" : fmt::format(", site {}", [&] {
               std::string names;
               for (const Site site : e.sites)
                 names += fmt::format("{}{}", names.empty() ? "" : ", ", name(site));
               return names;
             }()));
  const auto offset_of = [](const Trial* trial) {
    return trial ? fmt::format("{:.0f}", trial->health.offset) : std::string("not tried");
  };
  fmt::print(
      "proof:   offset {} as recorded, {} with that in FP32, {} with zero_sum there{}, {} all in FP32\n",
      offset_of(e.recorded), offset_of(e.cured), offset_of(e.zero_sum),
      e.zero_sum_all ? fmt::format(" ({} everywhere)", offset_of(e.zero_sum_all)) : "", offset_of(e.control));
  fmt::print("verdict: {}: {}\n", name(found.verdict.cause), found.verdict.words);
  fmt::print("on a GPU: {}\n", of_gpu.empty() ? "no capture here" : of_gpu);
  fmt::print("time:    {:.0f} s: {:.0f} training, {:.0f} for {} replays\n", seconds_since(start), trained,
             isolated, replays.trials().size());
  fmt::print("page:    {}; live: evenkeel watch {}\n", fs::absolute(report).string(),
             fmt::format("{} {} {}", folders[0].string(), folders[1].string(), folders[2].string()));
  return 0;
}

}  // namespace

int run_demo(int argc, char** argv) {
  std::vector<std::string> plans;
  std::string text, out;
  bool quick = false, story = false;
  Options options(
      "demo [--quick] [--text FOLDER] [--out FOLDER] | demo --story [--plan PLAN]...",
      "The whole job on this machine, in a few minutes on two cores and without a GPU: trains a small GPT-2 "
      "three times "
      "side by\n"
      "side, of which one drifts; finds the guilty layer, heads and rounding by replays; explains the worst "
      "addition; and "
      "writes\n"
      "the report. --story: the mechanism in the small, from one addition to one head, in under a minute.",
      "demo --quick --text ~/notes");
  options.flag("--quick", "a smaller model: one minute", quick);
  options.value("--text", "FOLDER",
                "text to train on (default: the project's own sources and documents; --quick: synthetic)",
                text);
  options.value("--out", "FOLDER", "for runs and report, new or empty (default: evenkeel-demo)", out);
  options.flag("--story", "the mechanism in the small instead", story);
  options.values("--plan", "PLAN", "with --story: one more plan for its head, several allowed", plans);
  if (!options.parse(argc, argv)) return 0;
  for (const std::string& plan : plans)
    parse_plan(plan);  // an unknown name is an error before the work starts
  require(plans.empty() || story, "--plan: expected together with --story");
  if (story) {
    require(!quick && text.empty() && out.empty(), "--story: expected no --quick, --text or --out with it");
    tell_story(plans);
    return 0;
  }
  if (!text.empty()) require_data(fs::exists(text), "--text {}: no such file or folder", text);
  const fs::path folder = out.empty() ? fresh_folder() : fs::path(out);
  require_data(!fs::exists(folder) || (fs::is_directory(folder) && fs::is_empty(folder)),
               "--out {}: expected a folder that is not there or is empty", folder.string());
  return show_all(quick ? quick_scale() : full_scale(), text, folder);
}

}  // namespace evenkeel::cli
