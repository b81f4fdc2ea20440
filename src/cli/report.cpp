// `evenkeel report`: one page of everything that is known of some runs.
#include "report/page.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/whole_file.h"
#include "cli/options.h"

namespace evenkeel::cli {

int run_report(int argc, char** argv) {
  namespace fs = std::filesystem;
  std::vector<std::string> words, captures;
  std::string out = "report.html";
  bool json = false;
  Options options(
      "report RUN... [-o FILE] [options]",
      "Writes one page that needs nothing else: the verdict, the loss of the runs with what happened to "
      "each, the\nchain from symptom to proof, and every panel that the runs' records allow. What is missing "
      "or "
      "damaged is\nsaid there, with the command that makes it.",
      "report runs/a runs/b -o report.html");
  options.words("RUN", words, 1, 64);
  options.value("-o", "FILE", "where the page goes (report.html)", out);
  options.values("--capture", "FILE",
                 "a capture to look into, several allowed (default: those in the run's folder)", captures);
  options.flag("--json", "what was written, as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  for (const std::string& word : words) {
    std::error_code error;
    require_data(fs::is_directory(word, error), "{}: expected a run's folder, found {}", word,
                 fs::exists(word, error) ? "a file" : "nothing");
  }
  PageOptions of_page;
  of_page.captures.assign(captures.begin(), captures.end());
  const std::vector<fs::path> runs(words.begin(), words.end());
  const std::string text = page(runs, of_page);
  write_whole_file(out, text);
  if (json)
    fmt::print("{}\n", nlohmann::json{{"file", out}, {"bytes", text.size()}, {"runs", words}}.dump(2));
  else
    fmt::print("{}: {} run{}, {:.0f} kB\n", out, words.size(), words.size() == 1 ? "" : "s",
               static_cast<double>(text.size()) * 1e-3);
  return 0;
}

}  // namespace evenkeel::cli
