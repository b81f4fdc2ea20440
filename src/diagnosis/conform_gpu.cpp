#include "diagnosis/conform_gpu.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace evenkeel {
namespace {

uint16_t bf16_bits(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

class Transfer {
 public:
  Transfer(DeviceMemory& memory, TensorType type) : memory_(memory), type_(type) {}
  size_t bytes(size_t count) const { return count * (type_ == TensorType::bf16 ? 2 : 4); }
  size_t offset(const void* part) const {
    return static_cast<size_t>(static_cast<const char*>(part) - memory_.as<char>());
  }

  void up(View<const float> from, void* to) {
    const auto [B, H, rows, D] = from.shape;
    std::vector<float> values;
    values.reserve(static_cast<size_t>(from.count()));
    for (int64_t b = 0; b < B; ++b)
      for (int64_t h = 0; h < H; ++h)
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t d = 0; d < D; ++d) values.push_back(*from.at(b, h, i, d));
    if (type_ == TensorType::fp32) return memory_.upload(values.data(), bytes(values.size()), offset(to));
    std::vector<uint16_t> narrow(values.size());
    std::transform(values.begin(), values.end(), narrow.begin(), bf16_bits);
    memory_.upload(narrow.data(), bytes(narrow.size()), offset(to));
  }
  // What the kernel does not write is found there as kUnwritten.
  void poison(size_t count, void* to) {
    if (type_ == TensorType::fp32) {
      const std::vector<uint32_t> values(count, kUnwritten);
      return memory_.upload(values.data(), bytes(count), offset(to));
    }
    const std::vector<uint16_t> values(count, uint16_t{kUnwritten >> 16});
    memory_.upload(values.data(), bytes(count), offset(to));
  }
  void down(const void* from, Tensor<float>& to) const {
    std::vector<float>& values = to.values();
    if (type_ == TensorType::fp32) return memory_.download(values.data(), bytes(values.size()), offset(from));
    std::vector<uint16_t> narrow(values.size());
    memory_.download(narrow.data(), bytes(narrow.size()), offset(from));
    std::transform(narrow.begin(), narrow.end(), values.begin(), from_bf16);
  }

 private:
  DeviceMemory& memory_;
  TensorType type_;
};

DeviceTensor contiguous(void* data, const std::array<int64_t, 4>& shape) {
  return {data, contiguous_strides(shape)};
}

// Where the last element of a view lies, plus 1.
size_t extent(const View<const uint8_t>& view) {
  int64_t last = 0;
  for (size_t axis = 0; axis < 4; ++axis) last += (view.shape[axis] - 1) * view.stride[axis];
  return static_cast<size_t>(last + 1);
}

// Tensors in bf16 where everything that leaves the kernel is rounded to it anyway.
TensorType type_for(const PrecisionPlan& plan) {
  for (Site site : {Site::output, Site::dq, Site::dk, Site::dv})
    if (plan.at(site) != Rounding{kBf16}) return TensorType::fp32;
  return TensorType::bf16;
}

}  // namespace

ConformKernel GpuConform::kernel() {
  return [this](const AttentionProblem& config, const AttentionInputs& in, View<const float> grad_output,
                AttentionBuffers& out) { run(config, in, grad_output, out); };
}

void GpuConform::run(const AttentionProblem& config, const AttentionInputs& in, View<const float> grad_output,
                     AttentionBuffers& out) {
  AttentionProblem problem = problem_of(config, in);
  const PrecisionPlan& plan = config.plans[0];
  require(config.plans.size() == 1, "conform on the GPU: expected 1 plan, got {}", config.plans.size());
  problem.type = type_for(plan);
  problem.tile_keys = config.tile_keys == 0 ? 0 : 64;  // the only tiles the GPU has
  const View<const uint8_t>& visible = config.mask.visible;
  const PassSizes sizes = resolve(problem, cuda_device()).sizes();

  Transfer transfer(memory_, problem.type);
  const auto row_count = static_cast<size_t>(problem.B * problem.H * problem.T),
             rows = row_count * sizeof(float);
  const size_t queries = static_cast<size_t>(in.q.count()), keys = static_cast<size_t>(in.k.count()),
               values = static_cast<size_t>(in.v.count()),
               outputs = row_count * static_cast<size_t>(problem.Dv);
  void *q, *k, *v, *d_o, *o, *lse, *dq, *dk, *dv, *saved, *workspace, *mask;
  const auto divide = [&](Carver carver) {
    for (void** part : {&q, &dq}) *part = carver.take_bytes(transfer.bytes(queries));
    for (void** part : {&d_o, &o}) *part = carver.take_bytes(transfer.bytes(outputs));
    for (void** part : {&k, &dk}) *part = carver.take_bytes(transfer.bytes(keys));
    for (void** part : {&v, &dv}) *part = carver.take_bytes(transfer.bytes(values));
    lse = carver.take_bytes(rows);
    saved = carver.take_bytes(sizes.saved);
    workspace = carver.take_bytes(sizes.workspace);
    mask = carver.take_bytes(visible.present() ? extent(visible) : 0);
    return carver.used();
  };
  const size_t needed = divide(Carver(nullptr));
  if (memory_.bytes() < needed) memory_ = DeviceMemory(needed);
  divide(Carver(memory_.data()));

  transfer.up(in.q, q);
  transfer.up(in.k, k);
  transfer.up(in.v, v);
  transfer.up(grad_output, d_o);
  transfer.poison(outputs, o), transfer.poison(queries, dq);
  transfer.poison(keys, dk), transfer.poison(values, dv);
  if (visible.present()) {
    memory_.upload(visible.data, extent(visible), transfer.offset(mask));
    problem.mask.visible.data = static_cast<const uint8_t*>(mask);
  }
  const std::array<int64_t, 4> per_output{problem.B, problem.H, problem.T, problem.Dv};
  const PassInputs inputs{contiguous(q, in.q.shape), contiguous(k, in.k.shape), contiguous(v, in.v.shape)};
  const ForwardPass forward{contiguous(o, per_output), static_cast<float*>(lse), saved, nullptr};
  const BackwardPass backward{contiguous(dq, in.q.shape), contiguous(dk, in.k.shape),
                              contiguous(dv, in.v.shape)};
  const AttentionCall call = resolve(problem, cuda_device());
  call.forward(inputs, forward, workspace, nullptr);
  call.backward(inputs, contiguous(d_o, per_output), forward, backward, workspace, nullptr);
  uses_.insert(fmt::format("{}: {} ({})", to_string(plan), call.choice().kernel, call.choice().why));

  transfer.down(o, out.o);
  transfer.down(dq, out.dq);
  transfer.down(dk, out.dk);
  transfer.down(dv, out.dv);
  memory_.download(out.lse.values().data(), rows, transfer.offset(lse));
}

}  // namespace evenkeel
