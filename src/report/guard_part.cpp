// What the guard did to the runs: a paragraph for each, and the plan of every head that it changed, before and after.
#include <fmt/format.h>

#include "diagnosis/guard_changes.h"
#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {
namespace {

std::string row_of(const PageData& data, size_t n, const GuardChange& change) {
  std::string heads;
  for (const RunHead& head : change.heads)
    heads += fmt::format("{}head {} of layer {}", heads.empty() ? "" : ", ", head.head, head.layer);
  return fmt::format(
      "<tr><th scope=\"row\" class=\"{}\">{}</th><td>{}</td><td>{}</td><td class=\"plan\">{}</td><td "
      "class=\"plan\">{}</td></tr>\n",
      colour_of(data, n), escape(data.runs[n].label), count(change.step), heads,
      escape(change.before.empty() ? "not known" : change.before), escape(change.after));
}

}  // namespace

std::string guard_words(const PageData& data) {
  constexpr size_t kMostSteps = 6;
  std::string text;
  for (size_t n = 0; n < data.runs.size(); ++n) {
    std::string steps;
    size_t acted = 0, roll_backs = 0;
    for (const RunEvent& event : data.runs[n].events) {
      if (!event.is_guards_act()) continue;
      roll_backs += event.kind == RunEvent::Kind::guard_roll_back ? 1 : 0;
      if (acted++ < kMostSteps) steps += fmt::format("{}{}", steps.empty() ? "" : ", ", event.step);
    }
    if (acted == 0) continue;
    text += fmt::format(
        "<p class=\"more guarded\">The {} switched zero_sum on in drifting heads of <span "
        "class=\"{}\">{}</span> at {} {}{}{}.</p>\n",
        term("guard"), colour_of(data, n), escape(data.runs[n].label), acted == 1 ? "step" : "steps", steps,
        acted > kMostSteps ? ", ..." : "",
        roll_backs == 0 ? "" : fmt::format("; returns to a checkpoint: {}", roll_backs));
  }
  return text;
}

std::string guard_part(const PageData& data) {
  std::string rows;
  for (size_t n = 0; n < data.runs.size(); ++n)
    for (const GuardChange& change : guard_changes(data.runs[n])) rows += row_of(data, n, change);
  if (rows.empty()) return "";
  return section(
      "guard", "What the guard changed",
      "The plan of each head that the " + term("guard") + " acted on, before and after.",
      "<div class=\"scroll\"><table class=\"runs\"><thead><tr><th scope=\"col\">run</th><th "
      "scope=\"col\">from step</th><th scope=\"col\">head</th><th scope=\"col\" class=\"plan\">plan "
      "before</th><th scope=\"col\" class=\"plan\">plan after</th></tr></thead><tbody>\n" +
          rows + "</tbody></table></div>\n");
}

}  // namespace evenkeel
