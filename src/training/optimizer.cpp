#include "training/optimizer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "base/error.h"
#include "base/threads.h"
#include "model/matrix_product.h"
#include "numerics/names.h"
#include "training/optimizer_rates.h"
#include "training/ranks.h"

namespace evenkeel {

OptimizerKind parse_optimizer(std::string_view text) {
  const auto kind = value_named<OptimizerKind>(text, kOptimizerNames);
  require(kind.has_value(), "[optimizer] expected adamw or muon, got '{}'", text);
  return *kind;
}

void validate(const OptimizerConfig& c, const Ranks* sharded_over) {
  const auto share = [](float x) { return x >= 0 && x < 1; };
  require(share(c.beta1) && share(c.beta2),
          "[optimizer] beta1, beta2: expected numbers from 0 to below 1, got {} and {}", c.beta1, c.beta2);
  require(share(c.momentum), "[optimizer] momentum: expected a number from 0 to below 1, got {}", c.momentum);
  require(c.epsilon > 0, "[optimizer] epsilon: expected a number above 0, got {}", c.epsilon);
  require(c.weight_decay >= 0, "[optimizer] weight_decay: expected a number of 0 or more, got {}",
          c.weight_decay);
  require(c.clip >= 0, "[optimizer] clip: expected a norm of 0 (off) or more, got {}", c.clip);
  require(!sharded_over || c.kind == OptimizerKind::adamw,
          "[optimizer] expected adamw where its states are sharded over ranks, got {}", name(c.kind));
}

namespace {

constexpr int64_t kBlock = 8192;  // floats that one task passes over; fixes the order of sums
static_assert(Ranks::kSliceUnit % kBlock == 0, "a block must not lie in two slices");

// The sums of squares of blocks.
std::vector<double> square_sums(const float* x, int64_t count) {
  std::vector<double> sums(static_cast<size_t>((count + kBlock - 1) / kBlock));
  parallel_for(static_cast<int64_t>(sums.size()), [&](int64_t block, int) {
    double sum = 0;
    for (int64_t n = block * kBlock; n < std::min(count, (block + 1) * kBlock); ++n)
      sum += static_cast<double>(x[n]) * x[n];
    sums[static_cast<size_t>(block)] = sum;
  });
  return sums;
}
// The root of their sum, in order.
double root_of_sum(const std::vector<double>& sums) {
  double sum = 0;
  for (double part : sums) sum += part;
  return std::sqrt(sum);
}

class CpuOptimizer final : public Optimizer {
 public:
  CpuOptimizer(const OptimizerConfig& config, const ParameterTable& table, Ranks* ranks)
      : config_(config),
        table_(table),
        ranks_(ranks),
        slice_(ranks ? ranks->slice(table.size()) : Slice{0, table.size()}),
        first_(static_cast<size_t>(slice_.count())),
        second_(first_.size()) {
    validate(config, ranks);
  }

  StepNorms step(Model& model, double lr) override {
    float* const gradients = model.gradients();
    StepNorms norms{gradient_norm(gradients), true};
    if (!std::isfinite(norms.gradient)) return {norms.gradient, false};
    ++steps_;
    const float factor = config_.clip > 0 && norms.gradient > config_.clip
                             ? static_cast<float>(config_.clip / norms.gradient)
                             : 1.0f;
    for (const ParameterTensor& tensor : table_.tensors())
      if (config_.kind == OptimizerKind::muon && tensor.muon)
        muon(tensor, model.parameters(), gradients, factor, lr);
      else
        adamw(tensor, model.parameters(), gradients, factor, lr);
    model.parameters_changed();
    return norms;
  }

  void read_state(std::span<float> first, std::span<float> second, int64_t& steps) const override {
    check_sizes(first.size(), second.size());
    std::copy(first_.begin(), first_.end(), first.begin() + slice_.begin);
    std::copy(second_.begin(), second_.end(), second.begin() + slice_.begin);
    steps = steps_;
  }
  void write_state(std::span<const float> first, std::span<const float> second, int64_t steps) override {
    check_sizes(first.size(), second.size());
    require(steps >= 0, "[optimizer] expected 0 or more steps, got {}", steps);
    std::copy_n(first.begin() + slice_.begin, slice_.count(), first_.begin());
    std::copy_n(second.begin() + slice_.begin, slice_.count(), second_.begin());
    steps_ = steps;
  }

 private:
  void check_sizes(size_t first, size_t second) const {
    const auto size = static_cast<size_t>(table_.size());
    require(first == size && second == size, "[optimizer] expected states of {} numbers, got {} and {}", size,
            first, second);
  }

  double gradient_norm(const float* gradients) const {
    std::vector<double> sums = square_sums(gradients + slice_.begin, slice_.count());
    if (!ranks_) return root_of_sum(sums);
    // As many on each rank as on the first, which has the most; nothing changes by adding zeros.
    sums.resize(static_cast<size_t>((ranks_->slice(table_.size(), 0).count() + kBlock - 1) / kBlock));
    return root_of_sum(ranks_->gather(sums));
  }

