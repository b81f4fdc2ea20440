// `evenkeel demo`: the whole job on this machine, nothing staged. It trains three runs side by side, finds by replays which
// rounding makes one of them drift, and writes the report. With --verbose also every replay and a recorded step of a GPU's run.
#include "cli/demo.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/whole_file.h"
#include "cli/options.h"
#include "diagnosis/capture_run.h"
#include "diagnosis/guard.h"
#include "diagnosis/head_analysis.h"
#include "diagnosis/isolate.h"
#include "diagnosis/next_command.h"
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
  const char* time = "";     // on two idle cores, in words
  RunConfig config;          // of all three runs, but for the plan
  bool synthetic = false;    // text, unless another is asked for
  int64_t replay_steps = 0;  // of a replay
};

Scale full_scale() {
  Scale scale;
  scale.time = "a few minutes";
  scale.config.model = model_preset("micro");
  scale.config.sequences = 16;
  scale.config.schedule.peak = 9e-3;
  scale.config.schedule.warmup = 100;
  scale.config.schedule.steps = 401;  // the facts of step 400 are the last
  scale.replay_steps = 100;
  return scale;
}

// So small a model drifts on some texts only, and later on others: it has one on which it is known to.
Scale short_scale() {
  Scale scale;
  scale.time = "less than a minute";
  scale.synthetic = true;
  scale.config.seed = 3;
  scale.config.model = model_preset("micro");
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
  config.divergence = 0;  // a run that fails shall continue
}

// --- the text

