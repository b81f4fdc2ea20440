// The command line: Options::parse, on words separated by NUL or newline.
#include "cli/options.h"

#include "fuzz/fuzz.h"

using namespace evenkeel;

namespace {

// One option of each kind, as a command would declare them.
struct Parsed {
  bool json = false;
  std::string plan;
  int64_t rows = 64;
  std::vector<std::string> sites, words;

  // False: help was asked for.
  bool parse(std::vector<std::string> line) {
    cli::Options options("fuzz WORD... [options]", "Reads its options.", "fuzz a b --rows 3");
    options.flag("--json", "machine-readable", json);
    options.value("--plan", "PLAN", "the plan", plan);
    options.value("--rows", "N", "how many rows", rows, -5, 1'000'000'000'000);
    options.values("--site", "SITE", "a site", sites);
    options.words("WORD...", words, 1, 4);
    std::vector<char*> arguments;
    for (std::string& word : line) arguments.push_back(word.data());
    return options.parse(static_cast<int>(arguments.size()), arguments.data());
  }
  // The same again, in the other spelling of options and in an order of its own.
  std::vector<std::string> written() const {
    std::vector<std::string> line = {"fuzz", "--rows=" + std::to_string(rows)};
    if (!plan.empty()) line.push_back("--plan=" + plan);  // an empty value is an error
    for (const std::string& site : sites) line.push_back("--site=" + site);
    if (json) line.push_back("--json");
    line.push_back("--");  // a word may look like an option
    line.insert(line.end(), words.begin(), words.end());
    return line;
  }
  friend bool operator==(const Parsed&, const Parsed&) = default;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::string> line = {"fuzz", ""};
  for (char c : fuzz::text_of(data, size)) {
    if (c == '\0' || c == '\n')
      line.emplace_back();
    else
      line.back() += c;
  }
  Parsed first;
  bool finished = false;
  if (!fuzz::accepts([&] { finished = first.parse(line); }) || !finished) return 0;
  fuzz::must(first.rows >= -5 && first.rows <= 1'000'000'000'000, "a number is within its limits");
  fuzz::must(first.words.size() >= 1 && first.words.size() <= 4, "the words are as many as declared");
  Parsed second;
  fuzz::must(second.parse(first.written()) && second == first, "options are the same written and read again");
  return 0;
}
