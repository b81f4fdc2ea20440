#include "attention/cuda_request.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace evenkeel {
namespace {

constexpr int64_t kLargestHead = 128;
constexpr uintptr_t kBufferAlignment = 256;

using Sizes = std::array<int64_t, 4>;

size_t element_bytes(TensorType type) { return type == TensorType::bf16 ? 2 : 4; }

std::string strides_of(const DeviceTensor& t) {
  return fmt::format("({}, {}, {}, {})", t.stride[0], t.stride[1], t.stride[2], t.stride[3]);
}

// The tensors of one request, all checked alike.
class TensorCheck {
 public:
  TensorCheck(const CudaAttention& problem, AttentionKernel kernel) : p_(problem), kernel_(kernel) {}

  void query(const char* name, const DeviceTensor& t, bool written) const {
    check(name, t, {p_.B, p_.H, p_.T, p_.D}, p_.query_offsets != nullptr, written);
  }
  void key(const char* name, const DeviceTensor& t, bool written) const {
    check(name, t, {p_.B, p_.G, p_.N, p_.D}, p_.key_offsets != nullptr, written);
  }

 private:
  void check(const char* name, const DeviceTensor& t, const Sizes& sizes, bool packed, bool written) const {
    require(t.present(), "[attention on the GPU] expected a tensor {}, got null", name);
    require(reinterpret_cast<uintptr_t>(t.data) % element_bytes(p_.type) == 0,
            "[attention on the GPU] expected {} at a multiple of its element's {} bytes", name,
            element_bytes(p_.type));
    require(!packed || t.stride[0] == 0,
            "[attention on the GPU] expected a batch stride of 0 for {}, which has offsets, got strides {}",
            name, strides_of(t));
    for (size_t axis = 0; axis < 4; ++axis)
      require(!written || t.stride[axis] != 0 || sizes[axis] == 1 || (packed && axis == 0),
              "[attention on the GPU] expected {}, which is written, without a stride of 0 on an axis of {} "
              "entries, got strides {}",
              name, sizes[axis], strides_of(t));
    require(kernel_ != AttentionKernel::hopper || is_aligned(t, sizes),
            "[attention on the GPU] expected {} at a multiple of 16 bytes, its last stride 1 and the others "
            "multiples of 8 (as `aligned` promises; without that promise the any-plan kernels run), got "
            "strides {}",
            name, strides_of(t));
  }

  const CudaAttention& p_;
  AttentionKernel kernel_;
};

void check_buffer(const char* name, const void* buffer, size_t bytes) {
  require(bytes == 0 || buffer != nullptr, "[attention on the GPU] expected {} of {} bytes, got null", name,
          bytes);
  require(reinterpret_cast<uintptr_t>(buffer) % kBufferAlignment == 0,
          "[attention on the GPU] expected {} at a multiple of {} bytes", name, kBufferAlignment);
}

void check_inputs(const TensorCheck& check, const CudaInputs& in) {
  check.query("q", in.q, /*written=*/false);
  check.key("k", in.k, false);
  check.key("v", in.v, false);
}

}  // namespace

CudaAttention complete(const CudaAttention& problem) {
  CudaAttention p = problem;
  const std::pair<const char*, int64_t> sizes[] = {{"B", p.B}, {"H", p.H}, {"G", p.G},
                                                   {"T", p.T}, {"N", p.N}, {"D", p.D}};
  for (const auto& [name, size] : sizes)
    require(size >= 1 && size <= std::numeric_limits<int32_t>::max(),
            "[attention on the GPU] expected {} from 1 to 2^31 - 1, got {}", name, size);
  require(p.D <= kLargestHead, "[attention on the GPU] expected a head size from 1 to {}, got {}",
          kLargestHead, p.D);
  require(p.H % p.G == 0,
          "[attention on the GPU] expected query heads in whole groups for {} key/value heads, got {} query "
          "heads",
          p.G, p.H);
  const auto plans = static_cast<int64_t>(p.plans.size());
  require(plans == 1 || plans == p.H,
          "[attention on the GPU] expected 1 plan or one for each of {} query heads, got {}", p.H, plans);
  require(std::isfinite(p.scale), "[attention on the GPU] expected a finite scale, got {}", p.scale);
  require(std::isfinite(p.softcap) && p.softcap >= 0,
          "[attention on the GPU] expected a finite softcap of 0 (off) or more, got {}", p.softcap);
  require(p.tile_keys == 64 || p.tile_keys == 0,
          "[attention on the GPU] expected tile_keys of 64, or 0 for all keys in one tile, got {}",
          p.tile_keys);
  require(p.fact_sequences >= 0 && p.fact_sequences <= p.B,
          "[attention on the GPU] expected fact_sequences from 0 (all) to {}, got {}", p.B, p.fact_sequences);
  require(!p.query_offsets || p.query_lengths,
          "[attention on the GPU] expected query_lengths with query_offsets, got null");
  require(!p.key_offsets || p.key_lengths,
          "[attention on the GPU] expected key_lengths with key_offsets, got null");
  require(!p.query_offsets || p.query_rows >= 1,
          "[attention on the GPU] expected query_rows, the rows of all sequences, with query_offsets, got {}",
          p.query_rows);
  require(!p.key_offsets || p.key_rows >= 1,
          "[attention on the GPU] expected key_rows, the keys of all sequences, with key_offsets, got {}",
          p.key_rows);
  if (p.fact_sequences == 0) p.fact_sequences = p.B;
  if (p.scale == 0) p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(p.D)));
  if (std::all_of(p.plans.begin(), p.plans.end(), [&](const auto& plan) { return plan == p.plans[0]; }))
    p.plans.resize(1);
  return p;
}

void check_forward(const CudaAttention& problem, AttentionKernel kernel, const CudaSizes& sizes,
                   const CudaInputs& in, const CudaForward& out, bool with_facts, const void* workspace) {
  const TensorCheck check(problem, kernel);
  check_inputs(check, in);
  check.query("o", out.o, /*written=*/true);
  require(out.lse != nullptr, "[attention on the GPU] expected lse, got null");
  require(with_facts || !out.ties, "[attention on the GPU] expected with_facts where ties are asked for");
  check_buffer("saved", out.saved, sizes.saved);
  check_buffer("workspace", workspace, sizes.workspace);
}

void check_backward(const CudaAttention& problem, AttentionKernel kernel, const CudaSizes& sizes,
                    const CudaInputs& in, const DeviceTensor& grad_output, const CudaForward& saved,
                    const CudaBackward& out, bool with_facts, const void* workspace) {
  const TensorCheck check(problem, kernel);
  check_inputs(check, in);
  check.query("grad_output", grad_output, /*written=*/false);
  check.query("o", saved.o, false);
  check.query("dq", out.dq, /*written=*/true);
  if (!with_facts || out.dk.present() || out.dv.present()) {
    check.key("dk", out.dk, true);
    check.key("dv", out.dv, true);
  }
  require(saved.lse != nullptr, "[attention on the GPU] expected lse, got null");
  require(
      with_facts || !(out.delta || out.residual || out.residual_floor || out.delta_error),
      "[attention on the GPU] expected with_facts where delta, residual, residual_floor or delta_error is "
      "asked for");
  check_buffer("saved", saved.saved, sizes.saved);
  check_buffer("workspace", workspace, sizes.workspace);
}

}  // namespace evenkeel
