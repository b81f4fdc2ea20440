// What the any-plan kernels know of a problem: the plans' table, where the tensors lie, which keys a row
// sees; and the loading and multiplying of tiles. The definition is the CPU implementation (row_tile*.cpp);
// names are the same.
//
// Operands are read as sums of 1 to 3 bf16 parts, each the upper half of what the parts before it left. That is
// exact for 8, 16 and 24 significant bits (as long as the last part is not below bf16's smallest subnormal,
// 2^-133). A bf16 tensor that its site leaves unchanged is read in place. Others are taken apart beforehand
// (any_plan_prepare.cuh).
#pragma once

#include "attention/cuda/device_rounding.cuh"
#include "attention/precision_plan.h"
#include "attention/row_shift.h"
#include "gpu/cuda/instructions.cuh"
#include "gpu/cuda/mma.cuh"
#include "gpu/cuda/warp.cuh"

namespace evenkeel::any_plan {

inline constexpr float kNone = RowShift::kNone;

// Keys a tile of the forward pass: where pv and row_sum are rounded. The backward pass rounds nothing between
// tiles, and its smaller step leaves registers for the gradients.
inline constexpr int kTileKeys = 64;
inline constexpr int kBackwardStep = 32;
inline constexpr int kOwnedRows = 64;  // rows or keys that a block of the backward pass owns
inline constexpr int kWarpRows = 16;   // rows of one mma

// The kernels' variants, each taking what the one before it takes and more; more registers and instructions,
// too.
enum class Variant : uint8_t {
  quick,  // operands, P and dS in bf16; what else the loops round is bf16 or not rounded; plain masks
  full,   // and every stabiliser, tile_keys = 0, P and dS in formats of RoundKind::nearest that bf16 contains
  any,    // and any format, element type, mask and alignment
};
// What a variant's loops round other sites than P and dS to, at most.
template <Variant kVariant>
inline constexpr RoundKind kMostKind = kVariant == Variant::any ? RoundKind::any : RoundKind::bf16;

// Rounds P or dS.
template <Variant kVariant, int kCount>
__device__ __forceinline__ void round_operand(float (&x)[kCount][4], const SiteRounding& site,
                                              const StreamKey& key, const Elements& elements) {
  round_fragments<kVariant == Variant::full ? RoundKind::nearest : kMostKind<kVariant>>(x, site, key,
                                                                                        elements);
}
// Must they be, where products follow at once? But in Variant::any, these round to bf16 as they pack.
template <Variant kVariant>
__device__ __forceinline__ bool is_rounded_apart(const SiteRounding& site) {
  return kVariant == Variant::any || (kVariant == Variant::full && site.kind != RoundKind::bf16);
}

// Of the operands that are prepared before the tiles.
enum class OperandOf : uint8_t { q, k, v, grad };

// In the table of the backward pass q, k and v have the roundings of its own readings (Site::q_bwd, ...).
struct DevicePlan {
  DeviceRounding site[kSiteCount];
  SharedScale shared[4];  // by OperandOf
  uint64_t seed;
  float keel;
  ShiftParameters shift;
  Variant forward, backward;  // backward's is the whole group's: its heads share dK and dV
  bool sums_rounded, max_first, wide_output, shadow, probs_delta, centres_keys;  // as HeadPlan
  bool saves_output;  // o_for_delta is not what `o` holds
  // Parts of the operands; of k and v: those of the copy this head reads.
  uint8_t parts_q, parts_k, parts_v, parts_grad, parts_probs, parts_probs_bwd, parts_dscores;

