// The command `evenkeel`: picks the subcommand, turns exceptions into messages and exit codes.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#include "base/error.h"
#include "cli/options.h"

namespace {

using namespace evenkeel;

struct Command {
  const char *name, *summary;
  int (*run)(int, char**);
};
constexpr Command kCommands[] = {
    {"demo", "the whole job on this machine: no GPU, no download", cli::run_demo},
    {"explain", "one operation, or one tensor-core sum, bit by bit", cli::run_explain},
    {"conform", "judge attention by the sign of its errors, on hard inputs", cli::run_conform},
    {"data", "text to tokens: prepare | synth | inspect", cli::run_data},
    {"train", "train GPT-2 with a precision plan per layer and head", cli::run_train},
    {"sample", "text from a checkpoint", cli::run_sample},
    {"probe", "every head of a step under the microscope: a run's, or a capture's", cli::run_probe},
    {"capture", "one layer's attention at one step of a run, into a file", cli::run_capture},
    {"isolate", "which layer, heads and rounding derail a run: found and proved by replays",
     cli::run_isolate},
    {"verdict", "what ails a run, from its records and the replays made so far", cli::run_verdict},
    {"indicators", "which warning sign speaks, how long before the loss moves, and how often for nothing",
     cli::run_indicators},
    {"report", "everything known of some runs, on one page", cli::run_report},
    {"watch", "the report's page, live in the browser", cli::run_watch},
    {"bench", "speed as ratios: round | attention", cli::run_bench},
    {"info", "version, CPU features, which kernels will run and why", cli::run_info},
};

void print_usage(std::FILE* to) {
  fmt::print(
      to,
      "Evenkeel finds, explains and prevents the training failures that rounding in attention causes.\n\n"
      "usage: evenkeel COMMAND [options]\n\n");
  for (const Command& command : kCommands) fmt::print(to, "  {:<12}{}\n", command.name, command.summary);
  fmt::print(to,
             "\n`evenkeel COMMAND --help` shows options and an example. In the source tree, `./evenkeel "
             "test` runs every test.\n"
             "exit codes: 0 ok, 1 finding or failed check, 2 usage, 3 data or environment\n");
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
  if (argc < 2 || std::strcmp(argv[1], "--help") == 0 || std::strcmp(argv[1], "-h") == 0) {
    print_usage(argc < 2 ? stderr : stdout);
    return argc < 2 ? 2 : 0;
  }
  if (std::strcmp(argv[1], "--version") == 0) {
    fmt::print("evenkeel {}\n", EVENKEEL_VERSION);
    return 0;
  }
  for (const Command& command : kCommands) {
    if (std::strcmp(argv[1], command.name) != 0) continue;
    try {
      const int code = command.run(argc - 1, argv + 1);
      // A full disk or a closed pipe shows only when the buffer is written.
      if (std::fflush(stdout) != 0 || std::ferror(stdout)) throw DataError("cannot write the output");
      return code;
    } catch (const std::invalid_argument& error) {
      fmt::print(stderr, "evenkeel {}: {}\n", command.name, error.what());
      return 2;
    } catch (const std::bad_alloc&) {
      fmt::print(stderr,
                 "evenkeel {}: not enough memory for these settings; a smaller model or fewer sequences need "
                 "less\n",
                 command.name);
      return 3;
    } catch (const std::exception& error) {
      fmt::print(stderr, "evenkeel {}: {}\n", command.name, error.what());
      return 3;
    }
  }
  fmt::print(stderr, "evenkeel: unknown command '{}': expected one of", argv[1]);
  for (const Command& command : kCommands) fmt::print(stderr, " {}", command.name);
  fmt::print(stderr, "\n");
  return 2;
}
