// A run's folder as whoever reads it finds it, and the text of its config.toml. Tolerant: a folder may be incomplete, still being written, written by a newer program or damaged; what is
// there is taken, and what is not is said in words. Nothing that a file holds is an error, and no file makes a reader wait.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/toml.h"
#include "records/events.h"
#include "records/metrics.h"
#include "records/record_json.h"

namespace evenkeel {

// --- config.toml: its keys are training/run_config.cpp's

// DataError where the folder has none, or none that can be read.
std::string read_config_text(const std::filesystem::path& folder);
void write_config_text(const std::filesystem::path& folder, const std::string& text);

// --- all of a folder

struct RunHead {
  int layer, head;
};
struct RunEvent {
  enum class Kind { checkpoint, plan_change, guard_warning, guard_remedy, guard_roll_back, finding };
  Kind kind = Kind::checkpoint;
  int64_t step = 0;
  std::string words;
  // Of a change of the plan, by the guard too: the clauses, and the step from which they hold. Of the guard: its heads.
  std::string clauses = {};
  int64_t holds_from = 0;
  std::vector<RunHead> heads = {};

  bool is_guards_act() const { return kind == Kind::guard_remedy || kind == Kind::guard_roll_back; }
};
inline constexpr std::string_view kEventNames[] = {"checkpoint",    "plan change",      "guard: warning",
                                                   "guard: remedy", "guard: roll-back", "finding"};
constexpr std::string_view name(RunEvent::Kind kind) { return kEventNames[static_cast<size_t>(kind)]; }

struct RunRecords {
  std::filesystem::path folder;
  std::string label;               // its name on the page: the folder's own, unless two runs have the same
  std::vector<std::string> notes;  // what is missing or cannot be read, a sentence each
  std::string
      unreadable;  // why nothing of a metrics.jsonl that is there could be read; empty: something could

  Metrics metrics;
  std::vector<double> loss, gradient_norm, validation_loss;  // (metrics.steps); NaN where a line lacks it
  std::vector<RunEvent> events;                              // ascending
  std::optional<TomlTable> config;                           // config.toml
  std::optional<nlohmann::json> verdict;                     // verdict.json: an object
  std::optional<Finding> finding;
  std::vector<std::filesystem::path> captures;

  bool has_steps() const { return !metrics.empty(); }
  // How far the run has come, in steps: the last recorded one and those before it.
  int64_t step_count() const { return has_steps() ? metrics.steps.back() + 1 : 0; }
  // A value of config.toml as text, "attention.plan"; empty where there is none.
  std::string setting(std::string_view table, std::string_view key) const;
  // The same as a whole number of 0 or more; nothing where it is none.
  std::optional<int64_t> whole_setting(std::string_view table, std::string_view key) const;
  int64_t warmup() const {
    return whole_setting("schedule", "warmup").value_or(0);
  }  // steps; 0: none is known
  // verdict.json by its fields; an empty one where there is none.
  RecordObject verdict_record() const;
};

// Has it a config.toml or a metrics.jsonl?
bool is_run_folder(const std::filesystem::path& folder);
// The runs that lie in a folder, by name. None where it cannot be read.
std::vector<std::filesystem::path> runs_in(const std::filesystem::path& folder);

// Of a folder that need not be there.
RunRecords read_run(const std::filesystem::path& folder);

// The parts of it, each of one file's text.
void take_metrics(Metrics metrics, RunRecords& run);
void read_guard(std::string_view text, RunRecords& run);
void read_findings(std::string_view text, RunRecords& run);
void read_config(std::string_view text, RunRecords& run);
void read_verdict(std::string_view text, RunRecords& run);

}  // namespace evenkeel