// The project's own sources and documents, in one file: what is edited meanwhile does not change the runs' batches.
// Synthetic text where that is wanted, or where the sources are not here.
std::string own_text(const fs::path& folder, bool synthetic) {
  const fs::path root = EVENKEEL_SOURCE_DIR, file = folder / "text.txt";
  WholeFileWriter writer(file);
  if (synthetic || !fs::exists(root / "src")) {
    writer.append(synthetic_text(/*seed=*/1, /*bytes=*/400'000));
  } else {
    std::vector<std::string> paths = {(root / "README.md").string(), (root / "src").string()};
    for (const fs::directory_entry& entry :
         fs::directory_iterator(root / "docs"))  // tables and pages lie there, too
      if (entry.path().extension() == ".md") paths.push_back(entry.path().string());
    std::sort(paths.begin(), paths.end());
    for (const TextFile& text : find_text_files(paths).files) writer.append(MappedFile(text.path).text());
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
  return fmt::format("   {:<33}{}  offset {:>4.0f}  loss {:.3f}", run.words, sparkline(run.offsets),
                     run.offsets.empty() ? 0.0 : run.offsets.back(), run.loss);
}

// A line each, rewritten in place on a terminal; elsewhere every 100 steps where that is wanted.
class RunLines {
 public:
  RunLines(const std::vector<Run>& runs, bool wanted)
      : runs_(runs), terminal_(isatty(STDERR_FILENO) != 0), wanted_(wanted) {}

  void show(int64_t step, int64_t steps) {
    if (!terminal_ && !wanted_) return;
    if (!terminal_) {
      if (step > 0 && step % 100 == 0) {
        fmt::print("   step {:>4}: offsets", step);
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
    fmt::print(stderr, "   step {} of {}, {:.0f} s left\n", step, steps - 1,
               static_cast<double>(steps - step - 1) / rate);
    drawn_ = true;
  }
  void clear() {
    if (drawn_) fmt::print(stderr, "\033[{}A\033[J", runs_.size() + 1);
    drawn_ = false;
  }

 private:
  const std::vector<Run>& runs_;
  const bool terminal_, wanted_;
  bool drawn_ = false;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point shown_{};
};

// Step by step in turn, each with all threads: the lines grow side by side on any number of cores.
void train_side_by_side(std::vector<Run>& runs, const RunConfig& config, bool verbose) {
  RunLines lines(runs, verbose);
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
  }
}

// One line on a terminal: which replay, and how long the search will take.
class SearchLine {
 public:
  void show(int64_t done, int64_t step, const Window& window) {
    if (!terminal_ || seconds_since(shown_) < 0.2) return;
    shown_ = Clock::now();
    const double replays = static_cast<double>(done) + static_cast<double>(step - window.begin + 1) /
                                                           static_cast<double>(window.end - window.begin);
    const double left =
        seconds_since(start_) * std::max(kUsualReplays - replays, 0.0) / std::max(replays, 0.1);
    fmt::print(stderr, "\r   replay {} of about {:.0f}, {:.0f} s left\033[K", done + 1, kUsualReplays, left);
  }
  void clear() const {
    if (terminal_) fmt::print(stderr, "\r\033[K");
  }

 private:
  static constexpr double kUsualReplays = 13;  // of the demo's own runs
  const bool terminal_ = isatty(STDERR_FILENO) != 0;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point shown_{};
};

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

// An addition in three lines: exact, kept | round | sticky bits, stored. `evenkeel explain` has the rest.
std::string short_trace(const Explanation& e) {
  if (e.roundings.empty()) return fmt::format("  {} = {}\n", e.expression, e.value);
  const RoundingStep& last = e.roundings.back();
  const std::string bits = last.special || last.cut.empty()
                               ? std::string()
                               : fmt::format("{}{} | {} | {} x 2^{}", last.before < 0 ? "-" : "", last.kept,
                                             last.cut[0], last.cut.substr(1), last.exponent);
  return fmt::format(
      "  exact:  {} = {}\n  kept | round | sticky bits: {}\n  stored as {}: {}, error {:+.3g}\n",
      e.expression, e.exact, bits.empty() ? "none are cut off" : bits, to_string(last.rounding), e.value,
      e.error);
}

struct CaptureStory {
  fs::path file;
  std::string words;  // of the worst head
  std::string trace;  // of its worst addition; may be empty
};

// The worst head of a capture, replayed on the CPU.
CaptureStory look_at(const fs::path& file) {
  const Capture capture = read_capture(file);
  const std::vector<HeadProbe> probes = probe(capture);
  const int64_t worst = worst_head(probes);
  require_data(worst >= 0, "{}: expected a head, found none", file.string());
  const auto n = static_cast<size_t>(worst);
  CaptureStory story = {
      file,
      fmt::format("{} at step {} ({}; plan {}): {}", capture.source, capture.step, capture.model,
                  to_string(capture.plans[n]),
                  in_words(probes[n], fmt::format("layer {} head {}", capture.layer, capture.heads[n]))),
      ""};
  const HeadAnalysis analysis = analyse_head(capture, worst);
  if (analysis.trace && !analysis.trace->guilty.empty())
    story.trace = short_trace(analysis.trace->guilty[0].explanation);
  return story;
}

// ---

// Where nothing is yet: evenkeel-demo, evenkeel-demo-2, ...
fs::path fresh_folder() {
  fs::path folder = "evenkeel-demo";
  for (int n = 2; fs::exists(folder); ++n) folder = fmt::format("evenkeel-demo-{}", n);
  return folder;
}

class Demo {
 public:
  Demo(const Scale& scale, fs::path out, bool json, bool verbose)
      : scale_(scale),
        config_(scale.config),
        out_(std::move(out)),
        json_(json),
        verbose_(verbose && !json),
        colour_(use_colour()) {}

  void run(const std::string& text) {
    fs::create_directories(out_);
    say("This trains a small GPT-2 three times, finds the rounding that makes one run drift, and writes a "
        "report.\nIt takes {} on two idle cores and needs no GPU.\n\n",
        scale_.time);
    say_heading("1. Train: the same weights and batches, three ways to compute attention");
    train(text);
    const double trained = seconds_since(start_);
    say_heading("2. Find the rounding: replay recorded steps with parts of attention in FP32");
    search();
    capture_guilty_layer();
    isolated_ = seconds_since(start_) - trained;
    if (verbose_) say_heading("A recorded step of a GPU's BF16 run, replayed here");
    if (verbose_ || json_) look_at_capture();
    report_ = out_ / "report.html";
    std::vector<fs::path> folders;
    for (const Run& run : runs_) folders.push_back(run.folder);
    write_whole_file(report_, page(folders));
    if (json_)
      print_json();
    else
      print_summary(trained);
  }

 private:
  template <class... Args>
  void say(fmt::format_string<Args...> text, Args&&... args) const {
    if (json_) return;
    fmt::print(text, std::forward<Args>(args)...);
    std::fflush(stdout);
  }
  void say_heading(const char* text) const {
    if (!json_) heading(text, colour_);
  }

  void train(const std::string& text) {
    complete(config_, text.empty() ? own_text(out_, scale_.synthetic) : text);
    runs_.push_back({"row_sum-e5m2", "fp32,row_sum=e5m2", "row sum of softmax in 8 bits"});
    runs_.push_back({"zero_sum", "fp32,row_sum=e5m2,stabiliser=zero_sum", "the same, with zero_sum"});
    runs_.push_back({"fp32", "fp32", "all of attention in FP32"});
    say("   Bars: the offset, the part of the scores that softmax cannot see, from 1 to 100,000; steps 0 to "
        "{}.\n",
        config_.schedule.steps - 1);
    for (Run& run : runs_) {
      config_.plan = run.plan;
      config_.checkpoint_every = &run == &runs_[0] ? 100 : 0;  // replays start from them
      run.folder = out_ / run.name;
      run.run = std::make_unique<GuardedRun>(run.folder, Trainer::start(run.folder, config_));
    }
    train_side_by_side(runs_, config_, verbose_);
    for (const Run& run : runs_) say("{}\n", line_of(run));
    say("\n");
  }

  void search() {
    SearchLine line;
    Replays::Options of_replays;
    of_replays.keep = true;
    of_replays.progress = [&](const TrialSetup&, int64_t step, const Window& window) {
      line.show(static_cast<int64_t>(replays_->trials().size()), step, window);
    };
    replays_ = std::make_unique<Replays>(runs_[0].folder, of_replays);
    IsolateOptions of_search;
    of_search.steps = scale_.replay_steps;
    of_search.tell = [&](const std::string& link) {
      line.clear();
      if (verbose_) say("   {}\n", link);
    };
    if (verbose_) say("   $ evenkeel isolate {} --steps {}\n", runs_[0].folder.string(), scale_.replay_steps);
    found_ = isolate(*replays_, of_search);
    line.clear();
    write_verdict(found_, *replays_);  // for the report
    print_proof();
  }

  // The replays that prove it, and the addition with the largest rounding error.
  void print_proof() const {
    const Evidence& e = found_.evidence;
    const auto row = [&](const std::string& words, const Trial* trial) {
      if (trial) say("   {:<60}offset {:>4.0f}\n", words, trial->health.offset);
    };
    if (e.recorded)
      say("   {} replays of steps {} to {}:\n", replays_->trials().size(), e.window.begin, e.window.end);
    row("as recorded", e.recorded);
    row(fmt::format("with {} in FP32", guilty_in_words()), e.cured);
    row("with zero_sum there", e.zero_sum);
    row("with zero_sum everywhere", e.zero_sum_all);
    row("with all of attention in FP32", e.control);
    if (found_.bits && verbose_)
      say("\n   the addition there with the largest rounding error\n{}", short_trace(*found_.bits));
    else if (found_.bits && !found_.bits->roundings.empty())
      say("   One addition of that sum: {} = {}, stored as {}.\n", found_.bits->expression,
          found_.bits->exact, found_.bits->value);
    say("\n");
  }

  // For the page's panels.
  void capture_guilty_layer() const {
    if (found_.evidence.guilty.empty()) return;
    CaptureRequest request;
    request.layer = found_.evidence.guilty[0] / config_.model.heads;
    request.sequences = 1;
    write_capture(runs_[0].folder / "worst.safetensors",
                  capture_run(runs_[0].folder, config_.schedule.steps - 1, request).at(0));
  }

  void look_at_capture() {
    const std::vector<fs::path> files = shipped_captures();
    if (files.empty()) {
      say("No capture lies in {}: `evenkeel capture` makes one where there is a GPU.\n\n",
          (fs::path(EVENKEEL_SOURCE_DIR) / "docs/captures").string());
      return;
    }
    capture_ = look_at(files.back());
    say("{}\nits addition with the largest rounding error\n{}more of it: evenkeel probe {}\n\n",
        capture_->words, capture_->trace, capture_->file.string());
  }

  // "row_sum of layer 0 head 1"
  std::string guilty_in_words() const {
    const Evidence& e = found_.evidence;
    std::string sites;
    for (size_t n = 0; n < e.sites.size(); ++n)
      sites += fmt::format("{}{}", n == 0 ? "" : ", ", name(e.sites[n]));
    const std::string heads = e.guilty.empty() ? "no heads" : heads_in_words(e.guilty, config_.model.heads);
    return sites.empty() ? heads : fmt::format("{} of {}", sites, heads);
  }

  std::string next_command() const {
    const std::string& of_verdict = found_.verdict.next_command;
    return of_verdict.empty() ? isolate_command(runs_[0].folder) : of_verdict;
  }

  void print_summary(double trained) const {
    heading("3. What happened", colour_);
    fmt::print(
        "   Softmax ignores a constant that is added to a row of scores, so each row of the gradient dS "
        "must\n"
        "   sum to zero. Rounding breaks that sum: the row leaks, and nothing pulls the constant back.\n\n");
    if (verbose_)
      fmt::print("symptom:  {}\n",
                 found_.evidence.symptom.words.empty() ? "none" : found_.evidence.symptom.words);
    fmt::print("cause:    {} ({})\n", guilty_in_words(), name(found_.verdict.cause));
    fmt::print("verdict:  {}\n", found_.verdict.words);
    fmt::print("how sure: {}\n", found_.verdict.certainty);
    fmt::print("time:     {:.0f} s: {:.0f} training, {:.0f} for {} replays\n", seconds_since(start_), trained,
               isolated_, replays_->trials().size());
    fmt::print("report:   {}\n", fs::absolute(report_).string());
    fmt::print("next:     {}\n", next_command());
  }

  void print_json() const {
    using Json = nlohmann::ordered_json;
    Json runs = Json::array();
    for (const Run& run : runs_)
      runs.push_back({{"run", run.folder.string()},
                      {"plan", run.plan},
                      {"offsets", run.offsets},
                      {"facts_every", config_.facts_every},
                      {"loss", run.loss}});
    const Json out = {
        {"schema", 1},
        {"runs", runs},
        {"guilty", guilty_in_words()},
        {"isolation", Json(to_json(found_, *replays_))},
        {"capture", capture_ ? Json{{"file", capture_->file.string()}, {"words", capture_->words}} : Json()},
        {"report", fs::absolute(report_).string()},
        {"seconds", seconds_since(start_)},
        {"next", next_command()}};
    fmt::print("{}\n", out.dump(2));
  }

  const Clock::time_point start_ = Clock::now();
  const Scale& scale_;
  RunConfig config_;
  const fs::path out_;
  const bool json_, verbose_, colour_;
  std::vector<Run> runs_;
  std::unique_ptr<Replays> replays_;
  Isolation found_;
  std::optional<CaptureStory> capture_;
  fs::path report_;
  double isolated_ = 0;  // seconds
};

}  // namespace

int run_demo(int argc, char** argv) {
  std::vector<std::string> plans;
  std::string text, out;
  bool full = false, quick = false, verbose = false, story = false, json = false;
  Options options(
      "demo [--quick | --full] [--verbose] [--text FOLDER] [--out FOLDER] | demo --story [--plan PLAN]...",
      "The whole job on this machine, without a GPU, in less than a minute on two idle cores. It trains a "
      "small model\n"
      "three times; one run drifts. It finds the layer, heads and rounding that did it by replays, and "
      "writes the "
      "report.\n"
      "--story: the mechanism in the small, from one addition to one head.",
      "demo --out demo");
  options.flag("--quick", "a small model on synthetic text, less than a minute (the default)", quick);
  options.flag("--full", "a larger model, on the project's own text: a few minutes", full);
  options.flag("--verbose", "also every replay, the bits of an addition, and a recorded step of a GPU's run",
               verbose);
  options.value("--text", "FOLDER",
                "text to train on (default: synthetic; --full: the project's own sources and documents)",
                text);
  options.value("--out", "FOLDER", "for runs and report, new or empty (default: evenkeel-demo)", out);
  options.flag("--story", "the mechanism in the small instead, in under a minute", story);
  options.values("--plan", "PLAN", "with --story: one more plan for its head, several allowed", plans);
  options.flag("--json", "what came out, as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  for (const std::string& plan : plans)
    parse_plan(plan);  // an unknown name is an error before the work starts
  require(plans.empty() || story, "--plan: expected together with --story");
  require(!quick || !full, "expected --quick or --full, found both");
  if (story) {
    require(!quick && !full && !verbose && text.empty() && out.empty(),
            "--story: expected no --quick, --full, --verbose, --text or --out with it");
    tell_story(plans, json);
    return 0;
  }
  if (!text.empty()) require_data(fs::exists(text), "--text {}: no such file or folder", text);
  const fs::path folder = out.empty() ? fresh_folder() : fs::path(out);
  require_data(!fs::exists(folder) || (fs::is_directory(folder) && fs::is_empty(folder)),
               "--out {}: expected a folder that is not there or is empty", folder.string());
  const Scale scale = full ? full_scale() : short_scale();
  Demo(scale, folder, json, verbose).run(text);
  return 0;
}

}  // namespace evenkeel::cli
