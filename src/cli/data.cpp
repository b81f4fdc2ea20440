// `evenkeel data`: text to tokens, synthetic text, a look at a token file.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/progress.h"
#include "base/threads.h"
#include "base/whole_file.h"
#include "cli/options.h"
#include "training/prepare.h"
#include "training/pretokenize.h"
#include "training/synth.h"
#include "training/token_file.h"
#include "training/tokenizer.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

void print_json(const Json& json) {
  fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));  // text may be no UTF-8
}

int run_prepare(int argc, char** argv) {
  PrepareRequest request;
  request.tokenizer = "bpe:8192";
  bool json = false;
  Options options("data prepare --out FOLDER [options] PATH...",
                  "Text files and folders of them to token files: train.bin and val.bin (nanoGPT's uint16), "
                  "tokenizer.json\n"
                  "(Hugging Face's) and meta.json. Every file is a document; <|endoftext|> ends it. Binary "
                  "files, hidden files\n"
                  "and links in folders are left out.",
                  "data prepare --tokenizer bpe:8192 --out data/mine src docs");
  options.value("--out", "FOLDER", "where the files go", request.folder);
  options.value("--tokenizer", "T",
                "bpe:N (trained on the text; default bpe:8192), bytes, tokenizer.json or vocab.bpe",
                request.tokenizer);
  options.value("--val-share", "X", "share of the text for val.bin, below 1; 0: no val.bin",
                request.validation_share, 0, std::nextafter(1.0, 0.0));
  options.flag("--json", "the same as JSON", json);
  options.words("files or folders of text", request.paths, 1, std::numeric_limits<size_t>::max());
  if (!options.parse(argc, argv)) return 0;
  require(!request.folder.empty(), "expected --out FOLDER");

  const char* stage_shown = nullptr;
  std::optional<Progress> line;
  const Prepared result = prepare_tokens(request, [&](const char* stage, int64_t total, int64_t done) {
    if (stage != stage_shown) line.emplace(stage_shown = stage, total);
    line->advance(done);
  });
  line.reset();

  if (json) {
    const auto split_json = [](const PreparedSplit& part) {
      return Json{{"tokens", part.tokens}, {"bytes", part.bytes}, {"documents", part.documents}};
    };
    print_json({{"schema", 1},
                {"folder", request.folder},
                {"tokenizer", request.tokenizer},
                {"vocabulary", result.vocabulary},
                {"binary_files_left_out", result.binary_files},
                {"train", split_json(result.train)},
                {"validation", split_json(result.validation)}});
    return 0;
  }
  const auto print_split = [](const char* file, const PreparedSplit& part) {
    fmt::print("{:<11}{} tokens of {} bytes in {} documents ({:.2f} bytes a token)\n", file, part.tokens,
               part.bytes, part.documents,
               static_cast<double>(part.bytes) / static_cast<double>(std::max<int64_t>(1, part.tokens)));
  };
  print_split("train.bin", result.train);
  if (result.validation.documents > 0)
    print_split("val.bin", result.validation);
  else if (request.validation_share > 0)
    fmt::print("val.bin    none: the text cannot be cut at --val-share {}\n", request.validation_share);
  fmt::print("vocabulary {}", result.vocabulary);
  if (result.vocabulary < result.asked_vocabulary)
    fmt::print(" of the {} asked for: no pair is left that occurs twice", result.asked_vocabulary);
  fmt::print("\n");
  if (result.binary_files > 0) fmt::print("left out   {} binary files\n", result.binary_files);
  fmt::print("in         {}\n", request.folder);
  return 0;
}

