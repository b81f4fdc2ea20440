// The splitting of text, the encoder, the decoder, the trainer and the files of tokenizers, against slow and
// obvious versions of each.
#include "training/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/json_text.h"
#include "base/threads.h"
#include "numerics/random.h"
#include "training/pretokenize.h"
#include "training/synth.h"
#include "training/unicode_tables.h"

namespace evenkeel {
namespace {

using Json = nlohmann::ordered_json;

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for (size_t begin = 0, end; begin < text.size(); begin = end) {
    end = word_end(text, begin);
    words.emplace_back(text.substr(begin, end - begin));
  }
  return words;
}

std::string utf8(uint32_t point) {
  std::string text;
  if (point < 0x80) return {static_cast<char>(point)};
  if (point < 0x800) return {static_cast<char>(0xC0 | point >> 6), static_cast<char>(0x80 | (point & 0x3F))};
  if (point >= 0x10000)
    text = {static_cast<char>(0xF0 | point >> 18), static_cast<char>(0x80 | (point >> 12 & 0x3F))};
  else
    text = {static_cast<char>(0xE0 | point >> 12)};
  return text + static_cast<char>(0x80 | (point >> 6 & 0x3F)) + static_cast<char>(0x80 | (point & 0x3F));
}

// Text of pieces that meet each other in every way: contractions, blanks, scripts, broken UTF-8.
std::string random_text(uint64_t seed, int64_t pieces) {
  static const std::vector<std::string> kPieces = {"'s",
                                                   "'t",
                                                   "'re",
                                                   "'ve",
                                                   "'m",
                                                   "'ll",
                                                   "'d",
                                                   "'",
                                                   "s",
                                                   " ",
                                                   "  ",
                                                   "\n",
                                                   "\t",
                                                   "\r\n",
                                                   "a",
                                                   "the",
                                                   "Z",
                                                   "ing",
                                                   "1",
                                                   "42",
                                                   "!",
                                                   "--",
                                                   "_",
                                                   "\0x",
                                                   "\x80",
                                                   "\xC3",
                                                   "\xE2\x82",
                                                   "\xFF",
                                                   "\xC0\x80",
                                                   "\xED\xA0\x80",
                                                   "\xC3\xA9",
                                                   "\xE6\xBC\xA2",
                                                   "\xF0\x9F\x98\x80",
                                                   "\xC2\xA0",
                                                   "\xE3\x80\x80",
                                                   "\xC2\x85",
                                                   "\xC2\xB2",
                                                   "\xE2\x85\xA7",
                                                   "\xE2\x80\x8B",
                                                   "<|endoftext|>"};
  RandomStream random({seed, 0, 7});
  std::string text;
  for (int64_t i = 0; i < pieces; ++i)
    text += random.below(20) == 0 ? std::string(1, static_cast<char>(random.below(256)))
                                  : kPieces[random.below(static_cast<int64_t>(kPieces.size()))];
  return text;
}

// ---------------------------------------------------------------------------------------- splitting

TEST(Pretokenize, splits_as_the_pattern_says) {
  const std::pair<const char*, std::vector<std::string>> kCases[] = {
      {"Hello world", {"Hello", " world"}},
      {"it's we'll they've I'm he'd don't you're",
       {"it", "'s", " we", "'ll", " they", "'ve", " I", "'m", " he", "'d", " don", "'t", " you", "'re"}},
      {"it'S 's'start", {"it", "'", "S", " '", "s", "'s", "tart"}},  // small letters alone, not after a blank
      {"'r 'v 'l", {"'", "r", " '", "v", " '", "l"}},
      {"a  b", {"a", " ", " b"}},
      {"a   b", {"a", "  ", " b"}},
      {"a\n\nb", {"a", "\n", "\n", "b"}},
      {"a \n b", {"a", " \n", " b"}},
      {"a\n", {"a", "\n"}},
      {"a  \n\t ", {"a", "  \n\t "}},  // at the end all of it
      {" a", {" a"}},
      {"\ta", {"\t", "a"}},
      {"x1y22", {"x", "1", "y", "22"}},
      {"f(x) = -1.5e3;", {"f", "(", "x", ")", " =", " -", "1", ".", "5", "e", "3", ";"}},
      {"\xC3\xA9t\xC3\xA9 \xC2\xB2", {"\xC3\xA9t\xC3\xA9", " \xC2\xB2"}},
      {"a\xC2\xA0 b", {"a", "\xC2\xA0", " b"}},  // a no-break space is white space, but no blank
      {"a\xC2\xA0"
       "b",
       {"a", "\xC2\xA0", "b"}},
      {"a\x80\xFF!b", {"a", "\x80\xFF!", "b"}},  // no UTF-8: like any other sign
      {" \xE2\x82", {" \xE2\x82"}},              // cut short
      {"\xED\xA0\x80"
       "a",
       {"\xED\xA0\x80", "a"}},  // a surrogate
      {"\x1C"
       "a",
       {"\x1C", "a"}},  // a separator of ASCII is no white space
  };
  for (const auto& [text, words] : kCases) EXPECT_EQ(words_of(text), words) << text;
}

TEST(Pretokenize, knows_every_character) {
  EXPECT_STREQ(kUnicodeVersion, "15.0.0");
  int64_t letters = 0, numbers = 0, spaces = 0, others = 0;
  for (uint32_t point = 0; point <= 0x10FFFF; ++point) {
    if (point >= 0xD800 && point < 0xE000) continue;
    const std::string text = utf8(point);
    const Character character = character_at(text, 0);
    ASSERT_EQ(character.bytes, text.size()) << point;
    (character.kind == CharacterKind::letter   ? letters
     : character.kind == CharacterKind::number ? numbers
     : character.kind == CharacterKind::space  ? spaces
                                               : others)++;
  }
  // Counted without our script, by another program's tables of Unicode 15.0.
  EXPECT_EQ(letters, 136104);
  EXPECT_EQ(numbers, 1831);
  EXPECT_EQ(spaces, 25);
  const auto kind = [](const char* text) { return character_at(text, 0).kind; };
  EXPECT_EQ(kind("\xE6\xBC\xA2"), CharacterKind::letter);     // U+6F22, within a range of the database
  EXPECT_EQ(kind("\xF0\x9F\x98\x80"), CharacterKind::other);  // U+1F600
  EXPECT_EQ(kind("\xE2\x80\xA8"), CharacterKind::space);      // U+2028
  EXPECT_EQ(kind("\xE2\x80\x8B"), CharacterKind::other);      // U+200B, of no width, is none
  EXPECT_EQ(kind("\xCC\x81"), CharacterKind::other);          // U+0301, a mark
}

TEST(Pretokenize, safe_cuts_are_cuts_of_the_whole_text) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::string text = random_text(seed, 400);
    std::set<size_t> ends;
    size_t end = 0;
    for (const std::string& word : words_of(text)) ends.insert(end += word.size());
    int cuts = 0;
    for (size_t at = 0; at < text.size(); ++at) {
      if (!is_safe_cut(text, at)) continue;
      ++cuts;
      ASSERT_TRUE(ends.contains(at)) << at;
      // The two sides alone give the words of the whole.
      auto words = words_of(text.substr(0, at));
      for (std::string& word : words_of(text.substr(at))) words.push_back(std::move(word));
      ASSERT_EQ(words, words_of(text)) << at;
    }
    EXPECT_GT(cuts, 20);
  }
}

