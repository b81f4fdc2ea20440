#include "model/model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace evenkeel {

std::vector<float> query_key_factors(const ModelConfig& config, std::span<const HeadFacts> facts) {
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

int64_t clip_query_key(const ModelConfig& config, const ParameterTable& table,
                       std::span<const HeadFacts> facts, float* parameters) {
  const std::vector<float> factors = query_key_factors(config, facts);
  const int64_t H = config.heads, C = config.width, D = config.head_size(), Q = config.query_width(),
                stride = config.qkv_width();
  int64_t clipped = 0;
  for (int64_t l = 0; l < config.layers; ++l) {
    const ParameterTensor* weight = table.find(fmt::format("h.{}.attn.c_attn.weight", l));
    const ParameterTensor* bias = table.find(fmt::format("h.{}.attn.c_attn.bias", l));
    for (int64_t h = 0; h < H; ++h) {
      const float factor = factors[static_cast<size_t>(l * H + h)];
      if (factor == 1) continue;
      ++clipped;
      for (int64_t part : {0, 1}) {  // the columns of q, then of k
        const int64_t first = part * Q + h * D;
        for (int64_t row = 0; row < C; ++row)
          for (int64_t d = 0; d < D; ++d) parameters[weight->offset + row * stride + first + d] *= factor;
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
                            kUnknown, kUnknown, kUnknown, kUnknown, kUnknown};

HeadFacts facts_of(const FactSums& sums, const StepContext& context) {
  const double rows = static_cast<double>(sums.rows);
  HeadFacts facts = kNoFacts;
  if (context.score_facts) {
    facts.largest_score = sums.largest_score;
    facts.largest_row_mean = sums.largest_row_mean;
    if (sums.key_sequences > 0)
      facts.key_share = static_cast<float>(sums.key_share / static_cast<double>(sums.key_sequences));
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

Model::Model(const ModelConfig& config)
    : config_(config),
      table_(config),
      slopes_(alibi_slopes(config)),
      no_sinks_(config.sinks ? static_cast<size_t>(config.heads) : 0) {
  facts_.assign(static_cast<size_t>(config.layers * config.heads), kNoFacts);
  const auto find = [&](const std::string& name) {
    const ParameterTensor* tensor = table_.find(name);
    return tensor ? tensor->offset : -1;
  };
  for (int64_t l = 0; l < config_.layers; ++l) {
    const auto in_layer = [&](const char* name) { return find(fmt::format("h.{}.{}", l, name)); };
    offsets_.push_back({in_layer("ln_1.weight"), in_layer("ln_1.bias"), in_layer("attn.c_attn.weight"),
                        in_layer("attn.c_attn.bias"), in_layer("attn.q_norm.weight"),
                        in_layer("attn.k_norm.weight"), in_layer("attn.sinks"),
                        in_layer("attn.c_gate.weight"), in_layer("attn.c_gate.bias"),
                        in_layer("attn.c_proj.weight"), in_layer("attn.c_proj.bias"), in_layer("ln_2.weight"),
                        in_layer("ln_2.bias"), in_layer("mlp.c_fc.weight"), in_layer("mlp.c_fc.bias"),
                        in_layer("mlp.c_proj.weight"), in_layer("mlp.c_proj.bias")});
  }
  wte_ = find("wte.weight");
  wpe_ = find("wpe.weight");
  lnf_gain_ = find("ln_f.weight");
  lnf_bias_ = find("ln_f.bias");
  head_ = config_.tied_embeddings ? wte_ : find("lm_head.weight");
  set_plan(ScopedPlan(parse_plan("fp32")));
}

void Model::set_plan(const ScopedPlan& plan) {
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

AttentionProblem Model::attention_problem(int64_t layer, int64_t B, int64_t T) const {
  AttentionProblem p;
  p.B = B, p.T = p.N = T;
  p.H = config_.heads;
  p.G = config_.key_head_count();
  p.D = config_.head_size();
  p.type = config_.tensor_type();
  p.plans = plans_[static_cast<size_t>(layer)];
  p.softcap = config_.softcap;
  p.slopes = slopes_;
  p.sinks = no_sinks_;
  p.mask.causal = true;
  p.tile_keys = config_.tile_keys;
  p.layer = static_cast<uint32_t>(layer);
  return p;
}

const PrecisionPlan& Model::plan(int64_t layer, int64_t head) const {
  require(0 <= layer && layer < config_.layers && 0 <= head && head < config_.heads,
          "[model] expected a layer below {} and a head below {}, got {} and {}", config_.layers,
          config_.heads, layer, head);
  return plans_[static_cast<size_t>(layer)][static_cast<size_t>(head)];
}

void Model::start_captures(const Batch& batch, const StepContext& context) {
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
    for (Tensor<float>* t : {&c.q, &c.o, &c.d_o}) fit(*t, {B, H, T, config_.head_size()});
    for (Tensor<float>* t : {&c.k, &c.v}) fit(*t, {B, config_.key_head_count(), T, config_.head_size()});
    fit(c.lse, {B, H, T, 1});
  }
}

void Model::swap_captures(std::vector<LayerCapture>& other) {
  captures_.swap(other);
  for (LayerCapture& old : captures_) old.plans.clear();  // no step's any more
}

std::shared_ptr<float> Model::make_host_buffer() const {
  return {new float[static_cast<size_t>(table_.size())], std::default_delete<float[]>()};
}

const LayerCapture& Model::captured(int64_t layer) const {
  const auto at = static_cast<size_t>(layer);
  require_data(
      0 <= layer && at < captures_.size() && !captures_[at].plans.empty(),
      "layer {} was not captured: expected a step that was asked for it (StepContext::capture_sequences)",
      layer);
  return captures_[at];
}

void Model::check_batch(const Batch& batch, bool with_targets) const {
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
