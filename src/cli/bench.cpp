// `evenkeel bench`: picks the bench.
#include "cli/bench.h"

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
#include "cli/options.h"

namespace evenkeel::cli {

int run_bench(int argc, char** argv) {
  bool gpu = false;
  GpuBenchOptions bench;
  std::vector<std::string> words;
  Options options(
      "bench round|attention [options]",
      "Speed as ratios against what the machine can do, measured in the same run: round against memcpy,\n"
      "attention against matrix products. With --gpu: attention on the GPU, next to PyTorch's "
      "FlashAttention-2 and\n"
      "cuDNN where a python3 with PyTorch is found (EVENKEEL_PYTHON names another one).",
      "bench round --check");
  options.flag("--check", "exit 1 where a ratio misses its target", bench.check);
  options.flag("--gpu", "attention: on the GPU", gpu);
  options.flag("--quick", "--gpu: rows 1 and 4 in half a minute", bench.quick);
  options.values("--row", "N", "--gpu: only this row of the table, from 1; several allowed", bench.rows);
  options.values("--plan", "PLAN", "--gpu: time this plan too, at every row; several allowed", bench.plans);
  options.value("--rounds", "N", "--gpu: rounds (default 15, with --quick 7)", bench.rounds, 1, 1000);
  options.value("--layout", "ORDER", "--gpu: axes in memory, bthd (default) or bhtd", bench.layout);
  options.flag("--json", "the same as JSON", bench.json);
  options.words("what to measure, round or attention", words, 1, 1);
  if (!options.parse(argc, argv)) return 0;
  require(words[0] == "round" || words[0] == "attention", "unknown bench '{}': expected round or attention",
          words[0]);
  require(!gpu || words[0] == "attention", "--gpu: expected bench attention, got bench {}", words[0]);
  require(gpu || (!bench.quick && bench.rows.empty() && bench.plans.empty() && bench.rounds == 0),
          "--quick, --row, --plan and --rounds: expected with --gpu");
  if (gpu) return bench_attention_gpu(bench);
  return words[0] == "round" ? bench_round(bench.check, bench.json)
                             : bench_attention(bench.check, bench.json);
}

}  // namespace evenkeel::cli
