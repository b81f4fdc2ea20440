// findings.json and guard.jsonl: what happened to a run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace evenkeel {

// --- findings.json: what happens in a run and is not an error: recorded, and the run ends in order.

struct Finding {
  int64_t step = 0;
  std::string kind;   // "not_finite", "divergence"
  std::string words;  // with the figures
};
void write_finding(const std::filesystem::path& folder, const Finding& finding);
void remove_findings(const std::filesystem::path& folder);
// Those of the file's object that can be read, in its order.
std::vector<Finding> findings_in(const nlohmann::json& object);
// The last one; nothing where there is none that can be read.
std::optional<Finding> read_finding(const std::filesystem::path& folder);

// --- guard.jsonl

struct GuardEvent {
  enum class Kind {
    warning,    // the heads drift; nothing was done
    remedy,     // they have the remedy from the next step on
    roll_back,  // the same, from the checkpoint of step `to` on
  };
  Kind kind = Kind::warning;
  int64_t step = 0;
  std::vector<int64_t> heads;  // l H + h, ascending
  std::string clauses;         // what was or would be added to the plan
  int64_t to = -1;
  std::string words;         // with the figures
  std::string next_command;  // what to type; empty where the guard has done all there is to do
};
inline constexpr std::string_view kGuardEventNames[] = {"warning", "remedy", "roll_back"};
constexpr std::string_view name(GuardEvent::Kind kind) { return kGuardEventNames[static_cast<size_t>(kind)]; }
nlohmann::json to_json(const GuardEvent& event, int64_t H);
void append_guard_event(const std::filesystem::path& folder, const GuardEvent& event, int64_t H);

}  // namespace evenkeel
