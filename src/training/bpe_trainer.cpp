// BpeTrainer of tokenizer.h: counts words on all threads, then merges pairs on one thread. Merging costs little, since
// words that differ are few and a merge touches only the words that have its pair.
#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <queue>
#include <unordered_set>

#include "base/error.h"
#include "base/threads.h"
#include "training/pretokenize.h"
#include "training/tokenizer.h"

namespace evenkeel {
namespace {

constexpr uint64_t kMix = 0x9E3779B97F4A7C15u;  // odd, of even bit density

uint64_t hash_of(std::string_view text) {
  uint64_t hash = text.size() * kMix;
  for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
    uint64_t part = 0;
    std::memcpy(&part, text.data() + at, std::min(sizeof part, text.size() - at));
    hash = (hash ^ part) * kMix;
    hash ^= hash >> 29;
  }
  return hash * kMix;
}

// What is no word of a language (a picture in base64, a genome) is counted in parts: the work of a merge in a
// word is its length.
constexpr size_t kLongestCountedWord = 256;

constexpr uint32_t kEmpty = ~uint32_t{0};

}  // namespace

// Words and how often each occurs. Open addressing, at most half full; the words lie one after another.
class BpeTrainer::WordCounts {
 public:
  struct Word {
    uint64_t hash;
    int64_t count;
    size_t begin;
    uint32_t size;
  };

  void add(std::string_view text, int64_t count) {
    const uint64_t hash = hash_of(text);
    size_t place = find(text, hash);
    if (slots_[place] != kEmpty) {
      words_[slots_[place]].count += count;
      return;
    }
    require_data(words_.size() < kEmpty, "[tokenizer] more than {} different words", kEmpty);
    if (2 * (words_.size() + 1) > slots_.size()) {
      grow();
      place = find(text, hash);
    }
    slots_[place] = static_cast<uint32_t>(words_.size());
    words_.push_back({hash, count, bytes_.size(), static_cast<uint32_t>(text.size())});
    bytes_.insert(bytes_.end(), text.begin(), text.end());
  }

  const std::vector<Word>& words() const { return words_; }
  std::string_view text(const Word& word) const { return {bytes_.data() + word.begin, word.size}; }

 private:
  size_t find(std::string_view wanted, uint64_t hash) const {
    const size_t mask = slots_.size() - 1;
    size_t place = hash & mask;
    while (slots_[place] != kEmpty) {
      const Word& word = words_[slots_[place]];
      if (word.hash == hash && text(word) == wanted) break;
      place = (place + 1) & mask;
    }
    return place;
  }

  void grow() {
    slots_.assign(2 * slots_.size(), kEmpty);
    const size_t mask = slots_.size() - 1;
    for (uint32_t index = 0; index < words_.size(); ++index) {
      size_t place = words_[index].hash & mask;
      while (slots_[place] != kEmpty) place = (place + 1) & mask;
      slots_[place] = index;
    }
  }

  std::vector<uint32_t> slots_ = std::vector<uint32_t>(1 << 12, kEmpty);  // indices of words_
  std::vector<Word> words_;
  std::vector<char> bytes_;
};

namespace {

// All words as runs of tokens, the pairs of neighbours in them, and which words have a pair.
class PairCounts {
 public:
  struct Pair {
    int32_t left, right;
    int64_t count;
  };

  void add_word(std::string_view bytes, int64_t count) {
    const auto word = static_cast<uint32_t>(words_.size());
    words_.push_back({tokens_.size(), static_cast<uint32_t>(bytes.size()), count});
    for (char byte : bytes) tokens_.push_back(static_cast<uint8_t>(byte));
    for (size_t i = 1; i < bytes.size(); ++i)
      change(static_cast<uint8_t>(bytes[i - 1]), static_cast<uint8_t>(bytes[i]), count, word);
  }

  // Pairs come out by count, the most frequent first, ties by their tokens. False: none is left.
  bool pop(Pair& best) {
    while (!heap_.empty()) {
      best = heap_.top();
      heap_.pop();
      const int64_t now = pairs_[find(best.left, best.right)].count;
      if (now == best.count) return true;
      // Counts only fall once a pair is in the heap, so what was on top with its old count may still be beaten.
      best.count = now;
      if (now > 0) heap_.push(best);
    }
    return false;
  }

  void merge(const Pair& pair, int32_t result) {
    Slot& slot = pairs_[find(pair.left, pair.right)];
    const std::vector<uint32_t> words = std::move(slot.words);
    slot.words = {};
    for (uint32_t index : words) merge_in_word(index, pair, result);
    pairs_[find(pair.left, pair.right)].count = 0;
    queue_changed();
  }

  void queue_changed() {
    for (const auto& [left, right] : risen_) {
      const Slot& slot = pairs_[find(left, right)];
      if (slot.count > 0) heap_.push({left, right, slot.count});
    }
    risen_.clear();
  }