  __device__ __forceinline__ SiteRounding at(Site s) const {
    return {site[static_cast<int>(s)].kind, &site[static_cast<int>(s)]};
  }
};

// A tensor of bf16 parts, strides in elements.
struct Operand {
  const __nv_bfloat16* data;
  int64_t part_stride;
  int64_t stride[4];
  const int32_t* offsets;  // (B) or null: rows of packed sequences
  int head_divisor;        // query heads that share a head of this tensor
  bool wide;               // rows are whole, aligned pieces of 16 bytes
};

// An output tensor of the problem's type.
struct Output {
  void* data;
  int64_t stride[4];
  const int32_t* offsets;
  bool wide;  // as Operand's
};

struct Problem {
  int B, H, G, T, N, D;
  bool fp32;  // element type
  float scale, softcap;
  int look_back, look_ahead;  // keys before and behind a row's own position that it sees
  const int32_t *query_lengths, *key_lengths;
  const uint8_t* visible;
  int64_t visible_stride[4];
  bool one_tile;  // tile_keys = 0
  uint32_t step, layer;
  const uint32_t* device_step;
  const DevicePlan* plans;
  int plan_count;
  int most_q, most_k, most_v, most_grad;  // parts for which there is room in shared memory

  Operand q, k, v, grad;
  Output o, dq, dk, dv;
  float* lse;             // (B, H, T)
  float2* row_values;     // (B, H, T): (L without centre_keys' part, 1), or for consistent (m, l)
  float* o_for_delta;     // (B, H, T, D), or null: no head's plan saves it
  int fact_sequences;     // that ties, delta, residual, ... are written of: the first so many of B
  int32_t* ties;          // (B, H, T) or null
  const float* mean_key;  // (B, G, D), where a plan centres keys
  float* used_delta;      // (B, H, T): between the kernels
  float *delta, *residual, *residual_floor, *delta_error;  // (B, H, T) or null
};

// --- Where things are
__device__ __forceinline__ const DevicePlan& plan_of(const Problem& p, int h) {
  return p.plans[p.plan_count == 1 ? 0 : h];
}
__device__ __forceinline__ int rows_of(const Problem& p, int b) {
  return p.query_lengths ? p.query_lengths[b] : p.T;
}
__device__ __forceinline__ int keys_of(const Problem& p, int b) {
  return p.key_lengths ? p.key_lengths[b] : p.N;
}

__device__ __forceinline__ StreamKey stream_key(const Problem& p, const DevicePlan& plan, uint32_t stream) {
  const uint32_t step = p.device_step ? *p.device_step : p.step;
  return {static_cast<uint32_t>(plan.seed), static_cast<uint32_t>(plan.seed >> 32), step,
          p.layer * 64 + stream};
}
__device__ __forceinline__ StreamKey stream_key(const Problem& p, const DevicePlan& plan, Site site) {
  return stream_key(p, plan, static_cast<uint32_t>(site));
}
__device__ __forceinline__ uint64_t row_pitch(const Problem& p) {
  return (static_cast<uint64_t>(p.T) + kRandomGroup - 1) / kRandomGroup * kRandomGroup;
}

// Which keys the rows of one sequence see.
struct Sight {
  int rows, keys, look_back, look_ahead;

  __device__ Sight(const Problem& p, int b)
      : rows(rows_of(p, b)), keys(keys_of(p, b)), look_back(p.look_back), look_ahead(p.look_ahead) {}
  __device__ __forceinline__ int first(int row) const { return max(0, row + keys - rows - look_back); }
  __device__ __forceinline__ int last(int row) const {  // one behind; 0 for a row that does not exist
    return row < rows ? min(keys, row + keys - rows + look_ahead + 1) : 0;
  }
  __device__ __forceinline__ bool sees(int row, int key) const {
    return key >= first(row) && key < last(row);
  }
};

// What some of a warp's rows see, and what all of them see: both ends of a row's range rise with the row.
struct RowsSight {
  int first, last, all_first, all_last;

