#include "training/synth.h"

#include <set>
#include <string_view>

#include "base/error.h"
#include "numerics/random.h"

namespace evenkeel {
namespace {

constexpr int64_t kTopics = 8, kNounsPerTopic = 24, kVerbs = 32, kAdjectives = 24, kNames = 32;

// Streams of a seed: the lexicon, and the paragraphs.
constexpr uint32_t kLexiconStream = 1, kParagraphStream = 2;

std::string make_word(RandomStream& random, int64_t syllables) {
  constexpr std::string_view kConsonants = "bdfgklmnprstvz", kVowels = "aeiou", kEnds = "lnrs";
  const auto pick = [&](std::string_view letters) {
    return letters[static_cast<size_t>(random.below(static_cast<int64_t>(letters.size())))];
  };
  std::string word;
  for (int64_t i = 0; i < syllables; ++i) {
    word += pick(kConsonants);
    word += pick(kVowels);
  }
  if (random.below(2) == 0) word += pick(kEnds);
  return word;
}

// Index i with a weight of 1 / (i + 1), in whole numbers: no machine rounds them differently.
int64_t zipf(RandomStream& random, int64_t count) {
  constexpr int64_t kScale = 1 << 16;
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += kScale / (i + 1);
  int64_t left = random.below(total);
  for (int64_t i = 0; i < count; ++i) {
    left -= kScale / (i + 1);
    if (left < 0) return i;
  }
  return count - 1;
}

}  // namespace

SyntheticLanguage::SyntheticLanguage(uint64_t seed) : seed_(seed) {
  RandomStream random({seed, 0, kLexiconStream});
  std::set<std::string> taken;
  const auto fill = [&](std::vector<std::string>& words, int64_t count, int64_t fewest_syllables) {
    while (static_cast<int64_t>(words.size()) < count) {
      std::string word = make_word(random, fewest_syllables + random.below(2));
      if (taken.insert(word).second) words.push_back(std::move(word));
    }
  };
  fill(nouns_, kTopics * kNounsPerTopic, 2);
  fill(verbs_, kVerbs, 1);
  fill(adjectives_, kAdjectives, 2);
  fill(names_, kNames, 2);
  for (std::string& name : names_) name[0] = static_cast<char>(name[0] - 'a' + 'A');
}

std::string SyntheticLanguage::paragraph(int64_t index) const {
  require(index >= 0 && index <= int64_t{~uint32_t{0}}, "[synth] expected a paragraph from 0 to {}, got {}",
          ~uint32_t{0}, index);
  RandomStream random({seed_, static_cast<uint32_t>(index), kParagraphStream});
  const int64_t topic = random.below(kTopics);
  const std::string& hero = names_[static_cast<size_t>(random.below(kNames))];
  int64_t last_noun = 0;
  const auto noun = [&]() -> const std::string& {
    // Half of the time the noun that goes with the last one, otherwise any of the topic.
    last_noun = random.below(2) == 0 ? (5 * last_noun + 3) % kNounsPerTopic : zipf(random, kNounsPerTopic);
    return nouns_[static_cast<size_t>(topic * kNounsPerTopic + last_noun)];
  };
  const auto verb = [&]() -> const std::string& { return verbs_[static_cast<size_t>(zipf(random, kVerbs))]; };
  const auto adjective = [&]() -> const std::string& {
    return adjectives_[static_cast<size_t>(zipf(random, kAdjectives))];
  };

  // Draws are statements of their own: the order in which arguments are evaluated is the compiler's.
  std::string text;
  const int64_t sentences = 3 + random.below(5);
  for (int64_t sentence = 0; sentence < sentences; ++sentence) {
    if (sentence > 0) text += ' ';
    const std::string& thing = noun();
    switch (random.below(4)) {
      case 0: {  // the verb agrees with its subject, across a clause
        const bool plural = random.below(2) == 0;
        text += "The " + adjective() + " " + thing + (plural ? "en" : "");
        if (random.below(2) == 0) {
          text += " that the " + noun();
          text += " " + verb() + "os";
        }
        text += " " + verb() + (plural ? "an" : "os");
        text += " the " + noun() + ".";
        break;
      }
      case 1: {  // a sum
        const int64_t has = 1 + random.below(20);
        const int64_t more = 1 + random.below(20);
        text += fmt::format("{} has {} {}en, and {} more: {} has {} {}en.", hero, has, thing, more, hero,
                            has + more, thing);
        break;
      }
      case 2: {  // a list, said twice
        std::string list = thing;
        for (int64_t more = 1 + random.below(4); more > 0; --more) list += ", " + noun();
        text += fmt::format("{} says \"{}\"; so it is \"{}\".", hero, list, list);
        break;
      }
      default: {  // brackets that close
        const std::string& kind = adjective();
        text += fmt::format("{} ({} [{} {}]) {}os it.", hero, thing, kind, thing, verb());
        break;
      }
    }
  }
  return text + "\n\n";
}

std::string synthetic_text(uint64_t seed, int64_t bytes) {
  require(bytes >= 0, "[synth] expected a length of 0 or more, got {}", bytes);
  const SyntheticLanguage language(seed);
  std::string text;
  for (int64_t index = 0; static_cast<int64_t>(text.size()) < bytes; ++index)
    text += language.paragraph(index);
  text.resize(static_cast<size_t>(bytes));
  return text;
}

}  // namespace evenkeel
