#include "training/tokenizer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "base/error.h"
#include "base/threads.h"
#include "training/pretokenize.h"

namespace evenkeel {
namespace {

constexpr uint64_t kMix0 = 0x9E3779B97F4A7C15u, kMix1 = 0xD6E8FEB86659FD93u;  // odd, of even bit density

constexpr uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

constexpr size_t kLongestWord = 1 << 20;
constexpr size_t kLongestSimpleWord = 48;  // up to here, looking at all pairs again beats a heap

}  // namespace

Tokenizer::Tokenizer(std::vector<std::string> bytes, std::vector<int32_t> special, std::vector<Merge> merges)
    : bytes_(std::move(bytes)), special_(std::move(special)), merges_(std::move(merges)) {
  std::sort(special_.begin(), special_.end());
  const auto is_special = [this](int32_t token) {
    return std::binary_search(special_.begin(), special_.end(), token);
  };
  byte_tokens_.fill(-1);
  for (int32_t token = 0; token < vocabulary(); ++token)
    if (bytes_[token].size() == 1 && !is_special(token))
      byte_tokens_[static_cast<uint8_t>(bytes_[token][0])] = token;
  for (int64_t value = 0; value < kByteValues; ++value)
    require(byte_tokens_[value] >= 0, "[tokenizer] expected a token for each of 256 bytes, none for 0x{:02X}",
            value);

  pairs_.resize(std::bit_ceil(2 * merges_.size() + 2));
  pair_shift_ = 64 - std::countr_zero(pairs_.size());
  for (size_t rank = 0; rank < merges_.size(); ++rank) {
    const Merge& merge = merges_[rank];
    for (int32_t token : {merge.left, merge.right, merge.result})
      require(token >= 0 && token < vocabulary() && !is_special(token),
              "[tokenizer] merge {}: expected ordinary tokens, got {}", rank, token);
    require(bytes_[merge.result] == bytes_[merge.left] + bytes_[merge.right],
            "[tokenizer] merge {}: token {} is not token {} followed by token {}", rank, merge.result,
            merge.left, merge.right);
    auto& slot = const_cast<PairSlot&>(find_pair(merge.left, merge.right));
    require(slot.pair == kNoPair, "[tokenizer] merges {} and {} are of the same pair", slot.rank, rank);
    slot = {pair_of(merge.left, merge.right), static_cast<uint32_t>(rank), merge.result};
  }

  for (int32_t token : special_)
    if (special_.size() == 1 || bytes_[token] == kEndOfText) end_of_text_ = token;
}

Tokenizer Tokenizer::byte_tokenizer() {
  std::vector<std::string> bytes;
  for (int64_t value = 0; value < kByteValues; ++value) bytes.emplace_back(1, static_cast<char>(value));
  bytes.emplace_back(kEndOfText);
  return Tokenizer(std::move(bytes), {static_cast<int32_t>(kByteValues)}, {});
}

const Tokenizer::PairSlot& Tokenizer::find_pair(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  size_t place = pair * kMix0 >> pair_shift_;
  while (pairs_[place].pair != pair && pairs_[place].pair != kNoPair)
    place = (place + 1) & (pairs_.size() - 1);
  return pairs_[place];
}

const std::string& Tokenizer::bytes_of(int32_t token) const {
  require(token >= 0 && token < vocabulary(), "[tokenizer] expected a token from 0 to {}, got {}",
          vocabulary() - 1, token);
  return bytes_[token];
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, size_t piece_bytes) const {
  require(piece_bytes > 0, "[tokenizer] expected pieces of at least one byte");
  const size_t pieces = piece_count(text.size(), piece_bytes);
  std::vector<std::vector<int32_t>> parts(pieces);
  std::vector<std::unique_ptr<Encoder>> encoders(thread_count());
  parallel_for(static_cast<int64_t>(pieces), [&](int64_t item, int worker) {
    if (!encoders[worker]) encoders[worker] = std::make_unique<Encoder>(*this);
    const Piece piece = find_piece(text, piece_bytes, item);
    parts[item].reserve((piece.end - piece.begin) / 2);
    encoders[worker]->encode(text.substr(piece.begin, piece.end - piece.begin), parts[item]);
  });
  size_t count = 0;
  for (const auto& part : parts) count += part.size();
  std::vector<int32_t> tokens;
  tokens.reserve(count);
  for (const auto& part : parts) tokens.insert(tokens.end(), part.begin(), part.end());
  return tokens;
}

std::string Tokenizer::decode(std::span<const int32_t> tokens) const {
  std::string text;
  for (int32_t token : tokens) text += bytes_of(token);
  return text;
}

// One word of the past and its tokens, in one line of the processor's cache. A new word takes the place of
// the old one of the same hash.
struct alignas(64) Encoder::CachedWord {
  static constexpr size_t kMostBytes = 23, kMostTokens = 9;
  struct Key {
    std::array<uint64_t, 3> words{};  // the bytes, zeros, and in the last byte the length

