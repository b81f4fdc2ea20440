// The report: run folders to one HTML document that needs nothing else. Charts are drawn here, as SVG, so that the page is
// whole without a script; assets/page.js adds hover, zoom and keys.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace evenkeel {

struct PageOptions {
  bool live = false;  // the page asks its server for changes (assets/live.js)
  // DataError where nothing of any run's metrics.jsonl could be read: a page of nothing but notes is none.
  bool needs_records = false;
  // Captures besides those that lie in the runs' folders.
  std::vector<std::filesystem::path> captures = {};
};

// The whole document. The page says what a folder lacks and what of it cannot be read. Unless records are needed, nothing
// is thrown because of what a run holds; a folder that is not there is a run without records.
std::string page(std::span<const std::filesystem::path> runs, const PageOptions& options = {});

// What is inside <main id="page">: what the live view replaces.
std::string page_body(std::span<const std::filesystem::path> runs, const PageOptions& options = {});

}  // namespace evenkeel
