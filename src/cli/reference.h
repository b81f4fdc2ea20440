// docs/reference.md's generated parts: commands, their options, the plan grammar's words, the fields of a run's records.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"

namespace evenkeel::cli {

// A command, or a part of one, and its table.
struct Page {
  std::string name;  // "train", "data prepare"
  CommandTable table;
};
std::vector<Page> pages_of(const Command& command);  // the command first, then its parts

// Markdown of one part: "commands", "options", "plan", "records". Throws std::invalid_argument on another name.
std::string reference(std::string_view part);
inline constexpr std::string_view kReferenceParts = "commands, options, plan, records";

}  // namespace evenkeel::cli
