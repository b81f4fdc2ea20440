// Optimisers against their slow definitions in FP64, and the learning rate's courses.
#include "training/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/threads.h"
#include "numerics/random.h"
#include "training/schedule.h"

namespace evenkeel {
namespace {

ModelConfig tiny() {
  ModelConfig c = model_preset("micro");
  c.layers = 1;
  c.heads = 2;
  c.width = 24;
  c.context = 8;
  c.vocabulary = 19;
  c.bias = true;
  return c;
}

// Gradients that differ from step to step and place to place; gaps between tensors stay zero.
std::vector<float> random_gradients(const ParameterTable& table, uint32_t step, float size = 0.01f) {
  std::vector<float> g(static_cast<size_t>(table.size()));
  for (const ParameterTensor& t : table.tensors()) {
    RandomStream draw({7, step, static_cast<uint32_t>(t.offset)});
    for (int64_t n = 0; n < t.count(); ++n)
      g[static_cast<size_t>(t.offset + n)] = size * static_cast<float>(draw.normal());
  }
  return g;
}
double norm(const std::vector<float>& x) {
  double sum = 0;
  for (float v : x) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}
std::vector<float> parameters_of(const Model& model) {
  std::vector<float> w(static_cast<size_t>(model.table().size()));
  model.read_parameters(w);
  return w;
}

TEST(AdamW, follows_its_definition) {
  for (float decay : {0.0f, 0.1f})
    for (float clip : {0.0f, 0.05f}) {
      const auto model = make_model_cpu(tiny(), 3);
      const ParameterTable& table = model->table();
      OptimizerConfig config;
      config.weight_decay = decay;
      config.clip = clip;
      const auto optimizer = make_optimizer_cpu(config, table);
      std::vector<float> start = parameters_of(*model);
      std::vector<double> w(start.begin(), start.end()), m(w.size()), v(w.size());
      for (uint32_t step = 0; step < 5; ++step) {
        const double lr = 1e-2 / (step + 1);
        const std::vector<float> g = random_gradients(table, step);
        model->write_gradients(g);
        const StepNorms norms = optimizer->step(*model, lr);
        EXPECT_TRUE(norms.applied);
        EXPECT_NEAR(norms.gradient, norm(g), 1e-9);
        const double factor = clip > 0 && norm(g) > clip ? clip / norm(g) : 1;
        for (const ParameterTensor& t : table.tensors())
          for (int64_t n = t.offset; n < t.offset + t.count(); ++n) {
            const auto i = static_cast<size_t>(n);
            const double grad = g[i] * factor;
            m[i] = 0.9 * m[i] + 0.1 * grad;
            v[i] = 0.95 * v[i] + 0.05 * grad * grad;
            if (t.decay) w[i] -= lr * decay * w[i];
            w[i] -= lr * (m[i] / (1 - std::pow(0.9, step + 1))) /
                    (std::sqrt(v[i] / (1 - std::pow(0.95, step + 1))) + 1e-8);
          }
      }
      const std::vector<float> after = parameters_of(*model);
      double moved = 0;
      for (size_t i = 0; i < after.size(); ++i) {
        ASSERT_NEAR(after[i], w[i], 2e-7 + 2e-6 * std::fabs(w[i])) << i;
        moved = std::max(moved, std::fabs(static_cast<double>(after[i]) - start[i]));
      }
      EXPECT_GT(moved, 1e-3);
    }
}

TEST(AdamW, decays_matrices_alone) {
  const auto model = make_model_cpu(tiny(), 3);
  OptimizerConfig config;
  config.weight_decay = 0.5f;
  const auto optimizer = make_optimizer_cpu(config, model->table());
  const std::vector<float> before = parameters_of(*model);
  model->zero_gradients();
  optimizer->step(*model, 0.1);
  const std::vector<float> after = parameters_of(*model);
  for (const ParameterTensor& t : model->table().tensors())
    for (int64_t n = t.offset; n < t.offset + t.count(); ++n) {
      const auto i = static_cast<size_t>(n);
      ASSERT_FLOAT_EQ(after[i], t.decay ? before[i] * 0.95f : before[i]) << t.name;
    }
}

TEST(Optimizer, leaves_everything_as_it_is_where_the_norm_is_not_finite) {
  for (OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon})
    for (float bad : {INFINITY, -INFINITY, NAN}) {
      const auto model = make_model_cpu(tiny(), 3);
      OptimizerConfig config;
      config.kind = kind;
      const auto optimizer = make_optimizer_cpu(config, model->table());
      const std::vector<float> before = parameters_of(*model);
      std::vector<float> g = random_gradients(model->table(), 0);
      g[17] = bad;
      model->write_gradients(g);
      EXPECT_FALSE(optimizer->step(*model, 0.1).applied);
      EXPECT_EQ(parameters_of(*model), before);
      std::vector<float> first(g.size(), 1), second(g.size(), 1);
      int64_t steps = -1;
      optimizer->read_state(first, second, steps);
      EXPECT_EQ(steps, 0);
      EXPECT_EQ(norm(first) + norm(second), 0);
    }
}

// A run that stops, has its state written and read, and goes on: the same bits.
TEST(Optimizer, state_goes_through_a_checkpoint_to_the_bit) {
  for (OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon}) {
    OptimizerConfig config;
    config.kind = kind;
    config.weight_decay = 0.1f;
    const auto run = [&](bool interrupted) {
      auto model = make_model_cpu(tiny(), 3);
      auto optimizer = make_optimizer_cpu(config, model->table());
      for (uint32_t step = 0; step < 6; ++step) {
        if (interrupted && step == 3) {
          const auto size = static_cast<size_t>(model->table().size());
          std::vector<float> w(size), first(size), second(size);
          int64_t steps = 0;
          model->read_parameters(w);
          optimizer->read_state(first, second, steps);
          model = make_model_cpu(tiny(), 99);
          model->write_parameters(w);
          optimizer = make_optimizer_cpu(config, model->table());
          optimizer->write_state(first, second, steps);
        }
        model->write_gradients(random_gradients(model->table(), step));
        optimizer->step(*model, 0.01);
      }
      return parameters_of(*model);
    };
    EXPECT_EQ(run(false), run(true)) << name(kind);
  }
}

