// Rounding by a format's text outside attention: what a plan does to an operand, as a function of its own.
#pragma once

#include <cstdint>

#include "numerics/random.h"
#include "numerics/rounding.h"

namespace evenkeel {

// y = x rounded as attention rounds q, k, v and dO: B sequences of H heads, T tokens (rows) each, D features; contiguous. Which
// values share a scale is shared_scale.h's. Element n of the tensor draws number n of the key's stream. y may be x.
// REQUIRES: no size is negative. The same bits for any number of threads.
void round_tensor(const Rounding& rounding, const float* x, float* y, int64_t B, int64_t H, int64_t T,
                  int64_t D, const RandomKey& key = {});

}  // namespace evenkeel
