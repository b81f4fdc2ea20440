#include "training/token_file.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/threads.h"
#include "numerics/random.h"
#include "records/schema.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr size_t kLargestCopiedFile = 1 << 16;
constexpr size_t kBinaryProbe = 8 << 10;
constexpr size_t kLargestMeta = 1 << 24;  // bytes of meta.json
constexpr int64_t kTokenBytes = sizeof(uint16_t);

constexpr int32_t kLlmcMagic = 20240520, kLlmcVersion = 1;
constexpr int64_t kLlmcHeaderInts = 256, kLlmcHeaderBytes = kLlmcHeaderInts * sizeof(int32_t);
static_assert(kLlmcHeaderBytes <= kTokenHeadBytes);

bool is_binary(std::string_view text) {
  return text.substr(0, kBinaryProbe).find('\0') != std::string_view::npos;
}

// fs functions that throw, as DataErrors with the system's words.
template <class Function>
auto on_files(Function&& f) {
  try {
    return f();
  } catch (const fs::filesystem_error& error) {
    throw DataError(fmt::format("cannot read {}: {}", error.path1().string(), error.code().message()));
  }
}

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

// A run's folder as our trainer makes it, from the beginning on: what lies in it is no text to train on. Some other program's
// config.toml beside texts does not make their folder a run.
bool is_trained_run(const fs::path& folder) {
  std::error_code error;
  return fs::exists(record_path(folder, RecordFile::config), error) &&
         fs::is_directory(folder / "checkpoints", error);
}

// All regular files below a folder: not hidden, no links, nothing of a run.
void collect_files(const fs::path& folder, const fs::path& except, std::vector<std::string>& found) {
  for (auto entry = fs::recursive_directory_iterator(folder); entry != fs::recursive_directory_iterator();
       ++entry) {
    const fs::file_type type = entry->symlink_status().type();  // of a link itself: it may lead nowhere
    const bool is_folder = type == fs::file_type::directory;
    if (is_hidden(entry->path()) || (is_folder && is_trained_run(entry->path())) ||
        (is_folder && !except.empty() && fs::equivalent(entry->path(), except))) {
      if (is_folder) entry.disable_recursion_pending();
    } else if (type == fs::file_type::regular) {
      found.push_back(entry->path().string());
    }
  }
}

bool is_token_file_name(const fs::path& path) { return path.extension() == ".bin"; }
// val.bin, fineweb_val_000000.bin; not interval.bin
bool is_validation_name(const fs::path& path) {
  std::string word;
  for (char character : path.filename().string() + ".") {
    if (std::isalpha(static_cast<unsigned char>(character))) {
      word += character;
      continue;
    }
    if (word == "val" || word == "validation") return true;
    word.clear();
  }
  return false;
}

// * stands for any characters, ? for one.
bool matches(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p, ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

// The files right in a folder that `wanted` takes, in the order of their names.
template <class Predicate>
std::vector<std::string> files_in(const fs::path& folder, Predicate&& wanted) {
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder))
    if (std::error_code error;
        !is_hidden(entry.path()) && wanted(entry.path()) && entry.is_regular_file(error))
      found.push_back(entry.path().string());
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

TokenSource::FileBytes::FileBytes(const std::string& path) : file_(path) {
  if (file_.size() > kLargestCopiedFile) return;
  copied_.resize(file_.size());
  file_.read_at(0, copied_.size(), copied_.data());
  file_.close();
}

void TokenSource::FileBytes::read_at(int64_t offset, size_t count, std::byte* to) const {
  if (copied_.empty())
    file_.read_at(static_cast<uint64_t>(offset), count, to);
  else
    std::memcpy(to, copied_.data() + offset, count);
}

