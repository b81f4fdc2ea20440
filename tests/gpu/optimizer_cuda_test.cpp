// The device optimiser against the CPU's, on tables of odd sizes.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/sizes.h"
#include "gpu/device_memory.h"
#include "numerics/random.h"
#include "rank_cases.h"
#include "training/device_ranks.h"
#include "training/optimizer.h"

namespace evenkeel {
namespace {

// Parameters and gradients on the device, and no model behind them.
class BuffersOnDevice final : public Model {
 public:
  explicit BuffersOnDevice(const ModelConfig& config)
      : Model(config), parameters_(bytes()), gradients_(bytes()) {
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
std::vector<ModelConfig> odd_configs() {
  ModelConfig tiny = model_preset("micro");
  tiny.layers = 1, tiny.heads = 2, tiny.width = 24, tiny.context = 8, tiny.vocabulary = 19;
  tiny.bias = true;
  ModelConfig other = tiny;
  other.layers = 3, other.heads = 3, other.width = 69, other.vocabulary = 257, other.context = 31;
  other.qk_norm = other.gated_attention = true;
  other.tied_embeddings = false;
  ModelConfig least = tiny;
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
std::vector<float> parameters_of(const Model& model) {
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

TEST(OptimizerCudaSmall, adamw_has_the_bits_of_the_cpu) {
  for (const ModelConfig& model : odd_configs())
    for (float decay : {0.0f, 0.1f}) {
      OptimizerConfig config;
      config.weight_decay = decay;
      config.clip = 0;
      const auto on_cpu = make_model_cpu(model, 3);
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
TEST(OptimizerCudaSmall, clips_as_the_cpu_does) {
  for (const ModelConfig& model : odd_configs())
    for (float clip : {1e-3f, 1e6f}) {
      OptimizerConfig config;
      config.clip = clip;
      const auto on_cpu = make_model_cpu(model, 3);
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

TEST(OptimizerCudaSmall, muon_follows_the_cpu) {
  for (const ModelConfig& model : odd_configs()) {
    OptimizerConfig config;
    config.kind = OptimizerKind::muon;
    config.weight_decay = 0.01f;
    const auto on_cpu = make_model_cpu(model, 3);
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

TEST(OptimizerCudaSmall, leaves_everything_where_the_norm_is_not_finite) {
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
TEST(OptimizerCudaSmall, huge_gradients_have_a_norm) {
  BuffersOnDevice model(odd_configs()[0]);
  std::vector<float> g(at(model.table().size()));
  g[5] = 3e38f, g[6] = -3e38f;
  model.write_gradients(g);
  const StepNorms norms = make_optimizer_cuda({}, model.table())->step(model, 0.1);
  EXPECT_TRUE(norms.applied);
  EXPECT_NEAR(norms.gradient, std::sqrt(2.0) * 3e38f, 1e25);
}

TEST(OptimizerCudaSmall, goes_on_from_its_state_with_the_same_bits) {
  for (OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon}) {
    OptimizerConfig config;
    config.kind = kind;
    const ModelConfig model = odd_configs()[1];
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

// --- Sharded over ranks: threads of this process, which share the GPU

// 3 units of slices: of 4 ranks, one has none; 30: the last has fewer; 1: three have none.
std::vector<ModelConfig> sharded_configs() {
  std::vector<ModelConfig> configs = odd_configs();
  configs[0].width = 40;
  return configs;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Gradients of this rank's slice alone: whatever is beside it must not be used.
std::vector<float> slice_alone(std::vector<float> values, const Slice& slice) {
  for (size_t n = 0; n < values.size(); ++n)
    if (n < at(slice.begin) || n >= at(slice.end)) values[n] = NAN;
  return values;
}

TEST(OptimizerCudaSmall, no_number_of_ranks_changes_a_bit_of_sharded_states) {
  constexpr uint32_t kSteps = 3;
  for (const ModelConfig& config : sharded_configs())
    for (float clip : {0.0f, 1e-3f}) {
      OptimizerConfig adamw;
      adamw.clip = clip;
      adamw.weight_decay = 0.1f;
      BuffersOnDevice whole(config);
      const ParameterTable& table = whole.table();
      const auto expected = make_optimizer_cuda(adamw, table);
      std::vector<double> norms;
      std::vector<std::vector<float>> weights;  // after each step
      State halfway;
      for (uint32_t step = 0; step < kSteps; ++step) {
        whole.write_gradients(random_gradients(table, step));
        norms.push_back(expected->step(whole, 0.01).gradient);
        weights.push_back(parameters_of(whole));
        if (step == 0) halfway = state_of(*expected, table);
      }
      const State last = state_of(*expected, table);
      for (int size : {1, 2, 4}) {
        const auto thrown = run_ranks(size, [&](const std::shared_ptr<Ranks>& ranks) {
          BuffersOnDevice model(config);
          const auto memory = make_device_memory(model.stream());
          const Slice slice = ranks->slice(table.size());
          auto optimizer = make_optimizer_cuda(adamw, table, ranks.get());
          for (uint32_t step = 0; step < kSteps; ++step) {
            if (step == 1) {  // goes on from the state of one that is not sharded
              optimizer = make_optimizer_cuda(adamw, table, ranks.get());
              optimizer->write_state(halfway.first, halfway.second, halfway.steps);
            }
            std::vector<float> before = parameters_of(model);
            model.write_gradients(slice_alone(random_gradients(table, step), slice));
            const StepNorms found = optimizer->step(model, 0.01);
            EXPECT_TRUE(found.applied);
            EXPECT_EQ(std::bit_cast<uint64_t>(found.gradient), std::bit_cast<uint64_t>(norms[step]));
            const std::vector<float>& should = weights[step];
            std::copy(should.begin() + slice.begin, should.begin() + slice.end, before.begin() + slice.begin);
            EXPECT_TRUE(same_bits(parameters_of(model), before)) << "beside the slice nothing may change";
            ranks->share_slices(*memory, model.parameters(), table.size());
            EXPECT_TRUE(same_bits(parameters_of(model), should)) << size << ", step " << step;
          }
          State own = state_of(*optimizer, table);
          EXPECT_EQ(own.steps, last.steps);
          for (size_t n = 0; n < own.first.size(); ++n) {
            const bool inside = n >= at(slice.begin) && n < at(slice.end);
            ASSERT_EQ(own.first[n], inside ? last.first[n] : 1) << n;  // state_of's ones
            ASSERT_EQ(own.second[n], inside ? last.second[n] : 1) << n;
          }
          for (std::vector<float>* values : {&own.first, &own.second})
            ranks->share_slices(host_memory(), values->data(), table.size());
          EXPECT_EQ(own, last);
          // And one that is not sharded goes on from there.
          const auto alone = make_optimizer_cuda(adamw, table);
          alone->write_state(own.first, own.second, own.steps);
          EXPECT_EQ(state_of(*alone, table), last);
        });
        for (const std::string& words : thrown) EXPECT_EQ(words, "") << size;
      }
    }
}

// In whichever slice it is, all ranks see it, and none moves.
TEST(OptimizerCudaSmall, one_ranks_infinity_stops_all) {
  const ModelConfig config = odd_configs()[1];
  for (int bad_rank : {0, 3}) {
    const auto thrown = run_ranks(4, [&](const std::shared_ptr<Ranks>& ranks) {
      BuffersOnDevice model(config);
      const ParameterTable& table = model.table();
      const Slice slice = ranks->slice(table.size());
      const auto optimizer = make_optimizer_cuda({}, table, ranks.get());
      std::vector<float> g = slice_alone(random_gradients(table, 0), slice);
      if (ranks->rank() == bad_rank) g[at(slice.end - 1)] = INFINITY;
      model.write_gradients(g);
      const std::vector<float> before = parameters_of(model);
      const State state = state_of(*optimizer, table);
      const StepNorms found = optimizer->step(model, 0.1);
      EXPECT_FALSE(found.applied);
      EXPECT_EQ(found.gradient, INFINITY);
      EXPECT_TRUE(same_bits(parameters_of(model), before));
      EXPECT_EQ(state_of(*optimizer, table), state);
    });
    for (const std::string& words : thrown) EXPECT_EQ(words, "");
  }
}

struct NoLink final : Link {
  void exchange(const void*, void*, size_t) override {}
  void gather(const void*, void*, size_t) override {}
  void abort(const std::string&, int) noexcept override {}
};

TEST(OptimizerCuda, holds_the_states_of_its_slice_alone) {
  ModelConfig config = model_preset("micro");
  config.layers = 5, config.heads = 8, config.width = 1024;  // 63 M parameters
  const ParameterTable table(config);
  const auto held = [&](Ranks* ranks) {
    size_t before = 0, after = 0, total = 0;
    device_wait();
    cudaMemGetInfo(&before, &total);
    const auto optimizer = make_optimizer_cuda({}, table, ranks);
    cudaMemGetInfo(&after, &total);
    return static_cast<double>(before) - static_cast<double>(after);
  };
  held(nullptr);                    // the device's own first needs
  const double pages = 8 * 0x1p21;  // what allocations are rounded up to, and flags
  const auto states = [](int64_t parameters) {
    return 2.0 * sizeof(float) * static_cast<double>(parameters);
  };
  EXPECT_NEAR(held(nullptr), states(table.size()), pages);
  for (int rank = 0; rank < 4; ++rank) {
    Ranks ranks(launch_of(rank, 4, 1), std::make_unique<NoLink>());
    const Slice slice = ranks.slice(table.size());
    ASSERT_LT(states(slice.count()) + pages, states(table.size()) / 2);
    EXPECT_NEAR(held(&ranks), states(slice.count()), pages) << rank;
  }
}

TEST(OptimizerCudaSmall, muon_is_not_sharded) {
  Ranks alone;
  const BuffersOnDevice model(odd_configs()[0]);
  OptimizerConfig config;
  config.kind = OptimizerKind::muon;
  try {
    make_optimizer_cuda(config, model.table(), &alone);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(),
                 "[optimizer] expected adamw where its states are sharded over ranks, got muon");
  }
}

TEST(OptimizerCudaSmall, gaps_between_tensors_stay_zero) {
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