TEST(Pretokenize, pieces_are_the_text_whatever_the_stride) {
  for (const std::string& text : {random_text(1, 300), std::string(500, 'x'), std::string(),
                                  std::string(300, ' '), "begin " + std::string(200, 'y') + " end"})
    for (size_t stride : {1, 2, 3, 7, 64, 1000}) {
      std::string joined;
      for (size_t i = 0; i < piece_count(text.size(), stride); ++i) {
        const Piece piece = find_piece(text, stride, i);
        ASSERT_LE(piece.begin, piece.end);
        joined += text.substr(piece.begin, piece.end - piece.begin);
      }
      EXPECT_EQ(joined, text) << stride;
    }
}

// ----------------------------------------------------------------------------------- the slow version

// Byte-level BPE as its definition reads: the pair of lowest rank, the leftmost, one at a time.
std::vector<int32_t> slow_encode(const Tokenizer& tokenizer, std::string_view text) {
  std::map<std::pair<int32_t, int32_t>, std::pair<size_t, int32_t>> ranks;
  for (size_t rank = 0; rank < tokenizer.merges().size(); ++rank) {
    const Merge& merge = tokenizer.merges()[rank];
    ranks[{merge.left, merge.right}] = {rank, merge.result};
  }
  std::map<std::string, int32_t> bytes;
  for (int32_t token = 0; token < tokenizer.vocabulary(); ++token)
    if (tokenizer.bytes_of(token).size() == 1) bytes[tokenizer.bytes_of(token)] = token;
  std::vector<int32_t> all;
  for (const std::string& word : words_of(text)) {
    std::vector<int32_t> tokens;
    for (char byte : word) tokens.push_back(bytes.at(std::string(1, byte)));
    for (;;) {
      size_t best = tokens.size(), best_rank = ~size_t{0};
      for (size_t i = 0; i + 1 < tokens.size(); ++i) {
        const auto found = ranks.find({tokens[i], tokens[i + 1]});
        if (found != ranks.end() && found->second.first < best_rank) {
          best = i;
          best_rank = found->second.first;
        }
      }
      if (best == tokens.size()) break;
      tokens[best] = ranks[{tokens[best], tokens[best + 1]}].second;
      tokens.erase(tokens.begin() + static_cast<ptrdiff_t>(best) + 1);
    }
    all.insert(all.end(), tokens.begin(), tokens.end());
  }
  return all;
}

