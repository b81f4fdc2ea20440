#include "report/page.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "diagnosis/indicators.h"
#include "report/assets.h"
#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

// Judged on the runs of the page: those that do not ail say what is ordinary.
void find_leads(PageData& data) {
  if (!ails(data.runs[data.subject], data.symptoms[data.subject])) return;
  std::vector<IndicatorRun> healthy, derailing;
  for (size_t n = 0; n < data.runs.size(); ++n) {
    const bool is_subject = n == data.subject;
    const RunRecords& run = data.runs[n];
    if (!run.has_steps() || (!is_subject && ails(run, data.symptoms[n]))) continue;
    (is_subject ? derailing : healthy).push_back(indicators_of(run.folder, run.metrics, run.config));
  }
  if (derailing.empty()) return;
  const IndicatorTable table = judge_indicators(healthy, derailing);
  const int64_t H = std::max<int64_t>(1, derailing[0].heads);
  data.loss_moved = table.moved[0];
  for (const IndicatorScore* score : best_rules(table)) {
    const auto& spoke = score->spoke[0];
    if (!spoke) continue;
    const bool is_guard = score->indicator >= kIndicators.size();
    LeadTime lead{std::string(score->name()),
                  std::string(is_guard ? "the guard's alarm" : kIndicators[score->indicator].meaning),
                  std::string(is_guard ? "alarm" : name(score->rule)),
                  spoke->step,
                  -1,
                  -1,
                  score->healthy,
                  score->false_alarms};
    if (spoke->head >= 0) lead.layer = spoke->head / H, lead.head = spoke->head % H;
    data.leads.push_back(std::move(lead));
  }
  std::stable_sort(data.leads.begin(), data.leads.end(),
                   [](const LeadTime& a, const LeadTime& b) { return a.alarm < b.alarm; });
}

PageData read_all(std::span<const fs::path> folders, const PageOptions& options) {
  std::vector<RunRecords> runs;
  for (const fs::path& folder : folders) runs.push_back(read_run(folder));
  require_data(
      !options.needs_records ||
          std::any_of(runs.begin(), runs.end(), [](const RunRecords& run) { return run.unreadable.empty(); }),
      "{}", runs.empty() ? "" : runs[0].unreadable);
  PageData data = page_data(std::move(runs));
  std::vector<fs::path> captures = options.captures;
  if (captures.empty()) captures = data.runs[data.subject].captures;
  // A healthy run's head of interest is only its largest: then the one that leaks most is worth more.
  const bool named = ails(data.runs[data.subject], data.symptoms[data.subject]);
  data.view = look_at(captures, named ? data.layer : -1, named ? data.head : -1, data.capture_notes);
  find_leads(data);
  return data;
}

}  // namespace

std::string page_body(std::span<const fs::path> runs, const PageOptions& options) {
  if (runs.empty()) return "<p class=\"missing\">No run was named.</p>\n";
  return body_of(read_all(runs, options));
}

std::string page(std::span<const fs::path> runs, const PageOptions& options) {
  std::string names;
  for (const fs::path& run : runs)
    names += (names.empty() ? "" : ", ") + (run.has_filename() ? run : run.parent_path()).filename().string();
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" "
      "content=\"light dark\">\n"
      "<link rel=\"icon\" href=\"data:,\">\n<title>{} · "
      "Evenkeel</title>\n<style>\n{}</style>\n</head>\n<body>\n"
      "<a class=\"skip\" href=\"#page\">To the report</a>\n"
      "<div class=\"bar\"><span class=\"brand\">Evenkeel</span><span class=\"what\">{}</span>"
      "<button type=\"button\" id=\"theme\" hidden>Theme</button></div>\n"
      "<main id=\"page\">\n{}</main>\n<script>\n{}</script>\n{}</body>\n</html>\n",
      escape(names), kPageCss, escape(names), page_body(runs, options), kPageJs,
      options.live ? fmt::format("<script>\n{}</script>\n", kLiveJs) : "");
}

}  // namespace evenkeel
