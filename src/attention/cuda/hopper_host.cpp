#include "attention/cuda/hopper_host.h"

#include "attention/head_plan.h"
#include "gpu/device.h"

namespace evenkeel::hopper {
CUtensorMap query_map(const CudaAttention& p, const DeviceTensor& tensor, int box_rows) {
  const bool packed = p.query_offsets;
  return gpu::tensor_map(tensor.data, {packed ? 1 : p.B, p.H, packed ? p.query_rows : p.T, p.D},
                         tensor.stride, box_rows);
}

CUtensorMap key_map(const CudaAttention& p, const DeviceTensor& tensor, int box_rows) {
  const bool packed = p.key_offsets;
  return gpu::tensor_map(tensor.data, {packed ? 1 : p.B, p.G, packed ? p.key_rows : p.N, p.D}, tensor.stride,
                         box_rows);
}

int multiprocessors() { return cuda_device().multiprocessors; }

Saved saved_layout(const CudaAttention& p, void* saved) {
  const HeadPlan plan(p.plans[0]);
  const size_t rows = static_cast<size_t>(p.B * p.H * p.T);
  auto* const base = static_cast<uint8_t*>(saved);
  Saved out;
  // Nothing lies between the pieces: D is a multiple of 8, so each starts where its elements may.
  if (plan.wide_output) {
    out.residue = reinterpret_cast<int8_t*>(base);
    out.bytes += rows * static_cast<size_t>(p.D);
  }
  if (plan.sums_rounded) {
    out.row_max = reinterpret_cast<float*>(base + out.bytes);
    out.bytes += rows * sizeof(float);
    out.row_sum = reinterpret_cast<float*>(base + out.bytes);
    out.bytes += rows * sizeof(float);
  }
  return out;
}

}  // namespace evenkeel::hopper
