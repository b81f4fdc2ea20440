// When each indicator raised its alarm, and how long before the loss moved.
#include <fmt/format.h>

#include <algorithm>

#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {

std::string lead_part(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  const std::string lead =
      fmt::format("When each indicator raised its alarm in {}, and how long before the {} moved: its {}.",
                  escape(run.label), term("loss"), term("lead time"));
  if (data.leads.empty()) {
    if (!ails(run, data.symptoms[data.subject]))
      return section("lead", "Lead time of each indicator", "",
                     missing("Every run of this page is healthy: there is nothing to warn of.", ""));
    return section("lead", "Lead time of each indicator", lead,
                   missing("No indicator could be judged on this run. They need records of every step:",
                           "evenkeel train ... --probe-every 50 --out NEW_RUN; evenkeel indicators --help"));
  }
  DotPlot plot;
  plot.id = "leads", plot.title = "Lead time", plot.x_label = "step of the alarm";
  plot.description = "The step at which each indicator raised its alarm; the rule is where the loss moved.";
  if (data.loss_moved) plot.guides.push_back({static_cast<double>(*data.loss_moved), "the loss moved"});
  std::string meanings;
  for (const LeadTime& l : data.leads) {
    const std::string when = data.loss_moved
                                 ? *data.loss_moved >= l.alarm
                                       ? fmt::format("{} steps before", count(*data.loss_moved - l.alarm))
                                       : fmt::format("{} steps after", count(l.alarm - *data.loss_moved))
                                 : fmt::format("step {}", count(l.alarm));
    plot.dots.push_back({l.name,
                         l.false_alarms > 0 ? fmt::format("{}, {} false", when, l.false_alarms) : when,
                         !data.loss_moved || l.alarm > *data.loss_moved ? "unknown"
                         : l.false_alarms > 0                           ? "bad"
                                                                        : "good",
                         static_cast<double>(l.alarm)});
    meanings += fmt::format("<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td></tr>\n",
                            escape(l.name), escape(l.meaning), escape(l.rule),
                            l.head >= 0 ? fmt::format("layer {} head {}", l.layer, l.head) : "the whole run");
  }
  const int64_t healthy = data.leads[0].healthy;
  const bool some_false =
      std::ranges::any_of(data.leads, [](const LeadTime& l) { return l.false_alarms > 0; });
  return section(
      "lead", "Lead time of each indicator", lead,
      draw(plot) + fmt::format("<details class=\"data\"><summary>What each of them is</summary><div "
                               "class=\"scroll\"><table class=\"settings\"><thead><tr>"
                               "<th scope=\"col\">indicator</th><th scope=\"col\">is</th><th "
                               "scope=\"col\">rule</th><th scope=\"col\">alarm in</th></tr></thead>"
                               "<tbody>\n{}</tbody></table></div></details>\n",
                               meanings),
      fmt::format(
          "<p>{}</p><p>{}</p>",
          data.loss_moved ? fmt::format("The loss moved at step {}.", count(*data.loss_moved))
                          : "The loss has not moved yet, or has no healthy twin to move from.",
          healthy > 0
              ? fmt::format("Each raises its alarm at the lowest level that {} of this page {} not reach.",
                            healthy == 1 ? "the healthy run" : fmt::format("the {} healthy runs", healthy),
                            healthy == 1 ? "does" : "do") +
                    (some_false ? " A false alarm is one in a healthy run, by the level of the other healthy "
                                  "runs; the guard has a level of its own."
                                : "")
              : "No healthy run is on this page: levels are those for a run that stands "
                "alone, and false alarms are not known."));
}

}  // namespace evenkeel
