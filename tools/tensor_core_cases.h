// Dot products made to be hard for a tensor core, in the tiles that the chip's instructions take.
//
// One k-block of an instruction is a row of 32 bytes of A times a column of 32 bytes of B, whatever the
// format (8 tf32, 16 bf16 or fp16, 32 FP8). So one layout serves all: a tile is 64 rows by 8 columns, 512
// results, and each result is a case: row of A, column of B, addend. A chain is two k-blocks, the first one's
// results being the addends of the second.
#pragma once

#include <cmath>
#include <numeric>

#include "numerics/random.h"
#include "tensor_core_vectors.h"

namespace evenkeel {

inline constexpr int kRows = 64, kColumns = 8, kCases = kRows * kColumns;  // of a tile
inline constexpr int kWords = 8;  // 32-bit words of a row in a k-block

struct Batch {
  Format format;
  int blocks;  // k-blocks: 1, or 2 for chains
  int tiles;
  std::vector<uint32_t> a, b, c;  // (tiles, kRows or kColumns, blocks, kWords); c (tiles, kRows, kColumns)
  std::vector<uint32_t> results[kInstructions];  // (tiles, kRows, kColumns)

  Batch(Format f, int k_blocks, int count) : format(f), blocks(k_blocks), tiles(count) {
    a.resize(size_t(tiles) * kRows * blocks * kWords);
    b.resize(size_t(tiles) * kColumns * blocks * kWords);
    c.resize(cases());
  }
  int64_t cases() const { return int64_t(tiles) * kCases; }
  int terms() const { return blocks * kWords * 32 / element_bits(format); }
  int line_words() const { return blocks * kWords; }
};

// The elements of row `line` of a or b: (terms).
inline std::vector<uint32_t> elements_of(const Batch& batch, const std::vector<uint32_t>& matrix,
                                         int64_t line) {
  const int bits = element_bits(batch.format), in_word = 32 / bits;
  std::vector<uint32_t> elements(batch.terms());
  for (size_t i = 0; i < elements.size(); ++i)
    elements[i] =
        matrix[line * batch.line_words() + i / in_word] >> i % in_word * bits & 0xffffffffu >> (32 - bits);
  return elements;
}

inline void set_elements(const Batch& batch, std::vector<uint32_t>& matrix, int64_t line,
                         const std::vector<uint32_t>& elements) {
  const int bits = element_bits(batch.format), in_word = 32 / bits;
  std::fill_n(matrix.begin() + line * batch.line_words(), batch.line_words(), 0u);
  for (size_t i = 0; i < elements.size(); ++i)
    matrix[line * batch.line_words() + i / in_word] |= elements[i] << i % in_word * bits;
}

// Rows and columns are drawn by recipe. The recipe kFloor has few products, all powers of two below the least exponent
// of the alignment where the format has such. What the floor cuts off can then decide FP32's last place,
// 2^-149.
enum Recipe { kOrdinary, kSpread, kAny, kFloor, kSubnormal, kLarge, kZeros, kSpecial };
inline constexpr Recipe kRecipes[] = {kOrdinary,  kOrdinary, kOrdinary, kSpread, kSpread, kSpread,
                                      kSpread,    kAny,      kAny,      kFloor,  kFloor,  kSubnormal,
                                      kSubnormal, kLarge,    kZeros,    kSpecial};

class TileMaker {
 public:
  TileMaker(Batch& batch, const RandomKey& key) : batch_(batch), format_(batch.format), key_(key) {}

  void make(int64_t tile) {
    const Recipe theme = draw_recipe();
    const bool cancelling = below(3) == 0;
    pairs_.resize(batch_.terms());
    std::iota(pairs_.begin(), pairs_.end(), 0);
    for (size_t i = pairs_.size() - 1; i > 0; --i) std::swap(pairs_[i], pairs_[below(i + 1)]);
    std::vector<std::vector<float>> rows, columns;
    for (int line = 0; line < kRows + kColumns; ++line) {
      const bool is_row = line < kRows;
      const Recipe recipe = below(2) ? theme : draw_recipe();
      const std::vector<uint32_t> elements = make_elements(recipe, cancelling && below(4), is_row);
      set_elements(batch_, is_row ? batch_.a : batch_.b,
                   is_row ? tile * kRows + line : tile * kColumns + line - kRows, elements);
      (is_row ? rows : columns).push_back(element_values(format_, elements));
    }
    for (int i = 0; i < kCases; ++i) {
      const std::vector<float>&row = rows[i / kColumns], &column = columns[i % kColumns];
      batch_.c[tile * kCases + i] = addend(std::inner_product(row.begin(), row.end(), column.begin(), 0.0));
    }
  }

 private:
  uint32_t word() { return random_bits(key_, element_++); }
  uint32_t below(uint64_t count) { return static_cast<uint32_t>(word() * count >> 32); }
  int between(int low, int high) { return low + static_cast<int>(below(high - low + 1)); }
  Recipe draw_recipe() { return kRecipes[below(std::size(kRecipes))]; }

  uint32_t sign() const { return 1u << (code_bits(format_) - 1); }
  int top_field() const { return max_exponent(format_) + bias(format_); }

