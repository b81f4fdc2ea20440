// How the FP8 kernels are judged, on the emulator and on a GPU: their errors against FP64, with signs, beside those of the CPU
// with the same plan.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "attention/attention.h"
#include "attention/cuda/hopper_fp8_tile.h"
#include "attention/kernel_families.h"
#include "attention_cases.h"
#include "numerics/round_block.h"

namespace evenkeel::fp8_judge {

using namespace hopper_fp8;

// What the plan makes of rows [0, rows) of one head, by the definition.
inline std::vector<float> rounded_head(const View<const float>& x, int64_t b, int64_t h, int64_t rows,
                                       bool is_value) {
  const Rounding rounding = parse_plan(kHopperFp8Plan).at(is_value ? Site::v : Site::q);
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

// The forward kernel rounds q itself, so its q is seen in its scores. The keys of a head are the same, 1 in one feature and 0 in the
// others: then L is q's number of that feature, but for the number of keys. Scales differ from tile to tile.
inline cases::Problem scores_are_queries(const cases::Sizes& sizes, const cases::Options& options = {}) {
  cases::Problem host = cases::make_problem({sizes, options, ""});
  for (int64_t b = 0; b < sizes.B; ++b)
    for (int64_t h = 0; h < sizes.H; ++h) {
      for (int64_t j = 0; j < sizes.N; ++j)
        for (int64_t d = 0; d < sizes.D; ++d) *host.k().at(b, h, j, d) = d == (5 * h + 3) % sizes.D;
      for (int64_t i = 0; i < sizes.T; ++i)
        for (int64_t d = 0; d < sizes.D; ++d)
          *host.q().at(b, h, i, d) *= static_cast<float>(1 << i / kTileRows * 3 % 7);
    }
  return host;
}
// Rows of that problem whose L is not q's number by the definition.
inline int64_t wrong_scores(const cases::Problem& host, const Tensor<float>& lse) {
  const auto [B, H, T, D] = host.in.q.shape;
  const float scale = 1 / std::sqrt(static_cast<float>(D));
  int64_t wrong = 0;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h) {
      const int64_t rows = host.query_lengths.empty() ? T : host.query_lengths[static_cast<size_t>(b)];
      const int64_t keys =
          host.key_lengths.empty() ? host.in.k.shape[2] : host.key_lengths[static_cast<size_t>(b)];
      if (keys == 0) continue;
      const std::vector<float> expected = rounded_head(host.in.q, b, h, rows, false);
      for (int64_t i = 0; i < rows; ++i) {
        const float truth = scale * expected[static_cast<size_t>(i * D + (5 * h + 3) % D)] +
                            std::log(static_cast<float>(keys)),
                    found = lse.values()[static_cast<size_t>((b * H + h) * T + i)];
        wrong += !(std::fabs(found - truth) <= 1e-5f * (8 + std::fabs(truth)));
      }
    }
  return wrong;
}

// Numbers in BF16 that are not those of the definition, at `stride` as DeviceTensor has it. first_row(b), rows(b): of sequence b.
template <class FirstRow, class Rows>
int64_t wrong_rows(const uint16_t* found, const std::array<int64_t, 4>& stride, const View<const float>& x,
                   FirstRow first_row, Rows rows, bool is_value) {
  int64_t wrong = 0;
  for (int64_t b = 0; b < x.shape[0]; ++b)
    for (int64_t h = 0; h < x.shape[1]; ++h) {
      const std::vector<float> expected = rounded_head(x, b, h, rows(b), is_value);
      for (int64_t i = 0; i < rows(b); ++i)
        for (int64_t d = 0; d < x.shape[3]; ++d) {
          const uint16_t bits = found[b * stride[0] + h * stride[1] + (first_row(b) + i) * stride[2] + d];
          const float value = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16),
                      truth = expected[static_cast<size_t>(i * x.shape[3] + d)];
          wrong += std::isnan(truth) ? !std::isnan(value) : !(value == truth);
        }
    }
  return wrong;
}

