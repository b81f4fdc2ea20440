#include "base/json_text.h"

#include <nlohmann/json.hpp>

namespace evenkeel {

nlohmann::json parse_json(std::string_view text) { return nlohmann::json::parse(text); }

nlohmann::json try_parse_json(std::string_view text) {
  return nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace evenkeel
