#include "model/model_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>

#include "base/error.h"
#include "base/threads.h"
#include "numerics/random.h"

namespace evenkeel {

ModelConfig model_preset(std::string_view name) {
  ModelConfig config;
  const bool llama = name.starts_with("llama-");
  const std::string_view size = llama ? name.substr(6) : name;
  if (size == "micro") {
    config.layers = 3, config.heads = 4, config.width = 128, config.context = 128, config.vocabulary = 256;
    config.norm_bias = !llama;
    config.precision = LinearPrecision::fp32;
  } else if (size == "nano") {
    config.layers = 6, config.heads = 6, config.width = 384, config.context = 512, config.vocabulary = 8192;
  } else if (name == "gpt2-medium") {
    config.layers = 24, config.heads = 16, config.width = 1024;
  } else {
    require(name == "gpt2" || name == "llama-124m", "[model] expected a preset ({}), got '{}'",
            fmt::join(kModelPresets, ", "), name);
  }
  if (!llama) return config;
  config.norm = NormKind::rms_norm;
  config.positions = Positions::rotary;
  config.mlp = MlpKind::swiglu;
  config.key_heads = size == "124m" ? 4 : 2;
  config.hidden = size == "micro" ? 384 : size == "nano" ? 1216 : 2432;
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
  within("key_heads", config.key_heads, 0, config.heads);
  within("head_size", config.head_features, 0, 1 << 12);
  within("hidden", config.hidden, 0, 1 << 20);
  within("tile_keys", config.tile_keys, 0, 1 << 20);
  require(config.head_features > 0 || config.width % config.heads == 0,
          "[model] expected a width that is a multiple of {} heads, got {}", config.heads, config.width);
  require(config.heads % config.key_head_count() == 0,
          "[model] expected key_heads that divide the {} heads, got {}", config.heads, config.key_heads);
  require(!config.is_rotary() || config.head_size() % 2 == 0,
          "[model] expected an even head size for rotary positions, got {}", config.head_size());
  require(std::isfinite(config.rotary_base) && config.rotary_base > 1,
          "[model] expected a rotary_base above 1, got {}", config.rotary_base);
  require(std::isfinite(config.norm_epsilon) && config.norm_epsilon > 0,
          "[model] expected a norm_epsilon above 0, got {}", config.norm_epsilon);
  require(config.norm == NormKind::rms_norm || config.norm_epsilon == ModelConfig().norm_epsilon,
          "[model] expected a norm_epsilon of {} with layer_norm, got {}", ModelConfig().norm_epsilon,
          config.norm_epsilon);
  require(config.norm == NormKind::layer_norm || !config.norm_bias,
          "[model] expected no norm_bias with rms_norm, which has none, got one");
  require(!(config.positions == Positions::alibi && config.softcap > 0),
          "[model] expected positions other than alibi with softcap, got a softcap of {}", config.softcap);
  const auto limit = [](const char* what, float value) {
    require(std::isfinite(value) && value >= 0, "[model] expected {} of 0 (off) or more, got {}", what,
            value);
  };
  limit("softcap", config.softcap);
  limit("qk_clip", config.qk_clip);
  require(!(config.qk_clip > 0 && config.qk_norm),
          "[model] expected qk_clip or qk_norm, got both: normalised q and k do not feel a scaled weight");
  require(!(config.qk_clip > 0 && config.key_head_count() != config.heads),
          "[model] expected qk_clip only where each head has its own keys, got {} key heads for {} heads",
          config.key_head_count(), config.heads);
}

std::vector<float> alibi_slopes(const ModelConfig& config) {
  if (config.positions != Positions::alibi) return {};
  const int64_t heads = config.heads;
  const auto whole = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(heads)));
  std::vector<float> slopes;
  for (int64_t n = 1; n <= heads; ++n) {
    const double exponent =
        n <= whole ? -8.0 * static_cast<double>(n) / static_cast<double>(whole)
                   : -4.0 * static_cast<double>(2 * (n - whole) - 1) / static_cast<double>(whole);
    slopes.push_back(static_cast<float>(std::exp2(exponent)));
  }
  return slopes;
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
  const int64_t C = config.width, V = config.vocabulary, F = config.hidden_width();
  const int64_t Q = config.query_width(), K = config.key_width();
  const auto norm = [&](const std::string& name) {
    add(name + ".weight", {C}, one);
    if (config.norm_bias) add(name + ".bias", {C}, zero);
  };
  const auto linear = [&](const std::string& name, int64_t in, ParameterInit init,
                          std::vector<MatrixPart> parts) {
    const int64_t out = parts.back().first + parts.back().columns;
    add(name + ".weight", {in, out}, init, std::move(parts));
    if (config.bias) add(name + ".bias", {out}, zero);
  };
  const auto of_vocabulary = [&](const char* name) {
    add(name, {V, C}, normal);
    size_ = tensors_.back().offset + config.padded_vocabulary() * C;
  };
  of_vocabulary("wte.weight");
  if (config.positions == Positions::learned) add("wpe.weight", {config.context, C}, normal);
  for (int64_t l = 0; l < config.layers; ++l) {
    const std::string layer = fmt::format("h.{}.", l);
    norm(layer + "ln_1");
    linear(layer + "attn.c_attn", C, normal, {{"q", 0, Q}, {"k", Q, K}, {"v", Q + K, K}});
    if (config.qk_norm) {
      add(layer + "attn.q_norm.weight", {config.head_size()}, one);
      add(layer + "attn.k_norm.weight", {config.head_size()}, one);
    }
    if (config.sinks) add(layer + "attn.sinks", {config.heads}, zero);
    if (config.gated_attention) linear(layer + "attn.c_gate", C, normal, {{"", 0, Q}});
    linear(layer + "attn.c_proj", Q, residual, {{"", 0, C}});
    norm(layer + "ln_2");
    if (config.mlp == MlpKind::swiglu)
      linear(layer + "mlp.c_fc", C, normal, {{"gate", 0, F}, {"up", F, F}});
    else
      linear(layer + "mlp.c_fc", C, normal, {{"", 0, F}});
    linear(layer + "mlp.c_proj", F, residual, {{"", 0, C}});
  }
  norm("ln_f");
  if (!config.tied_embeddings) of_vocabulary("lm_head.weight");
}

