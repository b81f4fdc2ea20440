// Forms of a problem that change its scores or who sees them: windows, masks, soft caps, slopes, sinks. For all fast
// kernels. Internal to src/attention.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/cuda/sequences.cuh"
#include "gpu/cuda/device_function.cuh"

namespace evenkeel {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct ScoreForms {
  Sequences sequences;
  float scale;
  float softcap;     // 0: off
  float score_unit;  // of the scores that softmax sees: a, or with a soft cap its c (they are then tanh)
  float score_log2;  // the same in powers of two
  const float *slopes, *sinks;  // (H) or null
  int left, right;              // a row at key position p sees keys p - left ... p + right
  const uint8_t* visible;       // or null
  int64_t visible_stride[4];
  bool shaped;  // soft cap, slopes or a mask of its own: more than windows and sinks
};

inline ScoreForms score_forms(const AttentionProblem& problem) {
  ScoreForms f{};
  f.sequences = sequences(problem);
  f.scale = problem.scale;
  f.softcap = problem.softcap;
  f.score_unit = problem.softcap > 0 ? problem.softcap : problem.scale;
  f.score_log2 = f.score_unit * gpu::kLog2E;
  // A window as wide as the sequences is none; so no sum overflows.
  const int64_t widest = std::max(problem.T, problem.N);
  const auto reach = [&](int64_t window) {
    return static_cast<int>(window < 0 ? widest : std::min(window, widest));
  };
  f.left = reach(problem.mask.window_left);
  f.right = problem.mask.causal ? 0 : reach(problem.mask.window_right);
  f.visible = problem.mask.visible.data;
  std::copy_n(problem.mask.visible.stride.begin(), 4, f.visible_stride);
  f.slopes = problem.slopes.data();
  f.sinks = problem.sinks.data();
  f.shaped = f.softcap > 0 || f.slopes || f.visible;
  return f;
}

// What a head's sink is to its softmax, in powers of two; -inf: it has none.
EK_DEVICE float sink_log2(const ScoreForms& f, int h) {
  return f.sinks ? f.sinks[h] * gpu::kLog2E : -kInfinity;
}
// How much a score, as the products leave it, falls for each key of distance.
EK_DEVICE float slope_of(const ScoreForms& f, int h) { return f.slopes ? f.slopes[h] / f.scale : 0.0f; }

// tanh(x): 1 - 2 / (1 + e^2x), with the absolute accuracy of a number near 1. A soft-capped score needs no more.
EK_DEVICE float tanh_of(float x) {
  return fmaf(-2.0f, gpu::reciprocal_approx(1.0f + gpu::exp2_approx(x * (2 * gpu::kLog2E))), 1.0f);
}

// With a soft cap: P times the slope of tanh, which dP - delta is multiplied by. A masked score is -inf: its P is 0, its slope
// is not a number.
EK_DEVICE float weight_of(float prob, float slope) { return prob == 0 ? 0.0f : prob * slope; }

// log(2^shift of_keys + 2^sink), of either where there is none of the other.
EK_DEVICE float log_sum(float shift, float of_keys, float sink) {
  if (sink == -kInfinity) return of_keys == 0 ? -kInfinity : fmaf(shift, gpu::kLn2, __logf(of_keys));
  const float top = of_keys == 0 ? sink : fmaxf(shift, sink);
  const float keys = of_keys == 0 ? 0.0f : of_keys * gpu::exp2_approx(shift - top);
  return fmaf(top, gpu::kLn2, __logf(keys + gpu::exp2_approx(sink - top)));
}

// Which rows of a sequence see which keys: a band, cut off at the sequence's ends.
struct Band {
  Sequence s;
  int offset, left, right;

  Band() = default;
  EK_DEVICE Band(const ScoreForms& f, int b)
      : s(sequence(f.sequences, b)), offset(s.keys - s.rows), left(f.left), right(f.right) {}
  // Row i sees keys [first_key, end_key) at most; none where first_key >= end_key.
  EK_DEVICE int first_key(int row) const { return max(0, row + offset - left); }
  EK_DEVICE int end_key(int row) const { return min(s.keys, row + offset + right + 1); }
  // Key tiles [first, end) that some row of a row tile sees. Every one of them has that tile among its row tiles.
  EK_DEVICE int first_key_tile(int row, int tile_keys) const { return first_key(row) / tile_keys; }
  EK_DEVICE int end_key_tile(int row, int tile_rows, int tile_keys) const {
    if (row >= s.rows) return 0;
    const int end = end_key(min(row + tile_rows, s.rows) - 1);
    return end <= first_key(row) ? 0 : (end + tile_keys - 1) / tile_keys;
  }
  // Row tiles [first, end) that see some key of the tile that begins with `key`.
  EK_DEVICE int first_row_tile(int key, int tile_rows) const {
    return max(0, key - right - offset) / tile_rows;
  }
  EK_DEVICE int end_row_tile(int key, int tile_keys, int tile_rows) const {
    if (key >= s.keys) return 0;
    const int last_row = min(s.rows - 1, min(key + tile_keys, s.keys) - 1 + left - offset);
    return last_row < 0 ? 0 : last_row / tile_rows + 1;
  }
  // Do all rows of [row, row + rows) see all keys of [key, key + keys)? Does one see one?
  EK_DEVICE bool all_seen(int row, int rows, int key, int keys) const {
    return key >= row + rows - 1 + offset - left && key + keys - 1 <= row + offset + right &&
           key + keys <= s.keys;
  }
  EK_DEVICE bool some_seen(int row, int rows, int key, int keys) const {
    return row < s.rows && key < end_key(min(row + rows, s.rows) - 1) && key + keys > first_key(row);
  }
};

// The mask of one head, element by element.
struct Visible {
  const uint8_t* data;  // of the head, or null: every key in the band is visible
  int64_t row_stride, key_stride;
  EK_DEVICE Visible(const ScoreForms& f, int b, int h)
      : data(f.visible ? f.visible + b * f.visible_stride[0] + h * f.visible_stride[1] : nullptr),
        row_stride(f.visible_stride[2]),
        key_stride(f.visible_stride[3]) {}
  // REQUIRES: row and key exist.
  EK_DEVICE bool operator()(int row, int key) const { return data[row * row_stride + key * key_stride] != 0; }
};

}  // namespace evenkeel
