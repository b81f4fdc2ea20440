#include "report/page.h"

#include <fmt/format.h>

#include "report/assets.h"
#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

PageData read_all(std::span<const fs::path> folders, const PageOptions& options) {
  std::vector<RunRecords> runs;
  for (const fs::path& folder : folders) runs.push_back(read_run(folder));
  PageData data = page_data(std::move(runs));
  std::vector<fs::path> captures = options.captures;
  if (captures.empty()) captures = data.runs[data.subject].captures;
  data.view = look_at(captures, data.layer, data.head, data.capture_notes);
  return data;
}

}  // namespace

std::string page_body(std::span<const fs::path> runs, const PageOptions& options) {
  if (runs.empty()) return "<p class=\"missing\">No run was named.</p>\n";
  return body_of(read_all(runs, options));
}

std::string page(std::span<const fs::path> runs, const PageOptions& options) {
  std::string names;
  for (const fs::path& run : runs) names += (names.empty() ? "" : ", ") + (run.has_filename() ? run : run.parent_path()).filename().string();
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n"
      "<title>{} · Evenkeel</title>\n<style>\n{}</style>\n</head>\n<body>\n"
      "<a class=\"skip\" href=\"#page\">To the report</a>\n"
      "<div class=\"bar\"><span class=\"brand\">Evenkeel</span><span class=\"what\">{}</span>"
      "<button type=\"button\" id=\"theme\" hidden>Theme</button></div>\n"
      "<main id=\"page\">\n{}</main>\n<script>\n{}</script>\n{}</body>\n</html>\n",
      escape(names), kPageCss, escape(names), page_body(runs, options), kPageJs,
      options.live ? fmt::format("<script>\n{}</script>\n", kLiveJs) : "");
}

}  // namespace evenkeel
