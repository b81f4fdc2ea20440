#include "numerics/shared_scale.h"

#include <charconv>
#include <stdexcept>

#include "numerics/names.h"

namespace evenkeel {
namespace {

ScaleGroup parse_group(std::string_view text, uint8_t& block) {
  for (int size : kScaleBlocks)
    if (text == "block" + std::to_string(size)) {
      block = static_cast<uint8_t>(size);
      return ScaleGroup::block;
    }
  for (ScaleGroup group : {ScaleGroup::row, ScaleGroup::tile, ScaleGroup::head, ScaleGroup::tensor})
    if (text == kScaleGroupNames[static_cast<size_t>(group)]) return group;
  throw std::invalid_argument(
      "unknown group '" + std::string(text) +
      "' of a shared scale: expected block16, block32, block64, block128, row, tile, head or "
      "tensor");
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
  if (shared.rule != ScaleRule::e4m3 || shared.group > ScaleGroup::row || shared.outer <= shared.group)
    throw std::invalid_argument(
        "bad scales '" + std::string(text) +
        "': a second scale goes with scales in e4m3 of blocks or rows and spans more than they do, as in "
        "block16@e4m3*tensor");
  return shared;
}

std::string to_string(const SharedScale& shared) {
  if (shared.group == ScaleGroup::none) return "";
  std::string text(kScaleGroupNames[static_cast<size_t>(shared.group)]);
  if (shared.group == ScaleGroup::block) text += std::to_string(shared.block);
  if (shared.rule != ScaleRule::fp32)
    text += "@" + std::string(kScaleRuleNames[static_cast<size_t>(shared.rule)]);
  if (shared.outer != ScaleGroup::none)
    text += "*" + std::string(kScaleGroupNames[static_cast<size_t>(shared.outer)]);
  return text;
}

}  // namespace evenkeel