// Counts all pairs anew for each merge.
std::vector<Merge> slow_train(std::string_view text, int64_t vocabulary) {
  std::map<std::string, int64_t> counts;
  for (const std::string& word : words_of(text)) ++counts[word];
  std::vector<std::pair<std::vector<int32_t>, int64_t>> words;
  for (const auto& [word, count] : counts) {
    std::vector<int32_t> tokens;
    for (char byte : word) tokens.push_back(static_cast<uint8_t>(byte));
    words.emplace_back(tokens, count);
  }
  std::vector<std::string> bytes;
  for (int value = 0; value < 256; ++value) bytes.emplace_back(1, static_cast<char>(value));
  std::vector<Merge> merges;
  while (static_cast<int64_t>(bytes.size()) + 1 < vocabulary) {
    std::map<std::pair<int32_t, int32_t>, int64_t> pairs;
    for (const auto& [tokens, count] : words)
      for (size_t i = 0; i + 1 < tokens.size(); ++i) pairs[{tokens[i], tokens[i + 1]}] += count;
    std::pair<int32_t, int32_t> best{-1, -1};
    int64_t most = 1;
    for (const auto& [pair, count] : pairs)  // in the order of pairs: the first of equals stays
      if (count > most &&
          std::find(bytes.begin(), bytes.end(), bytes[pair.first] + bytes[pair.second]) == bytes.end()) {
        best = pair;
        most = count;
      }
    if (best.first < 0) break;
    const auto result = static_cast<int32_t>(bytes.size());
    merges.push_back({best.first, best.second, result});
    bytes.push_back(bytes[best.first] + bytes[best.second]);
    for (auto& [tokens, count] : words) {
      std::vector<int32_t> merged;
      for (size_t i = 0; i < tokens.size(); ++i)
        if (i + 1 < tokens.size() && tokens[i] == best.first && tokens[i + 1] == best.second) {
          merged.push_back(result);
          ++i;
        } else {
          merged.push_back(tokens[i]);
        }
      tokens = merged;
    }
  }
  return merges;
}

Tokenizer train(std::string_view text, int64_t vocabulary, size_t stride = 1 << 12) {
  BpeTrainer trainer;
  parallel_for(static_cast<int64_t>(piece_count(text.size(), stride)), [&](int64_t index, int worker) {
    const Piece piece = find_piece(text, stride, index);
    trainer.add(text.substr(piece.begin, piece.end - piece.begin), worker);
  });
  return trainer.train(vocabulary);
}

