// How the FP8 forward pass is judged, on the emulator and on a GPU: its errors against FP64, with signs, beside those of the CPU
// with the same plan.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "attention/attention.h"
#include "attention/cuda/hopper_fp8_tile.h"
#include "attention/kernel_families.h"
#include "attention_cases.h"
#include "numerics/round_block.h"

namespace evenkeel::fp8_judge {

using namespace hopper_fp8;

// What the plan makes of rows [0, rows) of one head, by the definition: e4m3*tile, v e4m3*head.
inline std::vector<float> rounded_head(const View<const float>& x, int64_t b, int64_t h, int64_t rows,
                                       bool is_value) {
  const Rounding rounding = parse_rounding(is_value ? "e4m3*head" : "e4m3*tile");
  const int64_t D = x.shape[3], step = is_value ? rows : kTileRows;
  std::vector<float> head(static_cast<size_t>(rows * D));
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < D; ++d) head[static_cast<size_t>(i * D + d)] = *x.at(b, h, i, d);
  for (int64_t i = 0; i < rows; i += step)
    round_block(rounding, {head.data() + i * D, std::min(step, rows - i), D, D, 1});
  return head;
}

// Numbers of all tiles that are not those of the definition.
inline int64_t wrong_numbers(const uint8_t* tiles, const View<const float>& x, int64_t keys_or_rows,
                             bool is_value) {
  const int64_t D = x.shape[3], count = divide_up(x.shape[2], kPairRows) * kPairTiles;
  const int head = kernel_head(D);
  int64_t wrong = 0;
  for (int64_t b = 0; b < x.shape[0]; ++b)
    for (int64_t h = 0; h < x.shape[1]; ++h) {
      const std::vector<float> expected = rounded_head(x, b, h, keys_or_rows, is_value);
      for (int64_t tile = 0; tile * kTileRows < keys_or_rows; ++tile) {
        const int64_t first = tile * kTileRows, last = std::min<int64_t>(first + kTileRows, keys_or_rows);
        const auto index = static_cast<uint32_t>((b * x.shape[1] + h) * count + tile);
        const uint8_t* const at = tiles + image_offset(index, head);
        float scale;
        std::memcpy(&scale, tiles + scale_offset(index, head), sizeof scale);
        for (int row = 0; row < kTileRows; ++row)
          for (int d = 0; d < head; ++d) {
            const int line = is_value ? d : row, byte = is_value ? value_slot(row) : d;
            const float found =
                decode(kE4m3, at[tile_offset(line, byte, line_bytes(is_value, head))]) * scale;
            const float truth =
                d < D && row < last - first ? expected[static_cast<size_t>((first + row) * D + d)] : 0.0f;
            wrong += std::isnan(truth) ? !std::isnan(found) : !(found == truth);
          }
      }
    }
  return wrong;
}

// What the kernel computes: sums of 13 bits over 128 keys (the CPU's: 64, a tile) and over all features, FP32 beyond.
inline PrecisionPlan kernel_plan(const std::string& stabiliser) {
  return parse_plan(std::string(kHopperFp8Plan) + ",accumulate=h200/4,stabiliser=" + stabiliser);
}

// Of one tensor: root mean square, and the mean with its standard error, one sample a row.
struct Errors {
  double rms = 0, mean = 0, standard_error = 0, count = 0;
};
inline Errors errors_of(const char* name, const Tensor<float>& found, const Tensor<double>& exact) {
  Errors e;
  const auto width = static_cast<size_t>(found.shape()[3]);
  double squares = 0, sum = 0, row_squares = 0, rows = 0;
  for (size_t first = 0; first < found.values().size(); first += width) {
    double row = 0;
    bool seen = true;
    for (size_t n = first; n < first + width; ++n) {
      const double truth = exact.values()[n], value = double{found.values()[n]};
      if (std::isinf(truth) && value == truth) {  // L of a row that sees no key
        seen = false;
        continue;
      }
      if (!std::isfinite(value)) {
        ADD_FAILURE() << name << "[" << n << "] is " << value << ", exactly " << truth;
        return e;
      }
      squares += (value - truth) * (value - truth);
      row += (value - truth) / static_cast<double>(width);
    }
    if (!seen) continue;
    sum += row, row_squares += row * row, ++rows;
  }
  e.count = rows * static_cast<double>(width);
  if (rows == 0) return e;
  e.rms = std::sqrt(squares / e.count);
  e.mean = sum / rows;
  e.standard_error = std::sqrt(std::max(0.0, row_squares / rows - e.mean * e.mean) / rows);
  return e;
}

// The largest score and norm of v, for what FP32 arithmetic leaves where the measure is exact by luck.
inline double largest_magnitude(const View<const float>& x) {
  double largest = 0;
  for (int64_t b = 0; b < x.shape[0]; ++b)
    for (int64_t h = 0; h < x.shape[1]; ++h)
      for (int64_t i = 0; i < x.shape[2]; ++i)
        for (int64_t d = 0; d < x.shape[3]; ++d)
          largest = std::max(largest, std::fabs(double{*x.at(b, h, i, d)}));
  return largest;
}

struct Verdict {
  Errors o, o_measure, lse, lse_measure;
};

// Errors are at most 1.2 times those of the CPU with this plan. Small tensors are granted three standard errors of a root
// mean square. Means are not farther from zero than the CPU's by more than five standard errors.
inline Verdict judge(const std::string& name, const AttentionProblem& config, const AttentionInputs& in,
                     const Tensor<float>& o, const Tensor<float>& lse) {
  AttentionBuffers measure(in, /*with_facts=*/false);
  attention_forward(config, in, measure.forward());
  const Tensor<float> grad(o.shape());
  const AttentionReference exact = attention_reference(config, in, grad.view());
  const double v = largest_magnitude(in.v), score = largest_magnitude(in.q) * largest_magnitude(in.k) *
                                                    std::sqrt(static_cast<double>(o.shape()[3]));
  const double p = 0x1p-22 * (16 + score);
  Verdict verdict;
  const auto compare = [&](const char* what, const Tensor<float>& found, const Tensor<float>& of_cpu,
                           const Tensor<double>& truth, double arithmetic, Errors& ours, Errors& theirs) {
    ours = errors_of(what, found, truth);
    theirs = errors_of(what, of_cpu, truth);
    if (ours.count == 0) return;
    EXPECT_LE(ours.rms, (1.2 + 3 / std::sqrt(2 * ours.count)) * theirs.rms + arithmetic)
        << name << ": " << what << ", the CPU's is " << theirs.rms;
    EXPECT_LE(std::fabs(ours.mean), std::fabs(theirs.mean) + 5 * ours.standard_error + arithmetic)
        << name << ": " << what << " has a bias, the CPU's is " << theirs.mean;
  };
  compare("o", o, measure.o, exact.o, p * v, verdict.o, verdict.o_measure);
  compare("lse", lse, measure.lse, exact.lse, p, verdict.lse, verdict.lse_measure);
  return verdict;
}

}  // namespace evenkeel::fp8_judge
