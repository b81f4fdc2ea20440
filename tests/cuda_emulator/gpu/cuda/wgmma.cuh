// Products of a warpgroup on the CPU: src/gpu/cuda/wgmma.cuh by the definitions of its instructions. Operands are found by the
// bits of their descriptors. Products of numbers of 16 bits are exact and are added in FP64; the sum is rounded to FP32 once.
// A product reads its operands as late as it may: when the thread waits for it.
#pragma once

#include <array>
#include <vector>

#include "gpu/cuda/copy_engine.cuh"
#include "gpu/cuda/warp.cuh"

namespace evenkeel::gpu {

template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}

inline uint64_t operand(const void* at, uint32_t box_bytes = 16, uint32_t group_bytes = 8 * kRowBytes) {
  if (shared_address(at) % 1024 != 0) machine().fail("an operand that is not aligned to 1024 bytes");
  return uint64_t{shared_address(at) & 0x3FFFF} >> 4 |
         static_cast<uint64_t>((box_bytes >> 4) & 0x3fff) << 16 |
         static_cast<uint64_t>(group_bytes >> 4) << 32 | uint64_t{1} << 62;
}
inline uint64_t advance(uint64_t operand, uint32_t bytes) {
  return (operand & 0xffffffff00000000ull) | static_cast<uint32_t>(operand + (bytes >> 4));
}

namespace emulated {

// One product of one thread, whose accumulator is d. All lanes of a warp meet in `compute`.
struct WarpgroupProduct {
  int group, columns;
  float* d;
  std::array<const uint32_t*, 4> words;  // A in registers; null: by its descriptor
  uint64_t a, b;
  bool add, transpose_a, transpose_b;
  void (*compute)(WarpgroupProduct&);
};

struct Issued {
  std::vector<WarpgroupProduct> products;
  int group = 0;
};
inline Issued& issued() { return machine().of_thread<Issued>(); }

// The address of (line, term) of an operand with lines of 128 bytes: that of a plain matrix, whose bits 4 to 6 are then changed
// by its bits 7 to 9. Summed terms lie along the line; transposed, they are lines, and 64 others lie along one.
inline uint32_t operand_address(uint64_t descriptor, int line, int term, bool transposed) {
  if (descriptor >> 62 != 1) machine().fail("an operand with another swizzle than that of 128 bytes");
  const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
  const auto n = static_cast<uint32_t>(line), k = static_cast<uint32_t>(term);
  uint32_t address = transposed ? field(0) + n / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + n % 64 * 2
                                : field(0) + n / 8 * field(32) + n % 8 * 128 + k * 2;
  address &= 0x3ffff;
  return address ^ (address >> 7 & 7) << 4;
}

template <bool kFp16>
double number(uint32_t bits) {
  return double{kFp16 ? fp16_values()[bits & 0xffff] : bf16_value(bits & 0xffff)};
}
template <bool kFp16>
double operand_number(uint64_t descriptor, int line, int term, bool transposed) {
  uint16_t bits;
  std::memcpy(&bits, machine().shared_at(operand_address(descriptor, line, term, transposed), 2), 2);
  return number<kFp16>(bits);
}

// A warp's sixteen rows of 64.
template <bool kFp16>
void compute_16(WarpgroupProduct& mine) {
  machine().meet(kFp16 ? "wgmma of fp16" : "wgmma of bf16", mine, [](WarpgroupProduct** lanes) {
    const WarpgroupProduct& first = *lanes[0];
    const int first_row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
    double a[16][16], b[16][256];
    for (int row = 0; row < 16; ++row)
      for (int term = 0; term < 16; ++term) {
        const int lane = row % 8 * 4 + term % 8 / 2, word = term / 8 * 2 + row / 8;
        a[row][term] = first.words[0]
                           ? number<kFp16>(*lanes[lane]->words[static_cast<size_t>(word)] >> (term % 2 * 16))
                           : operand_number<kFp16>(first.a, first_row + row, term, first.transpose_a);
      }
    for (int term = 0; term < 16; ++term)
      for (int column = 0; column < first.columns; ++column)
        b[term][column] = operand_number<kFp16>(first.b, column, term, first.transpose_b);
    for (int row = 0; row < 16; ++row) {
      double sum[256];
      const auto at = [&](int column) -> float& {
        return lanes[row % 8 * 4 + column % 8 / 2]->d[column / 8 * 4 + row / 8 * 2 + column % 2];
      };
      for (int column = 0; column < first.columns; ++column)
        sum[column] = first.add ? double{at(column)} : 0.0;
      for (int term = 0; term < 16; ++term)
        for (int column = 0; column < first.columns; ++column) sum[column] += a[row][term] * b[term][column];
      for (int column = 0; column < first.columns; ++column) at(column) = static_cast<float>(sum[column]);
    }
  });
}

}  // namespace emulated

inline void products_begin() {}
inline void products_commit() { ++emulated::issued().group; }
template <int kPending>
void products_wait() {
  emulated::Issued& mine = emulated::issued();
  size_t done = 0;
  for (; done < mine.products.size() && mine.products[done].group < mine.group - kPending; ++done)
    mine.products[done].compute(mine.products[done]);
  mine.products.erase(mine.products.begin(), mine.products.begin() + static_cast<std::ptrdiff_t>(done));
}
template <int n>
void settle(float (&)[n]) {}
inline void hold(float x, float below_all) {
  if (x < below_all) machine().fail("a trap");
}

template <int N, bool kFp16 = false>
struct Wgmma {
  template <bool kTransposeA, bool kTransposeB>
  static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool sum) {
    emulated::Issued& mine = emulated::issued();
    mine.products.push_back(
        {mine.group, N, d, {}, a, b, sum, kTransposeA, kTransposeB, emulated::compute_16<kFp16>});
  }
  template <bool kTransposeB>
  static void rs(float (&d)[N / 2], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                 const uint32_t& a3, uint64_t b, bool sum) {
    emulated::Issued& mine = emulated::issued();
    mine.products.push_back(
        {mine.group, N, d, {&a0, &a1, &a2, &a3}, 0, b, sum, false, kTransposeB, emulated::compute_16<kFp16>});
  }
};

}  // namespace evenkeel::gpu
