// `evenkeel watch`: the report's page, live, until Ctrl-C.
#include "report/watch.h"

#include <fmt/format.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/options.h"
#include "report/page.h"

namespace evenkeel::cli {
namespace {

std::atomic<Watch*> watched = nullptr;
void end_watch(int) {
  if (Watch* const watch = watched) watch->stop();
}

void print_start(const Watch& watch, const std::vector<std::string>& runs, bool json) {
  const HttpServer& server = watch.server();
  if (json) {
    fmt::print(
        "{}\n",
        nlohmann::ordered_json{
            {"schema", 1}, {"url", server.url()}, {"this_machine_alone", server.loopback()}, {"runs", runs}}
            .dump());
    return;
  }
  fmt::print("{}\n", server.url());
  if (!server.loopback())
    fmt::print("whoever reaches this machine can read it: expected a network you trust\n");
  fmt::print("Ctrl-C ends it\n");
}

}  // namespace

int run_watch(int argc, char** argv) {
  std::vector<std::string> words;
  Watch::Options settings;
  int64_t port = settings.port;
  bool json = false;
  Options options(
      "watch RUN... [options]",
      "The page of `evenkeel report`, live in the browser, while the runs train or afterwards; Ctrl-C ends "
      "it. Runs may\n"
      "stop, go on and start anew meanwhile. Nothing is drawn while nobody looks, and once for any number of "
      "viewers.",
      "watch runs/a runs/b");
  options.words("RUN", words, 1, 64);
  options.value("--port", "N", fmt::format("of the server (default: {}); 0: any that is free", port), port, 0,
                65535);
  options.value("--address", "ADDRESS",
                fmt::format("of this machine (default: {}: seen from this machine alone)", settings.address),
                settings.address);
  options.flag("--json", "one JSON object with the address once the server listens, and no other line", json);
  if (!options.parse(argc, argv)) return 0;
  const std::vector<std::filesystem::path> runs(words.begin(), words.end());
  for (const std::filesystem::path& run : runs)
    require_data(std::filesystem::is_directory(run), "{}: expected a run's folder, found {}", run.string(),
                 std::filesystem::exists(run) ? "something else" : "nothing there");
  settings.port = static_cast<int>(port);
  settings.draw = [](std::span<const std::filesystem::path> of) { return page(of, {.live = true}); };

  Watch watch(runs, settings);
  watched = &watch;
  struct sigaction action {};
  action.sa_handler = end_watch;
  action.sa_flags = SA_RESETHAND;  // a second Ctrl-C ends it at once
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  print_start(watch, words, json);
  std::fflush(stdout);
  watch.run();
  watched = nullptr;
  if (!json) fmt::print("ended; the page was drawn {} times\n", watch.drawings());
  return 0;
}

}  // namespace evenkeel::cli