TEST(Muon, makes_singular_values_alike) {
  for (const auto& [rows, columns] :
       {std::pair<int64_t, int64_t>{24, 24}, {8, 40}, {40, 8}, {1, 7}, {7, 1}}) {
    std::vector<float> x(static_cast<size_t>(rows * columns));
    RandomStream draw({1, 0, static_cast<uint32_t>(rows)});
    for (float& value : x) value = static_cast<float>(draw.normal());
    std::vector<float> scaled(x);
    for (float& value : scaled) value *= 1024;
    orthogonalise(x, rows, columns);
    orthogonalise(scaled, rows, columns);
    for (size_t i = 0; i < x.size(); ++i)
      EXPECT_NEAR(x[i], scaled[i], 1e-4);  // the size of x does not matter
    // Singular values: of the smaller Gram matrix, by its characteristic action on random vectors. The mean of the
    // squares is exact, and power iteration finds the largest.
    const int64_t n = std::min(rows, columns);
    double squares = 0;
    for (float value : x) squares += static_cast<double>(value) * value;
    EXPECT_GT(squares / static_cast<double>(n), 0.68 * 0.68 * 0.8);
    EXPECT_LT(squares / static_cast<double>(n), 1.3);
    std::vector<double> u(static_cast<size_t>(columns), 1), v(static_cast<size_t>(rows));
    double largest = 0;
    for (int step = 0; step < 200; ++step) {
      for (int64_t i = 0; i < rows; ++i) {
        v[static_cast<size_t>(i)] = 0;
        for (int64_t j = 0; j < columns; ++j)
          v[static_cast<size_t>(i)] += x[static_cast<size_t>(i * columns + j)] * u[static_cast<size_t>(j)];
      }
      double length = 0;
      for (int64_t j = 0; j < columns; ++j) {
        u[static_cast<size_t>(j)] = 0;
        for (int64_t i = 0; i < rows; ++i)
          u[static_cast<size_t>(j)] += x[static_cast<size_t>(i * columns + j)] * v[static_cast<size_t>(i)];
        length += u[static_cast<size_t>(j)] * u[static_cast<size_t>(j)];
      }
      largest = std::sqrt(std::sqrt(length));
      for (double& value : u) value /= std::sqrt(length);
    }
    EXPECT_LT(largest, 1.25);
  }
  std::vector<float> zero(12);
  orthogonalise(zero, 3, 4);
  EXPECT_EQ(zero, std::vector<float>(12));
}

