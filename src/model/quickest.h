// Which of several ways to do the same work takes the least time, on a machine whose speed changes while it is asked.
#pragma once

#include <cstddef>
#include <functional>

namespace evenkeel {

struct Stopwatch {
  std::function<double(size_t way, int runs)>
      seconds;                  // of one of so many runs; infinite: this way is refused
  std::function<double()> now;  // seconds
};

// First each way twice, the first time to load it: at least 12 of them, and more while that takes less than 30 ms. Then the
// best four in turns, 3 to 9 rounds, while that takes less than 30 ms: what slows the machine down meets all of them. The
// lowest median wins; of equal ones, and where all are refused, the one that comes first. REQUIRES: ways >= 1.
size_t quickest(size_t ways, const Stopwatch& watch);

}  // namespace evenkeel