 private:
  struct Word {
    size_t begin;
    uint32_t size;
    int64_t count;
  };
  struct Slot {
    int32_t left = -1, right = -1;
    int64_t count = 0;
    std::vector<uint32_t> words;  // ascending; may name words that have lost the pair since
  };
  struct Less {
    bool operator()(const Pair& a, const Pair& b) const {
      if (a.count != b.count) return a.count < b.count;
      return a.left != b.left ? a.left > b.left : a.right > b.right;
    }
  };

  size_t find(int32_t left, int32_t right) const {
    const size_t mask = pairs_.size() - 1;
    const uint64_t key = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
    size_t place = (key * kMix >> 20) & mask;
    while (pairs_[place].left >= 0 && (pairs_[place].left != left || pairs_[place].right != right))
      place = (place + 1) & mask;
    return place;
  }

  void change(int32_t left, int32_t right, int64_t count, uint32_t word) {
    Slot* slot = &pairs_[find(left, right)];
    if (slot->left < 0) {
      if (2 * (used_ + 1) > pairs_.size()) {
        grow();
        slot = &pairs_[find(left, right)];
      }
      ++used_;
      slot->left = left;
      slot->right = right;
      risen_.emplace_back(left, right);
    }
    slot->count += count;
    if (count > 0 && (slot->words.empty() || slot->words.back() != word)) slot->words.push_back(word);
  }

  void grow() {
    std::vector<Slot> old(2 * pairs_.size());
    old.swap(pairs_);
    for (Slot& slot : old)
      if (slot.left >= 0) pairs_[find(slot.left, slot.right)] = std::move(slot);
  }

  void merge_in_word(uint32_t index, const Pair& pair, int32_t result) {
    Word& word = words_[index];
    int32_t* tokens = tokens_.data() + word.begin;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < word.size; ++kept) {
      if (i + 1 == word.size || tokens[i] != pair.left || tokens[i + 1] != pair.right) {
        tokens[kept] = tokens[i++];
        continue;
      }
      if (kept > 0) {
        change(tokens[kept - 1], pair.left, -word.count, index);
        change(tokens[kept - 1], result, word.count, index);
      }
      if (i + 2 < word.size) {
        change(pair.right, tokens[i + 2], -word.count, index);
        change(result, tokens[i + 2], word.count, index);
      }
      tokens[kept] = result;
      i += 2;
    }
    word.size = kept;
  }

  std::vector<Word> words_;
  std::vector<int32_t> tokens_;                           // of word w: tokens_[begin] to [begin + size)
  std::vector<Slot> pairs_ = std::vector<Slot>(1 << 12);  // open addressing, at most half full
  size_t used_ = 0;
  std::priority_queue<Pair, std::vector<Pair>, Less> heap_;
  std::vector<std::pair<int32_t, int32_t>> risen_;  // not in the heap yet
};

}  // namespace

BpeTrainer::BpeTrainer() {
  for (int worker = 0; worker < thread_count(); ++worker) counts_.push_back(std::make_unique<WordCounts>());
}
BpeTrainer::~BpeTrainer() = default;

void BpeTrainer::add(std::string_view text, int worker) {
  WordCounts& counts = *counts_.at(worker);
  for (size_t begin = 0, end; begin < text.size(); begin = end) {
    // Looked at no further than a counted word and a character more, or a word of n bytes would be read n / 256 times.
    constexpr size_t kLook = kLongestCountedWord + 8;
    end = std::min(word_end(text.substr(0, std::min(text.size(), begin + kLook)), begin),
                   begin + kLongestCountedWord);
    counts.add(text.substr(begin, end - begin), 1);
  }
}

Tokenizer BpeTrainer::train(int64_t vocabulary, const std::function<void(int64_t)>& progress) {
  require(vocabulary > kByteValues, "[tokenizer] expected a vocabulary of at least {}, got {}",
          kByteValues + 1, vocabulary);
  WordCounts& all = *counts_[0];
  for (size_t worker = 1; worker < counts_.size(); ++worker) {
    for (const auto& word : counts_[worker]->words()) all.add(counts_[worker]->text(word), word.count);
    *counts_[worker] = WordCounts();
  }
  PairCounts pairs;
  for (const auto& word : all.words()) pairs.add_word(all.text(word), word.count);
  pairs.queue_changed();

  std::vector<std::string> bytes;
  std::unordered_set<std::string> known;
  std::vector<Merge> merges;
  for (int64_t value = 0; value < kByteValues; ++value) bytes.emplace_back(1, static_cast<char>(value));
  PairCounts::Pair best;
  while (static_cast<int64_t>(bytes.size()) + 1 < vocabulary && pairs.pop(best) && best.count > 1) {
    std::string merged = bytes[best.left] + bytes[best.right];
    if (!known.insert(merged).second) continue;
    const auto result = static_cast<int32_t>(bytes.size());
    pairs.merge(best, result);
    merges.push_back({best.left, best.right, result});
    bytes.push_back(std::move(merged));
    if (progress) progress(static_cast<int64_t>(merges.size()));
  }
  bytes.emplace_back(kEndOfText);
  const auto end_of_text = static_cast<int32_t>(bytes.size()) - 1;
  return Tokenizer(std::move(bytes), {end_of_text}, std::move(merges));
}

}  // namespace evenkeel