  __device__ RowsSight(const Sight& sight, int row, int count) {
    const int bottom = min(row + count, sight.rows) - 1;
    first = sight.first(row);
    last = bottom >= row ? sight.last(bottom) : 0;
    all_first = sight.first(row + count - 1);
    all_last = row + count <= sight.rows ? sight.last(row) : 0;
  }
  __device__ __forceinline__ bool any(int key, int count) const { return last > key && first < key + count; }
  __device__ __forceinline__ bool whole(int key, int count) const {
    return all_first <= key && all_last >= key + count;
  }
};
// The same for a warp's keys [key, key + count): rows that see some of them, and all of them.
struct KeysSight {
  int first, last, all_first, all_last;

  // A row's position is its number and keys - rows.
  __device__ KeysSight(const Sight& sight, int key, int count) {
    const int shift = sight.keys - sight.rows;
    first = max(0, key - sight.look_ahead - shift);
    last = key < sight.keys ? min(sight.rows, key + count + sight.look_back - shift) : 0;
    all_first = max(0, key + count - 1 - sight.look_ahead - shift);
    all_last = key + count <= sight.keys ? min(sight.rows, key + sight.look_back - shift + 1) : 0;
  }
  __device__ __forceinline__ bool any(int row, int count) const { return last > row && first < row + count; }
  __device__ __forceinline__ bool whole(int row, int count) const {
    return all_first <= row && all_last >= row + count;
  }
};

// Nonzero: the row sees the key.
__device__ __forceinline__ const uint8_t& visible_at(const Problem& p, int b, int h, int row, int key) {
  return p.visible[b * p.visible_stride[0] + h * p.visible_stride[1] + row * p.visible_stride[2] +
                   key * p.visible_stride[3]];
}

// --- Tiles
// Rows that are not whole, aligned pieces, one value at a time. Not inlined: every load of a tile may come here, and few do.
template <int kD, int kThreads>
static __device__ __noinline__ void load_narrow_tile(uint32_t target, int rows, const __nv_bfloat16* source,
                                                     int64_t row_stride, int64_t stride, int D, int present) {
#pragma unroll 1
  for (int n = threadIdx.x; n < rows * kD; n += kThreads) {
    const int i = n / kD, d = n % kD;
    const uint16_t value =
        i < present && d < D ? __bfloat16_as_ushort(source[i * row_stride + d * stride]) : uint16_t{0};
    gpu::store_shared(target + tile_offset<kD>(i, d / 8) + d % 8 * 2, value);
  }
}

// Loads tiles of one head's rows as the products read them: `parts` tiles one behind the other, zeros behind
// the last row. What a thread copies is worked out once: its piece of a row, and rows a fixed number apart.
template <int kD, int kThreads, bool kAny>
class TileLoader {
 public:
  static constexpr int kPieces = kD / 8, kRowsApart = kThreads / kPieces;
  static_assert(kRowsApart % 8 == 0, "a thread's rows have their pieces permuted alike");

  __device__ TileLoader(const Operand& x, int D, int b, int h, int limit, int parts)
      : x_(x), parts_(parts), D_(D), limit_(limit) {
    own_ = x.data + b * x.stride[0] + (h / x.head_divisor) * x.stride[1] +
           (x.offsets ? x.offsets[b] : 0) * x.stride[2] + own_row() * x.stride[2] + own_piece() * 8;
  }

  // Rows [row, row + kRows).
  template <int kRows>
  __device__ __forceinline__ void load(uint32_t target, int row) const {
    static_assert(kRows % kRowsApart == 0);
    if constexpr (kAny)
      if (!x_.wide) {  // never of several parts: those we lay out ourselves
        load_narrow_tile<kD, kThreads>(target, kRows,
                                       own_ + (row - own_row()) * x_.stride[2] - own_piece() * 8,
                                       x_.stride[2], x_.stride[3], D_, limit_ - row);
        return;
      }
    const __nv_bfloat16* from = own_ + row * x_.stride[2];
    const int present = own_piece() * 8 < D_ ? limit_ - row - own_row() : 0;
    target += tile_offset<kD>(own_row(), own_piece());
    for (int part = 0; part < (kAny ? parts_ : 1); ++part) {
#pragma unroll
      for (int i = 0; i < kRows / kRowsApart; ++i) {
        // Where there is no row the address is not read.
        copy_16_async(target + i * kRowsApart * kTileRowBytes<kD>, from + i * kRowsApart * x_.stride[2],
                      i * kRowsApart < present);
      }
      target += kRows * kTileRowBytes<kD>;
      from += x_.part_stride;
    }
  }