class WithThreads {
 public:
  explicit WithThreads(int count) : before_(thread_count()) { set_thread_count(count); }
  ~WithThreads() { set_thread_count(before_); }

 private:
  int before_;
};

// ----------------------------------------------------------------------------------------- training

TEST(BpeTrainer, finds_the_merges_of_the_definition) {
  const std::string runs = "aaaa aaaaa aaa abababab bababa aaaaaaaaaaaaaaa abcabc bcbc abc bc";
  for (const std::string& text : {synthetic_text(3, 20000), random_text(4, 3000), runs, std::string("once")})
    for (int64_t vocabulary : {257, 300, 420})
      EXPECT_EQ(train(text, vocabulary).merges(), slow_train(text, vocabulary));
}

TEST(BpeTrainer, breaks_ties_by_the_order_of_pairs) {
  const Tokenizer tokenizer = train("zy zy ab ab", 260);
  ASSERT_EQ(tokenizer.merges().size(), 3u);
  EXPECT_EQ(tokenizer.merges()[0], (Merge{' ', 'a', 256}));  // " a", "ab" and "zy" occur twice each
  EXPECT_EQ(tokenizer.bytes_of(256), " a");
  EXPECT_EQ(tokenizer.bytes_of(257), "zy");
  EXPECT_EQ(tokenizer.bytes_of(258), " ab");
}

TEST(BpeTrainer, threads_change_nothing) {
  const std::string text = synthetic_text(5, 300000) + random_text(5, 20000);
  std::vector<Merge> alone;
  {
    const WithThreads one(1);
    alone = train(text, 1000).merges();
  }
  ASSERT_EQ(alone.size(), 743u);
  for (int threads : {2, 5}) {
    const WithThreads several(threads);
    EXPECT_EQ(train(text, 1000, 777).merges(), alone) << threads;
  }
}

TEST(BpeTrainer, stops_where_nothing_is_left_to_merge) {
  const Tokenizer tokenizer = train("abab abab", 5000);
  EXPECT_LT(tokenizer.vocabulary(), 265);
  EXPECT_EQ(tokenizer.end_of_text(), tokenizer.vocabulary() - 1);
  EXPECT_EQ(train("", 5000).vocabulary(), 257);
  EXPECT_THROW(train("abc", 256), std::invalid_argument);
}

TEST(BpeTrainer, long_words_are_bounded) {
  // One word of 300,000 letters: counted in parts, so no merge walks through all of it.
  std::string text;
  RandomStream random({9, 0, 0});
  while (text.size() < 300000) text += static_cast<char>('a' + random.below(4));
  EXPECT_EQ(train(text, 2000).vocabulary(), 2000);
  // Of 8 MB: found in parts, too. Looking for its end from every part would take minutes.
  const std::string repeated = [] {
    std::string part = "abcdefgh", all;
    while (all.size() < (8 << 20)) all += part;
    return all;
  }();
  EXPECT_EQ(train(repeated, 259).merges(), train(repeated.substr(0, 256 * 8), 259).merges());
}

// ----------------------------------------------------------------------------------------- encoding

class TrainedTokenizer : public testing::Test {
 protected:
  static const Tokenizer& tokenizer() {
    static const Tokenizer trained = train(synthetic_text(1, 400000) + random_text(1, 20000), 1200);
    return trained;
  }
};

TEST_F(TrainedTokenizer, encodes_as_the_definition) {
  for (uint64_t seed = 10; seed < 16; ++seed)
    for (const std::string& text :
         {synthetic_text(1, 3000 + static_cast<int64_t>(seed)), random_text(seed, 1500)})
      ASSERT_EQ(tokenizer().encode(text), slow_encode(tokenizer(), text)) << seed;
}

