// `evenkeel sample`: text from a checkpoint.
#include "training/sample.h"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/options.h"

namespace evenkeel::cli {

int run_sample(int argc, char** argv) {
  std::vector<std::string> words;
  std::string prompt, tokenizer;
  SampleOptions settings;
  int64_t seed = static_cast<int64_t>(settings.seed);
  bool json = false;
  Options options("sample RUN [options]", "Generates text from the newest checkpoint of a run.",
                  "sample runs/a --prompt 'int main' --tokens 100");
  options.words("RUN", words, 1, 1);
  options.value("--prompt", "TEXT", "what the text begins with", prompt, Options::Empty::allowed);
  options.value("--tokens", "N", "how many to generate", settings.tokens, 1, 1 << 20);
  options.value("--temperature", "T", "0: always the likeliest", settings.temperature, 0, 1e6);
  options.value("--top", "N", "only from the N likeliest; 0: from all", settings.top, 0, 1 << 20);
  options.value("--seed", "N", "of the choice", seed, 0, int64_t{1} << 40);
  options.value("--tokenizer", "FILE",
                "tokenizer.json or vocab.bpe (default: beside the data; bytes for text)", tokenizer);
  options.flag("--json", "prompt, text and tokens as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  settings.seed = static_cast<uint64_t>(seed);

  const Sampler sampler(words[0], tokenizer);
  if (!sampler.verified())
    fmt::print(stderr, "note: the checkpoint has no checksums (an older version wrote it): not verified\n");
  if (json) {
    const std::vector<int32_t> tokens = sampler.generate(prompt, settings);
    const nlohmann::ordered_json out = {
        {"schema", 1},     {"run", words[0]},  {"step", sampler.step()},
        {"seed", seed},    {"prompt", prompt}, {"text", sampler.text_of(tokens)},
        {"tokens", tokens}};
    // A model of bytes may write what is no UTF-8.
    fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    return 0;
  }
  fmt::print("{}", prompt);
  sampler.generate(prompt, settings, [](const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  });
  fmt::print("\n");
  return 0;
}

}  // namespace evenkeel::cli