int run_synth(int argc, char** argv) {
  int64_t bytes = 1'000'000, seed = 0;
  std::string out;
  bool json = false;
  Options options(
      "data synth --out FILE [options]",
      "Text in a made-up language with structure to learn; the same bytes for the same seed, and a longer\n"
      "text begins with the shorter.",
      "data synth --bytes 10000000 --seed 1 --out synth.txt");
  options.value("--out", "FILE", "where the text goes", out);
  options.value("--bytes", "N", "its length (default 1000000)", bytes, 1, int64_t{1} << 40);
  options.value("--seed", "S", "which text (default 0)", seed, 0, std::numeric_limits<int64_t>::max());
  options.flag("--json", "what was written, as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  require(!out.empty(), "expected --out FILE");
  const SyntheticLanguage language(static_cast<uint64_t>(seed));
  WholeFileWriter file(out);
  {
    constexpr size_t kAtOnce = 1 << 20;
    Progress progress("bytes", bytes);
    std::string text;
    for (int64_t index = 0, left = bytes; left > 0;) {
      while (text.size() < std::min(kAtOnce, static_cast<size_t>(left))) text += language.paragraph(index++);
      text.resize(std::min(text.size(), static_cast<size_t>(left)));
      file.append(text);
      left -= static_cast<int64_t>(text.size());
      progress.advance(static_cast<int64_t>(text.size()));
      text.clear();
    }
  }
  file.commit();
  if (json)
    print_json({{"schema", 1}, {"file", out}, {"bytes", bytes}, {"seed", seed}});
  else
    fmt::print("{}: {} bytes, seed {}\n", out, bytes, seed);
  return 0;
}

// Text for a terminal: what is not printable UTF-8 as \n, \t or \xNN.
std::string printable(std::string_view text) {
  std::string shown;
  for (size_t at = 0; at < text.size();) {
    const size_t length = character_at(text, at).bytes;
    const auto byte = static_cast<uint8_t>(text[at]);
    const bool is_bad_utf8 = length == 1 && byte >= 0x80;
    const bool is_control = byte < 0x20 || byte == 0x7F ||
                            (length == 2 && byte == 0xC2 && static_cast<uint8_t>(text[at + 1]) < 0xA0);
    if (byte == '\n')
      shown += "\\n";
    else if (byte == '\t')
      shown += "\\t";
    else if (is_bad_utf8 || is_control)
      for (size_t i = 0; i < length; ++i)
        shown += fmt::format("\\x{:02X}", static_cast<uint8_t>(text[at + i]));
    else
      shown += text.substr(at, length);
    at += length;
  }
  return shown;
}

struct TokenCount {
  int32_t token;
  int64_t count;
};

// The tokens that occur, the most frequent first.
std::vector<TokenCount> count_tokens(const TokenSource& source) {
  constexpr int64_t kBlock = 1 << 20;
  const auto vocabulary = static_cast<size_t>(source.vocabulary());
  std::vector<std::vector<int64_t>> counts(thread_count());
  std::vector<std::vector<int32_t>> blocks(counts.size());
  Progress progress("tokens", source.size());
  parallel_for((source.size() + kBlock - 1) / kBlock, [&](int64_t block, int worker) {
    counts[worker].resize(vocabulary);
    const int64_t begin = block * kBlock, size = std::min(kBlock, source.size() - begin);
    blocks[worker].resize(static_cast<size_t>(size));
    source.read(begin, size, blocks[worker].data());
    for (int32_t token : blocks[worker]) ++counts[worker][token];
    progress.advance(size);
  });
  std::vector<TokenCount> found;
  for (size_t token = 0; token < vocabulary; ++token) {
    int64_t count = 0;
    for (const auto& part : counts) count += part.empty() ? 0 : part[token];
    if (count > 0) found.push_back({static_cast<int32_t>(token), count});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const TokenCount& a, const TokenCount& b) { return a.count > b.count; });
  return found;
}

// The tokenizer asked for, or the one that lies with the tokens; none: tokens are numbers.
std::optional<Tokenizer> tokenizer_for(const TokenSource& source, const std::string& asked) {
  require(!asked.starts_with("bpe:"), "--tokenizer {}: expected bytes, a tokenizer.json or a vocab.bpe",
          asked);
  if (asked == "bytes") return Tokenizer::byte_tokenizer();
  if (!asked.empty()) return Tokenizer::load(asked);
  if (source.kind() == TokenKind::text) return Tokenizer::byte_tokenizer();
  const fs::path beside = fs::path(source.files()[0]).parent_path() / "tokenizer.json";
  if (fs::exists(beside)) return Tokenizer::load(beside.string());
  return {};
}