TEST_F(TrainedTokenizer, long_words_as_the_definition) {
  // Around the sizes where the cache ends (23 bytes) and the heap begins (48), and well beyond.
  RandomStream random({2, 0, 0});
  for (size_t size : {22, 23, 24, 25, 47, 48, 49, 50, 51, 200, 1500}) {
    std::string letters, repeated(size, 'a');
    while (letters.size() < size) letters += synthetic_text(1, 5000)[static_cast<size_t>(random.below(5000))];
    std::erase_if(letters, [](char c) { return c < 'a' || c > 'z'; });
    while (letters.size() < size) letters += letters.substr(0, size - letters.size());
    for (const std::string& text : {letters, repeated, " " + letters, letters + letters})
      ASSERT_EQ(tokenizer().encode(text), slow_encode(tokenizer(), text)) << size;
  }
}

TEST_F(TrainedTokenizer, the_cache_forgets_nothing_wrong) {
  // More different words than the cache has places, met again and again.
  std::string text;
  for (int round = 0; round < 2; ++round)
    for (int i = 0; i < 60000; ++i) text += " w" + std::to_string(i * 7919 % 60000) + "x";
  const std::vector<int32_t> tokens = tokenizer().encode(text);
  EXPECT_EQ(tokenizer().decode(tokens), text);
  EXPECT_EQ(std::vector<int32_t>(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(tokens.size() / 2)),
            std::vector<int32_t>(tokens.begin() + static_cast<ptrdiff_t>(tokens.size() / 2), tokens.end()));
}

TEST_F(TrainedTokenizer, pieces_and_threads_change_nothing) {
  const std::string text = random_text(20, 8000) + synthetic_text(20, 50000) + std::string(5000, 'q');
  Encoder encoder(tokenizer());
  std::vector<int32_t> whole;
  encoder.encode(text, whole);
  for (int threads : {1, 2, 5}) {
    const WithThreads some(threads);
    for (size_t piece : {1, 13, 1000, 1 << 20})
      ASSERT_EQ(tokenizer().encode(text, piece), whole) << threads << " threads, " << piece << " bytes";
  }
}

TEST_F(TrainedTokenizer, round_trip_of_any_bytes) {
  std::string all;
  for (int a = 0; a < 256; ++a)
    for (int b = 0; b < 256; ++b) all += {static_cast<char>(a), static_cast<char>(b)};
  EXPECT_EQ(tokenizer().decode(tokenizer().encode(all)), all);
  RandomStream random({30, 0, 0});
  for (int i = 0; i < 200; ++i) {
    std::string text(static_cast<size_t>(random.below(300)), '\0');
    for (char& byte : text) byte = static_cast<char>(random.below(256));
    ASSERT_EQ(tokenizer().decode(tokenizer().encode(text)), text);
  }
  EXPECT_TRUE(tokenizer().encode("").empty());
}

TEST_F(TrainedTokenizer, ids_are_bytes_then_merges_then_the_end) {
  for (int32_t byte = 0; byte < 256; ++byte)
    EXPECT_EQ(tokenizer().bytes_of(byte), std::string(1, static_cast<char>(byte)));
  EXPECT_EQ(tokenizer().merges()[0].result, 256);
  EXPECT_EQ(tokenizer().end_of_text(), 1199);
  EXPECT_EQ(tokenizer().bytes_of(1199), kEndOfText);
  // Text that spells the special token is text.
  const std::vector<int32_t> tokens = tokenizer().encode("a<|endoftext|>b");
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 1199), 0);
  EXPECT_THROW(tokenizer().bytes_of(1200), std::invalid_argument);
  EXPECT_THROW(tokenizer().decode(std::vector<int32_t>{-1}), std::invalid_argument);
}

TEST(Tokenizer, a_word_above_one_mebibyte_is_cut_and_decodes_all_the_same) {
  const Tokenizer tokenizer = train("aaaaaaaa aaaaaaaa", 260);
  const std::string text((1 << 20) + 5, 'a');
  const std::vector<int32_t> tokens = tokenizer.encode(text);
  EXPECT_EQ(tokenizer.decode(tokens), text);
  EXPECT_LT(tokens.size(), text.size() / 4);
}

TEST(Tokenizer, bytes_alone) {
  const Tokenizer tokenizer = Tokenizer::byte_tokenizer();
  EXPECT_EQ(tokenizer.vocabulary(), 257);
  EXPECT_EQ(tokenizer.encode("a\xFF"), (std::vector<int32_t>{'a', 0xFF}));
}

