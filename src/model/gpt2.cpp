#include "model/gpt2.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "base/error.h"
#include "base/threads.h"
#include "numerics/random.h"

namespace evenkeel {

Gpt2Config gpt2_preset(std::string_view name) {
  Gpt2Config config;
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

void validate(const Gpt2Config& config) {
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

int64_t Gpt2Config::padded_vocabulary() const { return aligned(vocabulary); }

int64_t ParameterTensor::count() const {
  int64_t product = 1;
  for (int64_t size : shape) product *= size;
  return product;
}

ParameterTable::ParameterTable(const Gpt2Config& config) {
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

double flops_per_token(const Gpt2Config& config, int64_t T) {
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

void initialise(const Gpt2Config& config, const ParameterTable& table, uint64_t seed,
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

std::vector<float> query_key_factors(const Gpt2Config& config, std::span<const HeadFacts> facts) {
  require(config.qk_clip > 0, "[model] expected a configuration with qk_clip above 0, got {}",
          config.qk_clip);
  std::vector<float> factors(facts.size(), 1.0f);
  for (size_t n = 0; n < facts.size(); ++n) {
    const float score = facts[n].largest_score;
    require(!std::isnan(score),
            "[model] qk_clip needs the last step's largest scores (StepContext::score_facts)");
    if (score > config.qk_clip && !std::isinf(score)) factors[n] = std::sqrt(config.qk_clip / score);
  }
  return factors;
}

int64_t clip_query_key(const Gpt2Config& config, const ParameterTable& table,
                       std::span<const HeadFacts> facts, float* parameters) {
  const std::vector<float> factors = query_key_factors(config, facts);
  const int64_t H = config.heads, C = config.width, D = config.head_size();
  int64_t clipped = 0;
  for (int64_t l = 0; l < config.layers; ++l) {
    const ParameterTensor* weight = table.find(fmt::format("h.{}.attn.c_attn.weight", l));
    const ParameterTensor* bias = table.find(fmt::format("h.{}.attn.c_attn.bias", l));
    for (int64_t h = 0; h < H; ++h) {
      const float factor = factors[static_cast<size_t>(l * H + h)];
      if (factor == 1) continue;
      ++clipped;
      for (int64_t part : {0, 1}) {  // the columns of q, then of k
        const int64_t first = part * C + h * D;
        for (int64_t row = 0; row < C; ++row)
          for (int64_t d = 0; d < D; ++d) parameters[weight->offset + row * 3 * C + first + d] *= factor;
        if (bias)
          for (int64_t d = 0; d < D; ++d) parameters[bias->offset + first + d] *= factor;
      }
    }
  }
  return clipped;
}

// --- What the backends share

namespace {
constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();
}
const HeadFacts kNoFacts = {kUnknown, kUnknown, kUnknown, kUnknown, kUnknown,
                            kUnknown, kUnknown, kUnknown, kUnknown};

HeadFacts facts_of(const FactSums& sums, const StepContext& context) {
  const double rows = static_cast<double>(sums.rows);
  HeadFacts facts = kNoFacts;
  if (context.score_facts) {
    facts.largest_score = sums.largest_score;
    facts.largest_row_mean = sums.largest_row_mean;
  }
  if (context.score_facts || context.tie_facts || context.residual_facts) {
    facts.mean_lse = static_cast<float>(sums.lse / rows);
    facts.largest_lse = sums.largest_lse;
  }
  const double sampled = sums.sampled > 0 ? static_cast<double>(sums.sampled) : rows;
  if (context.tie_facts) facts.tied_rows = static_cast<float>(static_cast<double>(sums.tied) / sampled);
  if (context.residual_facts) {
    const double mean = sums.residual / sampled, square = sums.residual_squares / sampled;
    facts.residual_mean = mean;
    facts.residual_error = std::sqrt(std::max(0.0, square - mean * mean) / std::max(1.0, sampled - 1));
    facts.residual_rms = std::sqrt(square);
    facts.delta_rms = std::sqrt(sums.delta_squares / sampled);
  }
  return facts;
}

Gpt2::Gpt2(const Gpt2Config& config) : config_(config), table_(config) {
  facts_.assign(static_cast<size_t>(config.layers * config.heads), kNoFacts);
  const auto find = [&](const std::string& name) {
    const ParameterTensor* tensor = table_.find(name);
    return tensor ? tensor->offset : -1;
  };
  for (int64_t l = 0; l < config_.layers; ++l) {
    const auto in_layer = [&](const char* name) { return find(fmt::format("h.{}.{}", l, name)); };
    offsets_.push_back({in_layer("ln_1.weight"), in_layer("ln_1.bias"), in_layer("attn.c_attn.weight"),
                        in_layer("attn.c_attn.bias"), in_layer("attn.q_norm.weight"),
                        in_layer("attn.k_norm.weight"), in_layer("attn.c_gate.weight"),
                        in_layer("attn.c_gate.bias"), in_layer("attn.c_proj.weight"),
                        in_layer("attn.c_proj.bias"), in_layer("ln_2.weight"), in_layer("ln_2.bias"),
                        in_layer("mlp.c_fc.weight"), in_layer("mlp.c_fc.bias"), in_layer("mlp.c_proj.weight"),
                        in_layer("mlp.c_proj.bias")});
  }
  wte_ = find("wte.weight");
  wpe_ = find("wpe.weight");
  lnf_gain_ = find("ln_f.weight");
  lnf_bias_ = find("ln_f.bias");
  head_ = config_.tied_embeddings ? wte_ : find("lm_head.weight");
  set_plan(ScopedPlan(parse_plan("fp32")));
}

void Gpt2::set_plan(const ScopedPlan& plan) {
  plan.check_scopes(config_.layers, config_.heads);
  std::vector<std::vector<PrecisionPlan>> plans(static_cast<size_t>(config_.layers));
  for (int64_t l = 0; l < config_.layers; ++l)
    for (int64_t h = 0; h < config_.heads; ++h) {
      plans[static_cast<size_t>(l)].push_back(plan.at(static_cast<int>(l), static_cast<int>(h)));
    }
  std::swap(plans_, plans);
  for (int64_t l = 0; l < config_.layers; ++l) try {
      check(attention_problem(l, 1, config_.context));
    } catch (const std::invalid_argument& error) {
      std::swap(plans_, plans);
      throw std::invalid_argument(fmt::format("[model] layer {}: {}", l, error.what()));
    }
  ++plan_version_;
}

AttentionProblem Gpt2::attention_problem(int64_t layer, int64_t B, int64_t T) const {
  AttentionProblem p;
  p.B = B, p.T = p.N = T;
  p.H = p.G = config_.heads;
  p.D = config_.head_size();
  p.type = config_.tensor_type();
  p.plans = plans_[static_cast<size_t>(layer)];
  p.softcap = config_.softcap;
  p.mask.causal = true;
  p.tile_keys = config_.tile_keys;
  p.layer = static_cast<uint32_t>(layer);
  return p;
}

const PrecisionPlan& Gpt2::plan(int64_t layer, int64_t head) const {
  require(0 <= layer && layer < config_.layers && 0 <= head && head < config_.heads,
          "[model] expected a layer below {} and a head below {}, got {} and {}", config_.layers,
          config_.heads, layer, head);
  return plans_[static_cast<size_t>(layer)][static_cast<size_t>(head)];
}

void Gpt2::start_captures(const Batch& batch, const StepContext& context) {
  const int64_t B = std::min(batch.B, context.capture_sequences), H = config_.heads,
                T = context.capture_rows > 0 ? std::min(batch.T, context.capture_rows) : batch.T;
  captures_.resize(static_cast<size_t>(config_.layers));
  const auto fit = [](Tensor<float>& tensor, const std::array<int64_t, 4>& shape) {
    if (tensor.shape() != shape) tensor = Tensor<float>(shape);
  };
  for (int64_t l = 0; l < config_.layers; ++l) {
    LayerCapture& c = captures_[static_cast<size_t>(l)];
    c.plans.clear();
    if (context.capture_layer >= 0 && l != context.capture_layer) {
      c = {};
      continue;
    }
    fit(c.x, {B, 1, T, config_.width});
    for (Tensor<float>* t : {&c.q, &c.k, &c.v, &c.o, &c.d_o}) fit(*t, {B, H, T, config_.head_size()});
    fit(c.lse, {B, H, T, 1});
  }
}

void Gpt2::swap_captures(std::vector<LayerCapture>& other) {
  captures_.swap(other);
  for (LayerCapture& old : captures_) old.plans.clear();  // no step's any more
}

std::shared_ptr<float> Gpt2::make_host_buffer() const {
  return {new float[static_cast<size_t>(table_.size())], std::default_delete<float[]>()};
}

const LayerCapture& Gpt2::captured(int64_t layer) const {
  const auto at = static_cast<size_t>(layer);
  require_data(
      0 <= layer && at < captures_.size() && !captures_[at].plans.empty(),
      "layer {} was not captured: expected a step that was asked for it (StepContext::capture_sequences)",
      layer);
  return captures_[at];
}

void Gpt2::check_batch(const Batch& batch, bool with_targets) const {
  require(batch.B >= 1, "[model] expected at least one sequence, got {}", batch.B);
  require(1 <= batch.T && batch.T <= config_.context, "[model] expected 1 to {} tokens a sequence, got {}",
          config_.context, batch.T);
  const auto check = [&](const char* what, std::span<const int32_t> values) {
    require(static_cast<int64_t>(values.size()) == batch.B * batch.T, "[model] expected {} x {} {}, got {}",
            batch.B, batch.T, what, values.size());
    for (size_t n = 0; n < values.size(); ++n)
      require(0 <= values[n] && values[n] < config_.vocabulary,
              "[model] expected {} from 0 to {}, found {} at place {} of sequence {}", what,
              config_.vocabulary - 1, values[n], n % static_cast<size_t>(batch.T),
              n / static_cast<size_t>(batch.T));
  };
  check("tokens", batch.tokens);
  if (with_targets) check("targets", batch.targets);
}

}  // namespace evenkeel
