// Which backend trains a model, and why: decided here, once a run, and nowhere else.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "attention/attention_call.h"
#include "model/model.h"
#include "training/optimizer.h"

namespace evenkeel {

enum class Backend {
  automatic,  // cuda where there is a GPU that it can use, else cpu
  cpu,
  cuda,
};
inline constexpr std::string_view kBackendNames[] = {"auto", "cpu", "cuda"};
constexpr std::string_view name(Backend backend) { return kBackendNames[static_cast<size_t>(backend)]; }
Backend parse_backend(std::string_view text);  // std::invalid_argument lists the known ones

struct BackendChoice {
  Backend backend = Backend::cpu;  // cpu or cuda
  std::string why;
};
// DataError where cuda is asked for and `device` cannot do it.
BackendChoice choose_backend(Backend asked, const CudaDevice& device);

// REQUIRES: cpu or cuda.
std::unique_ptr<Model> make_model(Backend backend, const ModelConfig& config, uint64_t seed);
std::unique_ptr<Optimizer> make_optimizer(Backend backend, const OptimizerConfig& config,
                                          const ParameterTable& table, Ranks* sharded_over = nullptr);

// Which attention kernels a model's plans take on a backend, and why, in words: one line for each kernel.
std::string attention_kernels_in_words(Backend backend, const CudaDevice& device, const Model& model,
                                       int64_t sequences);

// Operations a second that the machine can do on such operands, for the share that a run reaches. Measured on the CPU
// (fused multiply-adds of all threads, the best of a few short rounds); on a GPU from a table. None where the GPU is
// not known or its tensor cores do not take such operands.
std::optional<double> peak_flops(Backend backend, const CudaDevice& device, LinearPrecision precision);
// One short round of the CPU's.
double fma_flops_round();

}  // namespace evenkeel
