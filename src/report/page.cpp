#include "report/page.h"

#include <fmt/format.h>

#include "report/assets.h"

namespace evenkeel {

std::string page_body(std::span<const std::filesystem::path> runs, const PageOptions&) {
  return fmt::format("<p>{} runs</p>", runs.size());
}

std::string page(std::span<const std::filesystem::path> runs, const PageOptions& options) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Evenkeel</title>"
      "<style>{}</style></head><body><main id=\"page\">{}</main><script>{}</script>{}</body></html>\n",
      kPageCss, page_body(runs, options), kPageJs,
      options.live ? fmt::format("<script>{}</script>", kLiveJs) : "");
}

}  // namespace evenkeel
