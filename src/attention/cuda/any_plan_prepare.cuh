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

// Features that one thread prepares.
inline constexpr int kPiece = 8;

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
  int row_threads;        // threads of a row, kPiece features each: a power of two
  bool wide;              // rows of the source are whole, aligned pieces of 16 bytes
  __nv_bfloat16* target;  // (part, B, copies, rows, padded D), zeros beyond D
  int64_t part_stride;
};

__device__ __forceinline__ int64_t source_at(const Preparation& x, int b, int head, int row, int d) {
  return b * x.stride[0] + head * x.stride[1] +
         ((x.offsets ? x.offsets[b] : 0) + int64_t{row}) * x.stride[2] + d * x.stride[3];
}
__device__ __forceinline__ float source_value(const Problem& p, const Preparation& x, int64_t at) {
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
  for (int j = 0; j < keys; ++j) sum += source_value(p, k, source_at(k, b, g, j, d));
  mean[n] = keys > 0 ? static_cast<float>(sum / keys) : 0.0f;
}

// A thread's piece of a row, of one copy of the tensor. Blocks of values that share a scale begin at a multiple of their
// size, which is a power of two. So the threads of one are neighbours within a warp.
struct Piece {
  int b, copy, head, row, d;
  int count;  // values that exist, from d on

  __device__ Piece(const Problem& p, const Preparation& x, int copies) {
    const int blocks = (x.rows * x.row_threads + blockDim.x - 1) / blockDim.x;  // of a head
    const int thread = blockIdx.x % blocks * blockDim.x + threadIdx.x;
    copy = blockIdx.x / blocks % copies;
    b = blockIdx.x / blocks / copies;
    head = copy / (copies / x.heads);
    row = thread / x.row_threads;
    d = thread % x.row_threads * kPiece;
    const bool of_keys = x.site == Site::k || x.site == Site::v;
    const bool exists = row < min(x.rows, of_keys ? keys_of(p, b) : rows_of(p, b));
    count = exists ? min(kPiece, p.D - d) : 0;
  }

  // The values as their site meets them, zeros behind the last.
  __device__ __forceinline__ void load(float (&value)[kPiece], const Problem& p, const Preparation& x,
                                       bool centred) const {
#pragma unroll
    for (int n = 0; n < kPiece; ++n) value[n] = 0;
    if (count <= 0) return;
    const int64_t at = source_at(x, b, head, row, d);
    if (!x.wide) {
#pragma unroll
      for (int n = 0; n < kPiece; ++n)
        if (n < count) value[n] = source_value(p, x, at + n * x.stride[3]);
    } else if (p.fp32) {
      const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(x.source) + at);
#pragma unroll
      for (int n = 0; n < kPiece / 4; ++n) {
        const float4 four = from[n];
        value[4 * n] = four.x, value[4 * n + 1] = four.y;
        value[4 * n + 2] = four.z, value[4 * n + 3] = four.w;
      }
    } else {
      const uint4 eight = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(x.source) + at);
      const uint32_t pair[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) value[2 * n] = low_bf16(pair[n]), value[2 * n + 1] = high_bf16(pair[n]);
    }
    if (centred) {
      const float* const mean = p.mean_key + (b * p.G + head) * p.D + d;
#pragma unroll
      for (int n = 0; n < kPiece; ++n)
        if (n < count) value[n] = __fsub_rn(value[n], mean[n]);
    }
  }
};

// Of the values of `threads` neighbours, a power of two. All threads of a warp call it.
__device__ __forceinline__ uint32_t largest_bits(const float (&value)[kPiece], int threads) {
  uint32_t largest = 0;
#pragma unroll
  for (int n = 0; n < kPiece; ++n) largest = max(largest, counted_bits(value[n]));
  for (int lane = 1; lane < threads; lane *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lane));
  return largest;
}

__device__ __forceinline__ int tiles_of(const Preparation& x) {
  return (x.rows + kScaleTileRows - 1) / kScaleTileRows;
}

// The table is all zeros before. The order of maxima does not matter.
static __global__ void find_largest(const __grid_constant__ Problem p, const __grid_constant__ Preparation x,
                                    bool centred) {
  const Piece piece(p, x, x.heads);
  float value[kPiece];
  piece.load(value, p, x, centred);
  const uint32_t largest = largest_bits(value, x.row_threads);
  if (piece.d != 0 || piece.count == 0) return;
  const LargestTable& table = centred ? x.centred : x.plain;
  const int64_t at = static_cast<int64_t>(piece.b) * x.heads + piece.head;
  table.row[at * x.rows + piece.row] = largest;
  atomicMax(table.tile + at * tiles_of(x) + piece.row / kScaleTileRows, largest);
  atomicMax(table.head + at, largest);
  atomicMax(table.tensor + piece.b, largest);
}

__device__ __forceinline__ int column_blocks_of(const Preparation& x) {
  return (x.rows + kColumnRows - 1) / kColumnRows;
}