TEST(Muon, moves_hidden_matrices_by_a_fifth_of_the_rate_and_leaves_the_rest_to_adamw) {
  const auto muon = make_model_cpu(tiny(), 3), adamw = make_model_cpu(tiny(), 3);
  OptimizerConfig config;
  config.clip = 0;
  const auto plain = make_optimizer_cpu(config, adamw->table());
  config.kind = OptimizerKind::muon;
  const auto optimizer = make_optimizer_cpu(config, muon->table());
  const std::vector<float> before = parameters_of(*muon), g = random_gradients(muon->table(), 0);
  muon->write_gradients(g);
  adamw->write_gradients(g);
  optimizer->step(*muon, 0.01);
  plain->step(*adamw, 0.01);
  const std::vector<float> after = parameters_of(*muon), other = parameters_of(*adamw);
  int hidden = 0;
  for (const ParameterTensor& t : muon->table().tensors()) {
    double squares = 0;
    for (int64_t n = t.offset; n < t.offset + t.count(); ++n) {
      const auto i = static_cast<size_t>(n);
      squares += std::pow(static_cast<double>(after[i]) - before[i], 2);
      if (!t.muon) {
        ASSERT_EQ(after[i], other[i]) << t.name;
      }
    }
    if (!t.muon) continue;
    ++hidden;
    const double rms = std::sqrt(squares / static_cast<double>(t.count())) / 0.01;
    EXPECT_GT(rms, 0.2 * 0.6) << t.name;
    EXPECT_LT(rms, 0.2 * 1.2) << t.name;
  }
  EXPECT_EQ(hidden, 4);  // c_attn, attn.c_proj, c_fc, mlp.c_proj
}

TEST(Optimizer, refuses_what_cannot_be_meant) {
  const auto model = make_model_cpu(tiny(), 3);
  for (auto change : std::vector<void (*)(OptimizerConfig&)>{
           [](OptimizerConfig& c) { c.beta1 = 1; }, [](OptimizerConfig& c) { c.beta2 = -0.1f; },
           [](OptimizerConfig& c) { c.epsilon = 0; }, [](OptimizerConfig& c) { c.weight_decay = -1; },
           [](OptimizerConfig& c) { c.clip = NAN; }, [](OptimizerConfig& c) { c.momentum = 1; }}) {
    OptimizerConfig config;
    change(config);
    EXPECT_THROW(make_optimizer_cpu(config, model->table()), std::invalid_argument);
  }
  EXPECT_THROW(parse_optimizer("adam"), std::invalid_argument);
  const auto optimizer = make_optimizer_cpu({}, model->table());
  std::vector<float> small(3);
  int64_t steps = 0;
  EXPECT_THROW(optimizer->read_state(small, small, steps), std::invalid_argument);
}

TEST(Schedule, runs_its_courses) {
  Schedule s;
  s.peak = 1;
  s.floor = 0.1;
  s.warmup = 10;
  s.steps = 110;
  for (Course course : {Course::constant, Course::cosine, Course::linear, Course::wsd}) {
    s.course = course;
    validate(s);
    EXPECT_DOUBLE_EQ(s.at(0), 0.1);
    EXPECT_DOUBLE_EQ(s.at(9), 1);
    EXPECT_DOUBLE_EQ(s.at(10), 1);
    for (int64_t step = 10; step < 200; ++step) {
      EXPECT_LE(s.at(step + 1), s.at(step));
      EXPECT_GE(s.at(step), 0.1);
    }
    EXPECT_DOUBLE_EQ(s.at(110), course == Course::constant ? 1 : 0.1);
    EXPECT_EQ(parse_course(name(course)), course);
  }
  s.course = Course::cosine;
  EXPECT_NEAR(s.at(60), 0.55, 1e-12);
  s.course = Course::wsd;  // the last 22 of 110 steps
  EXPECT_DOUBLE_EQ(s.at(88), 1);
  EXPECT_NEAR(s.at(99), 0.55, 1e-12);
  EXPECT_THROW(parse_course("step"), std::invalid_argument);
  s.steps = 5;
  EXPECT_THROW(validate(s), std::invalid_argument);
  s.steps = 110;
  s.floor = 2;
  EXPECT_THROW(validate(s), std::invalid_argument);
  s.floor = 0;
  s.peak = NAN;
  EXPECT_THROW(validate(s), std::invalid_argument);
}

}  // namespace
}  // namespace evenkeel
