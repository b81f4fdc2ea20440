#include "diagnosis/next_command.h"

#include <fmt/format.h>

#include "base/text.h"
#include "records/schema.h"

namespace evenkeel {
namespace {

// "runs/a" and "runs/a/" are one folder.
std::filesystem::path without_slash(const std::filesystem::path& run) {
  return run.has_filename() ? run : run.parent_path();
}

}  // namespace

std::string train_command(const std::filesystem::path& run, const RunConfig& config, int64_t from,
                          const std::string& clauses, const std::string& suffix, const std::string& more) {
  if (!config.trainer.empty()) {  // its own program starts it
    std::string words = from > 0 ? fmt::format("go on from the checkpoint of step {}", from) : "start again";
    if (!clauses.empty())
      words += fmt::format(" with evenkeel.patch(plan=\"{}; {}\", model=model)", config.plan, clauses);
    return more.empty() ? words : fmt::format("{} with{}", words, more);
  }
  std::string command = "evenkeel train ";
  if (from > 0) {
    command += "--branch " + shell_word(fmt::format("{}@{}", run.string(), from));
    if (!clauses.empty()) command += " --at " + shell_word(fmt::format("{} {}", from, clauses));
  } else {
    command += "--config " + shell_word(record_path(run, RecordFile::config).string());
    if (!clauses.empty()) command += " --plan " + shell_word(config.plan + "; " + clauses);
  }
  return command + more + " --out " + shell_word(without_slash(run).string() + "-" + suffix);
}

std::string train_with_checkpoints_command(const std::filesystem::path& run, const RunConfig& config,
                                           int64_t from, int64_t every) {
  return train_command(run, config, from, "", "again", fmt::format(" --set run.keep_every={}", every));
}

std::string train_with_offsets_command(const std::filesystem::path& run, const RunConfig& config) {
  if (!config.trainer.empty())
    return fmt::format("start again with evenkeel.Monitor(model, \"{}-again\", every=10)",
                       without_slash(run).string());
  return train_command(run, config, 0, "", "again", " --facts-every 10");
}

std::string isolate_command(const std::filesystem::path& run, const std::string& trainer,
                            const std::string& options) {
  // Another's training can be replayed by its own code alone, which evenkeel.isolate calls.
  const char* const command =
      trainer.empty() ? "evenkeel isolate " : "python -m evenkeel isolate MODULE:FUNCTION ";
  return command + shell_word(run.string()) + options;
}

}  // namespace evenkeel
