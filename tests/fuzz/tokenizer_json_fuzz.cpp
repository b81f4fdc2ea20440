// Files of tokenizers. The first byte picks the kind: a tokenizer.json as it is, a vocab.bpe, or three lines that are
// put into a good tokenizer.json. These are more of the vocabulary, the merges, the added tokens, since a vocabulary
// of 256 bytes is longer than most inputs.
#include <array>

#include "fuzz/fuzz.h"
#include "training/tokenizer.h"

using namespace evenkeel;

namespace {

std::string take_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  return std::string(line);
}

// The vocabulary of the bytes alone, as text that more can be added to.
const std::string& byte_vocabulary() {
  static const std::string text = [] {
    const std::string json = Tokenizer::byte_tokenizer().to_json();
    const size_t begin = json.find("\"vocab\": {") + 10;
    return json.substr(begin, json.find(",\n      \"<|endoftext|>\"") - begin);
  }();
  return text;
}

Tokenizer parse(uint8_t kind, std::string_view text) {
  if (kind % 3 == 0) return Tokenizer::from_json(text, "t.json");
  if (kind % 3 == 1) return Tokenizer::from_merges(text, "vocab.bpe");
  const std::string more = take_line(text), merges = take_line(text), added = take_line(text);
  return Tokenizer::from_json(
      R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false}, "added_tokens": [)" + added +
          R"(], "model": {"merges": [)" + merges + R"(], "vocab": {)" + byte_vocabulary() + more + "}}}",
      "t.json");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text = fuzz::text_of(data + 1, size - 1);
  try {
    const Tokenizer tokenizer = parse(data[0], text);
    fuzz::must(tokenizer.vocabulary() >= kByteValues, "every byte has a token");
    const std::string written = tokenizer.to_json();
    fuzz::must(Tokenizer::from_json(written, "again.json").to_json() == written,
               "a tokenizer is the same written and read again");
    Encoder encoder(tokenizer);
    std::vector<int32_t> tokens;
    for (const std::string& input : {std::string(text), std::string(100, 'a') + written.substr(0, 3000)}) {
      tokens.clear();
      encoder.encode(input, tokens);
      fuzz::must(tokenizer.decode(tokens) == input, "text is the same encoded and decoded");
    }
  } catch (const DataError&) {  // a bad file is never taken for a bad request
  }
  return 0;
}
