// What turns gradients into a step. State lies in flat buffers of the parameters' own layout.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "model/model.h"

namespace evenkeel {

class Ranks;

enum class OptimizerKind {
  adamw,  // Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019
  muon,   // K. Jordan et al., 2024, for hidden matrices; AdamW for embeddings, head and vectors
};
inline constexpr std::string_view kOptimizerNames[] = {"adamw", "muon"};
constexpr std::string_view name(OptimizerKind kind) { return kOptimizerNames[static_cast<size_t>(kind)]; }
OptimizerKind parse_optimizer(std::string_view text);  // std::invalid_argument lists the known ones

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::adamw;
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
  float weight_decay = 0;  // of matrices; w -= lr weight_decay w
  float momentum = 0.95f;  // Muon's, with Nesterov's step
  float clip = 1;          // largest norm of the whole gradient; 0: never clipped
};
// std::invalid_argument: what was expected, what was found.
void validate(const OptimizerConfig& config, const Ranks* sharded_over = nullptr);

// What a step saw and did.
struct StepNorms {
  double gradient = 0;  // of the whole gradient, before it is clipped
  bool applied = true;  // false: the norm is not finite, and nothing was changed
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // Clips and applies the model's gradients at this learning rate. The same bits for any number of threads.
  virtual StepNorms step(Model& model, double lr) = 0;

  // For checkpoints, by copy: table().size() floats each. `steps`: how many were applied. One that is sharded over
  // ranks reads its own slice and leaves the rest as it is.
  virtual void read_state(std::span<float> first, std::span<float> second, int64_t& steps) const = 0;
  virtual void write_state(std::span<const float> first, std::span<const float> second, int64_t steps) = 0;
};

// Sharded over ranks (AdamW alone), an optimiser holds the states of this rank's slice of the flat buffers. It needs the
// gradients there, and updates the parameters there. Bits are those of one that does it all, also of the norm.
//
// On host memory:
std::unique_ptr<Optimizer> make_optimizer_cpu(const OptimizerConfig& config, const ParameterTable& table,
                                              Ranks* sharded_over = nullptr);

// On the device of a model from make_model_cuda: queued on its stream, one wait a step, for the norm (sharded without a
// device link, also for the norm's parts). AdamW gives the CPU's bits where the clipping factor is the same float (the
// norm's FP64 sum has another order); Muon's products have another order. DataError without CUDA.
std::unique_ptr<Optimizer> make_optimizer_cuda(const OptimizerConfig& config, const ParameterTable& table,
                                               Ranks* sharded_over = nullptr);

// The matrix nearest to x (rows, columns) whose singular values are all 1, roughly: five steps of Newton-Schulz with
// Jordan's coefficients, which leave them between 0.68 and 1.14. Exact zero stays zero.
void orthogonalise(std::span<float> x, int64_t rows, int64_t columns);

}  // namespace evenkeel
