// The any-plan kernels on a problem, and the CPU's results for it. For tests on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <bit>
#include <cstring>
#include <memory>

#include "attention/kernel_families.h"
#include "attention_cases.h"
#include "gpu/cuda/check.h"

namespace evenkeel {

using cases::to_bf16;

class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) : bytes_(bytes) {
    check_cuda(cudaMalloc(&data_, bytes + 256), "allocating");
    check_cuda(cudaMemset(data_, 0xff, bytes + 256), "poisoning");  // NaN in both types
  }
  DeviceBytes(const void* host, size_t bytes) : DeviceBytes(bytes) {
    check_cuda(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), "copying to the device");
  }
  DeviceBytes(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  template <class T>
  std::vector<T> read() const {
    std::vector<T> host(bytes_ / sizeof(T));
    check_cuda(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost),
               "copying back");
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

inline std::vector<uint8_t> encode(const float* x, size_t count, TensorType type) {
  std::vector<uint8_t> bytes(count * element_bytes(type));
  for (size_t n = 0; n < count; ++n)
    if (type == TensorType::fp32) {
      std::memcpy(&bytes[4 * n], &x[n], 4);
    } else {
      const auto half = static_cast<uint16_t>(std::bit_cast<uint32_t>(to_bf16(x[n])) >> 16);
      std::memcpy(&bytes[2 * n], &half, 2);
    }
  return bytes;
}

inline std::vector<float> decode(const std::vector<uint8_t>& bytes, TensorType type) {
  std::vector<float> x(bytes.size() / element_bytes(type));
  for (size_t n = 0; n < x.size(); ++n)
    if (type == TensorType::fp32) {
      std::memcpy(&x[n], &bytes[4 * n], 4);
    } else {
      uint16_t half;
      std::memcpy(&half, &bytes[2 * n], 2);
      x[n] = std::bit_cast<float>(uint32_t{half} << 16);
    }
  return x;
}

// All results, (B, H, T, D), (B, G, N, D) and (B, H, T), contiguous.
struct Results {
  std::vector<float> o, lse, dq, dk, dv, delta, residual, residual_floor, delta_error;
  std::vector<int32_t> ties;

  bool same_bits(const Results& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
    };
    return same(o, other.o) && same(lse, other.lse) && same(dq, other.dq) && same(dk, other.dk) &&
           same(dv, other.dv) && same(delta, other.delta) && same(residual, other.residual) &&
           same(residual_floor, other.residual_floor) && same(delta_error, other.delta_error) &&
           same(ties, other.ties);
  }
};

struct GpuOptions {
  TensorType type = TensorType::bf16;
  bool facts = true;
  int64_t fact_sequences = 0;  // 0: all
  int misaligned = 0;          // elements by which q, k, v, dO start late
  bool step_in_memory = false;
  bool backward = true;
};

// bf16 problems have bf16 numbers.
inline void make_bf16(cases::Problem& p) {
  for (std::vector<float>* memory : {&p.q_memory, &p.k_memory, &p.v_memory, &p.grad_memory})
    for (float& x : *memory) x = to_bf16(x);
}

// Lengths and masks are still the host's.
inline AttentionProblem cuda_problem(const cases::Problem& p, const AttentionProblem& config,
                                     TensorType type) {
  AttentionProblem a = problem_of(config, p.in);
  a.type = type;
  a.mask.query_lengths = a.mask.key_lengths = {};
  a.mask.visible = {};
  return a;
}