int run_inspect(int argc, char** argv) {
  std::vector<std::string> paths;
  std::string tokenizer_name;
  int64_t head = 64;
  bool json = false;
  Options options("data inspect PATH [options]",
                  "What a token file, a shard, a folder of them or a text holds: kind, tokens, the most "
                  "frequent, how it\n"
                  "begins. Says what is wrong with a bad one (exit code 3).",
                  "data inspect data/mine/train.bin --head 100");
  options.value("--tokenizer", "T",
                "to decode with: bytes, tokenizer.json or vocab.bpe (default: the one beside it)",
                tokenizer_name);
  options.value("--head", "N", "tokens to show from the beginning (default 64)", head, 0, 1'000'000);
  options.flag("--json", "the same as JSON", json);
  options.words("a token file, a folder or a text", paths, 1, 1);
  if (!options.parse(argc, argv)) return 0;

  const TokenSource source = TokenSource::open(paths[0]);
  const std::optional<Tokenizer> tokenizer = tokenizer_for(source, tokenizer_name);
  const std::vector<TokenCount> counts = count_tokens(source);
  int32_t largest = 0;
  for (const TokenCount& row : counts) largest = std::max(largest, row.token);
  require_data(!tokenizer || largest < tokenizer->vocabulary(),
               "{}: has token {}, its tokenizer has {} tokens: expected the tokenizer it was made with",
               paths[0], largest, tokenizer ? tokenizer->vocabulary() : 0);
  std::vector<int32_t> first(static_cast<size_t>(std::min(head, source.size())));
  source.read(0, static_cast<int64_t>(first.size()), first.data());
  const std::optional<TokenSource> validation = TokenSource::open_validation(paths[0]);

  constexpr size_t kFrequent = 10;
  const size_t frequent = std::min(kFrequent, counts.size());
  if (json) {
    Json out = {{"schema", 1},
                {"path", paths[0]},
                {"kind", name(source.kind())},
                {"files", source.files().size()},
                {"tokens", source.size()},
                {"vocabulary", source.vocabulary()},
                {"largest_token", largest},
                {"different_tokens", counts.size()},
                {"validation_tokens", validation ? Json(validation->size()) : Json()},
                {"frequent", Json::array()},
                {"head", first},
                {"text", tokenizer ? Json(tokenizer->decode(first)) : Json()}};
    for (size_t i = 0; i < frequent; ++i)
      out["frequent"].push_back({{"token", counts[i].token},
                                 {"count", counts[i].count},
                                 {"text", tokenizer ? Json(tokenizer->bytes_of(counts[i].token)) : Json()}});
    print_json(out);
    return 0;
  }
  fmt::print("kind       {}\n", name(source.kind()));
  if (source.files().size() > 1) fmt::print("files      {}\n", source.files().size());
  fmt::print("tokens     {}\n", source.size());
  if (validation) fmt::print("validation {} tokens\n", validation->size());
  fmt::print("vocabulary {}, of which {} occur; the largest is {}\n", source.vocabulary(), counts.size(),
             largest);
  fmt::print("frequent\n");
  for (size_t i = 0; i < frequent; ++i) {
    fmt::print("  {:>6}  {:>6.2f} %", counts[i].token,
               100 * static_cast<double>(counts[i].count) / static_cast<double>(source.size()));
    if (tokenizer) fmt::print("  \"{}\"", printable(tokenizer->bytes_of(counts[i].token)));
    fmt::print("\n");
  }
  if (first.empty()) return 0;
  std::string beginning;
  for (int32_t token : first) beginning += fmt::format("{}{}", beginning.empty() ? "" : " ", token);
  if (tokenizer) beginning = fmt::format("\"{}\"", printable(tokenizer->decode(first)));
  fmt::print("begins     {}\n", beginning);
  return 0;
}

}  // namespace

int run_data(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "prepare") return run_prepare(argc - 1, argv + 1);
  if (what == "synth") return run_synth(argc - 1, argv + 1);
  if (what == "inspect") return run_inspect(argc - 1, argv + 1);
  std::vector<std::string> words;
  Options options("data prepare|synth|inspect [options]",
                  "prepare    text files and folders to tokens, with a tokenizer trained on them or given\n"
                  "synth      text in a made-up language\n"
                  "inspect    what a token file or a text holds\n"
                  "\n`evenkeel data prepare --help` shows the options of prepare; so for the others.",
                  "data prepare --tokenizer bpe:8192 --out data/mine src docs");
  options.words("what to do: prepare, synth or inspect", words, 1, 1, {"prepare", "synth", "inspect"});
  options.parse(argc, argv);
  return 0;
}

}  // namespace evenkeel::cli