 private:
  static __device__ __forceinline__ int own_row() { return static_cast<int>(threadIdx.x) / kPieces; }
  static __device__ __forceinline__ int own_piece() { return static_cast<int>(threadIdx.x) % kPieces; }

  const Operand& x_;
  const __nv_bfloat16* own_;  // this thread's piece of its first row
  int parts_, D_, limit_;
};

// c[n] += (16 rows of a) (rows of b)^T, one row of b a column of c. kAny: all pairs of parts above 2^-24.
template <int kD, int kCount, bool kAny>
__device__ __forceinline__ void multiply_rows(float (&c)[kCount][4], uint32_t a, int a_rows, int a_row,
                                              int a_parts, uint32_t b, int b_rows, int b_row, int b_parts,
                                              int lane) {
  const auto product = [&](uint32_t a_tile, uint32_t b_tile) {
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      uint32_t left[4];
      load_left<kD>(left, a_tile, a_row, k, lane);
#pragma unroll
      for (int n = 0; n < kCount; n += 2) {
        uint32_t right[4];
        load_right_rows<kD>(right, b_tile, b_row + 8 * n, k, lane);
        multiply_add(c[n], left, right[0], right[1]);
        multiply_add(c[n + 1], left, right[2], right[3]);
      }
    }
  };
  if constexpr (kAny) {
    // Smallest terms first.
#pragma unroll 1
    for (int order = 2; order >= 0; --order)
#pragma unroll 1
      for (int part = 0; part <= order; ++part)
        if (part < a_parts && order - part < b_parts)
          product(a + part * a_rows * kTileRowBytes<kD>, b + (order - part) * b_rows * kTileRowBytes<kD>);
  } else {
    product(a, b);
  }
}
// The same with the rows of a in registers.
template <int kD, int kCount>
__device__ __forceinline__ void multiply_rows(float (&c)[kCount][4], const uint32_t (&a)[kD / 16][4],
                                              uint32_t b, int b_row, int lane) {
#pragma unroll
  for (int k = 0; k < kD / 16; ++k)
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      uint32_t right[4];
      load_right_rows<kD>(right, b, b_row + 8 * n, k, lane);
      multiply_add(c[n], a[k], right[0], right[1]);
      multiply_add(c[n + 1], a[k], right[2], right[3]);
    }
}

