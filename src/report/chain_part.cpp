// From the symptom to the proof, and the replays that show it.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "base/text.h"
#include "diagnosis/next_command.h"
#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

// A number of the records that should be a step.
std::string whole(std::optional<int64_t> step) { return step ? count(*step) : "–"; }

struct ChainLink {
  const char* name;
  std::string value, detail;  // HTML; empty value: not known
};

// A trial's part in the verdict.
std::optional<RecordObject> part_of(const RecordObject& verdict, VerdictPart part) {
  for (const RecordObject& entry : verdict.objects("parts"))
    if (entry.text("part") == name(part)) return entry;
  return {};
}
bool heals(const RecordObject& part) { return part.flag("heals").value_or(false); }
double offset_of(const RecordObject& part) { return part.number("offset").value_or(kUnknown); }

// The remedy that heals; of several, the one of the verdict's next command.
ChainLink remedy_link(const RecordObject& verdict) {
  std::string failed;
  for (const VerdictPart part : kRemedies)
    if (const std::optional<RecordObject> trial = part_of(verdict, part)) {
      if (heals(*trial))
        return {"remedy", escape(row_of(part).label),
                fmt::format("offset {} with it", figure(offset_of(*trial)))};
      failed += (failed.empty() ? "" : ", ") + std::string(row_of(part).label);
    }
  if (failed.empty()) return {"remedy", "", ""};
  return {"remedy", "none of those tried", "not healed by " + escape(failed)};
}

ChainLink proof_link(const RecordObject& verdict) {
  const auto cured = part_of(verdict, VerdictPart::cured),
             alone = part_of(verdict, VerdictPart::alone_guilty);
  if (!cured && !alone) return {"proof", "", ""};
  return {"proof", cured && alone && heals(*cured) && !heals(*alone) ? "both ways" : "one way",
          fmt::format(
              "{}{}{}", cured ? fmt::format("in FP32 it {}", heals(*cured) ? "heals" : "does not heal") : "",
              cured && alone ? "; " : "",
              alone ? fmt::format("alone it {}", heals(*alone) ? "stays healthy" : "is enough") : "")};
}

std::string list_of_numbers(const std::set<int64_t>& numbers) {
  std::string text;
  for (const int64_t n : numbers) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return text;
}

std::array<ChainLink, 7> links_of_symptom(const RunRecords& run, const Symptom& symptom) {
  std::array<ChainLink, 7> links = {{{"symptom", "", ""},
                                     {"layer", "", ""},
                                     {"head", "", ""},
                                     {"site", "", ""},
                                     {"bits", "", ""},
                                     {"remedy", "", ""},
                                     {"proof", "", ""}}};
  const auto since = [](int64_t step) { return fmt::format("since step {}", count(step)); };
  switch (symptom.kind) {
    case Symptom::Kind::none:
      links[0] = {"symptom", "none",
                  symptom.is_healthy()   ? "records look healthy"
                  : symptom.is_too_short ? "the run is too short to judge"
                                         : "nothing is recorded that could be judged"};
      break;
    case Symptom::Kind::offset:
      links[0] = {"symptom", "offset " + figure(last_offset(run)), since(symptom.since)};
      links[1] = {"layer", std::to_string(symptom.layer), "largest offset; not proved"};
      links[2] = {"head", std::to_string(symptom.head), "largest offset; not proved"};
      break;
    case Symptom::Kind::loss:
      links[0] = {"symptom", "the loss rises", since(symptom.since)};
      break;
    case Symptom::Kind::spikes:
      links[0] = {"symptom", "the loss jumps", since(symptom.since)};
      break;
  }
  return links;
}

// worst: the addition of the section "bits", which the link points to.
void add_verdict(const RecordObject& v, const Json& worst, std::array<ChainLink, 7>& links) {
  std::set<int64_t> layers, heads;
  for (const RecordObject& entry : v.objects("heads")) {
    const std::optional<int64_t> layer = entry.step("layer"), head = entry.step("head");
    if (layer && head) layers.insert(*layer), heads.insert(*head);
  }
  if (!layers.empty()) {
    links[1] = {"layer", list_of_numbers(layers), "the smallest set whose FP32 heals"};
    links[2] = {"head", list_of_numbers(heads),
                layers.size() > 1 ? "of these layers together" : "the smallest set whose FP32 heals"};
  }
  if (const auto sites = v.texts("sites"); !sites.empty())
    links[3] = {"site", escape(joined(sites, ", ")), "kept in " + escape(joined(v.texts("formats"), ", "))};
  if (v.find("bits") && worst.is_object())
    if (const auto error = worst.find("error"); error != worst.end())
      links[4] = {"bits", figure(record_number(*error).value_or(kUnknown), 4),
                  "the worst addition's error; see <a href=\"#bits\">below</a>"};
  links[5] = remedy_link(v);
  links[6] = proof_link(v);
}

std::string evidence_of(const RecordObject& verdict) {
  const std::vector<std::string> chain = verdict.texts("evidence");
  if (chain.empty()) return "";
  std::string text = "<details class=\"evidence\"><summary>The evidence, link by link</summary><ol>\n";
  for (const std::string& link : chain) text += fmt::format("<li>{}</li>\n", escape(link));
  return text + "</ol></details>\n";
}