  // A finite number's code whose exponent field is drawn from [low, high], as far as the format has it.
  uint32_t number(int low, int high) {
    const int field = std::clamp(between(low, high), 0, top_field());
    uint32_t code = field << format_.significand_bits | (word() & ((1u << format_.significand_bits) - 1));
    if (!std::isfinite(decode(format_, code))) --code;  // e4m3's NaN stands beside its largest number
    return code | (below(2) ? sign() : 0);
  }
  uint32_t number(Recipe recipe) {
    const int one = bias(format_);
    switch (recipe) {
      case kSpread:
        return number(one - 15, one + 15);
      case kAny:
        return number(0, top_field());
      case kFloor:
        if (format_.exponent_bits < kFp32.exponent_bits) return number(kSpread);
        return below(2) ? 0
                        : number(one - 81, one - 67) >> format_.significand_bits << format_.significand_bits;
      case kSubnormal:
        return number(0, below(8) ? 0 : top_field());
      case kLarge:
        return number(top_field() - 1, top_field());
      case kZeros:
        return below(4) ? below(2) * sign() : number(0, top_field());
      default:
        return number(one - 3, one);
    }
  }
  uint32_t special() {
    const uint32_t payloads = (1u << format_.significand_bits) - 1;
    const uint32_t code = encode(format_, INFINITY);  // e4m3: the NaN
    return code + (format_.has_infinity && below(4) == 0 ? 1 + below(payloads) : 0) + below(2) * sign();
  }

  // Cancelling: in pairs of terms a is x and -x, b is y and y; then a few terms are drawn anew.
  std::vector<uint32_t> make_elements(Recipe recipe, bool cancelling, bool is_row) {
    std::vector<uint32_t> codes(pairs_.size());
    for (uint32_t& code : codes) code = number(recipe);
    if (cancelling) {
      for (size_t i = 0; i < codes.size(); i += 2)
        codes[pairs_[i + 1]] = codes[pairs_[i]] ^ (is_row ? sign() : 0);
      for (uint32_t left = below(3); left > 0; --left)
        codes[below(codes.size())] = number(below(2) ? recipe : kSpread);
    }
    if (recipe == kSpecial)
      for (uint32_t left = 1 + below(2); left > 0; --left) codes[below(codes.size())] = special();
    for (uint32_t& code : codes) code <<= element_shift(format_);
    return codes;
  }

  // An FP32 word beside products that sum to `sum`.
  uint32_t addend(double sum) {
    const uint32_t minus = 0x80000000u, near_sum = std::bit_cast<uint32_t>(static_cast<float>(sum));
    switch (below(8)) {
      case 0:
        return below(2) * minus;
      case 1:
        return word();
      case 2:
        return word() & (minus | 0x7fffffu);  // subnormal
      case 3:
      case 4:
        return near_sum ^ minus ^ (word() & ((1u << below(12)) - 1));  // cancels all but the last places
      case 5:
      case 6: {
        const int field = std::clamp(static_cast<int>(near_sum >> 23 & 255) + between(-14, 14), 0, 254);
        return field << 23 | (word() & (minus | 0x7fffffu));
      }
      default:
        return below(8) ? 0 : 0x7f800000u | below(2) * minus | below(2) * 0x400000u;
    }
  }

  Batch& batch_;
  Format format_;
  RandomKey key_;
  uint64_t element_ = 0;
  std::vector<int> pairs_;  // a random order of the terms; neighbours in it are a pair
};

// What a case is, by its data: the first that holds.
enum Kind { kNanInf, kZero, kOverflow, kCancelling, kSubnormals, kWide, kPlain, kKinds };
inline constexpr const char* kKindNames[kKinds] = {"nan_inf",   "zero", "overflow", "cancelling",
                                                   "subnormal", "wide", "plain"};

inline Kind kind_of(Format format, const float* a, const float* b, int terms, float c) {
  bool finite = std::isfinite(c), subnormal = c != 0 && std::fabs(c) < min_normal(kFp32);
  double sum = c, largest = std::fabs(sum), least = c == 0 ? INFINITY : largest;
  const float normal = min_normal(format);
  for (int i = 0; i < terms; ++i) {
    finite &= std::isfinite(a[i]) && std::isfinite(b[i]);
    const double product = static_cast<double>(a[i]) * b[i], size = std::fabs(product);
    sum += product;
    largest = std::max(largest, size);
    if (size == 0) continue;
    least = std::min(least, size);
    subnormal |= std::fabs(a[i]) < normal || std::fabs(b[i]) < normal || size < min_normal(kFp32);
  }
  if (!finite) return kNanInf;
  if (largest == 0) return kZero;
  if (std::fabs(sum) >= 0x1p128) return kOverflow;
  if (std::fabs(sum) < 0x1p-8 * largest) return kCancelling;
  if (subnormal) return kSubnormals;
  return largest >= 0x1p13 * least ? kWide : kPlain;  // some terms lose places in any alignment
}

inline ChipCase case_of(const Batch& batch, int64_t index) {
  ChipCase one;
  one.a = elements_of(batch, batch.a, index / kColumns);
  one.b = elements_of(batch, batch.b, index / kCases * kColumns + index % kColumns);
  one.c = batch.c[index];
  for (int i = 0; i < kInstructions; ++i)
    if (!batch.results[i].empty()) one.results[i] = batch.results[i][index];
  const std::vector<float> a = element_values(batch.format, one.a), b = element_values(batch.format, one.b);
  one.kind =
      kKindNames[kind_of(batch.format, a.data(), b.data(), batch.terms(), std::bit_cast<float>(one.c))];
  return one;
}

}  // namespace evenkeel
