// One head of a capture, as far as the page shows it: plain numbers. Computing them is attention's work; drawing them is not.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "diagnosis/head_analysis.h"

namespace evenkeel {

struct CaptureView {
  std::string file, source;  // source: the run it is of, by its own words
  int64_t step = 0, layer = 0, head = 0;
  std::string plan, words;  // of the head; what ails it, in a sentence
  HeadProbe probe;
  HeadAnalysis analysis;
  std::vector<std::vector<double>> v;  // (D, T): V of the analysed sequence, a row a feature
  std::vector<double> v_sign;          // (D): sum v / sum |v| over its keys, -1 to 1
};

// The head of interest (layer, head) if a capture has it, else the head that leaks most of them all. Captures that cannot
// be read are listed in notes. nullptr: there is nothing to look at. Kept until a file changes: a live page asks again and
// again for what takes seconds.
std::shared_ptr<const CaptureView> look_at(std::span<const std::filesystem::path> captures, int64_t layer,
                                           int64_t head, std::vector<std::string>& notes);

}  // namespace evenkeel