    explicit Key(std::string_view word) {
      std::memcpy(words.data(), word.data(), word.size());
      words[2] |= uint64_t{word.size()} << 56;
    }
    Key() = default;
    uint64_t hash() const { return ((words[0] ^ std::rotl(words[2], 23)) * kMix0 ^ words[1]) * kMix1; }
    friend bool operator==(const Key&, const Key&) = default;
  };
  Key key;  // length 0: empty
  std::array<int32_t, kMostTokens> tokens;
  int32_t count;
};

namespace {
constexpr int kCacheBits = 15;  // 2 MiB a thread
}

static_assert(std::endian::native == std::endian::little, "the length is in the last byte of a key");

Encoder::Encoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer), cache_(size_t{1} << kCacheBits) {}
Encoder::Encoder(Encoder&&) noexcept = default;
Encoder::~Encoder() = default;

void Encoder::encode(std::string_view text, std::vector<int32_t>& tokens) {
  for (size_t begin = 0, end; begin < text.size(); begin = end) {
    end = word_end(text, begin);
    std::string_view word = text.substr(begin, end - begin);
    if (word.size() > CachedWord::kMostBytes) {
      for (; word.size() > kLongestWord; word.remove_prefix(kLongestWord))
        encode_word(word.substr(0, kLongestWord), tokens);
      encode_word(word, tokens);
      continue;
    }
    const CachedWord::Key key(word);
    CachedWord& cached = cache_[key.hash() >> (64 - kCacheBits)];
    if (cached.key == key) {
      tokens.insert(tokens.end(), cached.tokens.data(), cached.tokens.data() + cached.count);
      continue;
    }
    const size_t before = tokens.size();
    encode_word(word, tokens);
    const size_t count = tokens.size() - before;
    if (count > CachedWord::kMostTokens) continue;
    cached.key = key;
    cached.count = static_cast<int32_t>(count);
    std::copy(tokens.begin() + before, tokens.end(), cached.tokens.begin());
  }
}

void Encoder::encode_word(std::string_view word, std::vector<int32_t>& tokens) {
  if (word.size() > kLongestSimpleWord) return encode_long_word(word, tokens);
  std::array<int32_t, kLongestSimpleWord> token;
  std::array<uint32_t, kLongestSimpleWord> rank;  // of the pair that begins here
  std::array<int32_t, kLongestSimpleWord> result;
  size_t count = word.size();
  for (size_t i = 0; i < count; ++i) token[i] = tokenizer_.byte_tokens_[static_cast<uint8_t>(word[i])];
  const auto look_up = [&](size_t i) {
    const auto& pair = tokenizer_.find_pair(token[i], token[i + 1]);
    rank[i] = pair.rank;
    result[i] = pair.result;
  };
  for (size_t i = 0; i + 1 < count; ++i) look_up(i);
  while (count > 1) {
    const size_t best = std::min_element(rank.begin(), rank.begin() + (count - 1)) - rank.begin();
    if (rank[best] == Tokenizer::kNoRank) break;
    token[best] = result[best];
    std::copy(token.begin() + best + 2, token.begin() + count, token.begin() + best + 1);
    --count;
    if (best + 1 < count) {
      std::copy(rank.begin() + best + 2, rank.begin() + count, rank.begin() + best + 1);
      std::copy(result.begin() + best + 2, result.begin() + count, result.begin() + best + 1);
      look_up(best);
    }
    if (best > 0) look_up(best - 1);
  }
  tokens.insert(tokens.end(), token.begin(), token.begin() + count);
}

void Encoder::await_pair(int32_t place) {
  const int32_t next = symbols_[place].next;
  if (next < 0) return;
  const uint32_t rank = tokenizer_.find_pair(symbols_[place].token, symbols_[next].token).rank;
  if (rank == Tokenizer::kNoRank) return;
  waiting_.push_back(uint64_t{rank} << 32 | static_cast<uint32_t>(place));
  std::push_heap(waiting_.begin(), waiting_.end(), std::greater<>());
}

void Encoder::encode_long_word(std::string_view word, std::vector<int32_t>& tokens) {
  const auto size = static_cast<int32_t>(word.size());
  symbols_.resize(word.size());
  for (int32_t i = 0; i < size; ++i)
    symbols_[i] = {tokenizer_.byte_tokens_[static_cast<uint8_t>(word[i])], i - 1, i + 1 < size ? i + 1 : -1};
  waiting_.clear();
  for (int32_t i = 0; i < size; ++i) await_pair(i);
  while (!waiting_.empty()) {
    std::pop_heap(waiting_.begin(), waiting_.end(), std::greater<>());
    const uint64_t first = waiting_.back();
    waiting_.pop_back();
    const auto place = static_cast<int32_t>(first & 0xFFFFFFFFu);
    Symbol& left = symbols_[place];
    if (left.token < 0 || left.next < 0) continue;
    Symbol& right = symbols_[left.next];
    const auto& pair = tokenizer_.find_pair(left.token, right.token);
    if (pair.rank != first >> 32) continue;  // one of the two has been merged since
    left.token = pair.result;
    right.token = -1;
    left.next = right.next;
    if (left.next >= 0) symbols_[left.next].previous = place;
    await_pair(place);
    if (left.previous >= 0) await_pair(left.previous);
  }
  for (int32_t place = 0; place >= 0; place = symbols_[place].next) tokens.push_back(symbols_[place].token);
}

}  // namespace evenkeel
