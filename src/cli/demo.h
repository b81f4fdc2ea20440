// What the two halves of `evenkeel demo` share.
#pragma once

#include <string>
#include <vector>

namespace evenkeel::cli {

void heading(const char* text, bool colour);
// Eight heights for 1 .. 100,000 on a logarithmic scale.
std::string sparkline(const std::vector<double>& offsets);

// The mechanism in the small: one addition, the sum that it breaks, one head that drifts; on the GPU's kernels, too. plans:
// more for the head.
void tell_story(const std::vector<std::string>& plans, bool json);

}  // namespace evenkeel::cli
