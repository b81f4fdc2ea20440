// Small models for tests: both families, their tokens, their parameters, one pass through them.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "model/model.h"
#include "model_families.h"
#include "numerics/random.h"

namespace evenkeel::gpt2_cases {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline size_t at(int64_t n) { return static_cast<size_t>(n); }

inline ModelConfig tiny() {
  ModelConfig config;
  config.layers = 2, config.heads = 2, config.width = 12, config.context = 7, config.vocabulary = 11;
  config.precision = LinearPrecision::fp32;
  return config;
}

struct Tokens {
  std::vector<int32_t> tokens, targets;
  int64_t B, T;
  Tokens(const ModelConfig& config, int64_t sequences, int64_t length, uint32_t which = 0)
      : B(sequences), T(length) {
    RandomStream stream({3, which, 0});
    for (int64_t n = 0; n < B * T; ++n) {
      tokens.push_back(static_cast<int32_t>(stream.below(config.vocabulary)));
      targets.push_back(static_cast<int32_t>(stream.below(config.vocabulary)));
    }
  }
  Batch batch() const { return {B, T, tokens, targets}; }
};

// All parameters random, biases and gains too, large enough that every one matters.
inline Floats lively_parameters(const ParameterTable& table) {
  Floats values(at(table.size()));
  RandomStream stream({5, 0, 0});
  for (const ParameterTensor& tensor : table.tensors())
    for (int64_t n = 0; n < tensor.count(); ++n)
      values[at(tensor.offset + n)] =
          static_cast<float>((tensor.init == ParameterInit::one ? 1.0 : 0.0) + 0.4 * stream.normal());
  return values;
}

inline std::unique_ptr<Model> lively_model(const ModelConfig& config) {
  auto model = make_model_cpu(config, 1);
  model->write_parameters(lively_parameters(model->table()));
  return model;
}

inline Floats gradients_of(const Model& model) {
  Floats gradients(at(model.table().size()));
  model.read_gradients(gradients);
  return gradients;
}
inline Floats parameters_of(const Model& model) {
  Floats parameters(at(model.table().size()));
  model.read_parameters(parameters);
  return parameters;
}

struct Pass {
  double loss;
  Floats gradients;
};
inline Pass pass(Model& model, const Batch& batch, const StepContext& context = {}, float loss_scale = 1) {
  model.zero_gradients();
  const double loss = model.forward_backward(batch, loss_scale, context);
  return {loss, gradients_of(model)};
}

inline bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline ModelConfig busy() {
  ModelConfig config = tiny();
  config.width = 40, config.heads = 4, config.context = 80, config.vocabulary = 130;
  config.bias = config.norm_bias = config.gated_attention = true;
  config.qk_norm = config.sinks = true;
  return config;
}

}  // namespace evenkeel::gpt2_cases
