#include "training/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "training/checkpoint.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBytes = 256;  // a vocabulary of so many needs no tokenizer

std::optional<Tokenizer> find_tokenizer(const RunConfig& config, std::string file) {
  if (file.empty() && config.model.vocabulary > kBytes) {
    const fs::path data = config.data;
    std::error_code error;
    const fs::path beside = (fs::is_directory(data, error) ? data : data.parent_path()) / "tokenizer.json";
    require_data(fs::exists(beside, error),
                 "expected a tokenizer for a vocabulary of {} (--tokenizer FILE), found none beside {}",
                 config.model.vocabulary, config.data);
    file = beside.string();
  }
  if (file.empty()) return {};
  Tokenizer tokenizer = Tokenizer::load(file);
  require_data(tokenizer.vocabulary() <= config.model.vocabulary,
               "{}: expected a tokenizer of at most {} tokens, as the model has, found {}", file,
               config.model.vocabulary, tokenizer.vocabulary());
  return tokenizer;
}

}  // namespace

int32_t choose_token(std::span<const float> logits, const SampleOptions& options, RandomStream& draw) {
  float largest = -INFINITY;
  for (const float logit : logits) {
    require_data(!std::isnan(logit), "expected finite logits, found NaN: the weights are not usable");
    largest = std::max(largest, logit);
  }
  require_data(std::isfinite(largest), "expected finite logits, found {}: the weights are not usable",
               largest);
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  if (options.top > 0) order.resize(std::min(order.size(), static_cast<size_t>(options.top)));
  if (options.temperature == 0) return order[0];
  std::vector<double> weight(order.size());
  double sum = 0;
  for (size_t i = 0; i < order.size(); ++i)
    sum += weight[i] =
        std::exp((logits[static_cast<size_t>(order[i])] - logits[static_cast<size_t>(order[0])]) /
                 options.temperature);
  double left = draw.unit() * sum;
  size_t chosen = 0;
  while (chosen + 1 < order.size() && (left -= weight[chosen]) > 0) ++chosen;
  return order[chosen];
}

Sampler::Sampler(const fs::path& run, std::string tokenizer)
    : config_(config_of_own_run(run)), tokenizer_(find_tokenizer(config_, std::move(tokenizer))) {
  const std::vector<Checkpoint> checkpoints = find_checkpoints(run / "checkpoints");
  require_data(!checkpoints.empty(), "{}: expected a checkpoint, found none", (run / "checkpoints").string());
  step_ = checkpoints.back().step;
  model_ = make_model_cpu(config_.model, config_.seed);
  verified_ = load_weights(checkpoints.back().folder / "model.safetensors", *model_);
  model_->set_plan(ScopedPlan::parse(config_.plan_at(step_)));
}

std::string Sampler::text_of(std::span<const int32_t> tokens) const {
  if (tokenizer_) return tokenizer_->decode(tokens);
  return std::string(tokens.begin(), tokens.end());
}

std::vector<int32_t> Sampler::generate(std::string_view prompt, const SampleOptions& options,
                                       const std::function<void(const std::string&)>& see) const {
  std::vector<int32_t> tokens;
  if (tokenizer_)
    tokens = tokenizer_->encode(prompt);
  else
    for (const char byte : prompt) tokens.push_back(static_cast<unsigned char>(byte));
  if (tokens.empty()) tokens.push_back(tokenizer_ ? tokenizer_->end_of_text() : '\n');
  for (const int32_t token : tokens)
    require(token >= 0 && token < config_.model.vocabulary,
            "--prompt: expected text whose tokens lie from 0 to {}, found token {}",
            config_.model.vocabulary - 1, token);
  // A model may have more tokens than its tokenizer: rounded up, never trained.
  const int64_t known = tokenizer_ ? tokenizer_->vocabulary() : config_.model.vocabulary;
  const size_t begin = tokens.size();
  RandomStream draw({options.seed, 0, 0});
  for (int64_t n = 0; n < options.tokens; ++n) {
    const size_t seen = std::min(tokens.size(), static_cast<size_t>(config_.model.context));
    const std::vector<float> logits = model_->logits(std::span(tokens).last(seen));
    tokens.push_back(choose_token(std::span(logits).first(static_cast<size_t>(known)), options, draw));
    if (see) see(text_of(std::span(tokens).last(1)));
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(begin), tokens.end()};
}

}  // namespace evenkeel
