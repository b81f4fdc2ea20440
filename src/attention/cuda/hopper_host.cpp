#include "attention/cuda/hopper_host.h"

#include <algorithm>

#include "attention/head_plan.h"
#include "gpu/device.h"

namespace evenkeel::hopper {
namespace {

CUtensorMap query_map(const AttentionProblem& p, const DeviceTensor& tensor, int64_t features, int box_rows) {
  const bool packed = !p.mask.query_offsets.empty();
  return gpu::tensor_map(tensor.data, {packed ? 1 : p.B, p.H, packed ? p.mask.query_rows : p.T, features},
                         tensor.stride, box_rows);
}
CUtensorMap key_map(const AttentionProblem& p, const DeviceTensor& tensor, int64_t features, int box_rows) {
  const bool packed = !p.mask.key_offsets.empty();
  return gpu::tensor_map(tensor.data, {packed ? 1 : p.B, p.G, packed ? p.mask.key_rows : p.N, features},
                         tensor.stride, box_rows);
}

}  // namespace

CUtensorMap query_map(const AttentionProblem& p, const DeviceTensor& tensor, int box_rows) {
  return query_map(p, tensor, p.D, box_rows);
}
CUtensorMap output_map(const AttentionProblem& p, const DeviceTensor& tensor, int box_rows) {
  return query_map(p, tensor, p.Dv, box_rows);
}
CUtensorMap key_map(const AttentionProblem& p, const DeviceTensor& tensor, int box_rows) {
  return key_map(p, tensor, p.D, box_rows);
}
CUtensorMap value_map(const AttentionProblem& p, const DeviceTensor& tensor, int box_rows) {
  return key_map(p, tensor, p.Dv, box_rows);
}

int multiprocessors() { return cuda_device().multiprocessors; }

Saved saved_layout(const AttentionProblem& p, void* saved) {
  const auto any = [&](bool HeadPlan::*rule) {
    return std::any_of(p.plans.begin(), p.plans.end(),
                       [&](const PrecisionPlan& plan) { return HeadPlan(plan).*rule; });
  };
  const size_t rows = static_cast<size_t>(p.B * p.H * p.T);
  Saved out;
  // Nothing lies between the pieces: Dv is a multiple of 8, so each starts where its elements may.
  const auto take = [&](size_t bytes) -> void* {  // null: counts alone
    void* const piece = saved ? static_cast<uint8_t*>(saved) + out.bytes : nullptr;
    out.bytes += bytes;
    return piece;
  };
  if (any(&HeadPlan::wide_output)) out.residue = static_cast<int8_t*>(take(rows * static_cast<size_t>(p.Dv)));
  if (any(&HeadPlan::sums_rounded)) {
    out.row_max = static_cast<float*>(take(rows * sizeof(float)));
    out.row_sum = static_cast<float*>(take(rows * sizeof(float)));
  }
  return out;
}

}  // namespace evenkeel::hopper
