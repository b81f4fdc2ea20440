#include "diagnosis/guard_changes.h"

#include <algorithm>
#include <optional>
#include <span>
#include <stdexcept>

#include "attention/precision_plan.h"

namespace evenkeel {
namespace {

// A change by the guard stands in guard.jsonl and, where our trainer made it, in config.toml: it is not its own past.
std::string plan_before(const RunRecords& run, const RunEvent& act) {
  std::string plan = run.setting("attention", "plan");
  for (const RunEvent& event : run.events)
    if ((event.kind == RunEvent::Kind::plan_change || event.is_guards_act()) &&
        event.holds_from <= act.holds_from && event.clauses != act.clauses)
      plan += "; " + event.clauses;
  return plan;
}

// Nothing where the text is no plan, or more text than any run's.
std::optional<ScopedPlan> parsed_plan(const std::string& text) {
  constexpr size_t kLongest = 1 << 14;
  if (text.size() > kLongest) return {};
  try {
    return ScopedPlan::parse(text);
  } catch (const std::invalid_argument&) {
    return {};
  }
}

}  // namespace

std::vector<GuardChange> guard_changes(const RunRecords& run) {
  std::vector<GuardChange> changes;
  size_t acts = 0;
  for (const RunEvent& act : run.events) {
    if (!act.is_guards_act() || acts++ >= kMostGuardActs) continue;
    const std::string text = plan_before(run, act);
    const std::optional<ScopedPlan> before = parsed_plan(text),
                                    after = parsed_plan(text + "; " + act.clauses);
    const size_t first = changes.size();
    for (const RunHead& head : std::span(act.heads).first(std::min(act.heads.size(), kMostGuardedHeads))) {
      const std::string from = before ? to_string(before->at(head.layer, head.head)) : "";
      const std::string to = after ? to_string(after->at(head.layer, head.head)) : act.clauses;
      const auto same = std::find_if(changes.begin() + static_cast<std::ptrdiff_t>(first), changes.end(),
                                     [&](const GuardChange& c) { return c.before == from && c.after == to; });
      if (same == changes.end())
        changes.push_back({act.holds_from, {head}, from, to});
      else
        same->heads.push_back(head);
    }
  }
  return changes;
}

}  // namespace evenkeel