// The value as its site meets it.
__device__ __forceinline__ float operand_value(const Problem& p, const Preparation& x, bool centred, int b,
                                               int head, int row, int d) {
  const float value = source_value(p, x, source_at(x, b, head, row, d));
  return centred ? __fsub_rn(value, p.mean_key[(b * p.G + head) * p.D + d]) : value;
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

__device__ __forceinline__ float largest_in(const LargestTable& table, const Preparation& x, ScaleGroup group,
                                            const Piece& piece) {
  const int64_t at = static_cast<int64_t>(piece.b) * x.heads + piece.head;
  return __uint_as_float(group == ScaleGroup::row ? table.row[at * x.rows + piece.row]
                         : group == ScaleGroup::tile
                             ? table.tile[at * tiles_of(x) + piece.row / kScaleTileRows]
                         : group == ScaleGroup::head ? table.head[at]
                                                     : table.tensor[piece.b]);
}

// The scale of a thread's values. All threads of a warp call it.
__device__ inline float piece_scale(const Preparation& x, const DeviceRounding& r, const SharedScale& shared,
                                    bool centred, const Piece& piece, const float (&value)[kPiece]) {
  const LargestTable& table = centred ? x.centred : x.plain;
  const bool of_block = shared.group == ScaleGroup::block;
  const uint32_t in_block = of_block ? largest_bits(value, min(shared.block / kPiece, x.row_threads)) : 0;
  if (piece.count <= 0) return 0;
  const float largest = of_block ? __uint_as_float(in_block) : largest_in(table, x, shared.group, piece);
  const float outer = shared.outer == ScaleGroup::none
                          ? 1.0f
                          : device_outer_scale(r, largest_in(table, x, shared.outer, piece));
  return device_block_scale(r, shared, largest, outer);
}

// The scale of value d of a thread's row, where columns have the scales.
static __device__ __noinline__ float column_scale(const Problem& p, const Preparation& x,
                                                  const DeviceRounding& r, const SharedScale& shared,
                                                  bool centred, Piece piece, int d) {
  const LargestTable& table = centred ? x.centred : x.plain;
  const int64_t at = static_cast<int64_t>(piece.b) * x.heads + piece.head;
  const uint32_t of_column = table.column[at * p.D + d];
  uint32_t largest = of_column;
  if (shared.group == ScaleGroup::column_block) {
    const int blocks = column_blocks_of(x), count = shared.block / kColumnRows,
              first = piece.row / shared.block * count;
    largest = 0;
    for (int n = first; n < min(first + count, blocks); ++n)
      largest = max(largest, table.column_block[(at * blocks + n) * p.D + d]);
  }
  float outer = 1;
  if (shared.outer != ScaleGroup::none)
    outer =
        device_outer_scale(r, shared.outer == ScaleGroup::column ? __uint_as_float(of_column)
                                                                 : largest_in(table, x, shared.outer, piece));
  return device_block_scale(r, shared, __uint_as_float(largest), outer);
}

__device__ __forceinline__ int parts_of(const DevicePlan& plan, OperandOf operand) {
  return operand == OperandOf::q   ? plan.parts_q
         : operand == OperandOf::k ? plan.parts_k
         : operand == OperandOf::v ? plan.parts_v
                                   : plan.parts_grad;
}

// kColumns: some plan has scales down columns. Without them a thread's values have one scale, and registers are saved.
template <bool kColumns>
__global__ void prepare_operand(const __grid_constant__ Problem p, const __grid_constant__ Preparation x) {
  const Piece piece(p, x, x.copies);
  const DevicePlan& plan = plan_of(p, piece.copy * (p.H / x.copies));
  const bool centred = x.site == Site::k && plan.centres_keys;
  float value[kPiece];
  piece.load(value, p, x, centred);
  const SiteRounding site = plan.at(x.site);
  const SharedScale& shared = plan.shared[static_cast<int>(x.operand)];
  const bool scaled = shared.group != ScaleGroup::none;
  const bool down = kColumns && runs_down_column(shared.group);
  float scale[kPiece];
  scale[0] = scaled && !down ? piece_scale(x, *site.rounding, shared, centred, piece, value) : 1.0f;
#pragma unroll
  for (int n = 0; n < kPiece; ++n)
    scale[n] = down && n < piece.count
                   ? column_scale(p, x, *site.rounding, shared, centred, piece, piece.d + n)
                   : scale[0];
  if (piece.row >= x.rows || piece.d >= x.padded_D) return;
  if (site.kind != RoundKind::identity) {
    const auto round_each = [&](auto round) {
#pragma unroll
      for (int n = 0; n < kPiece; ++n) {
        const auto round_it = [&](float y) { return round(y, n); };
        value[n] = scaled ? under_scale(value[n], scale[n], round_it) : round_it(value[n]);
      }
    };
    if (site.kind == RoundKind::nearest) {
      const NearestRounding nearest(*site.rounding);
      round_each([&](float y, int) { return nearest(y); });
    } else {
      const StreamKey key = stream_key(p, plan, x.site);
      const uint64_t element =
          ((static_cast<uint64_t>(piece.b) * x.heads + piece.head) * x.rows + piece.row) * p.D + piece.d;
      round_each([&](float y, int n) { return round_one<RoundKind::any>(y, site, key, element + n); });
    }
  }
  const int64_t at =
      ((static_cast<int64_t>(piece.b) * x.copies + piece.copy) * x.rows + piece.row) * x.padded_D + piece.d;
  for (int part = 0, parts = parts_of(plan, x.operand); part < parts; ++part) {
    *reinterpret_cast<uint4*>(x.target + part * x.part_stride + at) = {
        pack_upper(value[0], value[1]), pack_upper(value[2], value[3]), pack_upper(value[4], value[5]),
        pack_upper(value[6], value[7])};
#pragma unroll
    for (int n = 0; n < kPiece; ++n) value[n] = beyond_upper(value[n]);
  }
}

}  // namespace evenkeel::any_plan
