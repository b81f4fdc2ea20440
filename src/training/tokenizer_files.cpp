// The files of a Tokenizer (tokenizer.h): Hugging Face's tokenizer.json and GPT-2's vocab.bpe. Both write a
// token's bytes as printable characters, GPT-2's way.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/error.h"
#include "base/json_text.h"
#include "base/text.h"
#include "base/whole_file.h"
#include "training/tokenizer.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

// Every byte as a character that can be seen. A printable byte of Latin-1 is the character of that number. The
// others are the characters from 256 on. `order` is the order of those characters, which is GPT-2's of ids.
struct ByteCharacters {
  static constexpr int kFirstOther = 256;
  std::array<std::string, kByteValues> character;  // of a byte, in UTF-8
  std::array<uint8_t, kByteValues> order;          // bytes
  std::unordered_map<std::string, char> byte_of;

  ByteCharacters() {
    const auto printable = [](int byte) {
      return (byte > ' ' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);  // 0xAD: the soft hyphen
    };
    int placed = 0, others = 0;
    for (bool wanted : {true, false})
      for (int byte = 0; byte < kByteValues; ++byte) {
        if (printable(byte) != wanted) continue;
        order[placed++] = static_cast<uint8_t>(byte);
        const int point = wanted ? byte : kFirstOther + others++;
        append_utf8(character[byte], static_cast<char32_t>(point));
        byte_of[character[byte]] = static_cast<char>(byte);
      }
  }

  std::string write(std::string_view bytes) const {
    std::string text;
    for (char byte : bytes) text += character[static_cast<uint8_t>(byte)];
    return text;
  }

  // False: there is a character that stands for no byte.
  bool read(std::string_view text, std::string& bytes) const {
    bytes.clear();
    for (size_t at = 0; at < text.size();) {
      const size_t length = static_cast<uint8_t>(text[at]) < 0x80 ? 1 : 2;
      const auto found = byte_of.find(std::string(text.substr(at, length)));
      if (found == byte_of.end()) return false;
      bytes += found->second;
      at += length;
    }
    return true;
  }
};

const ByteCharacters& byte_characters() {
  static const ByteCharacters characters;
  return characters;
}

// The two sides of "left right"; false: not of that form.
bool split_merge(std::string_view line, std::string_view& left, std::string_view& right) {
  const size_t blank = line.find(' ');
  if (blank == 0 || blank == std::string_view::npos || blank + 1 == line.size()) return false;
  left = line.substr(0, blank);
  right = line.substr(blank + 1);
  return right.find(' ') == std::string_view::npos;
}

// ------------------------------------------------------------------------------------------- tokenizer.json

// Reads the parts of the file that change the tokens, and refuses what it does not know: a tokenizer that is
// nearly the same is worse than none.
class JsonReader {
 public:
  JsonReader(const Json& root, std::string_view file) : root_(root), file_(file) {}

  Tokenizer read() {
    check(root_.is_object(), "expected an object", root_);
    check_is_byte_level_bpe();
    const Json& model = root_["model"];
    const Json& vocab = member(model, "vocab");
    check(vocab.is_object(), "model.vocab: expected an object of tokens and ids", vocab);
    read_special_tokens(vocab);
    tokens_.resize(vocab.size() + special_outside_vocab_);
    std::vector<bool> taken(tokens_.size());
    const auto place = [&](std::string_view content, int64_t id, std::string bytes) {
      require_data(id >= 0 && id < static_cast<int64_t>(tokens_.size()) && !taken[id],
                   "{}: token '{}' has id {}: expected the ids from 0 to {}, each once", file_,
                   shown(content), id, tokens_.size() - 1);
      taken[id] = true;
      tokens_[id] = std::move(bytes);
    };
    for (const auto& [content, id] : special_) place(content, id, content);
    std::string bytes;
    for (const auto& [content, id] : vocab.items()) {
      if (special_.contains(content)) continue;
      check(id.is_number_integer(), "model.vocab: expected a whole number as id", id);
      require_data(!content.empty() && byte_characters().read(content, bytes),
                   "{}: token '{}': expected GPT-2's characters for bytes", file_, shown(content));
      ids_[content] = id.get<int32_t>();
      place(content, id.get<int64_t>(), bytes);
    }
    for (uint8_t byte : byte_characters().order)
      require_data(ids_.contains(byte_characters().character[byte]),
                   "{}: expected a token for each of 256 bytes, none for 0x{:02X} ('{}')", file_, byte,
                   byte_characters().character[byte]);
    std::vector<Merge> merges = read_merges(member(model, "merges"));
    std::vector<int32_t> special;
    for (const auto& [content, id] : special_) special.push_back(static_cast<int32_t>(id));
    return Tokenizer(std::move(tokens_), std::move(special), std::move(merges));
  }

