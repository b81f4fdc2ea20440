// The device optimiser against the CPU's, on tables of odd sizes.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "attention/device_memory.h"
#include "numerics/random.h"
#include "training/optimizer.h"

namespace evenkeel {
namespace {

constexpr size_t at(int64_t n) { return static_cast<size_t>(n); }

// Parameters and gradients on the device, and no model behind them.
class BuffersOnDevice final : public Gpt2 {
 public:
  explicit BuffersOnDevice(const Gpt2Config& config)
      : Gpt2(config), parameters_(bytes()), gradients_(bytes()) {
    std::vector<float> values(at(table().size()));
    initialise(config, table(), 3, values);
    write_parameters(values);
    gradients_.fill(0);
  }
  float* parameters() override { return parameters_.as<float>(); }
  float* gradients() override { return gradients_.as<float>(); }
  void parameters_changed() override { ++changes; }
  void* stream() const override { return stream_.get(); }
  void read_parameters(std::span<float> to) const override {
    parameters_.download(to.data(), to.size_bytes());
  }
  void write_parameters(std::span<const float> from) override {
    parameters_.upload(from.data(), from.size_bytes());
  }
  void read_gradients(std::span<float> to) const override { gradients_.download(to.data(), to.size_bytes()); }
  void write_gradients(std::span<const float> from) override {
    gradients_.upload(from.data(), from.size_bytes());
  }
  void zero_gradients() override { gradients_.fill(0); }
  double forward_backward(const Batch&, float, const StepContext&) override { return 0; }
  double loss(const Batch&, const StepContext&) override { return 0; }
  std::vector<float> logits(std::span<const int32_t>) override { return {}; }
  int64_t apply_qk_clip() override { return 0; }

  int changes = 0;

