#include "numerics/tensor_core.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

namespace evenkeel {
namespace {

constexpr bool rows_are_sound() {
  for (const TensorCoreModel& m : kTensorCoreModels)
    if (m.block_terms < 1 || m.block_terms > kMaxBlockTerms || m.alignment_bits < m.output_bits ||
        m.alignment_bits > 28 || m.output_bits > 23 || m.passes < 1)
      return false;
  return true;
}
static_assert(rows_are_sound());

const float kNan = std::bit_cast<float>(kTensorCoreNan);

// A block with a NaN or an infinity in it. The finite part is no longer of interest.
float special_sum(const float* a, const float* b, size_t count, float c) {
  bool nan = std::isnan(c), plus = c == INFINITY, minus = c == -INFINITY;
  for (size_t i = 0; i < count; ++i) {
    if (std::isfinite(a[i]) && std::isfinite(b[i])) continue;
    const float product = a[i] * b[i];
    nan |= std::isnan(product);
    plus |= product == INFINITY;
    minus |= product == -INFINITY;
  }
  return nan || (plus && minus) ? kNan : plus ? INFINITY : -INFINITY;
}

// 2^e as a double, exactly. REQUIRES: -1022 <= e <= 1023.
double double_power(int e) { return std::bit_cast<double>(static_cast<uint64_t>(e + 1023) << 52); }

// One block. Two passes over the terms, both without branches so that they become vector code.
float add_block(const TensorCoreModel& model, const float* a, const float* b, size_t count, float c) {
  const int least = 127 + min_exponent(model.operand);  // least exponent of an operand, biased as in FP32
  int max_exponent = model.min_exponent, topmost = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto x = std::bit_cast<uint32_t>(a[i]), y = std::bit_cast<uint32_t>(b[i]);
    const int x_field = x >> 23 & 255, y_field = y >> 23 & 255;
    topmost = std::max(topmost, std::max(x_field, y_field));
    const int exponent = std::max(x_field, least) + std::max(y_field, least) - 254;
    const bool zero = (x << 1 == 0) | (y << 1 == 0);
    max_exponent = std::max(max_exponent, zero ? model.min_exponent : exponent);
  }
  const int c_field = std::bit_cast<uint32_t>(c) >> 23 & 255;
  if (std::max(topmost, c_field) == 255) return special_sum(a, b, count, c);
  if (c != 0) max_exponent = std::max(max_exponent, std::max(c_field, 1) - 127);

  // In units of 2^(max_exponent - F) a term is below 4 * 2^F <= 2^30, and conversion to an integer truncates
  // toward zero. Products (48 bits) and scaling by a power of two are exact in double.
  const int unit = max_exponent - model.alignment_bits;
  const double scale = double_power(-unit);
  int64_t sum = static_cast<int32_t>(c * scale);
  for (size_t i = 0; i < count; ++i)
    sum += static_cast<int32_t>(static_cast<double>(a[i]) * static_cast<double>(b[i]) * scale);
  if (sum == 0) return 0;

  uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  const uint32_t sign = sum < 0 ? 0x80000000u : 0;
  const int length = 64 - std::countl_zero(magnitude);
  const int exponent = unit + length - 1;
  if (exponent > 127) return std::bit_cast<float>(sign | 0x7f800000u);
  const int step = std::max(exponent, -126) - model.output_bits;
  if (step > unit) magnitude = step - unit > 63 ? 0 : magnitude >> (step - unit) << (step - unit);
  if (magnitude == 0) return 0;
  // At most 24 bits are left, none of them below 2^-149: in place for FP32 after one shift.
  const int to_float = unit - (std::max(exponent, -126) - 23);
  const uint64_t bits = to_float >= 0 ? magnitude << to_float : magnitude >> -to_float;
  if (exponent < -126) return std::bit_cast<float>(sign | static_cast<uint32_t>(bits));
  return std::bit_cast<float>(sign | static_cast<uint32_t>(exponent + 127) << 23 |
                              (static_cast<uint32_t>(bits) & 0x7fffffu));
}

// c + x as FP32 adds, with the tensor core's NaN.
float add_last(float c, float x) {
  const float sum = c + x;
  return std::isnan(sum) ? kNan : sum;
}

// Which term is the i-th of pass p, in a group of passes * block_terms terms: pairs are dealt out in turn.
size_t dealt(size_t i, size_t pass, size_t passes) { return i / 2 * 2 * passes + pass * 2 + i % 2; }

}  // namespace

const TensorCoreModel& find_tensor_core_model(Format operand, std::string_view chip) {
  std::string formats;
  for (const TensorCoreModel& model : kTensorCoreModels) {
    if (model.chip != chip) continue;
    if (model.operand == operand) return model;
    formats += (formats.empty() ? "" : ", ") + to_string(model.operand);
  }
  if (formats.empty())
    throw std::invalid_argument("unknown chip '" + std::string(chip) + "': expected one of " +
                                tensor_core_chips());
  throw std::invalid_argument("no " + to_string(operand) + " tensor cores are known for " +
                              std::string(chip) + ": expected one of " + formats);
}

std::string tensor_core_chips() {
  std::string chips;
  std::string_view last;
  for (const TensorCoreModel& model : kTensorCoreModels) {
    if (model.chip != last) chips += (chips.empty() ? "" : ", ") + std::string(model.chip);
    last = model.chip;
  }
  return chips;
}

float tensor_core_dot(const TensorCoreModel& model, const float* a, const float* b, size_t count, float c) {
  return tensor_core_dot(model, a, 1, b, 1, count, c);
}

