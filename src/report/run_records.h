// A run's folder as the report reads it. Tolerant: a folder may be incomplete, still being written, written by a newer
// program or damaged; what is there is taken, and what is not is said in words. Nothing that a file holds is an error.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/toml.h"
#include "diagnosis/verdict.h"

namespace evenkeel {

// One number a head at some steps; floats, for there may be many.
struct HeadSeries {
  std::vector<int64_t> steps;  // ascending
  std::vector<float> values;   // (steps, L H); NaN: not known
};

struct RunEvent {
  enum class Kind { checkpoint, plan_change, guard_warning, guard_remedy, guard_roll_back, finding };
  Kind kind = Kind::checkpoint;
  int64_t step = 0;
  std::string words;
};
inline constexpr std::string_view kEventNames[] = {"checkpoint",    "plan change",      "guard: warning",
                                                   "guard: remedy", "guard: roll-back", "finding"};
constexpr std::string_view name(RunEvent::Kind kind) { return kEventNames[static_cast<size_t>(kind)]; }

struct RunRecords {
  std::filesystem::path folder;
  std::string label;               // its name on the page: the folder's own, unless two runs have the same
  std::vector<std::string> notes;  // what is missing or cannot be read, a sentence each

  // --- metrics.jsonl: one entry a recorded step, ascending; NaN where a line lacks it
  std::vector<int64_t> steps;
  std::vector<double> loss, gradient_norm, validation_loss;
  int64_t layers = 0, heads = 0;  // L, H; 0: nothing is recorded by head
  // By name: largest_row_mean, largest_lse, tied_rows, residual_mean, ... and, from the full sets, every probe.
  std::map<std::string, HeadSeries, std::less<>> facts, probes;
  std::vector<int64_t> norm_steps;
  std::map<std::string, std::vector<double>> norms;  // of weights, by name, (norm_steps)

  // --- the rest
  std::vector<RunEvent> events;           // ascending
  std::optional<TomlTable> config;        // config.toml
  std::optional<nlohmann::json> verdict;  // verdict.json: an object
  std::optional<Finding> finding;
  std::vector<std::filesystem::path> captures;

  bool has_steps() const { return !steps.empty(); }
  // A value of config.toml as text, "attention.plan"; empty where there is none.
  std::string setting(std::string_view table, std::string_view key) const;
  // In the form that diagnosis judges.
  RunRecord record() const;
};

// Of a folder that need not be there.
RunRecords read_run(const std::filesystem::path& folder);

// The parts of it, each of one file's text.
void read_metrics(std::string_view text, RunRecords& run);
void read_guard(std::string_view text, RunRecords& run);
void read_findings(std::string_view text, RunRecords& run);
void read_config(std::string_view text, RunRecords& run);
void read_verdict(std::string_view text, RunRecords& run);

// What an object has under a key; NaN, or empty, where it is no number, or no text.
double number_at(const nlohmann::json& object, const char* key);
std::string text_at(const nlohmann::json& object, const char* key);

}  // namespace evenkeel