inline Results run_gpu(const cases::Problem& p, const AttentionProblem& config,
                       const GpuOptions& options = {}) {
  const TensorType type = options.type;
  AttentionProblem a = cuda_problem(p, config, type);
  a.with_facts = options.facts;
  if (options.fact_sequences > 0) a.fact_sequences = options.fact_sequences;
  std::vector<std::unique_ptr<DeviceBytes>> memory;
  const auto upload = [&](const View<const float>& view, const std::vector<float>& values) {
    std::vector<float> shifted(static_cast<size_t>(options.misaligned));
    shifted.insert(shifted.end(), values.begin(), values.end());
    const std::vector<uint8_t> bytes = encode(shifted.data(), shifted.size(), type);
    memory.push_back(std::make_unique<DeviceBytes>(bytes.data(), bytes.size()));
    const size_t start =
        static_cast<size_t>(view.data - values.data() + options.misaligned) * element_bytes(type);
    return DeviceTensor{memory.back()->as<uint8_t>() + start, view.stride};
  };
  const auto owner = [&](const std::vector<float>& own) -> const std::vector<float>& {
    return own.empty() ? p.q_memory : own;  // packed: all three in one
  };
  const PassInputs in{upload(p.in.q, p.q_memory), upload(p.in.k, owner(p.k_memory)),
                      upload(p.in.v, owner(p.v_memory))};
  const DeviceTensor grad = upload(p.grad_output, p.grad_memory);
  const auto lengths = [&](const std::vector<int32_t>& from) -> std::span<const int32_t> {
    if (from.empty()) return {};
    memory.push_back(std::make_unique<DeviceBytes>(from.data(), from.size() * 4));
    return {memory.back()->as<int32_t>(), from.size()};
  };
  a.mask.query_lengths = lengths(p.query_lengths);
  a.mask.key_lengths = lengths(p.key_lengths);
  if (!p.visible.empty()) {
    memory.push_back(std::make_unique<DeviceBytes>(p.visible.data(), p.visible.size()));
    a.mask.visible = config.mask.visible;
    a.mask.visible.data = memory.back()->as<uint8_t>();
  }
  if (options.step_in_memory) {
    memory.push_back(std::make_unique<DeviceBytes>(&config.step, sizeof config.step));
    a.device_step = memory.back()->as<uint32_t>();
    a.step = 0xdead;
  }
  const auto rows = static_cast<size_t>(a.B * a.H * a.T), keys = static_cast<size_t>(a.B * a.G * a.N),
             D = static_cast<size_t>(a.D);
  DeviceBytes o(rows * D * element_bytes(type)), dq(rows * D * element_bytes(type)),
      dk(keys * D * element_bytes(type)), dv(keys * D * element_bytes(type)), lse(rows * 4), delta(rows * 4),
      residual(rows * 4), residual_floor(rows * 4), delta_error(rows * 4), ties(rows * 4);
  const AttentionCall call(kernel_family("any_plan"), a);
  const PassSizes& sizes = call.sizes();
  DeviceBytes saved(sizes.saved), workspace(sizes.workspace);
  const auto contiguous = [](const DeviceBytes& x, int64_t H, int64_t T, int64_t size) {
    return DeviceTensor{x.as<void>(), contiguous_strides({1, H, T, size})};
  };
  const ForwardPass forward{contiguous(o, a.H, a.T, a.D), lse.as<float>(), saved.as<void>(),
                            options.facts ? ties.as<int32_t>() : nullptr};
  call.forward(in, forward, workspace.as<void>(), nullptr);
  check_cuda(cudaMemset(workspace.as<void>(), 0xff, sizes.workspace), "poisoning");  // it is not kept
  if (options.backward) {
    BackwardPass backward{contiguous(dq, a.H, a.T, a.D), contiguous(dk, a.G, a.N, a.D),
                          contiguous(dv, a.G, a.N, a.D)};
    if (options.facts) {
      backward.delta = delta.as<float>();
      backward.residual = residual.as<float>();
      backward.residual_floor = residual_floor.as<float>();
      backward.delta_error = delta_error.as<float>();
    }
    call.backward(in, grad, forward, backward, workspace.as<void>(), nullptr);
  }
  check_cuda(cudaDeviceSynchronize(), "running the any-plan kernels");
  const auto values = [&](const DeviceBytes& x) { return decode(x.read<uint8_t>(), type); };
  return {values(o),
          lse.read<float>(),
          values(dq),
          values(dk),
          values(dv),
          delta.read<float>(),
          residual.read<float>(),
          residual_floor.read<float>(),
          delta_error.read<float>(),
          ties.read<int32_t>()};
}

// The CPU's results, stored as the GPU stores them.
inline Results run_cpu(const cases::Problem& p, const AttentionProblem& config, TensorType type) {
  AttentionBuffers buffers(p.in, /*with_facts=*/true);
  AttentionProblem allowed = config;
  allowed.allow_nonfinite = true;
  attention_forward(allowed, p.in, buffers.forward());
  attention_backward(allowed, p.in, p.grad_output, buffers.forward(), buffers.backward());
  const auto stored = [&](const Tensor<float>& x) {
    std::vector<float> values = x.values();
    if (type == TensorType::bf16)
      for (float& v : values) v = to_bf16(v);
    return values;
  };
  const auto narrow = [](const Tensor<double>& x) {
    return std::vector<float>(x.values().begin(), x.values().end());
  };
  return {stored(buffers.o),
          buffers.lse.values(),
          stored(buffers.dq),
          stored(buffers.dk),
          stored(buffers.dv),
          buffers.delta.values(),
          narrow(buffers.residual),
          narrow(buffers.residual_floor),
          {},
          buffers.ties.values()};
}

inline std::string first_difference(const std::vector<float>& gpu, const std::vector<float>& cpu) {
  size_t count = 0, first = 0;
  for (size_t n = gpu.size(); n-- > 0;)
    if (std::bit_cast<uint32_t>(gpu[n]) != std::bit_cast<uint32_t>(cpu[n]) &&
        !(std::isnan(gpu[n]) && std::isnan(cpu[n])))
      ++count, first = n;
  if (count == 0) return "";
  char text[160];
  std::snprintf(text, sizeof text, "%zu of %zu differ, the first at %zu: GPU %a, CPU %a", count, gpu.size(),
                first, static_cast<double>(gpu[first]), static_cast<double>(cpu[first]));
  return text;
}

// L = m + log l, and log may differ by an ulp: that of 1 or of L itself, whichever is larger.
inline bool within_an_ulp(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t n = 0; n < a.size(); ++n)
    if (a[n] != b[n] && !(std::abs(a[n] - b[n]) <= ulp(kFp32, std::max(1.0f, std::abs(b[n]))))) return false;
  return true;
}

}  // namespace evenkeel
