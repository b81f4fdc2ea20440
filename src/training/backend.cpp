#include "training/backend.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <vector>

#include "attention/attention_kernels.h"
#include "base/error.h"
#include "base/threads.h"
#include "numerics/cpu.h"
#include "numerics/names.h"

namespace evenkeel {

Backend parse_backend(std::string_view text) {
  if (const auto backend = value_named<Backend>(text, kBackendNames)) return *backend;
  throw std::invalid_argument(
      fmt::format("[train] expected a backend ({}), got '{}'", fmt::join(kBackendNames, ", "), text));
}

BackendChoice choose_backend(Backend asked, const CudaDevice& device) {
  const std::string fault = !device.present ? fmt::format("no GPU: {}", device.why)
                            : device.major < kLeastCudaMajor
                                ? fmt::format("{} has compute capability {}.{}, below {}.0", device.name,
                                              device.major, device.minor, kLeastCudaMajor)
                                : "";
  if (asked == Backend::cpu) return {Backend::cpu, "asked for"};
  if (asked == Backend::cuda) {
    require_data(fault.empty(), "[train] backend cuda: expected a GPU to train on, found {}", fault);
    return {Backend::cuda, device.name + ", asked for"};
  }
  if (fault.empty()) return {Backend::cuda, device.name};
  return {Backend::cpu, fault};
}

std::unique_ptr<Model> make_model(Backend backend, const ModelConfig& config, uint64_t seed) {
  return backend == Backend::cuda ? make_model_cuda(config, seed) : make_model_cpu(config, seed);
}

std::unique_ptr<Optimizer> make_optimizer(Backend backend, const OptimizerConfig& config,
                                          const ParameterTable& table, Ranks* sharded_over) {
  return backend == Backend::cuda ? make_optimizer_cuda(config, table, sharded_over)
                                  : make_optimizer_cpu(config, table, sharded_over);
}

std::string attention_kernels_in_words(Backend backend, const CudaDevice& device, const Model& model,
                                       int64_t sequences) {
  if (backend == Backend::cpu)
    return fmt::format("attention: any plan on the CPU, {} kernels", name(cpu_target()));
  const ModelConfig& config = model.config();
  std::map<std::string, std::vector<int64_t>> layers_of;  // by kernel and reason
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const KernelChoice choice =
        choose_kernel(model.attention_problem(layer, sequences, config.context), device);
    layers_of[fmt::format("{} kernels: {}", choice.kernel, choice.why)].push_back(layer);
  }
  std::string words;
  for (const auto& [kernel, layers] : layers_of)
    words += fmt::format("{}attention{}: {}", words.empty() ? "" : "\n",
                         layers_of.size() == 1 ? "" : fmt::format(" of layers {}", fmt::join(layers, ", ")),
                         kernel);
  return words;
}

double fma_flops_round() {
  constexpr int64_t kRounds = 1'000'000;
  std::vector<float> sinks(static_cast<size_t>(thread_count()), 1.0f);
  std::vector<int64_t> done(sinks.size());
  const auto began = std::chrono::steady_clock::now();
  parallel_for(thread_count(), [&](int64_t item, int) {
    done[static_cast<size_t>(item)] =
        attention_kernels().fma_rounds(kRounds, &sinks[static_cast<size_t>(item)]);
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  int64_t total = 0;
  for (int64_t n : done) total += n;
  return 2 * static_cast<double>(total) / seconds;
}

std::optional<double> peak_flops(Backend backend, const CudaDevice& device, LinearPrecision precision) {
  if (backend == Backend::cpu) {
    constexpr int kTries = 3;  // a disturbed round is no peak
    double best = 0;
    for (int n = 0; n < kTries; ++n) best = std::max(best, fma_flops_round());
    return best;
  }
  if (precision != LinearPrecision::bf16) return {};
  // BF16 operands, FP32 sums, dense, as NVIDIA's data sheets have them; the first name that fits.
  struct Known {
    std::string_view name;
    double teraflops;
  };
  constexpr Known kKnown[] = {{"B200", 2250},     {"H100 PCIe", 756}, {"H100 NVL", 835}, {"H200", 989.5},
                              {"H100", 989.5},    {"H800", 989.5},    {"H20", 148},      {"A100", 312},
                              {"A800", 312},      {"L40S", 362},      {"L40", 181},      {"L4", 121},
                              {"RTX 4090", 165.2}};
  for (const Known& known : kKnown)
    if (device.name.find(known.name) != std::string::npos) return known.teraflops * 1e12;
  return {};
}

}  // namespace evenkeel
