#include "diagnosis/drift.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/attention.h"

namespace evenkeel {
namespace {

constexpr int64_t T = 64, C = 32, D = 32;  // rows, input features, head size
constexpr float kSharedFeature = 2;        // of every token, in feature 0
constexpr float kBeta1 = 0.9f, kBeta2 = 0.95f, kEpsilon = 1e-8f;

using Matrix = std::vector<float>;  // (C, D)

Matrix random_matrix(float scale, RandomStream& draw) {
  Matrix m(C * D);
  for (float& x : m) x = scale * static_cast<float>(draw.normal());
  return m;
}

// One projection with its Adam state.
struct Projection {
  Matrix weight, mean = Matrix(C * D), square = Matrix(C * D);

  // (1, 1, T, D) = x (T, C) weight (C, D)
  Tensor<float> forward(const std::vector<float>& x) const {
    Tensor<float> y({1, 1, T, D});
    float* out = y.values().data();
    for (int64_t i = 0; i < T; ++i)
      for (int64_t c = 0; c < C; ++c)
        for (int64_t d = 0; d < D; ++d) out[i * D + d] += x[i * C + c] * weight[c * D + d];
    return y;
  }

  void update(const std::vector<float>& x, const Tensor<float>& d_y, int64_t step, float learning_rate) {
    Matrix gradient(C * D);
    for (int64_t i = 0; i < T; ++i)
      for (int64_t c = 0; c < C; ++c)
        for (int64_t d = 0; d < D; ++d) gradient[c * D + d] += x[i * C + c] * d_y.values()[i * D + d];
    const auto t = static_cast<float>(step);
    const float correct1 = 1 - std::pow(kBeta1, t), correct2 = 1 - std::pow(kBeta2, t);
    for (size_t n = 0; n < weight.size(); ++n) {
      mean[n] = kBeta1 * mean[n] + (1 - kBeta1) * gradient[n];
      square[n] = kBeta2 * square[n] + (1 - kBeta2) * gradient[n] * gradient[n];
      weight[n] -= learning_rate * (mean[n] / correct1) / (std::sqrt(square[n] / correct2) + kEpsilon);
    }
  }
};

struct Head {
  Projection q, k, v;
  Head(RandomStream& draw)
      : q{random_matrix(0.3f, draw)}, k{random_matrix(0.3f, draw)}, v{random_matrix(0.2f, draw)} {}
};

struct Activations {
  Tensor<float> q, k, v;
  Activations(const Head& head, const std::vector<float>& x)
      : q(head.q.forward(x)), k(head.k.forward(x)), v(head.v.forward(x)) {}
  AttentionInputs inputs() const {
    return {std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view()};
  }
};

void measure_scores(const Activations& a, DriftPoint& point) {
  for (int64_t i = 0; i < T; ++i) {
    double sum = 0;
    for (int64_t j = 0; j <= i; ++j) {
      double score = 0;
      for (int64_t d = 0; d < D; ++d)
        score += static_cast<double>(a.q.values()[i * D + d]) * a.k.values()[j * D + d];
      score /= std::sqrt(static_cast<double>(D));
      sum += score;
      point.max_score = std::max(point.max_score, std::fabs(score));
    }
    point.offset = std::max(point.offset, std::fabs(sum / static_cast<double>(i + 1)));
  }
}

}  // namespace

std::vector<DriftPoint> run_drift(const PrecisionPlan& plan, const DriftSettings& settings) {
  RandomStream weights({settings.seed, 0, 0}), tokens({settings.seed, 0, 1});
  Head head(weights);
  const Head teacher(weights);
  AttentionProblem config, exact;
  config.mask.causal = exact.mask.causal = true;
  config.plans = {plan};
  exact.plans = {PrecisionPlan{}};
  config.allow_nonfinite = true;  // a run that explodes is a result

  std::vector<DriftPoint> points;
  const int64_t every = std::max<int64_t>(1, settings.steps / std::max<int64_t>(1, settings.points));
  double loss_sum = 0;
  for (int64_t step = 1; step <= settings.steps; ++step) {
    std::vector<float> x(T * C);  // (T, C), fresh tokens every step
    for (float& value : x) value = static_cast<float>(tokens.normal());
    for (int64_t i = 0; i < T; ++i) x[static_cast<size_t>(i * C)] = kSharedFeature;
    const Activations ours(head, x), theirs(teacher, x);
    AttentionBuffers found(ours.inputs(), false), target(theirs.inputs(), false);
    config.step = static_cast<uint32_t>(step);
    attention_forward(config, ours.inputs(), found.forward());
    attention_forward(exact, theirs.inputs(), target.forward());
    // loss = sum (O - target)^2 / 2 over features, mean over tokens
    Tensor<float> d_o({1, 1, T, D});
    for (size_t n = 0; n < d_o.values().size(); ++n) {
      const float error = found.o.values()[n] - target.o.values()[n];
      loss_sum += 0.5 * error * error / T;
      d_o.values()[n] = error / T;
    }
    attention_backward(config, ours.inputs(), std::as_const(d_o).view(), found.forward(), found.backward());
    head.q.update(x, found.dq, step, settings.learning_rate);
    head.k.update(x, found.dk, step, settings.learning_rate);
    head.v.update(x, found.dv, step, settings.learning_rate);
    if (step % every == 0) {
      DriftPoint point{step, loss_sum / static_cast<double>(every), 0, 0};
      measure_scores(ours, point);
      points.push_back(point);
      loss_sum = 0;
    }
  }
  return points;
}

}  // namespace evenkeel
