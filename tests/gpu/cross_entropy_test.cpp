// The loss on the GPU, row by row, against its definition in FP64. Tests named small_* are also run under
// compute-sanitizer. The bench runs only when asked for:
//   cross_entropy_test --gtest_also_run_disabled_tests --gtest_filter='*bench*'
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/sizes.h"
#include "gpu/device_memory.h"
#include "model/cuda/device_layers.h"
#include "numerics/random.h"

namespace evenkeel {
namespace {

using Floats = std::vector<float>;

uint16_t bf16_of(float x) {  // of values that BF16 has
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}
float of_bf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// N rows of V logits that BF16 has, `stride` apart, what lies between of any content; and what they should become, by
// sums in FP64.
struct LossRows {
  LossRows(int64_t n, int64_t v)
      : N(n),
        V(v),
        stride((v + 7) / 8 * 8 + (v % 2) * 8),
        logits(at(n * stride), 99.0f),
        softmax(logits.size()) {
    RandomStream draw({5, 1, static_cast<uint32_t>(v)});
    for (int64_t row = 0; row < N; ++row) {
      const double middle = 40 * draw.unit() - 20, size = 0.2 + 4 * draw.unit();
      float* const x = logits.data() + row * stride;
      for (int64_t c = 0; c < V; ++c)
        x[c] = of_bf16(bf16_of(static_cast<float>(middle + size * draw.normal())));
      targets.push_back(row == 0       ? 0
                        : row == N - 1 ? static_cast<int32_t>(V - 1)
                                       : static_cast<int32_t>(draw.below(static_cast<uint64_t>(V))));
      const double most = *std::max_element(x, x + V);
      double sum = 0;
      for (int64_t c = 0; c < V; ++c) sum += std::exp(x[c] - most);
      for (int64_t c = 0; c < V; ++c)
        softmax[at(row * stride + c)] = static_cast<float>(std::exp(x[c] - most) / sum);
      losses.push_back(std::log(sum) + most - x[targets.back()]);
    }
  }
  int64_t N, V, stride;
  Floats logits, softmax;  // (N, stride)
  std::vector<int32_t> targets;
  std::vector<double> losses;
};

struct LossResult {
  Floats losses, gradients;  // (N), (N, stride)
};
LossResult loss_of(const LossRows& rows, TensorType type, bool gradients, float scale) {
  const DeviceStream stream;
  const DeviceMemory targets(rows.targets);
  DeviceMemory losses(at(rows.N) * sizeof(float)), logits;
  std::vector<uint16_t> halves;
  if (type == TensorType::bf16) {
    for (float x : rows.logits) halves.push_back(bf16_of(x));
    logits = DeviceMemory(halves);
  } else {
    logits = DeviceMemory(rows.logits);
  }
  device::cross_entropy(logits.data(), targets.as<int32_t>(), rows.N, rows.V, rows.stride, type, gradients,
                        scale, losses.as<float>(), static_cast<cudaStream_t>(stream.get()));
  LossResult result{losses.download<float>(), {}};
  if (type == TensorType::bf16)
    for (uint16_t x : logits.download<uint16_t>()) result.gradients.push_back(of_bf16(x));
  else
    result.gradients = logits.download<float>();
  return result;
}

// Every loss, every gradient within its rounding, no drift of the roundings, zeros behind.
void expect_losses(const LossRows& rows, TensorType type) {
  const float scale = 0.37f / static_cast<float>(rows.N);
  const LossResult found = loss_of(rows, type, true, scale);
  // Exponents up to some 40 in FP32 are good to 40 2^-23, and so are exponentials; BF16 rounds by 2^-8 at most.
  constexpr double kError = 0x1p-16;
  const double rounding = kError + (type == TensorType::bf16 ? 0x1p-8 : 0);
  double drift = 0;
  for (int64_t row = 0; row < rows.N; ++row) {
    ASSERT_NEAR(found.losses[at(row)], rows.losses[at(row)], kError * (1 + std::fabs(rows.losses[at(row)])))
        << row;
    double of_row = 0;
    for (int64_t c = 0; c < rows.stride; ++c) {
      const bool target = c == rows.targets[at(row)];
      const double p = rows.softmax[at(row * rows.stride + c)], expected = (p - (target ? 1 : 0)) * scale,
                   value = found.gradients[at(row * rows.stride + c)];
      ASSERT_NEAR(value, expected, rounding * std::fabs(expected) + (target ? kError * scale : 0))
          << "row " << row << ", column " << c;
      if (c < rows.V && !target) of_row += (value - expected) / expected;
    }
    drift += of_row / static_cast<double>(rows.V * rows.N);
  }
  // Equal logits of a row round alike: as if it had some twenty values.
  const double values = static_cast<double>(std::min<int64_t>(rows.V, 20) * rows.N);
  EXPECT_LT(std::fabs(drift), 6 * rounding / std::sqrt(3 * values) + kError);
  // The same losses without gradients, and the logits are left as they are.
  const LossResult alone = loss_of(rows, type, false, scale);
  for (size_t n = 0; n < alone.losses.size(); ++n)
    ASSERT_NEAR(alone.losses[n], rows.losses[n], kError * (1 + std::fabs(rows.losses[n]))) << n;
  ASSERT_EQ(alone.gradients.size(), rows.logits.size());
  EXPECT_EQ(std::memcmp(alone.gradients.data(), rows.logits.data(), rows.logits.size() * sizeof(float)), 0);
}

TEST(CrossEntropy, small_rows_are_the_definition) {
  for (TensorType type : {TensorType::bf16, TensorType::fp32})
    for (const auto& [N, V] :
         {std::pair<int64_t, int64_t>{1, 1}, {5, 2}, {3, 7}, {2, 8}, {9, 101}, {3, 8192}, {3, 8193}}) {
      SCOPED_TRACE(V);
      expect_losses(LossRows(N, V), type);
    }
}

// So many rows that a block walks over several; rows of GPT-2's vocabulary, as long as registers allow, and longer.
TEST(CrossEntropy, long_rows_are_the_definition) {
  for (const auto& [N, V] : {std::pair<int64_t, int64_t>{6000, 1000},
                             {300, 28672},
                             {400, 50257},
                             {140, 57344},
                             {140, 57345},
                             {3, 120001}}) {
    const LossRows rows(N, V);
    for (TensorType type : {TensorType::bf16, TensorType::fp32}) {
      SCOPED_TRACE(V);
      expect_losses(rows, type);
    }
  }
}

TEST(CrossEntropy, small_nan_stays_in_its_row) {
  for (int64_t V : {int64_t{101}, int64_t{50257}}) {
    LossRows rows(3, V);
    const LossResult before = loss_of(rows, TensorType::bf16, true, 0.25f);
    rows.logits[at(rows.stride + V / 2)] = NAN;
    const LossResult found = loss_of(rows, TensorType::bf16, true, 0.25f);
    EXPECT_TRUE(std::isnan(found.losses[1]));
    for (int64_t row : {int64_t{0}, int64_t{2}}) {
      EXPECT_EQ(found.losses[at(row)], before.losses[at(row)]);
      for (int64_t n = row * rows.stride; n < (row + 1) * rows.stride; ++n)
        ASSERT_EQ(found.gradients[at(n)], before.gradients[at(n)]);
    }
    for (int64_t c = 0; c < rows.stride; ++c) {
      const float value = found.gradients[at(rows.stride + c)];
      ASSERT_TRUE(c < V ? std::isnan(value) : value == 0) << c;
    }
  }
}

// --- Speed

// The best and the middle of some runs; rows of V, padded to `stride`.
void print_loss(int64_t N, int64_t V, int64_t stride) {
  constexpr int64_t kDrawn = 1024;  // different rows
  constexpr int kRuns = 21;
  std::vector<uint16_t> drawn(at(kDrawn * stride));
  RandomStream draw({5, 2, 1});
  for (uint16_t& x : drawn) x = bf16_of(static_cast<float>(2 * draw.normal()));
  std::vector<int32_t> targets;
  for (int64_t n = 0; n < N; ++n)
    targets.push_back(static_cast<int32_t>(draw.below(static_cast<uint64_t>(V))));
  const size_t bytes = at(N * stride) * 2, part = drawn.size() * 2;
  DeviceMemory given(bytes), logits(bytes), losses(at(N) * sizeof(float));
  const DeviceMemory on_device(targets);
  for (size_t offset = 0; offset < bytes; offset += part)
    given.upload(drawn.data(), std::min(part, bytes - offset), offset);
  std::vector<double> seconds;
  for (int run = 0; run < kRuns; ++run) {
    ASSERT_EQ(cudaMemcpy(logits.data(), given.data(), bytes, cudaMemcpyDeviceToDevice), cudaSuccess);
    seconds.push_back(device_seconds([&](void* stream) {
      device::cross_entropy(logits.data(), on_device.as<int32_t>(), N, V, stride, TensorType::bf16, true,
                            1.0f / static_cast<float>(N), losses.as<float>(),
                            static_cast<cudaStream_t>(stream));
    }));
  }
  std::sort(seconds.begin(), seconds.end());
  fmt::print(
      "\nloss and gradient of {} x {} BF16 logits (rows of {}): {:.3f} ms at best, {:.3f} in the middle, "
      "{:.2f} TB/s\n",
      N, V, stride, seconds.front() * 1e3, seconds[kRuns / 2] * 1e3,
      2 * static_cast<double>(bytes) / seconds[kRuns / 2] * 1e-12);
}

TEST(CrossEntropy, DISABLED_bench) {
  print_loss(32 * 512, 8192, 8192);
  print_loss(64 * 1024, 50257, 50304);
}

}  // namespace
}  // namespace evenkeel