TextFiles find_text_files(const std::vector<std::string>& paths, const std::string& except) {
  return on_files([&] {
    const bool has_exception = !except.empty() && fs::exists(except);
    TextFiles result;
    for (const std::string& path : paths) {
      std::vector<std::string> found;
      require_data(fs::exists(path), "{}: no such file or folder", path);
      if (fs::is_directory(path))
        collect_files(path, has_exception ? fs::path(except) : fs::path(), found);
      else
        found.push_back(path);
      std::sort(found.begin(), found.end());
      for (std::string& file : found) {
        require_data(fs::is_regular_file(file), "{}: expected a regular file or a folder", file);
        const RandomAccessFile opened(file);
        std::string head(std::min<size_t>(opened.size(), kBinaryProbe), '\0');
        opened.read_at(0, head.size(), head.data());
        if (is_binary(head))
          ++result.binary;
        else
          result.files.push_back({std::move(file), static_cast<int64_t>(opened.size())});
      }
    }
    return result;
  });
}

const char* name(TokenKind kind) {
  switch (kind) {
    case TokenKind::nanogpt:
      return "nanoGPT tokens (uint16)";
    case TokenKind::llmc:
      return "llm.c shard (uint16)";
    case TokenKind::text:
      return "text (bytes)";
  }
  return "";
}

TokenLayout token_layout(std::string_view bytes, std::string_view file) {
  return token_layout(bytes, static_cast<int64_t>(bytes.size()), file);
}

TokenLayout token_layout(std::string_view bytes, int64_t size, std::string_view file) {
  const auto header_int = [&](size_t index) {
    int32_t value;
    std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
    return value;
  };
  require_data(size > 0, "{}: expected tokens, found an empty file", file);
  const bool has_magic = size >= static_cast<int64_t>(sizeof(int32_t)) && header_int(0) == kLlmcMagic;
  if (!has_magic) {
    require_data(
        size % kTokenBytes == 0,
        "{}: expected uint16 tokens or the header of an llm.c shard, found an odd number of bytes ({})", file,
        size);
    return {TokenKind::nanogpt, 0, size / kTokenBytes};
  }
  require_data(size >= kLlmcHeaderBytes, "{}: expected a header of {} bytes, found a file of {}", file,
               kLlmcHeaderBytes, size);
  require_data(header_int(1) == kLlmcVersion, "{}: expected version {} in the header, found {}", file,
               kLlmcVersion, header_int(1));
  const int64_t tokens = header_int(2);
  require_data(tokens > 0, "{}: expected at least one token, the header says {}", file, tokens);
  require_data(size == kLlmcHeaderBytes + tokens * kTokenBytes,
               "{}: the header says {} tokens, so expected {} bytes, found {}", file, tokens,
               kLlmcHeaderBytes + tokens * kTokenBytes, size);
  return {TokenKind::llmc, kLlmcHeaderBytes, tokens};
}

TokenMeta parse_token_meta(std::string_view text, std::string_view file) {
  using Json = nlohmann::json;
  constexpr int64_t kLargestVocabulary = int64_t{1} << 16;
  try {
    const Json root = parse_json(text);
    TokenMeta meta;
    const Json& vocabulary = root.at("vocabulary");
    require_data(vocabulary.is_number_integer(), "{}: expected a whole number as vocabulary", file);
    meta.vocabulary = vocabulary.get<int64_t>();
    require_data(meta.vocabulary > 0 && meta.vocabulary <= kLargestVocabulary,
                 "{}: expected a vocabulary of 1 to {}, found {}", file, kLargestVocabulary, meta.vocabulary);
    const Json& files = root.at("files");
    require_data(files.is_object(), "{}: expected an object of files", file);
    for (const auto& [key, value] : files.items()) {
      const Json tokens = value.at("tokens");
      require_data(tokens.is_number_integer(), "{}: expected a whole number of tokens in {}", file, key);
      meta.files.emplace_back(key, tokens.get<int64_t>());
    }
    return meta;
  } catch (const Json::exception& error) {
    throw DataError(fmt::format("{}: expected \"vocabulary\" and \"files\" with their \"tokens\": {}", file,
                                error.what()));
  }
}

