// Text from a run's newest checkpoint, on the CPU, with the plan that held there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "numerics/random.h"
#include "training/run_config.h"
#include "training/tokenizer.h"

namespace evenkeel {

struct SampleOptions {
  int64_t tokens = 200;      // to generate
  double temperature = 0.8;  // 0: always the likeliest
  int64_t top = 0;           // only from the `top` likeliest; 0: from all
  uint64_t seed = 1;         // of the choice
};

// The next token. Of equally likely ones the first comes first; a draw is taken from `draw` unless the temperature is 0.
// DataError where a logit is NaN or the largest is not finite: such weights have no next token.
int32_t choose_token(std::span<const float> logits, const SampleOptions& options, RandomStream& draw);

class Sampler {
 public:
  // tokenizer: tokenizer.json or vocab.bpe; empty: the one beside the run's data, and bytes for a vocabulary of at most
  // 256. DataError where the folder is no run, has no checkpoint, or a tokenizer is needed and not found.
  explicit Sampler(const std::filesystem::path& run, std::string tokenizer = {});

  int64_t step() const { return step_; }  // of the checkpoint
  // False: an older version wrote the checkpoint, without checksums.
  bool verified() const { return verified_; }
  // Tokens that follow the prompt. `see` gets the text of each as it comes.
  std::vector<int32_t> generate(std::string_view prompt, const SampleOptions& options,
                                const std::function<void(const std::string&)>& see = {}) const;
  std::string text_of(std::span<const int32_t> tokens) const;

 private:
  RunConfig config_;
  int64_t step_ = 0;
  bool verified_ = false;
  std::unique_ptr<Model> model_;
  std::optional<Tokenizer> tokenizer_;  // none: tokens are bytes
};

}  // namespace evenkeel
