// Models on the GPU beside the CPU's: configurations, tokens, how far gradients may be apart. For gpt2_cuda_test.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <ostream>
#include <vector>

#include "../model_families.h"
#include "base/sizes.h"
#include "model/model.h"
#include "numerics/random.h"

namespace evenkeel::beside_cpu {

using Floats = std::vector<float>;

struct Case {
  const char* name;
  ModelConfig config;
  const char* plan;
  int64_t B = 3, T = 37;

  friend std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }
};

inline ModelConfig config_of(LinearPrecision precision, int64_t heads, int64_t head_size) {
  ModelConfig config;
  config.layers = 2, config.heads = heads, config.width = heads * head_size;
  config.context = 160, config.vocabulary = 101;
  config.precision = precision;
  return config;
}
inline ModelConfig changed(ModelConfig config, void (*change)(ModelConfig&)) {
  change(config);
  return config;
}
inline constexpr auto kFp32 = LinearPrecision::fp32, kBf16 = LinearPrecision::bf16;

struct Tokens {
  Tokens(const ModelConfig& config, int64_t b, int64_t t, uint32_t seed = 7) : B(b), T(t) {
    RandomStream draw({1, 0, seed});
    // Half of the places are one token's, so that its row has many terms.
    for (int64_t n = 0; n < B * T; ++n) {
      tokens.push_back(draw.unit() < 0.5 ? 5 % static_cast<int32_t>(config.vocabulary)
                                         : static_cast<int32_t>(draw.below(config.vocabulary)));
      targets.push_back(static_cast<int32_t>(draw.below(config.vocabulary)));
    }
  }
  Batch batch() const { return {B, T, tokens, targets}; }
  int64_t B, T;
  std::vector<int32_t> tokens, targets;
};

// Initial parameters, but with gains and biases of all sizes.
inline Floats parameters_of(const Model& model) {
  Floats values(at(model.table().size()));
  model.read_parameters(values);
  for (const ParameterTensor& tensor : model.table().tensors()) {
    RandomStream draw({3, 0, static_cast<uint32_t>(tensor.offset)});
    const double size = tensor.shape.size() == 1 ? 0.2 : 0.04;
    for (int64_t n = 0; n < tensor.count(); ++n)
      values[at(tensor.offset + n)] += static_cast<float>(size * draw.normal());
  }
  return values;
}

inline Floats gradients_of(const Model& model) {
  Floats values(at(model.table().size()));
  model.read_gradients(values);
  return values;
}

inline bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Two models of the same parameters and plan.
struct Pair {
  explicit Pair(const ModelConfig& config, const char* plan_text)
      : cpu(make_model_cpu(config, 11)),
        cuda(make_model_cuda(config, 11)),
        plan(ScopedPlan::parse(plan_text)) {
    Floats initial_cpu(at(cpu->table().size())), initial_cuda(initial_cpu);
    cpu->read_parameters(initial_cpu);
    cuda->read_parameters(initial_cuda);
    EXPECT_TRUE(same_bits(initial_cpu, initial_cuda)) << "initial parameters differ";
    const Floats parameters = parameters_of(*cpu);
    for (Model* model : {cpu.get(), cuda.get()}) {
      model->write_parameters(parameters);
      model->set_plan(plan);
    }
  }
  std::unique_ptr<Model> cpu, cuda;
  const ScopedPlan plan;
};

// The distance between two gradients of one tensor, relative to its length; and its part along the gradient,
// which has a sign: what is lost or gained in every step.
struct Distance {
  Distance(const float* found, const float* expected, int64_t count) {
    double squares = 0, difference = 0, dot = 0;
    for (int64_t n = 0; n < count; ++n) {
      const double e = static_cast<double>(expected[n]), d = static_cast<double>(found[n]) - e;
      squares += e * e, difference += d * d, dot += d * e;
    }
    relative = std::sqrt(difference / squares);
    along = dot / squares;
  }
  double relative, along;
};

// Of FP32: attention's split products leave a few units of 2^-21, in some twenty places on the way. Of BF16:
// roundings at 2^-9 that fall differently where sums differ in their last bits, in as many places; logits are BF16
// on the GPU.
struct Bounds {
  double loss, relative, along;
};
inline Bounds bounds_of(const ModelConfig& config) {
  return config.precision == kFp32 ? Bounds{2e-6, 2e-5, 1e-5} : Bounds{2e-3, 2e-2, 5e-3};
}
// Where the terms of a gradient cancel (gains of qk_norm do: ten times as much as others), every rounding before it
// counts for more. So the FP32 bound of a tensor is at least what its gradient moves on the CPU when every parameter
// changes at random by 2^-17 of itself. That is a few 2^-21 times the root of twenty.
inline constexpr double kChange = 0x1p-17;