 private:
  void check(bool condition, std::string_view expected, const Json& found) const {
    if (condition) return;
    throw DataError(fmt::format("{}: {}, found {}", file_, expected,
                                shown(found.dump(-1, ' ', false, Json::error_handler_t::replace))));
  }

  const Json& member(const Json& object, const char* name) const {
    const auto found = object.find(name);
    require_data(found != object.end(), "{}: expected a member '{}', found none", file_, name);
    return *found;
  }

  // Absent, null, or one of the harmless values.
  void check_neutral(const Json& object, const char* name, const std::vector<Json>& harmless) const {
    const auto found = object.find(name);
    if (found == object.end() || found->is_null()) return;
    check(std::find(harmless.begin(), harmless.end(), *found) != harmless.end(),
          fmt::format("'{}': expected none, as in GPT-2's byte-level BPE", name), *found);
  }

  void check_is_byte_level_bpe() const {
    const Json& model = member(root_, "model");
    check(model.is_object(), "model: expected an object", model);
    check_neutral(model, "type", {"BPE"});
    check_neutral(model, "dropout", {0, 0.0});
    check_neutral(model, "continuing_subword_prefix", {""});
    check_neutral(model, "end_of_word_suffix", {""});
    check_neutral(model, "byte_fallback", {false});
    check_neutral(model, "ignore_merges", {false});
    check_neutral(root_, "normalizer", {});
    const Json& splitter = member(root_, "pre_tokenizer");
    check(splitter.is_object() && splitter.value("type", Json()) == Json("ByteLevel"),
          "pre_tokenizer: expected the type ByteLevel", splitter);
    check(splitter.value("add_prefix_space", Json(true)) == Json(false),
          "pre_tokenizer: expected add_prefix_space false", splitter);
    check(splitter.value("use_regex", Json(true)) == Json(true), "pre_tokenizer: expected use_regex true",
          splitter);
  }

  void read_special_tokens(const Json& vocab) {
    const auto added = root_.find("added_tokens");
    if (added == root_.end() || added->is_null()) return;
    check(added->is_array(), "added_tokens: expected a list", *added);
    for (const Json& token : *added) {
      check(token.is_object() && token.value("content", Json()).is_string() &&
                token.value("id", Json()).is_number_integer(),
            "added_tokens: expected objects with an id and a content", token);
      // One that is not special would be found in text before words are.
      check(token.value("special", Json(false)) == Json(true), "added_tokens: expected special tokens alone",
            token);
      const std::string content = token["content"];
      const int64_t id = token["id"];
      check(!content.empty() && special_.emplace(content, id).second,
            "added_tokens: expected each token once, and none empty", token);
      const auto listed = vocab.find(content);
      if (listed == vocab.end())
        ++special_outside_vocab_;
      else
        check(*listed == Json(id),
              fmt::format("token '{}': expected the id {} of added_tokens", shown(content), id), *listed);
    }
  }

  std::vector<Merge> read_merges(const Json& list) const {
    check(list.is_array(), "model.merges: expected a list", list);
    std::vector<Merge> merges;
    merges.reserve(list.size());
    std::unordered_map<uint64_t, size_t> seen;
    for (const Json& item : list) {
      std::string_view left, right;
      const bool is_pair = item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string();
      if (is_pair) {
        left = item[0].get_ref<const std::string&>();
        right = item[1].get_ref<const std::string&>();
      }
      check(is_pair || (item.is_string() && split_merge(item.get_ref<const std::string&>(), left, right)),
            fmt::format("model.merges[{}]: expected \"left right\" or a pair of strings", merges.size()),
            item);
      const auto id = [&](std::string_view token) {
        const auto found = ids_.find(std::string(token));
        require_data(found != ids_.end(),
                     "{}: model.merges[{}]: '{}' is not an ordinary token of model.vocab", file_,
                     merges.size(), shown(token));
        return found->second;
      };
      const Merge merge{id(left), id(right), id(std::string(left) + std::string(right))};
      const uint64_t pair =
          uint64_t{static_cast<uint32_t>(merge.left)} << 32 | static_cast<uint32_t>(merge.right);
      const auto [first, is_new] = seen.emplace(pair, merges.size());
      require_data(is_new, "{}: model.merges[{}]: '{}' and '{}' are merged already by model.merges[{}]",
                   file_, merges.size(), shown(left), shown(right), first->second);
      merges.push_back(merge);
    }
    return merges;
  }

