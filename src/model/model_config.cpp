#include "model/model_config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "base/error.h"
#include "base/threads.h"
#include "numerics/random.h"

namespace evenkeel {

ModelConfig model_preset(std::string_view name) {
  ModelConfig config;
  if (name == "micro") {
    config.layers = 3, config.heads = 4, config.width = 128, config.context = 128, config.vocabulary = 256;
    config.norm_bias = true;
    config.precision = LinearPrecision::fp32;
  } else if (name == "nano") {
    config.layers = 6, config.heads = 6, config.width = 384, config.context = 512, config.vocabulary = 8192;
  } else if (name == "gpt2-medium") {
    config.layers = 24, config.heads = 16, config.width = 1024;
  } else {
    require(name == "gpt2", "[model] expected a preset (micro, nano, gpt2, gpt2-medium), got '{}'", name);
  }
  return config;
}

void validate(const ModelConfig& config) {
  const auto within = [](const char* what, int64_t value, int64_t low, int64_t high) {
    require(low <= value && value <= high, "[model] expected {} from {} to {}, got {}", what, low, high,
            value);
  };
  // Far beyond any use; they keep every product of sizes within 64 bits.
  within("layers", config.layers, 1, 1 << 12);
  within("heads", config.heads, 1, 1 << 12);
  within("width", config.width, 1, 1 << 17);
  within("context", config.context, 1, 1 << 20);
  within("vocabulary", config.vocabulary, 1, 1 << 24);
  within("tile_keys", config.tile_keys, 0, 1 << 20);
  require(config.width % config.heads == 0, "[model] expected a width that is a multiple of {} heads, got {}",
          config.heads, config.width);
  const auto limit = [](const char* what, float value) {
    require(std::isfinite(value) && value >= 0, "[model] expected {} of 0 (off) or more, got {}", what,
            value);
  };
  limit("softcap", config.softcap);
  limit("qk_clip", config.qk_clip);
  require(!(config.qk_clip > 0 && config.qk_norm),
          "[model] expected qk_clip or qk_norm, got both: normalised q and k do not feel a scaled weight");
}

// --- Parameters

namespace {
constexpr int64_t kAlignment =
    64;  // floats: 256 bytes, as device memory likes it; rows: whole tiles of products
constexpr int64_t aligned(int64_t count) { return (count + kAlignment - 1) / kAlignment * kAlignment; }
}  // namespace

int64_t ModelConfig::padded_vocabulary() const { return aligned(vocabulary); }

int64_t ParameterTensor::count() const {
  int64_t product = 1;
  for (int64_t size : shape) product *= size;
  return product;
}

ParameterTable::ParameterTable(const ModelConfig& config) {
  validate(config);
  using enum ParameterInit;
  const int64_t C = config.width, V = config.vocabulary;
  const auto norm = [&](const std::string& name) {
    add(name + ".weight", {C}, one, false);
    if (config.norm_bias) add(name + ".bias", {C}, zero, false);
  };
  const auto linear = [&](const std::string& name, int64_t in, int64_t out, ParameterInit init,
                          int64_t parts) {
    add(name + ".weight", {in, out}, init, true, parts);
    if (config.bias) add(name + ".bias", {out}, zero, false);
  };
  const auto of_vocabulary = [&](const char* name) {
    add(name, {V, C}, normal, false);
    size_ = tensors_.back().offset + config.padded_vocabulary() * C;
  };
  of_vocabulary("wte.weight");
  add("wpe.weight", {config.context, C}, normal, false);
  for (int64_t l = 0; l < config.layers; ++l) {
    const std::string layer = fmt::format("h.{}.", l);
    norm(layer + "ln_1");
    linear(layer + "attn.c_attn", C, 3 * C, normal, 3);
    if (config.qk_norm) {
      add(layer + "attn.q_norm.weight", {config.head_size()}, one, false);
      add(layer + "attn.k_norm.weight", {config.head_size()}, one, false);
    }
    if (config.gated_attention) linear(layer + "attn.c_gate", C, C, normal, 1);
    linear(layer + "attn.c_proj", C, C, residual, 1);
    norm(layer + "ln_2");
    linear(layer + "mlp.c_fc", C, 4 * C, normal, 1);
    linear(layer + "mlp.c_proj", 4 * C, C, residual, 1);
  }
  norm("ln_f");
  if (!config.tied_embeddings) of_vocabulary("lm_head.weight");
}

void ParameterTable::add(std::string name, std::vector<int64_t> shape, ParameterInit init, bool muon,
                         int64_t parts) {
  const bool matrix = shape.size() == 2;
  tensors_.push_back({std::move(name), std::move(shape), size_, matrix, muon, parts, init});
  size_ += aligned(tensors_.back().count());
}

const ParameterTensor* ParameterTable::find(std::string_view name) const {
  const auto found =
      std::find_if(tensors_.begin(), tensors_.end(), [&](const auto& t) { return t.name == name; });
  return found == tensors_.end() ? nullptr : &*found;
}

int64_t ParameterTable::parameter_count() const {
  int64_t count = 0;
  for (const ParameterTensor& tensor : tensors_) count += tensor.count();
  return count;
}

std::string describe(const ModelConfig& c) {
  return fmt::format("GPT-2, {} layers, {} heads, width {}, context {}, vocabulary {}{}{}, linear layers {}",
                     c.layers, c.heads, c.width, c.context, c.vocabulary, c.qk_norm ? ", qk_norm" : "",
                     c.gated_attention ? ", gated attention" : "",
                     c.precision == LinearPrecision::bf16 ? "bf16" : "fp32");
}

double flops_per_token(const ModelConfig& config, int64_t T) {
  const ParameterTable table(config);
  int64_t weights = config.tied_embeddings ? config.vocabulary * config.width : 0;
  for (const ParameterTensor& tensor : table.tensors())
    if (tensor.muon || tensor.name == "lm_head.weight") weights += tensor.count();
  return 6.0 * static_cast<double>(weights) + 12.0 * static_cast<double>(config.layers * config.width * T);
}

namespace {

// FNV-1a: names a tensor's random numbers, so that an option that adds tensors changes no other's.
uint32_t hash_of(std::string_view text) {
  uint32_t hash = 2166136261u;
  for (unsigned char c : text) hash = (hash ^ c) * 16777619u;
  return hash;
}

// Steps of training count from 0, so that this one's numbers are nobody else's.
constexpr uint32_t kInitStep = std::numeric_limits<uint32_t>::max();

void fill_normal(float* values, int64_t count, float deviation, uint64_t seed, uint32_t tensor) {
  // A call of philox gives four words, and so four normal numbers (Box-Muller).
  constexpr int64_t kWords = 4, kPart = 1 << 12;
  const int64_t calls = (count + kWords - 1) / kWords;
  parallel_for((calls + kPart - 1) / kPart, [&](int64_t part, int) {
    for (int64_t call = part * kPart; call < std::min(calls, (part + 1) * kPart); ++call) {
      const auto words =
          philox({static_cast<uint32_t>(call), static_cast<uint32_t>(call >> 32), tensor, kInitStep},
                 static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
      for (int64_t word = 0; word < kWords; ++word) {
        const int64_t n = call * kWords + word;
        if (n >= count) break;
        const auto unit = [&](int64_t w) {
          return (static_cast<double>(words[static_cast<size_t>(w)]) + 0.5) * 0x1p-32;
        };
        const double radius = std::sqrt(-2 * std::log(unit(word / 2 * 2)));
        const double angle = 2 * std::numbers::pi * unit(word / 2 * 2 + 1);
        values[n] =
            static_cast<float>(deviation * radius * (word % 2 == 0 ? std::cos(angle) : std::sin(angle)));
      }
    }
  });
}

}  // namespace

void initialise(const ModelConfig& config, const ParameterTable& table, uint64_t seed,
                std::span<float> parameters) {
  require(static_cast<int64_t>(parameters.size()) == table.size(), "[model] expected {} parameters, got {}",
          table.size(), parameters.size());
  constexpr float kDeviation = 0.02f;
  std::fill(parameters.begin(), parameters.end(), 0.0f);
  for (const ParameterTensor& tensor : table.tensors()) {
    float* values = parameters.data() + tensor.offset;
    if (tensor.init == ParameterInit::one) std::fill_n(values, tensor.count(), 1.0f);
    if (tensor.init == ParameterInit::normal || tensor.init == ParameterInit::residual) {
      const float scale = tensor.init == ParameterInit::residual
                              ? 1 / std::sqrt(2 * static_cast<float>(config.layers))
                              : 1.0f;
      fill_normal(values, tensor.count(), kDeviation * scale, seed, hash_of(tensor.name));
    }
  }
}

}  // namespace evenkeel