// Returns the CPU's gradients at the changed parameters.
inline Floats changed_gradients(const Pair& pair, const Tokens& tokens, float loss_scale) {
  const auto model = make_model_cpu(pair.cpu->config(), 11);
  Floats parameters(at(model->table().size()));
  pair.cpu->read_parameters(parameters);
  RandomStream draw({9, 0, 1});
  for (float& p : parameters) p *= static_cast<float>(1 + kChange * draw.normal());
  model->write_parameters(parameters);
  model->set_plan(pair.plan);
  model->forward_backward(tokens.batch(), loss_scale, {});
  return gradients_of(*model);
}

inline void compare_gradients(const Pair& pair, const Tokens& tokens, float loss_scale,
                              const Bounds& bounds) {
  const Floats expected = gradients_of(*pair.cpu), found = gradients_of(*pair.cuda);
  const bool fp32 = pair.cpu->config().precision == kFp32;
  const Floats moved = fp32 ? changed_gradients(pair, tokens, loss_scale) : expected;
  for (const ParameterTensor& tensor : pair.cpu->table().tensors()) {
    const auto distance = [&](const Floats& gradients) {
      return Distance(gradients.data() + tensor.offset, expected.data() + tensor.offset, tensor.count());
    };
    const Distance d = distance(found);
    EXPECT_LE(d.relative, std::max(bounds.relative, distance(moved).relative)) << tensor.name;
    // Of an error of this size in any direction, 1 / sqrt(n) lies along a gradient of n values: of the two of a sink's, most.
    const double chance = bounds.relative / std::sqrt(static_cast<double>(tensor.count()));
    EXPECT_LE(std::fabs(d.along), std::max(bounds.along, chance))
        << tensor.name << " (signed: " << d.along << ")";
  }
  // What lies between tensors stays zero.
  for (size_t n = 0; n + 1 < pair.cpu->table().tensors().size(); ++n) {
    const ParameterTensor &tensor = pair.cpu->table().tensors()[n],
                          &next = pair.cpu->table().tensors()[n + 1];
    for (int64_t gap = tensor.offset + tensor.count(); gap < next.offset; ++gap)
      ASSERT_EQ(found[at(gap)], 0) << "behind " << tensor.name;
  }
}

