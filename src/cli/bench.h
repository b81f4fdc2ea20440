// The benches behind `evenkeel bench`. Each prints its table (or JSON) and returns the exit code: with
// `check`, 1 where a ratio misses its target.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "numerics/median.h"
#include "training/run_config.h"

namespace evenkeel::cli {

int bench_round(bool check, bool json);
int bench_attention(bool check, bool json);
int bench_probes(bool check, bool json);
int bench_probes_gpu(bool check, bool json);
int bench_train(bool check, bool json);

struct GpuBenchOptions {
  bool check = false, json = false;
  bool quick = false;                // two rows, few rounds, nothing else
  bool forms = false;                // forms of a problem instead, our kernels alone
  std::vector<std::string> rows;     // numbers of rows, from 1; none: all
  std::vector<std::string> plans;    // timed at every row beside the default remedy
  int64_t rounds = 0;                // 0: 15, quick 7; of whole steps 9 and 21
  std::vector<std::string> presets;  // of whole steps; none: all
  std::string layout = "bthd";  // order of the axes in memory, bthd or bhtd; where PyTorch is measured too
};
int bench_attention_gpu(const GpuBenchOptions& options);
int bench_train_gpu(const GpuBenchOptions& options);
int bench_attention_forms(const GpuBenchOptions& options);
// Its last part: decoding. Prints a table unless `quiet`; returns the rows.
nlohmann::ordered_json bench_decoding(int64_t rounds, bool quiet);

// --- What the benches share

// REQUIRES: not empty. The value at that place of the sorted ones.
double quantile(std::vector<double> values, double q);

// A run without an end, checkpoints and facts. Its data is not set.
RunConfig bench_run(const std::string& preset, Backend backend, int64_t sequences);
// Random tokens, as headerless uint16.
void write_bench_tokens(const std::filesystem::path& file, int64_t vocabulary);

}  // namespace evenkeel::cli
