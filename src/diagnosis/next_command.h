// What to type next: each diagnosis ends with one of these lines. A shell takes them as they are.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "training/run_config.h"

namespace evenkeel {

// The run again with `clauses` on top of its plan, in RUN-SUFFIX: from its checkpoint of step `from`, or (from <= 0)
// from the beginning. more: further options, "--lr 0.001".
std::string train_command(const std::filesystem::path& run, const RunConfig& config, int64_t from,
                          const std::string& clauses, const std::string& suffix,
                          const std::string& more = "");
// The same run with checkpoints that stay every `every` steps, from checkpoint `from` on.
std::string train_with_checkpoints_command(const std::filesystem::path& run, const RunConfig& config,
                                           int64_t from, int64_t every);
// The same run with a record of its offsets, by which drift is seen.
std::string train_with_offsets_command(const std::filesystem::path& run, const RunConfig& config);
// trainer: run.trainer of its settings, empty for our own. In the command of another's, MODULE:FUNCTION is for the reader to fill in.
std::string isolate_command(const std::filesystem::path& run, const std::string& trainer = "",
                            const std::string& options = "");

}  // namespace evenkeel
