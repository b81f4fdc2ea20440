// JSON from text, compiled once. A file that calls nlohmann's own parse() compiles that parser anew, which takes the
// compiler 1.7 s at -O3 and 6 s with the sanitizers.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace evenkeel {

// Throws nlohmann::json::parse_error where `text` is not JSON.
nlohmann::json parse_json(std::string_view text);
// A discarded value (is_discarded()) where `text` is not JSON.
nlohmann::json try_parse_json(std::string_view text);

}  // namespace evenkeel