void ParameterTable::add(std::string name, std::vector<int64_t> shape, ParameterInit init,
                         std::vector<MatrixPart> parts) {
  const bool matrix = shape.size() == 2, muon = !parts.empty();
  tensors_.push_back({std::move(name), std::move(shape), size_, matrix, muon, std::move(parts), init});
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
  const bool gpt2 =
      c.norm == NormKind::layer_norm && c.positions == Positions::learned && c.mlp == MlpKind::gelu;
  const bool llama = c.norm == NormKind::rms_norm && c.is_rotary() && c.mlp == MlpKind::swiglu;
  const std::string family =
      gpt2    ? "GPT-2"
      : llama ? "Llama"
              : fmt::format("{}, {} positions, {}", kNormNames[static_cast<size_t>(c.norm)],
                            kPositionNames[static_cast<size_t>(c.positions)],
                            kMlpNames[static_cast<size_t>(c.mlp)]);
  return fmt::format("{}, {} layers, {} heads{}, width {}, context {}, vocabulary {}{}{}{}, linear layers {}",
                     family, c.layers, c.heads,
                     c.key_head_count() == c.heads ? "" : fmt::format(" on {} key heads", c.key_head_count()),
                     c.width, c.context, c.vocabulary, c.qk_norm ? ", qk_norm" : "", c.sinks ? ", sinks" : "",
                     c.gated_attention ? ", gated attention" : "",
                     c.precision == LinearPrecision::bf16 ? "bf16" : "fp32");
}

double flops_per_token(const ModelConfig& config, int64_t T) {
  const ParameterTable table(config);
  int64_t weights = config.tied_embeddings ? config.vocabulary * config.width : 0;
  for (const ParameterTensor& tensor : table.tensors())
    if (tensor.muon || tensor.name == "lm_head.weight") weights += tensor.count();
  return 6.0 * static_cast<double>(weights) +
         12.0 * static_cast<double>(config.layers * config.query_width() * T);
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
