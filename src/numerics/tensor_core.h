// How tensor cores add: one row of data per chip and operand format, and the one rule they all follow.
// Knows nothing of matrices, tiles or threads: a dot product of two rows, plus an addend.
//
// The rule, for a block of products and the addend c:
//   1. A product's exponent is the sum of its operands' exponents; its significand, in [1, 4), is exact and
//      not normalised. A subnormal operand has its format's least exponent. What is zero takes no part.
//   2. Products and c are shifted right to the largest exponent, which is never less than `min_exponent`,
//      and truncated toward zero to `alignment_bits` bits after the point.
//   3. They are added as integers, without error; hence the order inside a block cannot matter.
//   4. The sum is truncated toward zero to FP32 with `output_bits` bits after the point. Beyond FP32's
//      range it is Inf; a zero is always +0.
// A longer row is a chain of blocks: each result is the addend of the next. NaN, Inf * 0 and Inf - Inf give
// kTensorCoreNan; other infinities stay. Every truncation points toward zero: tensor cores are biased.
//
// The rule, h200 and h200_mma were compared with an H200 bit for bit, 10,485,760 hard sums per format and instruction
// (tools/tensor_core_chip.cu: wide exponents, zeros, subnormals, Inf and NaN, overflow, cancellation). The other chips were
// compared with 5,000 published results per format. Their min_exponent is the published one. The rule's form is that of
// F. A. Khattak and M. Mikaitis, "Accurate models of NVIDIA tensor cores", ACM TACO 2026.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "numerics/format.h"

namespace evenkeel {

struct TensorCoreModel {
  std::string_view chip;
  Format operand;
  int block_terms;     // products added at once, at most kMaxBlockTerms
  int alignment_bits;  // F: bits after the point that survive the alignment, at most 28
  int output_bits;     // fraction bits of the FP32 result
  int min_exponent;    // least exponent of the alignment; bf16 and tf32 alone have products as small as that
  // 2: FP8 operands are widened and done in two blocks that start from 0. Pairs of terms are dealt out in
  // turn (0,1 4,5 8,9 ... then 2,3 6,7 ...), and c is added last, as an ordinary FP32 addition to nearest
  // even.
  int passes = 1;

  friend constexpr bool operator==(const TensorCoreModel&, const TensorCoreModel&) = default;
};

inline constexpr int kMaxBlockTerms = 32;
inline constexpr uint32_t kTensorCoreNan = 0x7FFFFFFFu;  // the one NaN that tensor cores return

// Hopper does FP8 in two ways: wgmma (h200, h100: what FlashAttention-3 uses) and mma.sync (h200_mma). For
// bf16, fp16 and tf32 the two instructions agree.
inline constexpr TensorCoreModel kTensorCoreModels[] = {
    // chip, operand, block_terms, alignment_bits, output_bits, min_exponent, passes
    {"h200", kBf16, 16, 25, 23, -133},
    {"h200", kFp16, 16, 25, 23, -133},
    {"h200", kTf32, 8, 25, 23, -133},
    {"h200", kE4m3, 32, 13, 13, -133},
    {"h200", kE5m2, 32, 13, 13, -133},
    {"h200_mma", kE4m3, 16, 25, 23, -133, 2},
    {"h200_mma", kE5m2, 16, 25, 23, -133, 2},

    {"h100", kBf16, 16, 25, 23, -133},
    {"h100", kFp16, 16, 25, 23, -133},
    {"h100", kTf32, 8, 25, 23, -133},
    {"h100", kE4m3, 32, 13, 13, -133},
    {"h100", kE5m2, 32, 13, 13, -133},

    // FP8: any F from 23 up fits the published results.
    {"b200", kBf16, 16, 25, 23, -133},
    {"b200", kFp16, 16, 25, 23, -133},
    {"b200", kTf32, 8, 25, 23, -133},
    {"b200", kE4m3, 16, 25, 23, -133, 2},
    {"b200", kE5m2, 16, 25, 23, -133, 2},

    {"a100", kBf16, 8, 24, 23, -132},
    {"a100", kFp16, 8, 24, 23, -132},
    {"a100", kTf32, 4, 24, 23, -132},

    {"a2", kBf16, 8, 24, 23, -132},
    {"a2", kFp16, 8, 24, 23, -132},
    {"a2", kTf32, 4, 24, 23, -132},

    {"ada", kBf16, 8, 24, 23, -132},
    {"ada", kFp16, 8, 24, 23, -132},
    {"ada", kTf32, 4, 24, 23, -132},
    {"ada", kE4m3, 16, 13, 13, -132},
    {"ada", kE5m2, 16, 13, 13, -132},

    {"l40s", kBf16, 8, 24, 23, -132},
    {"l40s", kFp16, 8, 24, 23, -132},
    {"l40s", kTf32, 4, 24, 23, -132},
    {"l40s", kE4m3, 16, 13, 13, -132},
    {"l40s", kE5m2, 16, 13, 13, -132},

    {"v100", kFp16, 4, 23, 23, -132},
};
inline constexpr std::string_view kDefaultChip = "h200";

// The row of a chip and an operand format. Throws std::invalid_argument that lists what is known.
const TensorCoreModel& find_tensor_core_model(Format operand, std::string_view chip = kDefaultChip);
std::string tensor_core_chips();  // "h200, h200_mma, h100, ..."

// c + sum of a[i] * b[i] as the chip adds it. Without terms: c. A last block that is not full is filled with
// zeros. Operands should be numbers of model.operand; any other float is taken as it is, as by a unit with
// wider multipliers. Allocates nothing; about 2 ns a product, 3 with strides.
float tensor_core_dot(const TensorCoreModel& model, const float* a, const float* b, size_t count, float c);
// The same, element i at a[i * a_stride] and b[i * b_stride].
float tensor_core_dot(const TensorCoreModel& model, const float* a, ptrdiff_t a_stride, const float* b,
                      ptrdiff_t b_stride, size_t count, float c);

// The same with a promotion every `blocks` blocks (0: never): their sum starts from 0 in the tensor core and is then added
// to c as FP32 adds, to nearest even. Passes that widen FP8 count as one block.
float tensor_core_dot_promoted(const TensorCoreModel& model, const float* a, ptrdiff_t a_stride,
                               const float* b, ptrdiff_t b_stride, size_t count, float c, size_t blocks);

// What became of one product or addend. All parts are exact: value = aligned + lost.
struct TensorCoreTerm {
  size_t index = 0;         // of the product; the addend has the index after the last
  float a = 0, b = 1;       // the addend is c * 1
  double value = 0;         // a * b
  bool takes_part = false;  // finite and not zero
  int exponent = 0;         // sum of the operands' exponents
  int shift = 0;            // places right to the block's exponent
  double aligned = 0;       // after the truncation
  double lost = 0;          // what the truncation cut off
};
struct TensorCoreBlock {
  std::vector<TensorCoreTerm> terms;  // the products, then the addend
  bool special = false;               // a NaN or an Inf decided: nothing below has a meaning but result
  int max_exponent = 0;
  double sum = 0;   // of what was aligned, exactly
  double lost = 0;  // by the last truncation: sum = result + lost
  float result = 0;
};
struct TensorCoreTrace {
  TensorCoreModel model{};
  std::vector<TensorCoreBlock> blocks;
  float addend = 0, result = 0;
};
// The same sum, step by step, written a second time with doubles: the slow, obvious definition that
// tensor_core_dot is tested against. REQUIRES: a.size() == b.size().
TensorCoreTrace tensor_core_trace(const TensorCoreModel& model, std::span<const float> a,
                                  std::span<const float> b, float c);

}  // namespace evenkeel