TokenSource TokenSource::open(const std::string& path) {
  return on_files([&] {
    if (fs::is_directory(path)) {
      const auto tokens =
          files_in(path, [](const fs::path& p) { return is_token_file_name(p) && !is_validation_name(p); });
      return tokens.empty() ? open_text(path) : open_token_files(tokens);
    }
    if (fs::exists(path)) return is_token_file_name(path) ? open_token_files({path}) : open_text(path);
    const std::string pattern = fs::path(path).filename().string();
    require_data(pattern.find_first_of("*?") != std::string::npos, "{}: no such file or folder", path);
    const fs::path folder = fs::path(path).parent_path();
    const auto found = files_in(folder.empty() ? "." : folder, [&](const fs::path& p) {
      return is_token_file_name(p) && matches(pattern, p.filename().string());
    });
    require_data(!found.empty(), "{}: no token file (*.bin) is called so", path);
    return open_token_files(found);
  });
}

std::optional<TokenSource> TokenSource::open_validation(const std::string& path) {
  return on_files([&]() -> std::optional<TokenSource> {
    if (!fs::is_directory(path)) return {};
    const auto tokens =
        files_in(path, [](const fs::path& p) { return is_token_file_name(p) && is_validation_name(p); });
    if (tokens.empty()) return {};
    return open_token_files(tokens);
  });
}

TokenSource TokenSource::open_text(const std::string& path) {
  TokenSource source;
  const TextFiles text = find_text_files({path});
  for (const TextFile& file : text.files) {
    FileBytes bytes(file.path);
    const int64_t size = bytes.size();
    if (size > 0) source.add(file.path, std::move(bytes), 0, size);
  }
  require_data(source.size_ > 0,
               "{}: expected text, or token files called *.bin; found {} empty and {} binary files", path,
               text.files.size(), text.binary);
  source.vocabulary_ = 256;
  return source;
}

TokenSource TokenSource::open_token_files(const std::vector<std::string>& paths) {
  TokenSource source;
  for (const std::string& path : paths) {
    FileBytes bytes(path);
    std::string head(std::min(kTokenHeadBytes, static_cast<size_t>(bytes.size())), '\0');
    bytes.read_at(0, head.size(), reinterpret_cast<std::byte*>(head.data()));
    const TokenLayout layout = token_layout(head, bytes.size(), path);
    if (source.segments_.empty()) source.kind_ = layout.kind;
    require_data(layout.kind == source.kind_, "{}: expected {} as in {}, found {}", path, name(source.kind_),
                 paths[0], name(layout.kind));
    source.add(path, std::move(bytes), layout.first_byte, layout.tokens);
    const fs::path meta_path = fs::path(path).parent_path() / "meta.json";
    if (!fs::exists(meta_path)) continue;
    const TokenMeta meta = parse_token_meta(read_regular_file(meta_path, kLargestMeta), meta_path.string());
    for (const auto& [file, tokens] : meta.files) {
      if (file != fs::path(path).filename().string()) continue;
      require_data(tokens == layout.tokens,
                   "{}: expected the {} tokens of {}, found {}: prepare the folder again", path, tokens,
                   meta_path.string(), layout.tokens);
      source.vocabulary_ = std::max(source.vocabulary_, meta.vocabulary);
    }
  }
  if (source.vocabulary_ == 0) source.vocabulary_ = source.largest_token() + 1;
  return source;
}

void TokenSource::add(std::string path, FileBytes bytes, int64_t first_byte, int64_t tokens) {
  segments_.push_back({std::move(path), std::move(bytes), first_byte, size_, tokens});
  size_ += tokens;
}

int32_t TokenSource::largest_token() const {
  constexpr int64_t kBlock = 1 << 20;  // tokens
  std::vector<int32_t> largest(static_cast<size_t>(thread_count()));
  std::vector<std::vector<uint16_t>> buffers(largest.size());
  parallel_for((size_ + kBlock - 1) / kBlock, [&](int64_t block, int worker) {
    const int64_t begin = block * kBlock, end = std::min(size_, begin + kBlock);
    std::vector<uint16_t>& tokens = buffers[static_cast<size_t>(worker)];
    tokens.resize(static_cast<size_t>(end - begin));
    const auto bytes = std::as_writable_bytes(std::span(tokens));
    read_bytes(static_cast<uint64_t>(begin * kTokenBytes), bytes.size(), bytes.data());
    for (uint16_t token : tokens)
      largest[static_cast<size_t>(worker)] = std::max<int32_t>(largest[static_cast<size_t>(worker)], token);
  });
  return *std::max_element(largest.begin(), largest.end());
}

