// `evenkeel bench`: picks the bench.
#include "cli/bench.h"

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/threads.h"
#include "cli/options.h"

namespace evenkeel::cli {

int run_bench(int argc, char** argv) {
  bool gpu = false;
  int64_t threads = 0;
  GpuBenchOptions bench;
  std::vector<std::string> words;
  Options options(
      "bench round|attention|train|probes [options]",
      "Speed as ratios against what the machine can do, measured in the same run: round against memcpy,\n"
      "attention against matrix products, train against the same model in PyTorch, where a python3 with it "
      "is\n"
      "found (EVENKEEL_PYTHON names another one). With --gpu: attention next to PyTorch's FlashAttention-2 "
      "and\n"
      "cuDNN, train next to torch.compile. probes: what they add to a training step; with --gpu, to nano's.",
      "bench round --check");
  options.flag("--check", "exit 1 where a figure misses its target", bench.check);
  options.flag("--gpu", "attention, train, probes: on the GPU", gpu);
  options.flag("--quick", "attention --gpu: rows 1 and 4 in half a minute", bench.quick);
  options.values("--row", "N", "attention --gpu: only this row of the table, from 1; several allowed",
                 bench.rows);
  options.values("--plan", "PLAN", "attention --gpu: time this plan too, at every row; several allowed",
                 bench.plans);
  options.value("--rounds", "N", "attention --gpu: rounds (default 15, with --quick 7)", bench.rounds, 1,
                1000);
  options.value("--layout", "ORDER", "attention --gpu: axes in memory, bthd (default) or bhtd", bench.layout);
  options.value("--threads", "N", "of the CPU; 0: all", threads, 0, 4096);
  options.flag("--json", "the same as JSON", bench.json);
  options.words("what to measure, round, attention, train or probes", words, 1, 1);
  if (!options.parse(argc, argv)) return 0;
  const std::string& what = words[0];
  require(what == "round" || what == "attention" || what == "train" || what == "probes",
          "unknown bench '{}': expected round, attention, train or probes", what);
  require(!gpu || what != "round", "--gpu: expected bench attention, train or probes, got bench {}", what);
  require((gpu && what == "attention") ||
              (!bench.quick && bench.rows.empty() && bench.plans.empty() && bench.rounds == 0),
          "--quick, --row, --plan and --rounds: expected with bench attention --gpu");
  if (threads > 0) set_thread_count(static_cast<int>(threads));
  if (what == "probes")
    return gpu ? bench_probes_gpu(bench.check, bench.json) : bench_probes(bench.check, bench.json);
  if (what == "train")
    return gpu ? bench_train_gpu(bench.check, bench.json) : bench_train(bench.check, bench.json);
  if (gpu) return bench_attention_gpu(bench);
  return what == "round" ? bench_round(bench.check, bench.json) : bench_attention(bench.check, bench.json);
}

}  // namespace evenkeel::cli
