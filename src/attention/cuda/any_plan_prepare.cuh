// What runs before the any-plan kernels: the plans' table into device memory, and operands that are not bf16
// numbers as they lie (FP32 tensors, rounded operands, centred keys) taken apart into bf16 parts. As
// cpu_operands.cpp.
#pragma once

#include "attention/cuda/any_plan_problem.cuh"
#include "attention/cuda/device_scale.cuh"

namespace evenkeel::any_plan {

// Rows of the table travel as an argument: nothing on the host has to outlive the call, and graphs keep a
// copy.
inline constexpr int kPlansAtOnce = 7;
struct PlanRows {
  DevicePlan row[kPlansAtOnce];
};
static_assert(sizeof(PlanRows) <= 4000, "kernel arguments have 4 KiB");

static __global__ void fill_plans(const __grid_constant__ PlanRows rows, DevicePlan* table, int count) {
  if (threadIdx.x < count) table[threadIdx.x] = rows.row[threadIdx.x];
}

// Largest magnitudes of one tensor, as bits: (B, heads, rows), (B, heads, tiles of rows), (B, heads), (B). Down the columns,
// where a plan has scales there: (B, heads, blocks of kColumnRows rows, D), (B, heads, D).
struct LargestTable {
  uint32_t *row, *tile, *head, *tensor;
  uint32_t *column_block, *column;
};
// The shortest block of a column: longer ones are some of these.
inline constexpr int kColumnRows = kScaleBlocks[0];

struct Preparation {
  Site site;
  OperandOf operand;
  LargestTable plain,
      centred;         // where scales are shared; centred: of keys less their mean, where a plan centres them
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

// The value as its site meets it.
__device__ __forceinline__ float operand_value(const Problem& p, const Preparation& x, bool centred, int b,
                                               int head, int row, int d) {
  const float value = source_value(p, x, b, head, row, d);
  return centred ? __fsub_rn(value, p.mean_key[(b * p.G + head) * p.D + d]) : value;
}
__device__ __forceinline__ int tiles_of(const Preparation& x) {
  return (x.rows + kScaleTileRows - 1) / kScaleTileRows;
}

// A thread a row; the table is all zeros before. The order of maxima does not matter.
static __global__ void find_largest(const __grid_constant__ Problem p, const __grid_constant__ Preparation x,
                                    bool centred) {
  const int64_t n = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (n >= static_cast<int64_t>(p.B) * x.heads * x.rows) return;
  const int row = n % x.rows, head = n / x.rows % x.heads, b = n / x.rows / x.heads;
  const bool of_keys = x.site == Site::k || x.site == Site::v;
  if (row >= (of_keys ? keys_of(p, b) : rows_of(p, b))) return;
  uint32_t largest = 0;
  for (int d = 0; d < p.D; ++d)
    largest = max(largest, counted_bits(operand_value(p, x, centred, b, head, row, d)));
  const LargestTable& table = centred ? x.centred : x.plain;
  const int64_t at = static_cast<int64_t>(b) * x.heads + head;
  table.row[n] = largest;
  atomicMax(table.tile + at * tiles_of(x) + row / kScaleTileRows, largest);
  atomicMax(table.head + at, largest);
  atomicMax(table.tensor + b, largest);
}

__device__ __forceinline__ int column_blocks_of(const Preparation& x) {
  return (x.rows + kColumnRows - 1) / kColumnRows;
}

// A thread for each block of a column; the table is all zeros before.
static __global__ void find_largest_of_columns(const __grid_constant__ Problem p,
                                               const __grid_constant__ Preparation x, bool centred) {
  const int64_t n = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int blocks = column_blocks_of(x);
  if (n >= static_cast<int64_t>(p.B) * x.heads * blocks * p.D) return;
  const int d = n % p.D, block = n / p.D % blocks, head = n / p.D / blocks % x.heads,
            b = n / p.D / blocks / x.heads;
  const bool of_keys = x.site == Site::k || x.site == Site::v;
  const int last = min((block + 1) * kColumnRows, of_keys ? keys_of(p, b) : rows_of(p, b));
  uint32_t largest = 0;
  for (int row = block * kColumnRows; row < last; ++row)
    largest = max(largest, counted_bits(operand_value(p, x, centred, b, head, row, d)));
  const LargestTable& table = centred ? x.centred : x.plain;
  table.column_block[n] = largest;
  atomicMax(table.column + (static_cast<int64_t>(b) * x.heads + head) * p.D + d, largest);
}

// block: rows of ScaleGroup::column_block.
__device__ inline float largest_in_column(const Problem& p, const LargestTable& table, const Preparation& x,
                                          ScaleGroup group, int block, int b, int head, int row, int d) {
  const int64_t at = static_cast<int64_t>(b) * x.heads + head;
  if (group == ScaleGroup::column) return __uint_as_float(table.column[at * p.D + d]);
  const int blocks = column_blocks_of(x), first = row / block * (block / kColumnRows),
            last = min(first + block / kColumnRows, blocks);
  uint32_t largest = 0;
  for (int n = first; n < last; ++n) largest = max(largest, table.column_block[(at * blocks + n) * p.D + d]);
  return __uint_as_float(largest);
}

__device__ __forceinline__ float largest_in(const LargestTable& table, const Preparation& x, ScaleGroup group,
                                            int b, int head, int row) {
  const int64_t at = static_cast<int64_t>(b) * x.heads + head;
  return __uint_as_float(group == ScaleGroup::row    ? table.row[at * x.rows + row]
                         : group == ScaleGroup::tile ? table.tile[at * tiles_of(x) + row / kScaleTileRows]
                         : group == ScaleGroup::head ? table.head[at]
                                                     : table.tensor[b]);
}

// The scale of one value, found again by each that shares it.
__device__ inline float operand_scale(const Problem& p, const Preparation& x, const DeviceRounding& r,
                                      const SharedScale& shared, bool centred, int b, int head, int row,
                                      int d) {
  const LargestTable& table = centred ? x.centred : x.plain;
  float largest;
  if (shared.group == ScaleGroup::block) {
    uint32_t bits = 0;
    const int first = d / shared.block * shared.block, last = min(first + shared.block, p.D);
    for (int j = first; j < last; ++j)
      bits = max(bits, counted_bits(operand_value(p, x, centred, b, head, row, j)));
    largest = __uint_as_float(bits);
  } else if (is_down_column(shared.group)) {
    largest = largest_in_column(p, table, x, shared.group, shared.block, b, head, row, d);
  } else {
    largest = largest_in(table, x, shared.group, b, head, row);
  }
  const float outer =
      shared.outer == ScaleGroup::none ? 1.0f
      : shared.outer == ScaleGroup::column
          ? device_outer_scale(r, largest_in_column(p, table, x, shared.outer, 0, b, head, row, d))
          : device_outer_scale(r, largest_in(table, x, shared.outer, b, head, row));
  return device_block_scale(r, shared, largest, outer);
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
      const bool centred = x.site == Site::k && plan.centres_keys;
      value = operand_value(p, x, centred, b, head, row, d);
      const uint64_t element = ((static_cast<uint64_t>(b) * x.heads + head) * x.rows + row) * p.D + d;
      const SiteRounding site = plan.at(x.site);
      const SharedScale& shared = plan.shared[static_cast<int>(x.operand)];
      const StreamKey key = stream_key(p, plan, x.site);
      if (shared.group == ScaleGroup::none) {
        value = round_one<true>(value, site, key, element);
      } else {
        const bool random = site.rounding->mode == static_cast<uint8_t>(RoundingMode::stochastic);
        value = round_under_scale(*site.rounding, value,
                                  operand_scale(p, x, *site.rounding, shared, centred, b, head, row, d),
                                  random ? device_random_bits(key, element) : 0);
      }
    }
    const int parts = x.operand == OperandOf::q   ? plan.parts_q
                      : x.operand == OperandOf::k ? plan.parts_k
                      : x.operand == OperandOf::v ? plan.parts_v
                                                  : plan.parts_grad;
    for (int part = 0; part < parts; ++part) {
      x.target[part * x.part_stride + n] =
          __ushort_as_bfloat16(static_cast<uint16_t>(__float_as_uint(value) >> 16));
      value = beyond_upper(value);
    }
  }
}

}  // namespace evenkeel::any_plan
