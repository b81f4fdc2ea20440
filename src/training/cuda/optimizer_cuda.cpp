// The device optimiser: what optimizer.cpp does, queued on the model's stream.
#include <algorithm>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/sizes.h"
#include "gpu/cuda/check.h"
#include "gpu/device_memory.h"
#include "model/device_product.h"
#include "training/cuda/optimizer_kernels.h"
#include "training/device_ranks.h"
#include "training/optimizer.h"
#include "training/optimizer_rates.h"

namespace evenkeel {
namespace {

static_assert(Ranks::kSliceUnit % kNormBlock == 0, "a part of the norm must not lie in two slices");

class CudaOptimizer final : public Optimizer {
 public:
  CudaOptimizer(const OptimizerConfig& config, const ParameterTable& table, Ranks* ranks)
      : config_(config),
        size_(table.size()),
        ranks_(ranks),
        slice_(ranks ? ranks->slice(size_) : Slice{0, size_}),
        rank_parts_(norm_parts(ranks ? ranks->slice(size_, 0).count() : size_)),
        first_(bytes_of(slice_.count())),
        second_(bytes_of(slice_.count())),
        parts_(at((ranks ? ranks->size() : 1) * rank_parts_) * sizeof(double)),
        norm_(sizeof(GradientNorm)) {
    validate(config, ranks);
    first_.fill(0);
    second_.fill(0);
    parts_.fill(0);
    std::vector<uint8_t> flags(at(size_ / kFlagSpan));
    for (const ParameterTensor& tensor : table.tensors()) {
      const bool muon = config.kind == OptimizerKind::muon && tensor.muon;
      require(tensor.offset % kFlagSpan == 0, "[optimizer] expected {} to start at a multiple of {}, got {}",
              tensor.name, kFlagSpan, tensor.offset);
      std::fill_n(flags.begin() + tensor.offset / kFlagSpan, divide_up(tensor.count(), kFlagSpan),
                  static_cast<uint8_t>((tensor.decay ? kDecays : 0) | (muon ? kIsMuons : 0)));
      if (muon)
        for (const MatrixPart& part : tensor.parts) add_to_group(tensor, part);
    }
    flags_ = DeviceMemory(std::vector<uint8_t>(flags.begin() + slice_.begin / kFlagSpan,
                                               flags.begin() + slice_.end / kFlagSpan));
    prepare_groups();
  }

  StepNorms step(Model& model, double lr) override {
    const auto stream = static_cast<cudaStream_t>(model.stream());
    float *const parameters = model.parameters(), *const gradients = model.gradients();
    auto* const norm = norm_.as<GradientNorm>();
    const StepRates rates(config_, lr, steps_ + 1);
    queue_norm(gradients, norm, stream);
    adamw({parameters + slice_.begin, first_.as<float>(), second_.as<float>(), gradients + slice_.begin,
           flags_.as<uint8_t>(), slice_.count(), config_.beta1, config_.beta2, config_.epsilon, rates.rate,
           rates.inverse_root, rates.keep},
          norm, stream);
    if (!groups_.empty() && (!products_ || products_stream_ != stream)) {
      products_ = std::make_unique<DeviceProducts>(stream);
      products_stream_ = stream;
    }
    for (const Group& group : groups_) {
      muon_momentum(group.matrices, gradients, first_.as<float>(), config_.momentum, norm, x_.as<float>(),
                    stream);
      muon_normalise(group.matrices, x_.as<float>(), matrix_parts_.as<double>(), stream);
      const float* update = orthogonalise(group.matrices);
      muon_apply(group.matrices, parameters, group.decay ? rates.keep : 1.0f,
                 muon_scale(lr, group.matrices.rows, group.matrices.columns), norm, update, stream);
    }
    check_launch("queueing the optimiser");
    GradientNorm found{};
    check_cuda(cudaMemcpyAsync(&found, norm, sizeof found, cudaMemcpyDeviceToHost, stream),
               "reading the norm");
    check_cuda(cudaStreamSynchronize(stream), "running the optimiser");
    if (!found.finite) return {found.norm, false};
    ++steps_;
    model.parameters_changed();
    return {found.norm, true};
  }

  void read_state(std::span<float> first, std::span<float> second, int64_t& steps) const override {
    check_sizes(first.size(), second.size());
    first_.download(first.data() + slice_.begin, first_.bytes());
    second_.download(second.data() + slice_.begin, second_.bytes());
    steps = steps_;
  }
  void write_state(std::span<const float> first, std::span<const float> second, int64_t steps) override {
    check_sizes(first.size(), second.size());
    require(steps >= 0, "[optimizer] expected 0 or more steps, got {}", steps);
    first_.upload(first.data() + slice_.begin, first_.bytes());
    second_.upload(second.data() + slice_.begin, second_.bytes());
    steps_ = steps;
  }

 private:
  // Muon's matrices of one shape, stride and decay go through every kernel together.
  struct Group {
    MuonGroup matrices{};
    bool decay = false;
    std::vector<int64_t> starts;
    DeviceMemory starts_on_device;
  };

  static size_t bytes_of(int64_t floats) { return at(floats) * sizeof(float); }
  void check_sizes(size_t first, size_t second) const {
    require(first == at(size_) && second == at(size_),
            "[optimizer] expected states of {} numbers, got {} and {}", size_, first, second);
  }

