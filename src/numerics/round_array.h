// Rounding of whole arrays: the fast version of rounding.h, the same bits. Vectorised, integer arithmetic only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics/random.h"
#include "numerics/rounding.h"

namespace evenkeel {

// target[i] = round_to(r, source[i], random_bits(key, first_element + i)) for i < count.
// `key` and `first_element` matter to stochastic rounding alone. target may be source, or not overlap it.
// Thread-safe, never allocates. Fastest for stochastic where first_element is a multiple of 64.
void round_array(const Rounding& r, float* target, const float* source, size_t count,
                 const RandomKey& key = {}, uint64_t first_element = 0);

}  // namespace evenkeel