float tensor_core_dot(const TensorCoreModel& model, const float* a, ptrdiff_t a_stride, const float* b,
                      ptrdiff_t b_stride, size_t count, float c) {
  const auto terms = static_cast<size_t>(model.block_terms), passes = static_cast<size_t>(model.passes);
  const bool in_place = a_stride == 1 && b_stride == 1 && passes == 1;
  float a_block[kMaxBlockTerms], b_block[kMaxBlockTerms];
  for (size_t first = 0; first < count; first += terms * passes) {
    float sum = passes == 1 ? c : 0;
    for (size_t pass = 0; pass < passes; ++pass) {
      if (in_place) {
        sum = add_block(model, a + first, b + first, std::min(terms, count - first), sum);
        continue;
      }
      size_t filled = 0;
      for (size_t i = 0; i < terms; ++i) {
        const size_t index = first + (passes == 1 ? i : dealt(i, pass, passes));
        if (index >= count) break;
        a_block[filled] = a[static_cast<ptrdiff_t>(index) * a_stride];
        b_block[filled++] = b[static_cast<ptrdiff_t>(index) * b_stride];
      }
      sum = add_block(model, a_block, b_block, filled, sum);
    }
    c = passes == 1 ? sum : add_last(sum, c);
  }
  return c;
}

float tensor_core_dot_promoted(const TensorCoreModel& model, const float* a, ptrdiff_t a_stride,
                               const float* b, ptrdiff_t b_stride, size_t count, float c, size_t blocks) {
  if (blocks == 0) return tensor_core_dot(model, a, a_stride, b, b_stride, count, c);
  const size_t terms = static_cast<size_t>(model.block_terms * model.passes) * blocks;
  for (size_t first = 0; first < count; first += terms) {
    const auto at = static_cast<ptrdiff_t>(first);
    c = add_last(c, tensor_core_dot(model, a + at * a_stride, a_stride, b + at * b_stride, b_stride,
                                    std::min(terms, count - first), 0));
  }
  return c;
}

namespace {

// Exponent of a finite, nonzero number whose format's least exponent is `least`.
int exponent_of(float x, int least) { return std::max(std::ilogb(x), least); }

// x cut off after the place 2^exponent, toward zero. Exact: both are sums of the same powers of two.
double truncate(double x, int exponent) { return std::ldexp(std::trunc(std::ldexp(x, -exponent)), exponent); }

TensorCoreBlock trace_block(const TensorCoreModel& model, std::vector<TensorCoreTerm> terms) {
  TensorCoreBlock block;
  ptrdiff_t plus = 0, minus = 0, nan = 0;
  block.max_exponent = model.min_exponent;
  for (TensorCoreTerm& term : terms) {
    term.value = static_cast<double>(term.a) * term.b;  // at most 48 bits: exact
    nan += std::isnan(term.value);
    plus += term.value == INFINITY;
    minus += term.value == -INFINITY;
    term.takes_part = std::isfinite(term.value) && term.value != 0;
    if (!term.takes_part) continue;
    const bool is_addend = &term == &terms.back();
    term.exponent = is_addend ? exponent_of(term.a, min_exponent(kFp32))
                              : exponent_of(term.a, min_exponent(model.operand)) +
                                    exponent_of(term.b, min_exponent(model.operand));
    block.max_exponent = std::max(block.max_exponent, term.exponent);
  }
  block.special = nan > 0 || plus > 0 || minus > 0;
  for (TensorCoreTerm& term : terms) {
    if (!term.takes_part || block.special) continue;
    term.shift = block.max_exponent - term.exponent;
    term.aligned = truncate(term.value, block.max_exponent - model.alignment_bits);
    term.lost = term.value - term.aligned;
    block.sum += term.aligned;
  }
  block.terms = std::move(terms);
  if (block.special) {
    block.result = nan > 0 || (plus > 0 && minus > 0) ? kNan : plus > 0 ? INFINITY : -INFINITY;
    return block;
  }
  if (block.sum == 0) return block;
  const int exponent = std::ilogb(block.sum);
  const double result = truncate(block.sum, std::max(exponent, min_exponent(kFp32)) - model.output_bits);
  block.lost = block.sum - result;
  // Overflow is Inf, whatever the mode; a zero is +0.
  block.result = exponent > max_exponent(kFp32) ? std::copysign(INFINITY, static_cast<float>(block.sum))
                 : result == 0                  ? 0.0f
                                                : static_cast<float>(result);
  if (std::isinf(block.result)) block.lost = 0;
  return block;
}

}  // namespace

TensorCoreTrace tensor_core_trace(const TensorCoreModel& model, std::span<const float> a,
                                  std::span<const float> b, float c) {
  TensorCoreTrace trace{model, {}, c, c};
  const auto terms = static_cast<size_t>(model.block_terms), passes = static_cast<size_t>(model.passes);
  for (size_t first = 0; first < a.size(); first += terms * passes) {
    float sum = passes == 1 ? trace.result : 0;
    for (size_t pass = 0; pass < passes; ++pass) {
      std::vector<TensorCoreTerm> block;
      for (size_t i = 0; i < terms; ++i) {
        const size_t index = first + (passes == 1 ? i : dealt(i, pass, passes));
        if (index < a.size()) block.push_back({.index = index, .a = a[index], .b = b[index]});
      }
      block.push_back({.index = a.size(), .a = sum, .b = 1});
      trace.blocks.push_back(trace_block(model, std::move(block)));
      sum = trace.blocks.back().result;
    }
    trace.result = passes == 1 ? sum : add_last(sum, trace.result);
  }
  return trace;
}

}  // namespace evenkeel
