// Pairwise covering: a short list of tests in which every pair of levels of every two factors occurs. Faults of kernels
// mostly need one or two conditions (a window *and* a partial tile); all products of a dozen factors are out of reach.
#pragma once

#include <cstdint>
#include <vector>

namespace evenkeel {

// Rows of one level for each factor: levels[f] levels of factor f, from 0 on. Greedy: each row is the best of a few random
// ones in new pairs. The same rows for the same seed. Cost: rows x tries x factors^2 x levels.
// REQUIRES: two factors at least, each with a level at least (std::invalid_argument).
std::vector<std::vector<int>> covering_rows(const std::vector<int>& levels, uint64_t seed);

}  // namespace evenkeel
