// What happened, in a sentence, and its figures.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "diagnosis/forecast.h"
#include "diagnosis/next_command.h"
#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {
namespace {

std::string tile(const std::string& label, const std::string& value, const std::string& remark) {
  return fmt::format("<div><dt>{}</dt><dd>{}</dd><dd class=\"remark\">{}</dd></div>\n", label, value, remark);
}

std::string capital(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text;
}

// "a. b" -> "a.", "b"; not behind "e.g" and numbers, which verdicts do not have.
std::pair<std::string, std::string> first_sentence(const std::string& text) {
  const size_t end = text.find(". ");
  if (end == std::string::npos) return {text, ""};
  return {text.substr(0, end + 1), text.substr(end + 2)};
}

struct Statement {
  std::string sentence, more, sure;
};
// Of runs that are all healthy: how sure each of them is, those of one certainty together.
std::string certainty_of(const PageData& data) {
  std::vector<std::pair<std::string, std::string>> found;  // certainty, runs
  for (size_t n = 0; n < data.runs.size(); ++n) {
    const std::string& sure = data.symptoms[n].certainty;
    const auto same =
        std::find_if(found.begin(), found.end(), [&](const auto& one) { return one.first == sure; });
    if (same == found.end())
      found.emplace_back(sure, data.runs[n].label);
    else
      same->second += ", " + data.runs[n].label;
  }
  if (found.size() == 1) return found[0].first;
  std::string text;
  for (const auto& [sure, runs] : found)
    text += fmt::format("{}{} ({})", text.empty() ? "" : "; ", sure, runs);
  return text;
}

Statement statement_of(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  const Symptom& symptom = data.symptoms[data.subject];
  Statement s;
  if (const std::string words = run.verdict_record().text("words"); !words.empty()) {
    std::tie(s.sentence, s.more) = first_sentence(words);
    s.sure = run.verdict_record().text("certainty");
  } else if (!run.has_steps()) {
    s.sentence = fmt::format("Nothing is recorded of {} yet.", run.label);
  } else if (symptom.kind == Symptom::Kind::none) {
    s.sentence =
        data.runs.size() > 1 && symptom.is_healthy()
            ? "All runs are healthy by their records: no offset beyond the limit of drift, no rise of the "
              "loss, no "
              "jumps."
            : sentence_of_none(symptom);
    s.sure = certainty_of(data);
  } else {
    s.sentence = fmt::format("Something is wrong in {}: {}.", run.label, symptom.words);
    s.more = "The cause is not established: no replay was made.";
  }
  return s;
}

// The loss of a run as it ends: not finite where the last recorded one is not.
double last_loss(const RunRecords& run) {
  const Series& loss = run.metrics.loss;
  if (!loss.empty() && !std::isfinite(loss.values.back())) return std::numeric_limits<double>::infinity();
  return recent(run.loss);
}

std::string tiles(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  std::string text = "<dl class=\"tiles\">\n";
  const std::string steps = run.setting("schedule", "steps");
  text += tile(term("step", "steps"), count(run.step_count()), steps.empty() ? "" : "of " + escape(steps));
  double best = kUnknown;
  std::string best_label;
  for (size_t n = 0; n < data.runs.size(); ++n)
    if (n != data.subject && !(last_loss(data.runs[n]) >= best))
      best = last_loss(data.runs[n]), best_label = data.runs[n].label;
  text += tile(term("loss"), figure(last_loss(run), 4),
               std::isnan(best) ? "mean of the last 20 steps"
                                : fmt::format("{} in {}", figure(best, 4), escape(best_label)));
  text += tile(term("offset", "largest offset"), figure(last_offset(run)),
               fmt::format("drift is beyond {}", figure(limit_of(run), 3)));
  text += tile(term("gradient norm"), figure(recent(run.gradient_norm)), "mean of the last 20 steps");
  if (const double ties = last_largest(run, name(HeadFact::tied_rows)); !std::isnan(ties))
    text += tile(term("tie", "rows with ties"), figure(100 * ties, 2) + " %", "in the head that has most");
  return text + "</dl>\n";
}

// What could not be read belongs where it cannot be overlooked.
std::string notes_of(const PageData& data) {
  std::string notes;
  for (const RunRecords& run : data.runs)
    for (const std::string& note : run.notes)
      notes += fmt::format("<li><b>{}</b>: {}</li>\n", escape(run.label), escape(note));
  for (const std::string& note : data.capture_notes) notes += fmt::format("<li>{}</li>\n", escape(note));
  if (notes.empty()) return "";
  return fmt::format(
      "<section id=\"notes\" class=\"notes\" aria-label=\"What is missing\"><h2>Not all is "
      "there</h2><ul>\n{}</ul></section>\n",
      notes);
}

}  // namespace

std::string verdict_part(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  const Symptom& symptom = data.symptoms[data.subject];
  const Statement statement = statement_of(data);
  std::string text = fmt::format(
      "<header class=\"verdict\">\n<p class=\"eyebrow\">Verdict · <span class=\"{}\">{}</span> "
      "{}</p>\n<h1>{}</h1>\n",
      colour_of(data, data.subject), escape(run.label), badge(run, symptom), escape(statement.sentence));
  if (!statement.more.empty()) text += fmt::format("<p class=\"more\">{}</p>\n", escape(statement.more));
  if (!statement.sure.empty())
    text += fmt::format("<p class=\"sure\">How sure? {}.</p>\n", escape(capital(statement.sure)));
  text += guard_words(data);
  if (const RunForecast expected = forecast(run); !expected.of_heads.empty() || expected.failure)
    text += fmt::format("<p class=\"more\" id=\"forecast\">Forecast: {}.</p>\n", escape(in_words(expected)));
  if (const std::string next = run.verdict_record().text("next_command"); !next.empty())
    text += missing("Next:", next);
  else if (!run.verdict && symptom.kind != Symptom::Kind::none)
    text += missing("Next:", isolate_command(run.folder, run.setting("run", "trainer")));
  if (run.has_steps()) text += tiles(data);
  return text + "</header>\n" + notes_of(data);
}

}  // namespace evenkeel
