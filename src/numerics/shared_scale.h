// A scale that a block of values shares, as rows of data: which values share it, what it is stored as and how it follows
// from the largest of them. The arithmetic is round_block.h's.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace evenkeel {

// Which values of a matrix share one scale.
enum class ScaleGroup : uint8_t {
  none,
  block,  // so many neighbours along the row, counted from the row's first column; the last block may be shorter
  row,  // a row: a token's features, or a row of a tile of scores
  column_block,  // so many neighbours down the column, counted from the head's first row; the last block may be shorter
  column,  // a column: a feature over all rows of a head, or a key's column of a tile of scores
  tile,    // kScaleTileRows rows of a head; of a tile of scores all its keys
  head,    // all rows of one head of one sequence
  tensor,  // all heads of one sequence: a batch that is split over machines must not change a scale
};
inline constexpr std::array<std::string_view, 8> kScaleGroupNames = {
    "none", "block", "row", "column_block", "column", "tile", "head", "tensor"};
inline constexpr int kScaleTileRows = 64;
inline constexpr int kScaleBlocks[] = {16, 32, 64, 128};  // down a column: no more than a tile's rows
constexpr bool is_down_column(ScaleGroup group) {
  return group == ScaleGroup::column_block || group == ScaleGroup::column;
}

// What a scale is stored as, and its rule. f is the format of the values, largest the largest finite magnitude that
// shares the scale.
enum class ScaleRule : uint8_t {
  fp32,  // largest / scale_target(f), which is max_finite(f) but for tapered formats
  e4m3,  // the same over the outer scale, rounded to E4M3 (NVFP4)
  e8m0,  // 2^(floor(log2 largest) - scale_target_exponent(f)): OCP MX 1.0; the block's largest value may saturate
  e8m0_up,  // the smallest power of two that is not below largest / scale_target(f): nothing saturates
};
inline constexpr std::array<std::string_view, 4> kScaleRuleNames = {"fp32", "e4m3", "e8m0", "e8m0_up"};

struct SharedScale {
  ScaleGroup group = ScaleGroup::none;
  uint8_t block = 0;  // of ScaleGroup::block and column_block: one of kScaleBlocks
  ScaleRule rule = ScaleRule::fp32;
  // e4m3 alone: a second scale, in FP32, that the blocks' scales share, so that the largest of them is E4M3's largest
  // number: 2688 = 6 * 448 for NVFP4. none: 1.
  ScaleGroup outer = ScaleGroup::none;

  friend constexpr bool operator==(const SharedScale&, const SharedScale&) = default;
};

// GROUP[@SCALE][*OUTER], as in block32@e8m0, tile, block16@e4m3*tensor. GROUP: block16, block32, block64, block128, row,
// column16, column32, column64, column, tile, head, tensor; SCALE: fp32 (where none is said), e4m3, e8m0, e8m0_up; OUTER
// with e4m3 alone: a group that holds whole groups.
// Throws std::invalid_argument saying what was expected.
SharedScale parse_shared_scale(std::string_view text);
std::string to_string(const SharedScale& shared);

}  // namespace evenkeel