inline std::vector<Case> cases() {
  const auto plain32 = config_of(kFp32, 2, 32), plain16 = config_of(kBf16, 2, 64);
  return {
      {"fp32", plain32, "fp32"},
      {"fp32_norm_bias", changed(plain32, [](auto& c) { c.norm_bias = true; }), "fp32"},
      {"fp32_bias_untied",
       changed(plain32, [](auto& c) { c.bias = c.norm_bias = true, c.tied_embeddings = false; }), "fp32"},
      {"fp32_qk_norm_gate", changed(plain32, [](auto& c) { c.qk_norm = c.gated_attention = c.bias = true; }),
       "fp32"},
      {"fp32_softcap_keel", changed(plain32, [](auto& c) { c.softcap = 5; }), "fp32,keel=1e-2"},
      {"fp32_head_128", config_of(kFp32, 1, 128), "fp32"},
      {"fp32_odd_width", config_of(kFp32, 1, 17), "fp32", 2, 19},
      {"fp32_one_token", plain32, "fp32", 1, 1},
      {"fp32_wide", changed(config_of(kFp32, 9, 128), [](auto& c) { c.layers = 1; }), "fp32", 1, 5},
      {"bf16", plain16, "flash2"},
      {"bf16_long", plain16, "flash2", 2, 130},
      {"bf16_zero_sum", plain16, "flash2,stabiliser=zero_sum"},
      {"bf16_all", plain16, "bf16_all", 2, 130},
      {"bf16_bias_untied",
       changed(plain16, [](auto& c) { c.bias = c.norm_bias = true, c.tied_embeddings = false; }), "flash2"},
      {"bf16_qk_norm", changed(plain16, [](auto& c) { c.qk_norm = true; }), "flash2"},
      {"bf16_gate", changed(plain16, [](auto& c) { c.gated_attention = c.bias = true; }), "flash2"},
      {"bf16_softcap", changed(plain16, [](auto& c) { c.softcap = 5; }), "flash2"},
      {"bf16_keel", plain16, "flash2,keel=1e-2"},
      {"bf16_plans", plain16,
       "flash2; layer 1 head 0: stabiliser=zero_sum; layer 0 head 1: row_sum=bf16; layer 1 head 1: "
       "keel=1e-2"},
      {"bf16_head_32", config_of(kBf16, 3, 32), "flash2"},
      {"bf16_head_96", config_of(kBf16, 1, 96), "flash2", 1, 70},
      {"bf16_head_128", config_of(kBf16, 1, 128), "flash2", 2, 33},
      {"bf16_head_20", config_of(kBf16, 3, 20), "flash2"},
      {"bf16_one_token", plain16, "flash2", 1, 1},
      // More rows than blocks at once, and every way of the cross-entropy: small rows, rows that fit into shared
      // memory twice (9001), rows that do not.
      {"bf16_many_rows", plain16, "flash2", 20, 150},
      {"fp32_vocabulary_9001", changed(plain32, [](auto& c) { c.vocabulary = 9001; }), "fp32", 4, 100},
      {"bf16_vocabulary_9001", changed(plain16, [](auto& c) { c.vocabulary = 9001; }), "flash2", 4, 100},
      {"fp32_vocabulary_30001", changed(plain32, [](auto& c) { c.vocabulary = 30001; }), "fp32", 4, 100},
      {"bf16_vocabulary_60001", changed(plain16, [](auto& c) { c.vocabulary = 60001; }), "flash2", 4, 100},
      // The other block, whole and part by part.
      {"fp32_rms_norm", changed(plain32, [](auto& c) { c.norm = NormKind::rms_norm; }), "fp32"},
      {"fp32_rotary", changed(plain32, [](auto& c) { c.positions = Positions::rotary; }), "fp32"},
      {"fp32_rotary_pairs", changed(plain32, [](auto& c) { c.positions = Positions::rotary_pairs; }), "fp32"},
      {"fp32_no_positions", changed(plain32, [](auto& c) { c.positions = Positions::none; }), "fp32"},
      {"fp32_swiglu_bias", changed(plain32, [](auto& c) { c.mlp = MlpKind::swiglu, c.bias = true; }), "fp32"},
      {"fp32_hidden_50", changed(plain32, [](auto& c) { c.hidden = 50; }), "fp32"},
      {"fp32_grouped", changed(config_of(kFp32, 4, 32), [](auto& c) { c.key_heads = 2; }), "fp32"},
      {"fp32_head_size_apart", changed(plain32, [](auto& c) { c.head_features = 40, c.key_heads = 1; }),
       "fp32"},
      {"fp32_llama", like_llama(config_of(kFp32, 4, 32)), "fp32"},
      {"fp32_llama_odd", like_llama(config_of(kFp32, 3, 6)), "fp32", 2, 19},
      {"fp32_llama_wide", changed(like_llama(config_of(kFp32, 9, 128)), [](auto& c) { c.layers = 1; }),
       "fp32", 1, 5},
      {"fp32_qwen", changed(like_llama(config_of(kFp32, 4, 32)), [](auto& c) { c.qk_norm = true; }), "fp32"},
      {"bf16_alibi", changed(plain16, [](auto& c) { c.positions = Positions::alibi; }), "flash2", 2, 130},
      {"bf16_sinks", changed(plain16, [](auto& c) { c.sinks = true; }), "flash2,stabiliser=wide_output", 2,
       130},
      {"bf16_llama_sinks", changed(like_llama(config_of(kBf16, 4, 64)), [](auto& c) { c.sinks = true; }),
       "flash2,stabiliser=zero_sum,keel=1e-2", 2, 130},
      {"bf16_llama", like_llama(config_of(kBf16, 4, 64)), "flash2", 2, 130},
      {"bf16_llama_wide_output", like_llama(config_of(kBf16, 4, 64)), "flash2,stabiliser=wide_output", 2,
       130},
      {"bf16_llama_all", like_llama(config_of(kBf16, 4, 64)), "bf16_all", 2, 130},
      {"bf16_llama_pairs",
       changed(like_llama(plain16), [](auto& c) { c.positions = Positions::rotary_pairs; }), "flash2"},
      {"bf16_llama_head_20", like_llama(config_of(kBf16, 4, 20)), "flash2"},
      {"bf16_qwen", changed(like_llama(config_of(kBf16, 4, 64)), [](auto& c) { c.qk_norm = true; }),
       "flash2"},
  };
}

}  // namespace evenkeel::beside_cpu
