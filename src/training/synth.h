// A made-up language for tests and demonstrations: text of any length without a download, the same bytes for
// the same seed on any machine. There is something to learn at every distance. Near: spelling (a few syllables),
// word frequencies (Zipf), order of words, which noun follows which. Far: agreement of subject and verb over a
// clause, topics of paragraphs, names and lists that are repeated, sums that come out right.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace evenkeel {

class SyntheticLanguage {
 public:
  explicit SyntheticLanguage(uint64_t seed);  // the words, too, are the seed's
  // Paragraph `index` of the text that never ends; a blank line closes it.
  std::string paragraph(int64_t index) const;

 private:
  uint64_t seed_;
  std::vector<std::string> nouns_, verbs_, adjectives_, names_;
};

// The first `bytes` bytes of that text: a longer text begins with the shorter.
std::string synthetic_text(uint64_t seed, int64_t bytes);

}  // namespace evenkeel