// -------------------------------------------------------------------------------------------- files

TEST_F(TrainedTokenizer, json_written_and_read_is_the_same) {
  const Tokenizer again = Tokenizer::from_json(tokenizer().to_json(), "t.json");
  EXPECT_EQ(again.merges(), tokenizer().merges());
  EXPECT_EQ(again.to_json(), tokenizer().to_json());
  EXPECT_EQ(again.end_of_text(), tokenizer().end_of_text());
  const std::string text = random_text(40, 3000);
  EXPECT_EQ(again.encode(text), tokenizer().encode(text));
}

// GPT-2's characters for bytes and their order, from its description: printable Latin-1 as it is, then the rest
// from U+0100 on.
std::vector<std::pair<uint8_t, std::string>> gpt2_bytes() {
  std::vector<std::pair<uint8_t, std::string>> order;
  for (int byte = 0; byte < 256; ++byte)
    if ((byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174)
      order.emplace_back(static_cast<uint8_t>(byte), utf8(static_cast<uint32_t>(byte)));
  uint32_t next = 256;
  for (int byte = 0; byte < 256; ++byte)
    if (byte <= 32 || (byte >= 127 && byte <= 160) || byte == 173)
      order.emplace_back(static_cast<uint8_t>(byte), utf8(next++));
  return order;
}

TEST(TokenizerFiles, vocab_bpe_has_gpt2s_ids) {
  // U+0120 is GPT-2's blank.
  const Tokenizer tokenizer =
      Tokenizer::from_merges("#version: 0.2\n\xC4\xA0 t\nh e\n\xC4\xA0t he\n", "vocab.bpe");
  const auto order = gpt2_bytes();
  ASSERT_EQ(order.size(), 256u);
  for (size_t id = 0; id < order.size(); ++id)
    EXPECT_EQ(tokenizer.bytes_of(static_cast<int32_t>(id)),
              std::string(1, static_cast<char>(order[id].first)));
  EXPECT_EQ(tokenizer.bytes_of(0), "!");
  EXPECT_EQ(tokenizer.bytes_of(220), " ");
  EXPECT_EQ(tokenizer.bytes_of(198), "\n");
  EXPECT_EQ(tokenizer.encode("the the\n"), (std::vector<int32_t>{83, 257, 258, 198}));
  EXPECT_EQ(tokenizer.vocabulary(), 260);
  EXPECT_EQ(tokenizer.end_of_text(), 259);
  // The same with line ends of another system, and without the last one.
  const Tokenizer other =
      Tokenizer::from_merges("#version: 0.2\r\n\xC4\xA0 t\r\nh e\r\n\xC4\xA0t he", "vocab.bpe");
  EXPECT_EQ(other.to_json(), tokenizer.to_json());
  // As GPT-2's ids: 50,000 merges put <|endoftext|> at 50256.
  EXPECT_EQ(Tokenizer::from_merges("#version: 0.2\n", "vocab.bpe").end_of_text(), 256);
}

Json small_tokenizer() {
  Json vocab = Json::object();
  int id = 0;
  for (const auto& [byte, character] : gpt2_bytes()) vocab[character] = id++;
  vocab["ab"] = 256;
  vocab["abc"] = 257;
  vocab["bc"] = 258;
  return {{"version", "1.0"},
          {"added_tokens", {{{"id", 259}, {"content", "<|endoftext|>"}, {"special", true}}}},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"a b", "ab c", "b c", "a bc"}}}}};
}