 private:
  size_t bytes() const { return at(table().size()) * sizeof(float); }
  DeviceStream stream_;
  DeviceMemory parameters_, gradients_;
};

// Widths and vocabularies that fill no block; tall, wide and square matrices; vectors of one head.
std::vector<Gpt2Config> odd_configs() {
  Gpt2Config tiny = gpt2_preset("micro");
  tiny.layers = 1, tiny.heads = 2, tiny.width = 24, tiny.context = 8, tiny.vocabulary = 19;
  tiny.bias = true;
  Gpt2Config other = tiny;
  other.layers = 3, other.heads = 3, other.width = 69, other.vocabulary = 257, other.context = 31;
  other.qk_norm = other.gated_attention = true;
  other.tied_embeddings = false;
  Gpt2Config least = tiny;
  least.heads = least.width = least.context = least.vocabulary = 1;
  return {tiny, other, least};
}

std::vector<float> random_gradients(const ParameterTable& table, uint32_t step, float size = 0.01f) {
  std::vector<float> g(at(table.size()));
  for (const ParameterTensor& t : table.tensors()) {
    RandomStream draw({7, step, static_cast<uint32_t>(t.offset)});
    for (int64_t n = 0; n < t.count(); ++n) g[at(t.offset + n)] = size * static_cast<float>(draw.normal());
  }
  return g;
}
std::vector<float> parameters_of(const Gpt2& model) {
  std::vector<float> w(at(model.table().size()));
  model.read_parameters(w);
  return w;
}
struct State {
  std::vector<float> first, second;
  int64_t steps = -1;
  friend bool operator==(const State&, const State&) = default;
};
State state_of(const Optimizer& optimizer, const ParameterTable& table) {
  State state{std::vector<float>(at(table.size()), 1), std::vector<float>(at(table.size()), 1)};
  optimizer.read_state(state.first, state.second, state.steps);
  return state;
}

TEST(OptimizerCudaSmall, AdamWHasTheBitsOfTheCpu) {
  for (const Gpt2Config& model : odd_configs())
    for (float decay : {0.0f, 0.1f}) {
      OptimizerConfig config;
      config.weight_decay = decay;
      config.clip = 0;
      const auto on_cpu = make_gpt2_cpu(model, 3);
      BuffersOnDevice on_device(model);
      const auto cpu = make_optimizer_cpu(config, on_cpu->table());
      const auto device = make_optimizer_cuda(config, on_cpu->table());
      for (uint32_t step = 0; step < 4; ++step) {
        std::vector<float> g = random_gradients(on_cpu->table(), step);
        g[0] = 1e-41f;  // below the normal range
        on_cpu->write_gradients(g);
        on_device.write_gradients(g);
        const double lr = 1e-2 / (step + 1);
        const StepNorms expected = cpu->step(*on_cpu, lr), found = device->step(on_device, lr);
        EXPECT_TRUE(found.applied);
        EXPECT_NEAR(found.gradient, expected.gradient, 1e-13 * expected.gradient);
      }
      EXPECT_EQ(on_device.changes, 4);
      EXPECT_EQ(parameters_of(on_device), parameters_of(*on_cpu));
      EXPECT_EQ(state_of(*device, on_cpu->table()), state_of(*cpu, on_cpu->table()));
    }
}

// The factor is rounded to a float from norms that agree to 1e-13: one unit in its last place apart at most. That is
// 2^-23 of a gradient, and twice as much of its square; AdamW's step feels it as 2^-22 at most.
TEST(OptimizerCudaSmall, ClipsAsTheCpuDoes) {
  for (const Gpt2Config& model : odd_configs())
    for (float clip : {1e-3f, 1e6f}) {
      OptimizerConfig config;
      config.clip = clip;
      const auto on_cpu = make_gpt2_cpu(model, 3);
      BuffersOnDevice on_device(model);
      const auto cpu = make_optimizer_cpu(config, on_cpu->table());
      const auto device = make_optimizer_cuda(config, on_cpu->table());
      const std::vector<float> before = parameters_of(on_device);
      const std::vector<float> g = random_gradients(on_cpu->table(), 0);
      on_cpu->write_gradients(g);
      on_device.write_gradients(g);
      cpu->step(*on_cpu, 0.125);
      device->step(on_device, 0.125);
      const std::vector<float> expected = parameters_of(*on_cpu), found = parameters_of(on_device);
      double moved = 0;
      for (size_t n = 0; n < found.size(); ++n) {
        ASSERT_NEAR(found[n], expected[n], 0.125 * 0x1p-22 + std::fabs(expected[n]) * 0x1p-23) << n;
        moved = std::max(moved, std::fabs(static_cast<double>(found[n]) - before[n]));
      }
      EXPECT_GT(moved, 0.1);  // clipped or not, AdamW's first step is about lr
      const State state = state_of(*device, on_cpu->table()), of_cpu = state_of(*cpu, on_cpu->table());
      double largest = 0;
      for (size_t n = 0; n < state.first.size(); ++n) {
        ASSERT_NEAR(state.first[n], of_cpu.first[n], std::fabs(of_cpu.first[n]) * 0x1p-22);
        largest = std::max(largest, std::fabs(static_cast<double>(state.first[n])));
      }
      EXPECT_EQ(largest <= 1e-4, clip == 1e-3f);  // the factor is at work: (1 - beta1) clip
    }
}

TEST(OptimizerCudaSmall, MuonFollowsTheCpu) {
  for (const Gpt2Config& model : odd_configs()) {
    OptimizerConfig config;
    config.kind = OptimizerKind::muon;
    config.weight_decay = 0.01f;
    const auto on_cpu = make_gpt2_cpu(model, 3);
    BuffersOnDevice on_device(model);
    const ParameterTable& table = on_cpu->table();
    const auto cpu = make_optimizer_cpu(config, table);
    const auto device = make_optimizer_cuda(config, table);
    const std::vector<float> before = parameters_of(on_device);
    for (uint32_t step = 0; step < 2; ++step) {
      const std::vector<float> g = random_gradients(table, step);
      on_cpu->write_gradients(g);
      on_device.write_gradients(g);
      cpu->step(*on_cpu, 0.02);
      device->step(on_device, 0.02);
    }
    const std::vector<float> expected = parameters_of(*on_cpu), found = parameters_of(on_device);
    // Newton-Schulz multiplies what another order of FP32 sums leaves in the smallest singular values, by up to
    // 3.4445^5 = 485: 485 sums' roundings of some 2^-24 sqrt(depth) are well below 1e-3 of an update.
    for (const ParameterTensor& t : table.tensors()) {
      double error = 0, size = 0;
      for (int64_t n = t.offset; n < t.offset + t.count(); ++n) {
        error += std::pow(static_cast<double>(found[at(n)]) - expected[at(n)], 2);
        size += std::pow(static_cast<double>(expected[at(n)]) - before[at(n)], 2);
      }
      ASSERT_GT(size, 0) << t.name;
      EXPECT_LT(std::sqrt(error / size), 1e-3) << t.name;
    }
    EXPECT_EQ(state_of(*device, table).steps, 2);
  }
}

TEST(OptimizerCudaSmall, LeavesEverythingWhereTheNormIsNotFinite) {
  for (OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon})
    for (float bad : {INFINITY, -INFINITY, NAN})
      for (bool last : {false, true}) {
        BuffersOnDevice model(odd_configs()[1]);
        const ParameterTable& table = model.table();
        OptimizerConfig config;
        config.kind = kind;
        const auto optimizer = make_optimizer_cuda(config, table);
        std::vector<float> g = random_gradients(table, 0);
        model.write_gradients(g);
        EXPECT_TRUE(optimizer->step(model, 0.1).applied);
        const std::vector<float> before = parameters_of(model);
        const State state = state_of(*optimizer, table);
        const ParameterTensor& tensor = last ? table.tensors().back() : table.tensors().front();
        g[at(tensor.offset + (last ? tensor.count() - 1 : 0))] = bad;
        model.write_gradients(g);
        const StepNorms norms = optimizer->step(model, 0.1);
        EXPECT_FALSE(norms.applied);
        EXPECT_FALSE(std::isfinite(norms.gradient));
        EXPECT_EQ(parameters_of(model), before);
        EXPECT_EQ(state_of(*optimizer, table), state);
        EXPECT_EQ(model.changes, 1);
      }
}

// Squares of floats near their largest are finite in FP64.
TEST(OptimizerCudaSmall, HugeGradientsHaveANorm) {
  BuffersOnDevice model(odd_configs()[0]);
  std::vector<float> g(at(model.table().size()));
  g[5] = 3e38f, g[6] = -3e38f;
  model.write_gradients(g);
  const StepNorms norms = make_optimizer_cuda({}, model.table())->step(model, 0.1);
  EXPECT_TRUE(norms.applied);
  EXPECT_NEAR(norms.gradient, std::sqrt(2.0) * 3e38f, 1e25);
}

TEST(OptimizerCudaSmall, GoesOnFromItsStateWithTheSameBits) {
  for (OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon}) {
    OptimizerConfig config;
    config.kind = kind;
    const Gpt2Config model = odd_configs()[1];
    BuffersOnDevice straight(model), stopped(model);
    const ParameterTable& table = straight.table();
    const auto whole = make_optimizer_cuda(config, table);
    auto part = make_optimizer_cuda(config, table);
    for (uint32_t step = 0; step < 4; ++step) {
      if (step == 2) {
        const State state = state_of(*part, table);
        part = make_optimizer_cuda(config, table);
        part->write_state(state.first, state.second, state.steps);
      }
      const std::vector<float> g = random_gradients(table, step);
      straight.write_gradients(g);
      stopped.write_gradients(g);
      whole->step(straight, 0.01);
      part->step(stopped, 0.01);
    }
    EXPECT_EQ(parameters_of(stopped), parameters_of(straight));
    EXPECT_EQ(state_of(*part, table), state_of(*whole, table));
  }
}

TEST(OptimizerCudaSmall, GapsBetweenTensorsStayZero) {
  BuffersOnDevice model(odd_configs()[1]);
  OptimizerConfig config;
  config.weight_decay = 0.1f;
  const auto optimizer = make_optimizer_cuda(config, model.table());
  model.write_gradients(random_gradients(model.table(), 0));
  optimizer->step(model, 0.1);
  const std::vector<float> w = parameters_of(model);
  size_t next = 0;
  for (const ParameterTensor& t : model.table().tensors()) {
    for (; next < at(t.offset); ++next) EXPECT_EQ(w[next], 0.0f);
    next = at(t.offset + t.count());
  }
}

}  // namespace
}  // namespace evenkeel
