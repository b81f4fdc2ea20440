// `evenkeel bench`: picks the bench.
#include "cli/bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/threads.h"
#include "cli/options.h"

namespace evenkeel::cli {

namespace {

struct Bench {
  const char *name, *against;
  int (*on_cpu)(bool check, bool json);
  int (*on_gpu)(const GpuBenchOptions& options);  // nullptr: the CPU's alone
};
constexpr Bench kBenches[] = {
    {"round", "rounding an array, against memcpy", bench_round, nullptr},
    {"attention", "against matrix products; with --gpu, next to PyTorch's FlashAttention-2 and cuDNN",
     bench_attention, bench_attention_gpu},
    {"train", "whole steps, against the same model in PyTorch; with --gpu, next to torch.compile",
     bench_train, bench_train_gpu},
    {"probes", "what probes add to a training step; with --gpu, to nano's", bench_probes,
     [](const GpuBenchOptions& o) { return bench_probes_gpu(o.check, o.json); }},
};

}  // namespace

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::lround(q * static_cast<double>(values.size() - 1)))];
}

int run_bench(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a bench that is stopped has said what it knows, in a file too
  bool gpu = false;
  int64_t threads = 0;
  GpuBenchOptions bench;
  std::vector<std::string> words;
  std::vector<std::string> names;
  std::string list;
  for (const Bench& b : kBenches) {
    names.emplace_back(b.name);
    list += fmt::format("\n  {:<10} {}", b.name, b.against);
  }
  Options options(
      fmt::format("bench {} [options]", fmt::join(names, "|")),
      "Speed as ratios against what the machine can do, measured in the same run.\n" + list +
          "\nPyTorch is measured where a python3 with it is found (EVENKEEL_PYTHON names another one).",
      "bench round --check");
  options.flag("--check", "exit 1 where a figure misses its target", bench.check);
  options.flag("--gpu", "attention, train, probes: on the GPU", gpu);
  options.flag("--quick", "attention --gpu: rows 1 and 4 in half a minute", bench.quick);
  options.flag("--forms",
               "attention --gpu: what windows, FP16, plans by head and other forms cost, our kernels alone",
               bench.forms);
  options.values("--row", "N", "attention --gpu: only this row of the table, from 1; several allowed",
                 bench.rows);
  options.values("--plan", "PLAN", "attention --gpu: time this plan too, at every row; several allowed",
                 bench.plans);
  options.value("--rounds", "N",
                "attention, train --gpu: rounds (default 15, with --quick 7; train 9 and 21)", bench.rounds,
                1, 1000);
  options.values("--preset", "NAME", "train --gpu: only this model; several allowed", bench.presets);
  options.value("--layout", "ORDER", "attention --gpu: axes in memory, bthd (default) or bhtd", bench.layout);
  options.value("--threads", "N", "of the CPU; 0: all", threads, 0, 4096);
  options.flag("--json", "the same as JSON", bench.json);
  options.words("what to measure, " + fmt::format("{}", fmt::join(names, ", ")), words, 1, 1, names);
  if (!options.parse(argc, argv)) return 0;
  const std::string& what = words[0];
  const Bench& chosen =
      *std::find_if(std::begin(kBenches), std::end(kBenches), [&](const Bench& b) { return what == b.name; });
  require(!gpu || chosen.on_gpu, "--gpu: expected bench attention, train or probes, got bench {}", what);
  require((gpu && what == "attention") ||
              (!bench.quick && !bench.forms && bench.rows.empty() && bench.plans.empty()),
          "--quick, --forms, --row and --plan: expected with bench attention --gpu");
  require((gpu && what == "train") || bench.presets.empty(), "--preset: expected with bench train --gpu");
  require((gpu && (what == "attention" || what == "train")) || bench.rounds == 0,
          "--rounds: expected with bench attention --gpu or bench train --gpu");
  if (threads > 0) set_thread_count(static_cast<int>(threads));
  return gpu ? chosen.on_gpu(bench) : chosen.on_cpu(bench.check, bench.json);
}

}  // namespace evenkeel::cli
