// The files of assets/, embedded by cmake/embed.cmake.
#pragma once

#include <string_view>

namespace evenkeel {

extern const std::string_view kPageCss, kPageJs, kLiveJs;

}  // namespace evenkeel
