// Byte-level BPE: every text of any bytes becomes tokens, and back exactly. Text is split into words as GPT-2
// does (pretokenize.h). In a word, the neighbouring pair of the lowest rank is merged, the leftmost first,
// until no pair is left that has a rank. (A word above 1 MiB is cut there, so that memory is
// bounded.)
//
// Token ids of tokenizers made here: 0 to 255 are the bytes by their value, then the merges by rank, then the
// special token <|endoftext|>. Those of a file are as the file says. Special tokens are for the ends of
// documents: text that spells one is encoded as ordinary text.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace evenkeel {

inline constexpr std::string_view kEndOfText = "<|endoftext|>";
inline constexpr int64_t kByteValues = 256;

struct Merge {
  int32_t left, right, result;  // token ids

  friend bool operator==(const Merge&, const Merge&) = default;
};

class Tokenizer {
 public:
  // bytes[t] is what token t stands for. Merges are by rank, the first is applied first; no pair twice.
  // REQUIRES: every single byte is one of the tokens that are not special; what a merge makes is its two
  // parts.
  Tokenizer(std::vector<std::string> bytes, std::vector<int32_t> special, std::vector<Merge> merges);

  static Tokenizer byte_tokenizer();  // no merges: 256 bytes and <|endoftext|>

  // A Hugging Face tokenizer.json (ByteLevel BPE), or GPT-2's vocab.bpe, known by its first line "#version".
  static Tokenizer load(const std::string& path);
  // `file` is for messages. A DataError says what was expected and what was found.
  static Tokenizer from_json(std::string_view text, std::string_view file);
  // Ids as GPT-2's: the bytes in the order of the characters that stand for them, merges, <|endoftext|>.
  static Tokenizer from_merges(std::string_view text, std::string_view file);
  std::string to_json() const;  // tokenizer.json

  int64_t vocabulary() const { return static_cast<int64_t>(bytes_.size()); }
  // What separates documents: <|endoftext|>, or the only special token; -1: there is none.
  int32_t end_of_text() const { return end_of_text_; }
  const std::string& bytes_of(int32_t token) const;
  const std::vector<Merge>& merges() const { return merges_; }

  // All cores; the same tokens whatever their number and the pieces the text is shared in.
  static constexpr size_t kPieceBytes = 1 << 20;
  std::vector<int32_t> encode(std::string_view text, size_t piece_bytes = kPieceBytes) const;
  // Throws std::invalid_argument on a token that is not of the vocabulary.
  std::string decode(std::span<const int32_t> tokens) const;

 private:
  friend class Encoder;

  // What two neighbouring tokens merge to.
  struct PairSlot {
    uint64_t pair = kNoPair;
    uint32_t rank = kNoRank;
    int32_t result = -1;
  };
  static constexpr uint64_t kNoPair = ~uint64_t{0};
  static constexpr uint32_t kNoRank = ~uint32_t{0};
  const PairSlot& find_pair(int32_t left, int32_t right) const;

  std::vector<std::string> bytes_;
  std::vector<int32_t> special_;  // ascending
  std::vector<Merge> merges_;
  std::array<int32_t, kByteValues> byte_tokens_{};
  std::vector<PairSlot> pairs_;  // open addressing, at most half full
  int pair_shift_ = 0;           // 64 - log2(pairs_.size())
  int32_t end_of_text_ = -1;
};

// The encoder of one thread: remembers words. Appends; beyond the growth of `tokens`, allocates only for
// words longer than any before. The tokenizer must outlive it.
class Encoder {
 public:
  explicit Encoder(const Tokenizer& tokenizer);
  Encoder(Encoder&&) noexcept;
  ~Encoder();
  // text begins where a word begins and ends where one ends: a whole text, or a Piece of it.
  void encode(std::string_view text, std::vector<int32_t>& tokens);

 private:
  struct CachedWord;
  struct Symbol {
    int32_t token, previous, next;  // places in symbols_; token -1: merged into the one before
  };
  void encode_word(std::string_view word, std::vector<int32_t>& tokens);
  void encode_long_word(std::string_view word, std::vector<int32_t>& tokens);
  void await_pair(int32_t place);

  const Tokenizer& tokenizer_;
  std::vector<CachedWord> cache_;
  std::vector<Symbol> symbols_;    // of a long word
  std::vector<uint64_t> waiting_;  // its pairs that may be merged: a heap of (rank, place of the left token)
};

// Learns the merges: counts words, then merges the most frequent pair of neighbours again and again; ties go
// to the pair of the smaller left, then right token. The same text gives the same merges on any number of
// threads.
class BpeTrainer {
 public:
  BpeTrainer();  // room for thread_count() workers
  ~BpeTrainer();
  // Counts the words of a whole text or a Piece of one. Different workers may add at the same time.
  void add(std::string_view text, int worker = 0);
  // `vocabulary` tokens, the bytes and <|endoftext|> included; fewer where no pair is left that occurs twice.
  // A pair whose bytes are a token already is passed over, so that every merge makes a token.
  // progress(merges so far) is called after each. REQUIRES: vocabulary > kByteValues.
  Tokenizer train(int64_t vocabulary, const std::function<void(int64_t)>& progress = {});

 private:
  class WordCounts;
  std::vector<std::unique_ptr<WordCounts>> counts_;  // of each worker
};

}  // namespace evenkeel