TEST(TokenizerFiles, json_subset) {
  const Tokenizer tokenizer = Tokenizer::from_json(small_tokenizer().dump(), "t.json");
  EXPECT_EQ(tokenizer.vocabulary(), 260);
  EXPECT_EQ(tokenizer.end_of_text(), 259);
  EXPECT_EQ(tokenizer.encode("abc bc"), (std::vector<int32_t>{257, 220, 258}));

  Json pairs = small_tokenizer();
  pairs["model"]["merges"] = parse_json(R"([["a", "b"], ["ab", "c"], ["b", "c"], ["a", "bc"]])");
  EXPECT_EQ(Tokenizer::from_json(pairs.dump(), "t.json").to_json(), tokenizer.to_json());

  Json listed_twice = small_tokenizer();  // as in GPT-2's own file
  listed_twice["model"]["vocab"]["<|endoftext|>"] = 259;
  EXPECT_EQ(Tokenizer::from_json(listed_twice.dump(), "t.json").to_json(), tokenizer.to_json());

  Json other_name = small_tokenizer();
  other_name["added_tokens"][0]["content"] = "</s>";
  EXPECT_EQ(Tokenizer::from_json(other_name.dump(), "t.json").end_of_text(), 259);

  Json none = small_tokenizer();
  none.erase("added_tokens");
  EXPECT_EQ(Tokenizer::from_json(none.dump(), "t.json").end_of_text(), -1);
}

void expect_refused(const std::string& text, const std::string& message) {
  try {
    Tokenizer::from_json(text, "t.json");
    ADD_FAILURE() << "accepted; expected: " << message;
  } catch (const DataError& error) {
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    EXPECT_TRUE(std::string(error.what()).starts_with("t.json: ")) << error.what();
  }
}

TEST(TokenizerFiles, refuses_what_would_give_other_tokens) {
  const auto with = [](auto&& change) {
    Json root = small_tokenizer();
    change(root);
    return root.dump();
  };
  expect_refused("", "expected a tokenizer.json");
  expect_refused("{", "expected a tokenizer.json");
  expect_refused("[]", "expected an object");
  expect_refused("{}", "'model'");
  expect_refused(with([](Json& r) { r.erase("pre_tokenizer"); }), "'pre_tokenizer'");
  expect_refused(with([](Json& r) { r["pre_tokenizer"]["type"] = "Metaspace"; }), "ByteLevel");
  expect_refused(with([](Json& r) { r["pre_tokenizer"]["add_prefix_space"] = true; }), "add_prefix_space");
  expect_refused(with([](Json& r) { r["pre_tokenizer"].erase("add_prefix_space"); }), "add_prefix_space");
  expect_refused(with([](Json& r) { r["pre_tokenizer"]["use_regex"] = false; }), "use_regex");
  expect_refused(with([](Json& r) { r["normalizer"] = {{"type", "NFC"}}; }), "normalizer");
  expect_refused(with([](Json& r) { r["model"]["type"] = "WordPiece"; }), "'type'");
  expect_refused(with([](Json& r) { r["model"]["dropout"] = 0.1; }), "dropout");
  expect_refused(with([](Json& r) { r["model"]["ignore_merges"] = true; }), "ignore_merges");
  expect_refused(with([](Json& r) { r["model"]["vocab"].erase("a"); }), "ids from 0 to");
  expect_refused(with([](Json& r) {
                   r["model"]["vocab"].erase("a");
                   r["model"]["vocab"]["xyz"] = 64;
                 }),
                 "none for 0x61");
  expect_refused(with([](Json& r) { r["model"]["vocab"]["abc"] = 256; }), "each once");
  expect_refused(with([](Json& r) { r["model"]["vocab"]["abc"] = -1; }), "each once");
  expect_refused(with([](Json& r) { r["model"]["vocab"]["abc"] = 1LL << 40; }), "each once");
  expect_refused(with([](Json& r) { r["model"]["vocab"]["abc"] = "257"; }), "whole number");
  expect_refused(with([](Json& r) { r["model"]["vocab"]["a b"] = 260; }), "GPT-2's characters");
  expect_refused(with([](Json& r) { r["model"]["merges"].push_back("a b"); }), "merged already");
  expect_refused(with([](Json& r) { r["model"]["merges"].push_back("ab"); }), "left right");
  expect_refused(with([](Json& r) { r["model"]["merges"].push_back("a b c"); }), "left right");
  expect_refused(with([](Json& r) { r["model"]["merges"].push_back("c a"); }), "'ca' is not");
  expect_refused(with([](Json& r) { r["model"]["merges"] = 5; }), "model.merges");
  expect_refused(with([](Json& r) { r["added_tokens"][0]["special"] = false; }), "special tokens alone");
  expect_refused(with([](Json& r) { r["added_tokens"][0]["id"] = 7; }), "each once");
  expect_refused(with([](Json& r) { r["added_tokens"].push_back(r["added_tokens"][0]); }), "each token once");
  expect_refused(with([](Json& r) { r["model"]["vocab"]["<|endoftext|>"] = 3; }), "id 259");
  expect_refused(with([](Json& r) {
                   r["added_tokens"][0] = {{"id", 64}, {"content", "a"}, {"special", true}};
                 }),
                 "none for 0x61");
}

