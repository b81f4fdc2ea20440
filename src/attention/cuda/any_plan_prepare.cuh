// What runs before the any-plan kernels: the plans' table into device memory, and operands that are not bf16
// numbers as they lie (FP32 tensors, rounded operands, centred keys) taken apart into bf16 parts. As
// cpu_operands.cpp.
#pragma once

#include "attention/cuda/any_plan_problem.cuh"

namespace evenkeel::any_plan {

// Rows of the table travel as an argument: nothing on the host has to outlive the call, and graphs keep a
// copy.
inline constexpr int kPlansAtOnce = 8;
struct PlanRows {
  DevicePlan row[kPlansAtOnce];
};
static_assert(sizeof(PlanRows) <= 4000, "kernel arguments have 4 KiB");

static __global__ void fill_plans(const __grid_constant__ PlanRows rows, DevicePlan* table, int count) {
  if (threadIdx.x < count) table[threadIdx.x] = rows.row[threadIdx.x];
}

struct Preparation {
  Site site;
  const void* source;  // (B, heads, rows, D) of the problem's type
  int64_t stride[4];
  const int32_t* offsets;
  int heads, copies;  // of the tensor; copies is heads, or H where heads of a group read k and v differently
  int rows, padded_D;
  __nv_bfloat16* target;  // (part, B, copies, rows, padded D), zeros beyond D
  int64_t part_stride;
};

__device__ __forceinline__ float source_value(const Problem& p, const Preparation& x, int b, int head,
                                              int row, int d) {
  const int64_t at = b * x.stride[0] + head * x.stride[1] +
                     ((x.offsets ? x.offsets[b] : 0) + int64_t{row}) * x.stride[2] + d * x.stride[3];
  return p.fp32 ? static_cast<const float*>(x.source)[at]
                : __bfloat162float(static_cast<const __nv_bfloat16*>(x.source)[at]);
}

// mean[b][g][d] over the keys that exist, summed in FP64 in their order.
static __global__ void mean_keys(const __grid_constant__ Problem p, const __grid_constant__ Preparation k,
                                 float* mean) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= p.B * p.G * p.D) return;
  const int d = n % p.D, g = n / p.D % p.G, b = n / p.D / p.G, keys = keys_of(p, b);
  double sum = 0;
#pragma unroll 8
  for (int j = 0; j < keys; ++j) sum += source_value(p, k, b, g, j, d);
  mean[n] = keys > 0 ? static_cast<float>(sum / keys) : 0.0f;
}

static __global__ void prepare_operand(const __grid_constant__ Problem p,
                                       const __grid_constant__ Preparation x) {
  const int64_t count = static_cast<int64_t>(p.B) * x.copies * x.rows * x.padded_D;
  for (int64_t n = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; n < count;
       n += int64_t{gridDim.x} * blockDim.x) {
    const int d = n % x.padded_D, row = n / x.padded_D % x.rows, copy = n / x.padded_D / x.rows % x.copies,
              b = n / x.padded_D / x.rows / x.copies;
    const int head = copy / (x.copies / x.heads);
    const DevicePlan& plan = plan_of(p, copy * (p.H / x.copies));
    const bool of_keys = x.site == Site::k || x.site == Site::v;
    float value = 0;
    if (d < p.D && row < (of_keys ? keys_of(p, b) : rows_of(p, b))) {
      value = source_value(p, x, b, head, row, d);
      const uint64_t tensor_row = (static_cast<uint64_t>(b) * x.heads + head) * x.rows + row;
      if (x.site == Site::k && plan.centres_keys)
        value = __fsub_rn(value, p.mean_key[(b * p.G + head) * p.D + d]);
      value = round_one<true>(value, plan.at(x.site), stream_key(p, plan, x.site), tensor_row * p.D + d);
    }
    const int parts = x.site == Site::q   ? plan.parts_q
                      : x.site == Site::k ? plan.parts_k
                      : x.site == Site::v ? plan.parts_v
                                          : plan.parts_grad;
    for (int part = 0; part < parts; ++part) {
      x.target[part * x.part_stride + n] =
          __ushort_as_bfloat16(static_cast<uint16_t>(__float_as_uint(value) >> 16));
      value = beyond_upper(value);
    }
  }
}

}  // namespace evenkeel::any_plan
