// A block of values that share scales, taken apart: the scales and why, what each value becomes, and what is lost. Plain
// data, and two renderings of it. Reads no files and prints nothing.
#pragma once

#include <string>
#include <vector>

#include "numerics/rounding.h"

namespace evenkeel {

struct BlockValue {
  float given = 0;
  float over_scale = 0;  // given / scale
  float stored = 0;      // that, in the format
  uint32_t code = 0;
  float becomes = 0;  // stored * scale
  double error = 0;   // becomes - given
  bool saturated = false;
};
struct BlockGroup {
  float largest = 0, scale = 0;
  std::vector<BlockValue> values;
  double error = 0;  // sum of the values' errors
};
struct BlockExplanation {
  Rounding rounding;
  float outer = 1;  // the scale that all scales share
  std::vector<BlockGroup> groups;
};

// The values as one row, or as one column where columns have the scales. REQUIRES: the rounding has a shared scale; values are finite.
BlockExplanation explain_block(const Rounding& rounding, const std::vector<float>& values);

std::string to_text(const BlockExplanation& explanation);
std::string to_json(const BlockExplanation& explanation);

}  // namespace evenkeel