TEST(TokenizerFiles, refuses_bad_merges) {
  const std::pair<const char*, const char*> kCases[] = {
      {"a b\n", "line 1: expected #version"},
      {"#version: 0.2\nab\n", "line 2: expected two tokens"},
      {"#version: 0.2\na b\n\nc d\n", "line 3: expected two tokens"},
      {"#version: 0.2\na b c\n", "line 2"},
      {"#version: 0.2\nab c\n", "'ab' is neither a byte"},
      {"#version: 0.2\na b\nab c\nb c\na bc\n", "line 5: 'abc' is made by a line above"},
  };
  for (const auto& [text, message] : kCases) try {
      Tokenizer::from_merges(text, "vocab.bpe");
      ADD_FAILURE() << text;
    } catch (const DataError& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
}

TEST(Tokenizer, refuses_impossible_parts) {
  std::vector<std::string> bytes;
  for (int value = 0; value < 256; ++value) bytes.emplace_back(1, static_cast<char>(value));
  bytes.push_back("ab");
  EXPECT_NO_THROW(Tokenizer(bytes, {}, {{'a', 'b', 256}}));
  EXPECT_THROW(Tokenizer(bytes, {}, {{'a', 'c', 256}}), std::invalid_argument);
  EXPECT_THROW(Tokenizer(bytes, {}, {{'a', 'b', 257}}), std::invalid_argument);
  EXPECT_THROW(Tokenizer(bytes, {256}, {{'a', 'b', 256}}), std::invalid_argument);
  EXPECT_THROW(Tokenizer(bytes, {}, {{'a', 'b', 256}, {'a', 'b', 256}}), std::invalid_argument);
  EXPECT_THROW(Tokenizer({"a"}, {}, {}), std::invalid_argument);
}

// ------------------------------------------------------------------------------------------ synthetic

TEST(Synth, same_bytes_for_the_same_seed) {
  const std::string text = synthetic_text(1, 100000);
  EXPECT_EQ(text.size(), 100000u);
  EXPECT_EQ(synthetic_text(1, 100000), text);
  EXPECT_EQ(synthetic_text(1, 777), text.substr(0, 777));  // a longer text begins with the shorter
  EXPECT_NE(synthetic_text(2, 100000), text);
  EXPECT_EQ(synthetic_text(1, 0), "");
  uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a: no compiler and no machine may change a byte
  for (char byte : text) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001B3u;
  EXPECT_EQ(hash, 1235836115108480521u) << text.substr(0, 300);
}

TEST(Synth, has_structure_to_learn) {
  const std::string text = synthetic_text(1, 200000);
  // Half of what a byte vocabulary of the same letters would need, and no more than that: neither noise nor a loop.
  const Tokenizer tokenizer = train(text, 1024);
  const double bytes_per_token = 200000.0 / static_cast<double>(tokenizer.encode(text).size());
  EXPECT_GT(bytes_per_token, 3.0);
  EXPECT_LT(bytes_per_token, 6.0);
  // Sums come out right.
  int sums = 0;
  for (size_t at = 0; (at = text.find(" has ", at)) != std::string::npos; ++at) {
    int has = 0, more = 0, now = 0;
    char thing[32], thing_again[32], name[32];
    if (std::sscanf(text.c_str() + at, " has %d %31[a-z], and %d more: %31s has %d %31[a-z].", &has, thing,
                    &more, name, &now, thing_again) != 6)
      continue;
    ++sums;
    ASSERT_EQ(has + more, now);
    ASSERT_STREQ(thing, thing_again);
  }
  EXPECT_GT(sums, 300);
}

}  // namespace
}  // namespace evenkeel
