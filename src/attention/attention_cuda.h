// Attention on a GPU: the same definition, sites and stabilisers as attention.h, on device memory.
// Plain C++: no CUDA header, and a build without CUDA has it too (its calls throw, and say so).
// Never allocates device memory, never synchronises; two calls may run on two streams at once.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/precision_plan.h"
#include "gpu/device.h"

namespace evenkeel {

enum class TensorType : uint8_t { bf16, fp32 };

// Device memory with strides in elements. A packed sequence of all batches has stride[0] = 0 and offsets below.
struct DeviceTensor {
  void* data = nullptr;
  std::array<int64_t, 4> stride{};  // (B, H or G, T or N, D)

  bool present() const { return data != nullptr; }
};

// One attention problem: everything that decides the bits, besides the numbers themselves.
struct CudaAttention {
  int64_t B = 0, H = 0, G = 0, T = 0, N = 0, D = 0;  // T and N: the longest sequence's
  TensorType type = TensorType::bf16;                // of q, k, v, o and their gradients
  std::vector<PrecisionPlan> plans;                  // one for all heads, or one per query head
  float scale = 0;                                   // 0 means 1 / sqrt(D)
  float softcap = 0;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  // Device memory, (B) each, or null: all T, all N. Rows beyond are not read; outputs there are zero (L: -inf)
  // in a padded tensor, and do not exist in a packed one.
  const int32_t *query_lengths = nullptr, *key_lengths = nullptr;
  // Device memory, (B) each, or null. Packed sequences: where sequence b's first row lies on the row axis of a
  // tensor whose batch stride is 0. Needs the lengths too.
  const int32_t *query_offsets = nullptr, *key_offsets = nullptr;
  int64_t query_rows = 0, key_rows = 0;  // packed: rows in all (of the row axis)
  DeviceTensor visible;                  // uint8, (B, H, T, N): nonzero is visible; strides of 0 broadcast
  // Keys a tile: 64, or 0 for all keys in one. Only the any-plan kernels round after each tile; the Hopper
  // kernels' plans have no rounding there.
  int64_t tile_keys = 64;
  // Optional outputs, which cost time, are of the first so many sequences alone, and the rest of them is left as it is;
  // 0: of all B. What else is computed is the same either way.
  int64_t fact_sequences = 0;
  uint32_t step = 0, layer = 0;           // of the random numbers
  const uint32_t* device_step = nullptr;  // device memory, or null: instead of `step`, for replayed graphs
  // Promised for every tensor of both passes: see is_aligned. False: only the any-plan kernels take the
  // problem.
  bool aligned = true;
};

// Does the tensor start at a multiple of 16 bytes, with a last stride of 1 and others that are multiples
// of 8? Hopper's copy engine needs that. The stride of an axis of one entry (of `sizes`) is not looked at,
// and 0 is a stride of the batch axis alone (a packed tensor).
bool is_aligned(const DeviceTensor& tensor, const std::array<int64_t, 4>& sizes);

// Which kernel runs, and why: decided here and nowhere else.
// Not asked of a plan: `accumulate`, since products add up as the chip's own tensor cores do.
enum class AttentionKernel { hopper, any_plan };
constexpr const char* name(AttentionKernel kernel) {
  return kernel == AttentionKernel::hopper ? "hopper" : "any_plan";
}
struct KernelChoice {
  AttentionKernel kernel = AttentionKernel::any_plan;
  std::string why;  // in words: what the fast kernel takes here, or the first thing that it does not take
};
KernelChoice choose_kernel(const CudaDevice& device, const CudaAttention& problem, bool with_facts);

struct CudaInputs {
  DeviceTensor q;     // (B, H, T, D)
  DeviceTensor k, v;  // (B, G, N, D)
};

struct CudaForward {
  DeviceTensor o;           // (B, H, T, D)
  float* lse = nullptr;     // (B, H, T) contiguous: L
  void* saved = nullptr;    // saved_bytes: what backward needs besides; opaque
  int32_t* ties = nullptr;  // (B, H, T), optional
};

struct CudaBackward {
  DeviceTensor dq;         // (B, H, T, D)
  DeviceTensor dk, dv;     // (B, G, N, D); with facts, both may be null: not computed
  float* delta = nullptr;  // (B, H, T), optional: as used, keel included
  // Optional, (B, H, T): as in AttentionBackward, and delta_lp - delta_hp, where delta_hp = sum P dP / sum P.
  float *residual = nullptr, *residual_floor = nullptr, *delta_error = nullptr;
};

// Sizes in bytes, for one problem; 256-byte alignment is expected of both. `with_facts`: some optional output is
// asked for, in either pass (the same answer must be given to both passes).
struct CudaSizes {
  size_t saved = 0;  // from forward to backward: B H T times what depends on neither B, T nor N; all written
  size_t workspace = 0;  // enough for either pass; not kept between calls
};
CudaSizes cuda_attention_sizes(const CudaAttention& problem, bool with_facts);

// Throw std::invalid_argument on what the definition does not allow, DataError where CUDA reports an error.
// `stream` is a cudaStream_t.
KernelChoice attention_forward_cuda(const CudaAttention& problem, const CudaInputs& in,
                                    const CudaForward& out, bool with_facts, void* workspace, void* stream);
KernelChoice attention_backward_cuda(const CudaAttention& problem, const CudaInputs& in,
                                     const DeviceTensor& grad_output, const CudaForward& saved,
                                     const CudaBackward& out, bool with_facts, void* workspace, void* stream);

}  // namespace evenkeel
