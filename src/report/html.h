// Text for the page: everything that comes from a run passes through escape().
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/markup.h"

namespace evenkeel {

// "1,240", "0.0215", "3.4 × 10⁻⁶", "−12", "not finite"; digits: significant ones.
std::string figure(double x, int digits = 3);
std::string count(int64_t n);  // "20,000"
// A power of ten: "10⁻³"; 1 and 10 as themselves.
std::string power_of_ten(int exponent);

// A word of the glossary, explained in one sentence on hover and on focus; the link leads to its entry. `shown`, if given,
// is HTML. REQUIRES: the glossary has it.
std::string term(std::string_view name, std::string_view shown = {});
// All of them, as a list.
std::string glossary();

}  // namespace evenkeel
