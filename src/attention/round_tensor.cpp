#include "attention/round_tensor.h"

#include <algorithm>

#include "attention/cpu_operands.h"
#include "base/threads.h"

namespace evenkeel {

void round_tensor(const Rounding& rounding, const float* x, float* y, int64_t B, int64_t H, int64_t T,
                  int64_t D, const RandomKey& key) {
  const int64_t of_head = T * D, of_sequence = H * of_head;
  if (B * of_sequence == 0) return;
  if (y != x) std::copy_n(x, B * of_sequence, y);
  const SharedScale& shared = rounding.shared;
  const bool of_all_heads = shared.group == ScaleGroup::tensor || shared.outer == ScaleGroup::tensor;
  parallel_for(B, [&](int64_t b, int) {
    float* const sequence = y + b * of_sequence;
    const float largest = of_all_heads ? largest_finite({sequence, 1, of_sequence, of_sequence, 1}) : -1.0f;
    for (int64_t h = 0; h < H; ++h) {
      float* const head = sequence + h * of_head;
      // A scale of the whole head is found from all its rows, also where they are rounded tile by tile.
      const float beyond = of_all_heads ? largest : largest_finite({head, 1, of_head, of_head, 1});
      round_rows(rounding, head, T, D, D, beyond, key, static_cast<uint64_t>(b * of_sequence + h * of_head));
    }
  });
}

}  // namespace evenkeel
