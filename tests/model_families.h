// The families of models that tests are instantiated with: what holds for one block must hold for the other.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "model/model_config.h"

namespace evenkeel {

// The same sizes with RMS norms, rotary positions, SwiGLU and, where heads are even in number, two heads to a key head.
inline ModelConfig like_llama(ModelConfig config) {
  config.norm = NormKind::rms_norm;
  config.norm_bias = false;
  config.positions = Positions::rotary;
  config.mlp = MlpKind::swiglu;
  config.key_heads = config.heads % 2 == 0 ? config.heads / 2 : config.heads;
  config.hidden = 3 * config.width;
  return config;
}

struct Family {
  const char* name;
  ModelConfig (*config)(ModelConfig);  // of these sizes
};
inline constexpr Family kFamilies[] = {{"gpt2", [](ModelConfig c) { return c; }}, {"llama", like_llama}};
inline std::string family_name(const ::testing::TestParamInfo<Family>& info) { return info.param.name; }

// Fixture is a ::testing::Test.
template <class Fixture>
class OfFamily : public Fixture, public ::testing::WithParamInterface<Family> {
 protected:
  using Base = Fixture;
};

}  // namespace evenkeel
