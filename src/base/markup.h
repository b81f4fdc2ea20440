// Text of anyone's for HTML and XML.
#pragma once

#include <string>
#include <string_view>

namespace evenkeel {

// For text and for attributes in double quotes. Control characters and bytes that are not UTF-8 become U+FFFD, so that
// whatever a file holds, the document stays one.
std::string escape(std::string_view text);

}  // namespace evenkeel