// The runs of the page, a row each.
std::string table_of_runs(const PageData& data) {
  std::string table =
      "<div class=\"scroll\"><table class=\"runs\"><thead><tr><th scope=\"col\">run</th><th "
      "scope=\"col\" class=\"plan\">plan</th><th scope=\"col\">steps</th>"
      "<th scope=\"col\">loss</th><th scope=\"col\">offset</th><th scope=\"col\">gradient norm</th><th "
      "scope=\"col\">ties, %</th>"
      "<th scope=\"col\">state</th></tr></thead><tbody>\n";
  for (size_t n = 0; n < data.runs.size(); ++n) {
    const RunRecords& run = data.runs[n];
    const double ties = last_largest(run, name(HeadFact::tied_rows));
    std::string plan = run.setting("attention", "plan");
    std::vector<const RunEvent*> changes;
    for (const RunEvent& event : run.events)
      if (event.kind == RunEvent::Kind::plan_change) changes.push_back(&event);
    if (changes.size() == 1)
      plan += fmt::format("; from step {}: {}", changes[0]->step, changes[0]->words);
    else if (!changes.empty())
      plan += fmt::format("; {} changes from step {} on", changes.size(), changes[0]->step);
    const auto cell = [](double x, int digits) {
      return std::isnan(x) ? std::string("–") : figure(x, digits);
    };
    table += fmt::format(
        "<tr><th scope=\"row\" class=\"{}\">{}</th><td "
        "class=\"plan\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td>{}</td><td>{}</td></tr>\n",
        colour_of(data, n), escape(run.label), escape(plan.empty() ? "not known" : plan),
        count(run.step_count()), cell(recent(run.loss), 4), cell(last_offset(run), 3),
        cell(recent(run.gradient_norm), 3), cell(100 * ties, 2), badge(run, data.symptoms[n]));
  }
  return table + "</tbody></table></div>\n";
}

// Every trial of a verdict, on one axis.
std::string trials_of(const RunRecords& run) {
  const RecordObject verdict = run.verdict_record();
  DotPlot plot;
  plot.id = "trials", plot.title = "Replays", plot.log_x = true;
  plot.x_label = "offset at the end of the replay, log axis";
  plot.description =
      "Each replay of the same stretch with one thing changed: how large the offset was at its end, and "
      "whether that counts as healed.";
  if (const auto limit = verdict.number("limit"); limit && std::isfinite(*limit))
    plot.guides.push_back({*limit, "limit of drift"});
  for (size_t n = 0; n < kVerdictPartCount; ++n)
    if (const auto trial = part_of(verdict, static_cast<VerdictPart>(n))) {
      const bool judged = trial->flag("heals").has_value(), healed = heals(*trial);
      plot.dots.push_back({std::string(kVerdictParts[n].label),
                           figure(offset_of(*trial)) + (!judged  ? ""
                                                        : healed ? " · heals"
                                                                 : " · does not heal"),
                           !judged  ? "unknown"
                           : healed ? "good"
                                    : "bad",
                           offset_of(*trial)});
    }
  return fmt::format(
      "<h3>The same stretch of {} again, one thing changed each time</h3><p class=\"lead\">Steps {} to {}, "
      "on the run's own batches.</p>{}",
      escape(run.label), whole(verdict.step("begin")), whole(verdict.step("end")), draw(plot));
}

}  // namespace

std::string chain_part(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  const Symptom& symptom = data.symptoms[data.subject];
  std::array<ChainLink, 7> links = links_of_symptom(run, symptom);
  if (run.verdict) add_verdict(run.verdict_record(), worst_addition(data), links);
  std::string text = "<ol class=\"chain\">\n";
  for (const ChainLink& link : links) {
    const bool known = !link.value.empty();
    text += fmt::format(
        "<li class=\"{}\"><span class=\"link\">{}</span><span class=\"value\">{}</span><span "
        "class=\"detail\">{}</span></li>\n",
        known ? "known" : "open", link.name, known ? link.value : "–",
        known ? link.detail : "not established");
  }
  text += "</ol>\n" + evidence_of(run.verdict_record());
  const bool open =
      std::any_of(links.begin(), links.end(), [](const ChainLink& link) { return link.value.empty(); });
  // `evenkeel verdict` alone writes a verdict, too.
  const bool replayed = !run.verdict_record().objects("parts").empty();
  if (open && symptom.kind != Symptom::Kind::none)
    text +=
        missing(replayed ? "Some links are not established; a larger budget of replays may find them:"
                         : "The links that are open are found by replays of the run:",
                isolate_command(run.folder, run.setting("run", "trainer"), replayed ? " --budget 80" : ""));
  return section(
      "chain", "From symptom to proof",
      fmt::format(
          "Each link is found by {}s of the run on its own batches, and is only named where they show it.",
          term("replay")),
      text);
}

std::string remedies_part(const PageData& data) {
  std::string table = table_of_runs(data);
  const RunRecords& run = data.runs[data.subject];
  const std::string folder = shell_word(run.folder.string());
  if (!run.verdict_record().objects("parts").empty())
    table += trials_of(run);
  else if (data.symptoms[data.subject].kind != Symptom::Kind::none)
    table += missing("No replay compares remedies on this run yet:",
                     isolate_command(run.folder, run.setting("run", "trainer")));
  if (data.runs.size() == 1)
    table += missing("To compare runs, name several:",
                     fmt::format("evenkeel report {} OTHER_RUN... -o report.html", folder));
  return section("remedies", "Remedies compared",
                 fmt::format("The runs of this page, then every {} that was tried on the failing one.",
                             term("stabiliser")),
                 table);
}

}  // namespace evenkeel