  void adamw(const ParameterTensor& tensor, float* parameters, const float* gradients, float factor,
             double lr) {
    const float beta1 = config_.beta1, beta2 = config_.beta2, epsilon = config_.epsilon;
    const StepRates rates(config_, lr, steps_);
    const float rate = rates.rate, inverse_root = rates.inverse_root, keep = tensor.decay ? rates.keep : 1.0f;
    const int64_t begin = std::max(tensor.offset, slice_.begin),
                  end = std::min(tensor.offset + tensor.count(), slice_.end);
    parallel_for((end - begin + kBlock - 1) / kBlock, [&](int64_t block, int) {
      // Counted from the slice's beginning.
      const int64_t first = begin - slice_.begin + block * kBlock,
                    last = std::min(end - slice_.begin, first + kBlock);
      float* const w = parameters + slice_.begin;
      const float* const gradient = gradients + slice_.begin;
      float* const m = first_.data();
      float* const v = second_.data();
      for (int64_t n = first; n < last; ++n) {
        const float g = gradient[n] * factor;
        m[n] = beta1 * m[n] + (1 - beta1) * g;
        v[n] = beta2 * v[n] + (1 - beta2) * g * g;
        w[n] = keep * w[n] - rate * m[n] / (std::sqrt(v[n]) * inverse_root + epsilon);
      }
    });
  }

  // q, k and v are matrices of their own, and so are the gate and the rest of an MLP.
  void muon(const ParameterTensor& tensor, float* parameters, const float* gradients, float factor,
            double lr) {
    const int64_t rows = tensor.shape[0], stride = tensor.shape[1];
    const float keep = tensor.decay ? StepRates(config_, lr, steps_).keep : 1.0f;
    for (const MatrixPart& part : tensor.parts) {
      const int64_t at = tensor.offset + part.first, columns = part.columns;
      const float scale = muon_scale(lr, rows, columns);
      scratch_.resize(static_cast<size_t>(rows * columns));
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
          const int64_t n = at + i * stride + j;
          const float g = gradients[n] * factor;
          float& m = first_[static_cast<size_t>(n)];
          m = config_.momentum * m + g;
          scratch_[static_cast<size_t>(i * columns + j)] = g + config_.momentum * m;
        }
      orthogonalise(scratch_, rows, columns);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
          float& w = parameters[at + i * stride + j];
          w = keep * w - scale * scratch_[static_cast<size_t>(i * columns + j)];
        }
    }
  }

  const OptimizerConfig config_;
  const ParameterTable& table_;
  Ranks* const ranks_;                 // over which the states are sharded; nullptr: they are not
  const Slice slice_;                  // of the flat buffers, whose states are here
  std::vector<float> first_, second_;  // AdamW's m and v; Muon's momentum lies in first_
  std::vector<float> scratch_;
  int64_t steps_ = 0;
};

}  // namespace

void orthogonalise(std::span<float> x, int64_t rows, int64_t columns) {
  require(static_cast<int64_t>(x.size()) == rows * columns, "[muon] expected {} numbers for {} x {}, got {}",
          rows * columns, rows, columns, x.size());
  const double norm = root_of_sum(square_sums(x.data(), rows * columns));
  if (norm == 0) return;
  // Every singular value is at most 1 then.
  const float inverse = static_cast<float>(1 / norm);
  for (float& value : x) value *= inverse;
  // The smaller Gram matrix: x x^T for wide matrices, x^T x for tall ones.
  const bool wide = rows <= columns;
  const int64_t n = std::min(rows, columns);
  std::vector<float> gram(static_cast<size_t>(n * n)), polynomial(gram.size()), next(x.size());
  for (int step = 0; step < kNewtonSchulzSteps; ++step) {
    const Matrix plain = Matrix::rows_of(x.data(), columns), turned = Matrix::transposed(x.data(), columns);
    multiply({n, n, wide ? columns : rows, wide ? plain : turned, wide ? turned : plain, gram.data(), n});
    multiply(
        {n, n, n, Matrix::rows_of(gram.data(), n), Matrix::rows_of(gram.data(), n), polynomial.data(), n});
    for (size_t i = 0; i < gram.size(); ++i)
      polynomial[i] = kNewtonSchulzB * gram[i] + kNewtonSchulzC * polynomial[i];
    const Matrix p = Matrix::rows_of(polynomial.data(), n);
    multiply({rows, columns, n, wide ? p : plain, wide ? plain : p, next.data(), columns});
    for (size_t i = 0; i < next.size(); ++i) x[i] = kNewtonSchulzA * x[i] + next[i];
  }
}

std::unique_ptr<Optimizer> make_optimizer_cpu(const OptimizerConfig& config, const ParameterTable& table,
                                              Ranks* sharded_over) {
  return std::make_unique<CpuOptimizer>(config, table, sharded_over);
}

}  // namespace evenkeel
