// The command `evenkeel`: picks the subcommand, turns exceptions into messages and exit codes.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "cli/commands.h"
#include "numerics/cpu.h"

namespace {

using namespace evenkeel;

const cli::Command& find_command(const std::string& name) {
  std::vector<std::string> names;
  for (const cli::Command& command : cli::kCommands) {
    if (name == command.name) return command;
    names.emplace_back(command.name);
  }
  throw std::invalid_argument(fmt::format("unknown command '{}'{}: expected one of {}", shown(name),
                                          cli::did_you_mean(name, names), fmt::join(names, ", ")));
}

// A standard stream that is closed leaves its number to the next file that is opened, and what is printed goes into that
// file. Called before anything opens one. False: the system has no /dev/null.
bool open_closed_streams() {
  for (int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(stream, F_GETFD) < 0 && open("/dev/null", O_RDWR) != stream) return false;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (!open_closed_streams()) return 3;
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error with words, not a death
  const std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  if (words.empty() || words[0] == "--help" || words[0] == "-h") {
    cli::print_usage(words.empty() ? stderr : stdout);
    return words.empty() ? 2 : 0;
  }
  if (words[0] == "--version") {
    fmt::print("evenkeel {}\n", EVENKEEL_VERSION);
    return 0;
  }
  const auto options_end = std::find(words.begin() + 1, words.end(), "--");
  const bool json = std::find(words.begin() + 1, options_end, "--json") != options_end;
  std::string speaker = "evenkeel";
  try {
    const char* const target = std::getenv("EVENKEEL_CPU");
    require(!target || is_cpu_target(target), "EVENKEEL_CPU: expected baseline, avx2 or avx512, found '{}'",
            target ? target : "");
    const cli::Command& command = find_command(words[0]);
    speaker += fmt::format(" {}", command.name);
    const int code = command.run(argc - 1, argv + 1);
    // A full disk or a closed pipe shows only when the buffer is written.
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) throw DataError("cannot write the output");
    return code;
  } catch (const std::exception& error) {
    return cli::print_error(speaker, error, json && !std::ferror(stdout));
  }
}
