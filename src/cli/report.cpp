// `evenkeel report`: one page of everything that is known of some runs.
#include "report/page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/whole_file.h"
#include "cli/options.h"
#include "records/run_records.h"

namespace evenkeel::cli {
namespace {

namespace fs = std::filesystem;

// DataError where there is nothing to report, with the runs that lie in the folder, if some do.
void check_run(const fs::path& folder) {
  std::error_code error;
  require_data(fs::is_directory(folder, error), "{}: expected a run's folder, found {}", folder.string(),
               fs::exists(folder, error) ? "a file" : "nothing");
  if (is_run_folder(folder)) return;
  constexpr size_t kNamed = 3;
  std::vector<std::string> inside;
  for (const fs::path& run : runs_in(folder)) inside.push_back(run.string());
  const std::string more = inside.size() > kNamed ? fmt::format(" and {} more", inside.size() - kNamed) : "";
  inside.resize(std::min(inside.size(), kNamed));
  throw DataError(fmt::format(
      "{}: expected a run's folder, found neither config.toml nor metrics.jsonl in it{}", folder.string(),
      inside.empty() ? "" : fmt::format("; these in it are runs: {}{}", fmt::join(inside, ", "), more)));
}

}  // namespace

int run_report(int argc, char** argv) {
  std::vector<std::string> words, captures;
  std::string out = "report.html";
  bool json = false;
  Options options(
      "report RUN... [-o FILE] [options]",
      "Writes one HTML file that needs nothing else: the verdict, offset and loss of the runs, the chain "
      "from "
      "symptom\nto proof, and every panel that the records allow. The page says what is missing or damaged, "
      "with the\ncommand that makes it.",
      "report runs/a runs/b -o report.html");
  options.words("RUN", words, 1, 64);
  options.value("-o", "FILE", "where the page goes", out);
  options.values("--capture", "FILE",
                 "a capture to look into, several allowed (default: those in the run's folder)", captures);
  options.flag("--json", "what was written, as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  for (const std::string& word : words) check_run(word);
  PageOptions of_page;
  of_page.needs_records = true;
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
