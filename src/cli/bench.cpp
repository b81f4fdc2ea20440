// `evenkeel bench`: picks the bench.
#include "cli/bench.h"

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cli/options.h"

namespace evenkeel::cli {

int run_bench(int argc, char** argv) {
  bool check = false, json = false;
  std::vector<std::string> words;
  Options options(
      "bench round|attention [--check] [--json]",
      "Speed as ratios against what the machine can do, measured in the same run: round against memcpy,\n"
      "attention against matrix products.",
      "bench round --check");
  options.flag("--check", "exit 1 where a ratio misses its target", check);
  options.flag("--json", "the same as JSON", json);
  options.words("what to measure, round or attention", words, 1, 1);
  if (!options.parse(argc, argv)) return 0;
  if (words[0] == "round") return bench_round(check, json);
  if (words[0] == "attention") return bench_attention(check, json);
  throw std::invalid_argument(fmt::format("unknown bench '{}': expected round or attention", words[0]));
}

}  // namespace evenkeel::cli
