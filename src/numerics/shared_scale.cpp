#include "numerics/shared_scale.h"

#include <charconv>
#include <stdexcept>

#include "numerics/names.h"

namespace evenkeel {
namespace {

ScaleGroup parse_group(std::string_view text, uint8_t& block) {
  for (int size : kScaleBlocks) {
    const bool along = text == "block" + std::to_string(size),
               down = size <= kScaleTileRows && text == "column" + std::to_string(size);
    if (!along && !down) continue;
    block = static_cast<uint8_t>(size);
    return along ? ScaleGroup::block : ScaleGroup::column_block;
  }
  for (ScaleGroup group :
       {ScaleGroup::row, ScaleGroup::column, ScaleGroup::tile, ScaleGroup::head, ScaleGroup::tensor})
    if (text == kScaleGroupNames[static_cast<size_t>(group)]) return group;
  throw std::invalid_argument(
      "unknown group '" + std::string(text) +
      "' of a shared scale: expected block16, block32, block64, block128, row, column16, column32, column64, "
      "column, tile, head or tensor");
}

// Is every group of one kind within one group of the other? A column is a head's: no tile holds it.
bool holds_whole(ScaleGroup outer, ScaleGroup group) {
  switch (group) {
    case ScaleGroup::block:
      return outer == ScaleGroup::row || outer >= ScaleGroup::tile;
    case ScaleGroup::column_block:
      return outer >= ScaleGroup::column;
    case ScaleGroup::row:
      return outer >= ScaleGroup::tile;
    case ScaleGroup::column:
      return outer >= ScaleGroup::head;
    default:
      return false;
  }
}

ScaleRule parse_rule(std::string_view text) {
  if (const auto rule = value_named<ScaleRule>(text, kScaleRuleNames)) return *rule;
  throw std::invalid_argument("unknown scale '" + std::string(text) +
                              "': expected fp32, e4m3, e8m0 or e8m0_up");
}

}  // namespace

SharedScale parse_shared_scale(std::string_view text) {
  SharedScale shared;
  const size_t star = text.find('*');
  std::string_view inner = text.substr(0, star);
  if (const size_t mark = inner.find('@'); mark != std::string_view::npos) {
    shared.rule = parse_rule(inner.substr(mark + 1));
    inner = inner.substr(0, mark);
  }
  shared.group = parse_group(inner, shared.block);
  if (star == std::string_view::npos) return shared;
  uint8_t block = 0;
  shared.outer = parse_group(text.substr(star + 1), block);
  if (shared.rule != ScaleRule::e4m3 || !holds_whole(shared.outer, shared.group))
    throw std::invalid_argument(
        "bad scales '" + std::string(text) +
        "': a second scale goes with scales in e4m3 of blocks, rows or columns and holds whole ones, as in "
        "block16@e4m3*tensor");
  return shared;
}

std::string to_string(const SharedScale& shared) {
  if (shared.group == ScaleGroup::none) return "";
  const bool down = shared.group == ScaleGroup::column_block;
  std::string text(kScaleGroupNames[static_cast<size_t>(down ? ScaleGroup::column : shared.group)]);
  if (down || shared.group == ScaleGroup::block) text += std::to_string(shared.block);
  if (shared.rule != ScaleRule::fp32)
    text += "@" + std::string(kScaleRuleNames[static_cast<size_t>(shared.rule)]);
  if (shared.outer != ScaleGroup::none)
    text += "*" + std::string(kScaleGroupNames[static_cast<size_t>(shared.outer)]);
  return text;
}

}  // namespace evenkeel