std::vector<TokenSource::Segment>::const_iterator TokenSource::segment_at(int64_t token) const {
  return std::upper_bound(segments_.begin(), segments_.end(), token,
                          [](int64_t at, const Segment& s) { return at < s.begin; }) -
         1;
}

void TokenSource::read_bytes(uint64_t offset, size_t count, std::byte* to) const {
  const auto width = static_cast<uint64_t>(token_bytes());
  for (auto segment = segment_at(static_cast<int64_t>(offset / width)); count > 0; ++segment) {
    const uint64_t within = offset - static_cast<uint64_t>(segment->begin) * width;
    const auto taken = static_cast<size_t>(
        std::min<uint64_t>(count, static_cast<uint64_t>(segment->tokens) * width - within));
    segment->bytes.read_at(segment->first_byte + static_cast<int64_t>(within), taken, to);
    offset += taken;
    count -= taken;
    to += taken;
  }
}

void TokenSource::read(int64_t offset, int64_t count, int32_t* out) const {
  require(offset >= 0 && count >= 0 && offset <= size_ && count <= size_ - offset,
          "[tokens] expected a range within {} tokens, got {} from {} on", size_, count, offset);
  if (count == 0) return;
  // The bytes go to the end of `out` and are spread from the front on. So a token is written at or before the place that
  // its bytes were read from.
  const size_t bytes = static_cast<size_t>(count * token_bytes());
  std::byte* const from = reinterpret_cast<std::byte*>(out + count) - bytes;
  read_bytes(static_cast<uint64_t>(offset * token_bytes()), bytes, from);
  if (kind_ == TokenKind::text) {
    for (int64_t i = 0; i < count; ++i) out[i] = std::to_integer<uint8_t>(from[i]);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t token;
    std::memcpy(&token, from + i * kTokenBytes, sizeof token);
    out[i] = token;
    require_data(out[i] < vocabulary_, "{}: expected tokens below {}, the vocabulary of meta.json, found {}",
                 segment_at(offset + i)->path, vocabulary_, out[i]);
  }
}

std::string TokenSource::digest() const {
  static std::mutex mutex;
  static std::map<std::string, std::string> known;  // by identities
  std::string identity = name(kind_);
  for (const Segment& segment : segments_) identity += "\n" + segment.bytes.identity();
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(identity); found != known.end()) return found->second;
  }
  const Digest digest = digest_in_blocks(
      static_cast<uint64_t>(size_ * token_bytes()),
      [this](uint64_t offset, size_t count, std::byte* to) { read_bytes(offset, count, to); });
  const std::lock_guard lock(mutex);
  return known[identity] = to_hex(digest);
}

std::vector<std::string> TokenSource::files() const {
  std::vector<std::string> paths;
  for (const Segment& segment : segments_) paths.push_back(segment.path);
  return paths;
}

void batch_offsets(uint64_t seed, int64_t step, int64_t rows, int64_t tokens_per_row, int64_t source_size,
                   int64_t* out) {
  constexpr uint32_t kStream = 0x62617463;  // "batc": no tensor of a step has this number
  require(step >= 0 && step <= int64_t{~uint32_t{0}}, "[tokens] expected a step from 0 to {}, got {}",
          ~uint32_t{0}, step);
  require(rows >= 0 && tokens_per_row > 0, "[tokens] expected rows of at least one token, got {} of {}", rows,
          tokens_per_row);
  require_data(tokens_per_row <= source_size, "[tokens] expected at least {} tokens for one row, found {}",
               tokens_per_row, source_size);
  const auto places = static_cast<uint64_t>(source_size - tokens_per_row + 1);
  const RandomKey key{seed, static_cast<uint32_t>(step), kStream};
  for (int64_t row = 0; row < rows; ++row) {
    const auto element = 2 * static_cast<uint64_t>(row);
    const uint64_t bits = uint64_t{random_bits(key, element)} << 32 | random_bits(key, element + 1);
    // The high half of the product: uniform but for 2^-64 times the number of places.
    out[row] = static_cast<int64_t>(static_cast<unsigned __int128>(bits) * places >> 64);
  }
}

}  // namespace evenkeel