// c (16 x kD) += x (16 x 8 kCount, as fragments) times rows [b_row, b_row + 8 kCount) of b.
// Where x is one part, see(left) is shown it as it is multiplied.
struct Nobody {
  __device__ __forceinline__ void operator()(const uint32_t (&)[4]) const {}
};
template <int kD, int kCount, bool kAny, class See = Nobody>
__device__ __forceinline__ void multiply_columns(float (&c)[kD / 8][4], const float (&x)[kCount][4],
                                                 int x_parts, uint32_t b, int b_rows, int b_row, int b_parts,
                                                 int lane, See see = {}) {
#pragma unroll
  for (int k = 0; k < kCount / 2; ++k) {
    if constexpr (kAny) {
      constexpr int kParts = 3;
      const bool alone = x_parts == 1 && b_parts == 1;
      uint32_t left[kParts][4];
      float rest[2][4];
#pragma unroll
      for (int e = 0; e < 8; ++e) rest[e / 4][e % 4] = x[2 * k + e / 4][e % 4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          left[part][e] = pack_upper(rest[e / 2][e % 2 * 2], rest[e / 2][e % 2 * 2 + 1]);
#pragma unroll
        for (int e = 0; e < 8; ++e) rest[e / 4][e % 4] = beyond_upper(rest[e / 4][e % 4]);
      }
#pragma unroll
      for (int n = 0; n < kD / 16; ++n) {
        // Several products go by themselves, smallest first, and are added with rounding to nearest: tensor cores truncate,
        // and six products a step would truncate the whole sum six times (O too small by 1e-6: a bias of delta).
        float sums[2][4];
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[e / 4][e % 4] = alone ? c[2 * n + e / 4][e % 4] : 0.0f;
#pragma unroll
        for (int order = kParts - 1; order >= 0; --order)
#pragma unroll
          for (int part = 0; part <= order; ++part) {
            if (part >= x_parts || order - part >= b_parts) continue;
            uint32_t right[4];
            load_right_columns<kD>(right, b + (order - part) * b_rows * kTileRowBytes<kD>, b_row + 16 * k, n,
                                   lane);
            multiply_add(sums[0], left[part], right[0], right[1]);
            multiply_add(sums[1], left[part], right[2], right[3]);
          }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& to = c[2 * n + e / 4][e % 4];
          to = alone ? sums[e / 4][e % 4] : __fadd_rn(to, sums[e / 4][e % 4]);
        }
      }
    } else {
      // x holds bf16 numbers, or is rounded to them here: the plan's own rounding of P and dS.
      uint32_t left[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        left[e] = pack_bf16(x[2 * k + e / 2][e % 2 * 2], x[2 * k + e / 2][e % 2 * 2 + 1]);
      see(left);
#pragma unroll
      for (int n = 0; n < kD / 16; ++n) {
        uint32_t right[4];
        load_right_columns<kD>(right, b, b_row + 16 * k, n, lane);
        multiply_add(c[2 * n], left, right[0], right[1]);
        multiply_add(c[2 * n + 1], left, right[2], right[3]);
      }
    }
  }
}

__device__ __forceinline__ int64_t output_row(const Output& to, int b, int h, int row) {
  return b * to.stride[0] + h * to.stride[1] +
         ((to.offsets ? to.offsets[b] : 0) + int64_t{row}) * to.stride[2];
}

// Two neighbouring values of an output row, whatever its layout and type.
static __device__ __noinline__ void store_pair(const Output& to, bool fp32, int D, int64_t row_start, int d,
                                               float x, float y) {
  for (int n = 0; n < 2 && d + n < D; ++n) {
    const int64_t at = row_start + (d + n) * to.stride[3];
    if (fp32)
      static_cast<float*>(to.data)[at] = n == 0 ? x : y;
    else
      static_cast<__nv_bfloat16*>(to.data)[at] = __float2bfloat16_rn(n == 0 ? x : y);
  }
}

// Writes a lane's values of two output rows, eight features at a time.
class RowWriter {
 public:
  // Rows from `existing` to `all` are padding: a packed tensor has none.
  __device__ RowWriter(const Problem& p, const Output& to, int b, int h, const int (&row)[2], int existing,
                       int all)
      : to_(to), D_(p.D), fp32_(p.fp32), plain_(to.wide && !p.fp32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      present_[i] = row[i] < (to.offsets ? existing : all);
      start_[i] = output_row(to, b, h, row[i]);
    }
  }
  __device__ __forceinline__ void write(int d, const float (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!present_[i] || d >= D_) continue;
      if (plain_)
        *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(to_.data) + start_[i] + d) =
            pack_bf16(x[2 * i], x[2 * i + 1]);
      else
        store_pair(to_, fp32_, D_, start_[i], d, x[2 * i], x[2 * i + 1]);
    }
  }

 private:
  const Output& to_;
  int64_t start_[2];
  int D_;
  bool fp32_, plain_, present_[2];
};

}  // namespace evenkeel::any_plan
