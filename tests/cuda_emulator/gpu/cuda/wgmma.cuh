// Products of a warpgroup on the CPU: src/gpu/cuda/wgmma.cuh by the definitions of its instructions. Operands are found by the
// bits of their descriptors. A product reads its operands as late as it may: when the thread waits for it. Products of 16-bit
// numbers are exact and are added in FP64; a sum of 16 is rounded to FP32 once. One block at a time.
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
  return uint64_t{shared_address(at)} >> 4 | static_cast<uint64_t>(box_bytes >> 4) << 16 |
         static_cast<uint64_t>(group_bytes >> 4) << 32 | uint64_t{1} << 62;
}
inline uint64_t advance(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }

namespace emulated {

struct WarpgroupProduct {
  int group, columns;
  float* d;
  std::array<const uint32_t*, 4> words;  // A in registers; null: by its descriptor
  uint64_t a, b;
  bool add;
  void (*compute)(WarpgroupProduct** lanes);  // of a warp, whose rows are its sixteen of 64
};

struct Issued {
  std::vector<WarpgroupProduct> products;
  int group = 0;
};
inline Issued& issued() {
  static std::array<Issued, 1024> of_thread;
  return of_thread[threadIdx.x];
}

// The number at (line, term), where terms are summed over. Not transposed: terms lie along a line of 128 bytes, 8 lines
// after 8 lines. Transposed: lines and terms change places, and 64 lines are a box. Bits 4.. of an address are then changed by
// its bits 7..
template <bool kTransposed, bool kFp16>
double operand_16(uint64_t descriptor, int line, int term) {
  const auto start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const auto box = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
  const auto group = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) machine().fail("an operand with another swizzle than that of 128 bytes");
  const auto l = static_cast<uint32_t>(line), t = static_cast<uint32_t>(term);
  uint32_t address = kTransposed ? start + l / 64 * box + t / 8 * group + t % 8 * 128 + l % 64 * 2
                                 : start + l / 8 * group + l % 8 * 128 + t * 2;
  address ^= (address >> 7 & 7) << 4;
  uint16_t bits = 0;
  std::memcpy(&bits, machine().shared_at(address, 2), 2);
  return double{kFp16 ? fp16_values()[bits] : bf16_value(bits)};
}

template <bool kTransposeA, bool kTransposeB, bool kFp16>
void multiply(WarpgroupProduct** lanes) {
  constexpr int kTerms = 16;
  const WarpgroupProduct& first = *lanes[0];
  const int first_row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  double a[16][kTerms], b[kTerms];
  for (int row = 0; row < 16; ++row)
    for (int term = 0; term < kTerms; ++term) {
      const int lane = row % 8 * 4 + term % 8 / 2, word = term / 8 * 2 + row / 8;
      if (first.words[0]) {
        const uint32_t bits = *lanes[lane]->words[static_cast<size_t>(word)] >> (term % 2 * 16) & 0xffff;
        a[row][term] = double{kFp16 ? fp16_values()[bits] : bf16_value(bits)};
      } else {
        a[row][term] = operand_16<kTransposeA, kFp16>(first.a, first_row + row, term);
      }
    }
  for (int column = 0; column < first.columns; ++column) {
    for (int term = 0; term < kTerms; ++term) b[term] = operand_16<kTransposeB, kFp16>(first.b, column, term);
    for (int row = 0; row < 16; ++row) {
      float& d = lanes[row % 8 * 4 + column % 8 / 2]->d[column / 8 * 4 + row / 8 * 2 + column % 2];
      double sum = first.add ? double{d} : 0.0;
      for (int term = 0; term < kTerms; ++term) sum += a[row][term] * b[term];
      d = static_cast<float>(sum);
    }
  }
}

}  // namespace emulated

inline void products_begin() {}
inline void products_commit() { ++emulated::issued().group; }
template <int kPending>
void products_wait() {
  emulated::Issued& mine = emulated::issued();
  size_t done = 0;
  for (; done < mine.products.size() && mine.products[done].group < mine.group - kPending; ++done)
    machine().meet("wgmma", mine.products[done], mine.products[done].compute);
  mine.products.erase(mine.products.begin(), mine.products.begin() + static_cast<std::ptrdiff_t>(done));
}
template <int n>
void settle(float (&)[n]) {}

template <int N, bool kFp16 = false>
struct Wgmma {
  template <bool kTransposeA, bool kTransposeB>
  static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
    emulated::Issued& mine = emulated::issued();
    mine.products.push_back(
        {mine.group, N, d, {}, a, b, add, emulated::multiply<kTransposeA, kTransposeB, kFp16>});
  }
  template <bool kTransposeB>
  static void rs(float (&d)[N / 2], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                 const uint32_t& a3, uint64_t b, bool add) {
    emulated::Issued& mine = emulated::issued();
    mine.products.push_back(
        {mine.group, N, d, {&a0, &a1, &a2, &a3}, 0, b, add, emulated::multiply<false, kTransposeB, kFp16>});
  }
};

}  // namespace evenkeel::gpu
