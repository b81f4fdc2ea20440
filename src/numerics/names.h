// Enums whose values have names: a table of them, in the order of the values.
#pragma once

#include <cstddef>
#include <iterator>
#include <optional>
#include <string_view>

namespace evenkeel {

// The value with this name, if there is one.
template <class Enum, class Names>
constexpr std::optional<Enum> value_named(std::string_view name, const Names& names) {
  for (size_t n = 0; n < std::size(names); ++n)
    if (names[n] == name) return static_cast<Enum>(n);
  return std::nullopt;
}

}  // namespace evenkeel
