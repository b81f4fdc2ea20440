// `evenkeel probe`: every head of a step under the microscope, in a run or in a capture.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>

#include "base/error.h"
#include "base/threads.h"
#include "cli/options.h"
#include "cli/probe_output.h"
#include "cli/replay_progress.h"
#include "diagnosis/capture_run.h"
#include "diagnosis/next_command.h"
#include "records/run_records.h"

namespace evenkeel::cli {
namespace {

namespace fs = std::filesystem;

struct ProbeCommand {
  std::vector<std::string> targets;
  std::string backend, site;
  int64_t layer = -1, head = -1, row = -1, sequences = 4, threads = 0;
  bool json = false;
};

// A run of another trainer cannot be replayed here: what its monitor captured at that step (captures/).
void read_captures_of(const ProbeCommand& command, const RunStep& at, Probed& probed) {
  std::set<int64_t> steps;  // a capture is of one layer, so a step has several
  for (const std::filesystem::path& file : read_run(at.run).captures) {
    Capture capture = read_capture(file);
    steps.insert(capture.step);
    if (capture.step == at.step && (command.layer < 0 || capture.layer == command.layer))
      probed.captures.push_back(std::move(capture));
  }
  require_data(!probed.captures.empty(), "{}: expected a capture of step {} in its folder, found {}",
               at.run.string(), at.step,
               steps.empty() ? "none" : fmt::format("some of steps {}", fmt::join(steps, ", ")));
}

void read_target(const ProbeCommand& command, const std::string& target, Probed& probed) {
  std::error_code error;
  if (fs::is_regular_file(target, error)) {
    probed.captures.push_back(read_capture(target));
    return;
  }
  const auto at = parse_run_step(target);
  require(at.has_value(), "'{}': expected a capture's file or RUN@STEP, as in runs/a@300; found neither",
          target);
  if (!config_of_run(at->run).trainer.empty()) return read_captures_of(command, *at, probed);
  CaptureRequest request;
  request.layer = command.layer;
  request.sequences = command.sequences;
  if (!command.backend.empty()) request.backend = parse_backend(command.backend);
  ReplayProgress line;
  request.progress = [&](int64_t done, int64_t all) { line.show(done, all); };
  for (Capture& capture : capture_run(at->run, at->step, request))
    probed.captures.push_back(std::move(capture));
  ProbeHistory history = read_probe_history(at->run);
  if (history.steps.size() > 1)
    probed.histories.emplace_back(at->run.filename().string(), std::move(history));
}

// What says which site it is; a capture alone cannot be replayed.
std::string command_after(const std::vector<std::string>& targets) {
  for (const std::string& target : targets)
    if (const auto at = parse_run_step(target); at && !fs::is_regular_file(target))
      return isolate_command(at->run, config_of_run(at->run).trainer);
  return "";
}

// The worst head of all captures, or the worst of those with the number that is asked for; and its analysis.
void choose_head(const ProbeCommand& command, Probed& probed) {
  std::vector<HeadProbe> candidates;
  std::vector<std::pair<size_t, int64_t>> places;
  for (size_t n = 0; n < probed.captures.size(); ++n)
    for (size_t h = 0; h < probed.captures[n].heads.size(); ++h) {
      if (command.head >= 0 && probed.captures[n].heads[h] != command.head) continue;
      candidates.push_back(probed.probes[n][h]);
      places.emplace_back(n, static_cast<int64_t>(h));
    }
  const int64_t worst = worst_head(candidates);
  require(worst >= 0, "--head: expected a head that was captured, got {}", command.head);
  std::tie(probed.capture, probed.head) = places[static_cast<size_t>(worst)];
  const Capture& capture = probed.captures[probed.capture];
  require(command.row < capture.q.shape()[2], "--row: expected a row from 0 to {}, got {}",
          capture.q.shape()[2] - 1, command.row);
  Look look;
  look.row = command.row;
  if (!command.site.empty()) look.site = parse_site(command.site);
  probed.analysis = analyse_head(capture, probed.head, look);
}

// Across steps (or captures of several files): the same head of the same layer.
std::vector<DirectionPair> compare_directions(const std::vector<Capture>& captures) {
  std::vector<DirectionPair> pairs;
  for (size_t a = 0; a < captures.size(); ++a)
    for (size_t b = a + 1; b < captures.size(); ++b) {
      const Capture &left = captures[a], &right = captures[b];
      if (left.layer != right.layer || left.x.values().empty() || left.x.shape()[3] != right.x.shape()[3] ||
          left.q.shape()[3] != right.q.shape()[3])
        continue;
      for (size_t h = 0; h < left.heads.size(); ++h) {
        const auto other = std::find(right.heads.begin(), right.heads.end(), left.heads[h]);
        if (other == right.heads.end()) continue;
        pairs.push_back(
            {a, b, left.heads[h],
             direction_similarity(left, static_cast<int64_t>(h), right, other - right.heads.begin())});
      }
    }
  return pairs;
}

}  // namespace

int run_probe(int argc, char** argv) {
  ProbeCommand command;
  Options options("probe RUN@STEP | CAPTURE ... [options]",
                  "Figures of every head at one step: scores, offset, ties, leak, spectra, and how much of "
                  "W_Q's gradient "
                  "is\n"
                  "rounding error. Then the paper's analyses of the worst head, down to the addition. "
                  "RUN@STEP is replayed "
                  "from\n"
                  "the nearest checkpoint; nothing in the run's folder changes. With several targets, also "
                  "how similar the\n"
                  "directions of their errors are.",
                  "probe runs/a@300 --layer 2");
  options.words("RUN@STEP | CAPTURE", command.targets, 1, 16);
  options.value("--layer", "L", "of a run: only this layer, from 0 on (default: all)", command.layer, 0,
                4095);
  options.value("--head", "H", "the head for the paper's analyses (default: the worst)", command.head, 0,
                4095);
  options.value("--row", "T", "the row for them (default: where delta's error is largest)", command.row, 0,
                1 << 24);
  options.value("--site", "SITE",
                "the sum to follow: row_sum, pv or output_for_delta (default: the first rounded)",
                command.site);
  options.value("--sequences", "N", "of a run: the step's first N sequences", command.sequences, 1, 1 << 20);
  options.value("--backend", "NAME", "of a run: replay on cpu or cuda (default: where it ran)",
                command.backend);
  options.value("--threads", "N", "of the CPU; 0: all", command.threads, 0, 4096);
  options.flag("--json", "the result as JSON, with every array", command.json);
  if (!options.parse(argc, argv)) return 0;
  if (command.threads > 0) set_thread_count(static_cast<int>(command.threads));

  Probed probed;
  for (const std::string& target : command.targets) read_target(command, target, probed);
  for (const Capture& capture : probed.captures) probed.probes.push_back(probe(capture));
  choose_head(command, probed);
  probed.pairs = compare_directions(probed.captures);
  probed.next_command = command_after(command.targets);
  if (command.json)
    print_json(probed);
  else
    print_text(probed, use_colour());
  return 0;
}

}  // namespace evenkeel::cli