// The problem with q, k and v as the plan rounds them, so that their rounding is no part of an error.
inline void round_operands(cases::Problem& host) {
  const auto round = [](View<float> x, const std::vector<int32_t>& lengths, bool is_value) {
    for (int64_t b = 0; b < x.shape[0]; ++b)
      for (int64_t h = 0; h < x.shape[1]; ++h) {
        const int64_t rows = lengths.empty() ? x.shape[2] : lengths[static_cast<size_t>(b)];
        const std::vector<float> rounded = rounded_head(x, b, h, rows, is_value);
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t d = 0; d < x.shape[3]; ++d)
            *x.at(b, h, i, d) = rounded[static_cast<size_t>(i * x.shape[3] + d)];
      }
  };
  round(host.q(), host.query_lengths, false);
  round(host.k(), host.key_lengths, false);
  round(host.v(), host.key_lengths, true);
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

// What a kernel found. Of the forward pass alone: no gradients.
struct Found {
  Tensor<float> o, lse, dq, dk, dv;
};
struct Line {
  const char* what;
  Errors ours, cpu;
};

// Errors are at most 1.2 times those of the CPU with this plan. Small tensors are granted three standard errors of a root
// mean square. Means are not farther from zero than the CPU's by more than five standard errors. O is granted what sums of 13
// bits over 128 keys lose beyond the CPU's over 64: 4e-4 of it where values have one sign (sums_of_13_bits_must_be_short).
inline std::vector<Line> judge(const std::string& name, const AttentionProblem& config,
                               const cases::Problem& host, const Found& found) {
  const AttentionInputs& in = host.in;
  AttentionBuffers cpu(in, /*with_facts=*/false);
  attention_forward(config, in, cpu.forward());
  const AttentionReference exact = attention_reference(config, in, host.grad_output);
  const double a = config.scale != 0 ? config.scale : 1 / std::sqrt(static_cast<double>(in.q.shape[3]));
  const double width = std::sqrt(static_cast<double>(in.q.shape[3]));
  const double q = largest_magnitude(in.q), k = largest_magnitude(in.k), v = largest_magnitude(in.v),
               grad = largest_magnitude(host.grad_output);
  const double p = 0x1p-22 * (16 + q * k * width);
  std::vector<Line> lines;
  const auto compare = [&](const char* what, const Tensor<float>& ours, const Tensor<float>& of_cpu,
                           const Tensor<double>& truth, double arithmetic) {
    const Line& line =
        lines.emplace_back(Line{what, errors_of(what, ours, truth), errors_of(what, of_cpu, truth)});
    if (line.ours.count == 0) return;
    EXPECT_LE(line.ours.rms, (1.2 + 3 / std::sqrt(2 * line.ours.count)) * line.cpu.rms + arithmetic)
        << name << ": " << what << ", the CPU's is " << line.cpu.rms;
    EXPECT_LE(std::fabs(line.ours.mean), std::fabs(line.cpu.mean) + 5 * line.ours.standard_error + arithmetic)
        << name << ": " << what << " has a bias, the CPU's is " << line.cpu.mean;
  };
  double sizes = 0;
  for (double x : exact.o.values()) sizes += std::fabs(x) / static_cast<double>(exact.o.values().size());
  compare("o", found.o, cpu.o, exact.o, p * v + 0x1p-11 * sizes);
  compare("lse", found.lse, cpu.lse, exact.lse, p);
  if (found.dq.values().empty()) return lines;
  attention_backward(config, in, host.grad_output, cpu.forward(), cpu.backward());
  const double dp = p * grad * v * width * width;
  compare("dq", found.dq, cpu.dq, exact.dq, dp * a * k);
  compare("dk", found.dk, cpu.dk, exact.dk, dp * a * q);
  compare("dv", found.dv, cpu.dv, exact.dv, p * grad);
  return lines;
}

}  // namespace evenkeel::fp8_judge