  // Of the whole gradient, from this rank's parts and all others'.
  void queue_norm(const float* gradients, GradientNorm* norm, cudaStream_t stream) {
    auto* const parts = parts_.as<double>();
    square_sums(gradients + slice_.begin, slice_.count(), parts + (ranks_ ? ranks_->rank() : 0) * rank_parts_,
                stream);
    check_launch("queueing the norm");
    if (ranks_)  // as pairs of floats, of which none is computed with
      ranks_->share_rows(*make_device_memory(stream), parts_.as<float>(), 2 * rank_parts_);
    gradient_norm(parts, static_cast<int64_t>(parts_.bytes() / sizeof(double)), config_.clip, norm, stream);
  }

  void add_to_group(const ParameterTensor& tensor, const MatrixPart& part) {
    const int64_t rows = tensor.shape[0], columns = part.columns, stride = tensor.shape[1];
    auto group = std::find_if(groups_.begin(), groups_.end(), [&](const Group& g) {
      return g.matrices.rows == rows && g.matrices.columns == columns && g.matrices.stride == stride &&
             g.decay == tensor.decay;
    });
    if (group == groups_.end()) {
      group = groups_.emplace(groups_.end());
      group->matrices = {rows, columns, stride, 0, nullptr};
      group->decay = tensor.decay;
    }
    group->starts.push_back(tensor.offset + part.first);
  }

  // Scratch for the largest group; all groups use it in turn.
  void prepare_groups() {
    int64_t values = 0, gram_values = 0, most = 0;
    for (Group& group : groups_) {
      MuonGroup& m = group.matrices;
      m.batch = static_cast<int64_t>(group.starts.size());
      group.starts_on_device = DeviceMemory(group.starts);
      m.starts = group.starts_on_device.as<int64_t>();
      const int64_t n = std::min(m.rows, m.columns);
      values = std::max(values, m.batch * m.rows * m.columns);
      gram_values = std::max(gram_values, m.batch * n * n);
      most = std::max(most, m.batch);
    }
    if (groups_.empty()) return;
    constexpr int64_t kMostMatrices = 65535;  // of a grid's second axis
    require(most <= kMostMatrices, "[muon] expected at most {} matrices of one shape, got {}", kMostMatrices,
            most);
    x_ = DeviceMemory(bytes_of(values));
    next_ = DeviceMemory(bytes_of(values));
    gram_ = DeviceMemory(bytes_of(gram_values));
    polynomial_ = DeviceMemory(bytes_of(gram_values));
    matrix_parts_ = DeviceMemory(at(most * kMatrixParts) * sizeof(double));
    x_.fill(0);
  }

  // Newton-Schulz on x_, whose matrices have norm 1; returns where the result lies. FP32 products, as the CPU's.
  const float* orthogonalise(const MuonGroup& m) {
    const bool wide = m.rows <= m.columns;  // the smaller Gram matrix: x x^T, or x^T x
    const int64_t n = std::min(m.rows, m.columns), size = m.rows * m.columns;
    float *x = x_.as<float>(), *next = next_.as<float>();
    float *const gram = gram_.as<float>(), *const polynomial = polynomial_.as<float>();
    const DeviceMatrix gram_matrix = DeviceMatrix::rows_of(gram, n),
                       factor = DeviceMatrix::rows_of(polynomial, n);
    DeviceProduct product{};
    product.type = product.c_type = TensorType::fp32;
    product.batch = m.batch;
    for (int step = 0; step < kNewtonSchulzSteps; ++step) {
      const DeviceMatrix plain = DeviceMatrix::rows_of(x, m.columns),
                         turned = DeviceMatrix::transposed(x, m.columns);
      DeviceProduct square = product;
      square.rows = square.columns = square.c_stride = n;
      square.depth = std::max(m.rows, m.columns);
      square.a = wide ? plain : turned;
      square.b = wide ? turned : plain;
      square.c = gram;
      square.a_batch = square.b_batch = size;
      square.c_batch = n * n;
      products_->multiply(square);
      square.depth = n;
      square.a = square.b = gram_matrix;
      square.a_batch = square.b_batch = n * n;
      square.c = polynomial;
      square.base = gram;
      square.scale = kNewtonSchulzC;
      square.base_scale = kNewtonSchulzB;
      products_->multiply(square);
      DeviceProduct update = product;
      update.rows = m.rows;
      update.columns = update.c_stride = m.columns;
      update.depth = n;
      update.a = wide ? factor : plain;
      update.b = wide ? plain : factor;
      update.a_batch = wide ? n * n : size;
      update.b_batch = wide ? size : n * n;
      update.c = next;
      update.c_batch = size;
      update.base = x;
      update.base_scale = kNewtonSchulzA;
      products_->multiply(update);
      std::swap(x, next);
    }
    return x;
  }

  const OptimizerConfig config_;
  const int64_t size_;
  Ranks* const ranks_;  // over which the states are sharded; nullptr: they are not
  const Slice slice_;   // of the flat buffers, whose states are here
  const int64_t
      rank_parts_;  // of the norm, on the first rank, which has the most; the others have zeros behind
  DeviceMemory first_, second_;  // (slice): AdamW's m and v; Muon's momentum lies in first_
  DeviceMemory flags_;           // (slice / kFlagSpan)
  DeviceMemory parts_, norm_;    // (ranks, rank_parts), GradientNorm
  std::vector<Group> groups_;
  DeviceMemory x_, next_, gram_, polynomial_, matrix_parts_;  // Muon's scratch
  std::unique_ptr<DeviceProducts> products_;                  // Muon's, of the model's stream
  cudaStream_t products_stream_ = nullptr;
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer_cuda(const OptimizerConfig& config, const ParameterTable& table,
                                               Ranks* sharded_over) {
  return std::make_unique<CudaOptimizer>(config, table, sharded_over);
}

}  // namespace evenkeel