  const Json& root_;
  std::string_view file_;
  std::map<std::string, int64_t> special_;  // content -> id
  size_t special_outside_vocab_ = 0;
  std::unordered_map<std::string, int32_t> ids_;  // of ordinary tokens, as written in the file
  std::vector<std::string> tokens_;               // bytes by id
};

constexpr std::string_view kMergesMark = "#version";

}  // namespace

Tokenizer Tokenizer::load(const std::string& path) {
  const MappedFile file(path);
  return file.text().starts_with(kMergesMark) ? from_merges(file.text(), path) : from_json(file.text(), path);
}

Tokenizer Tokenizer::from_json(std::string_view text, std::string_view file) {
  Json root;
  try {
    root = parse_json(text);
  } catch (const Json::exception& error) {
    throw DataError(fmt::format("{}: expected a tokenizer.json, or a vocab.bpe that begins with {}: {}", file,
                                kMergesMark, error.what()));
  }
  return JsonReader(root, file).read();
}

Tokenizer Tokenizer::from_merges(std::string_view text, std::string_view file) {
  const ByteCharacters& characters = byte_characters();
  std::vector<std::string> bytes;
  std::unordered_map<std::string, int32_t> ids;  // as written in the file
  for (uint8_t byte : characters.order) {
    ids[characters.character[byte]] = static_cast<int32_t>(bytes.size());
    bytes.emplace_back(1, static_cast<char>(byte));
  }
  std::vector<Merge> merges;
  for (size_t number = 1; !text.empty(); ++number) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (number == 1) {
      require_data(line.starts_with(kMergesMark), "{}: line 1: expected {}, found '{}'", file, kMergesMark,
                   shown(line));
      continue;
    }
    if (line.empty() && text.empty()) break;
    std::string_view left, right;
    require_data(split_merge(line, left, right),
                 "{}: line {}: expected two tokens with a blank between, found '{}'", file, number,
                 shown(line));
    const auto id = [&](std::string_view token) {
      const auto found = ids.find(std::string(token));
      require_data(found != ids.end(), "{}: line {}: '{}' is neither a byte nor made by a line above", file,
                   number, shown(token));
      return found->second;
    };
    const Merge merge{id(left), id(right), static_cast<int32_t>(bytes.size())};
    require_data(ids.emplace(std::string(left) + std::string(right), merge.result).second,
                 "{}: line {}: '{}{}' is made by a line above already", file, number, shown(left),
                 shown(right));
    require_data(!ids.contains(std::string(kEndOfText)), "{}: line {}: expected no merge that makes {}", file,
                 number, kEndOfText);
    bytes.push_back(bytes[merge.left] + bytes[merge.right]);
    merges.push_back(merge);
  }
  require_data(!bytes.empty(), "{}: expected {}", file, kMergesMark);
  bytes.emplace_back(kEndOfText);
  const auto end_of_text = static_cast<int32_t>(bytes.size()) - 1;
  return Tokenizer(std::move(bytes), {end_of_text}, std::move(merges));
}

std::string Tokenizer::to_json() const {
  using Ordered = nlohmann::ordered_json;
  const auto written = [&](int32_t token) { return byte_characters().write(bytes_[token]); };
  const Ordered byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  Ordered added = Ordered::array(), merges = Ordered::array();
  Ordered::object_t vocab;  // as a vector: its operator[] looks through all members
  for (int32_t token = 0; token < vocabulary(); ++token) {
    const bool is_special = std::binary_search(special_.begin(), special_.end(), token);
    vocab.emplace_back(is_special ? bytes_[token] : written(token), token);
    if (is_special)
      added.push_back({{"id", token},
                       {"content", bytes_[token]},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", true}});
  }
  for (const Merge& merge : merges_) merges.push_back(written(merge.left) + " " + written(merge.right));
  const Ordered root = {{"version", "1.0"},
                        {"truncation", nullptr},
                        {"padding", nullptr},
                        {"added_tokens", added},
                        {"normalizer", nullptr},
                        {"pre_tokenizer", byte_level},
                        {"post_processor", nullptr},
                        {"decoder", byte_level},
                        {"model",
                         {{"type", "BPE"},
                          {"dropout", nullptr},
                          {"unk_token", nullptr},
                          {"continuing_subword_prefix", nullptr},
                          {"end_of_word_suffix", nullptr},
                          {"fuse_unk", false},
                          {"byte_fallback", false},
                          {"ignore_merges", false},
                          {"vocab", std::move(vocab)},
                          {"merges", merges}}}};
  return root.dump(2) + "\n";
}

}  // namespace evenkeel
