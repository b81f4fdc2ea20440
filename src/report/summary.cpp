// The parts that say what happened: the verdict, the loss, the chain of causes, remedies compared, how to repeat it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kPoints = 2000;  // of a curve of the loss

const Json& list_at(const Json& object, const char* key) {
  static const Json kNone = Json::array();
  const auto found = object.find(key);
  return found != object.end() && found->is_array() ? *found : kNone;
}

std::vector<std::string> texts_at(const Json& object, const char* key) {
  std::vector<std::string> texts;
  for (const Json& item : list_at(object, key))
    if (item.is_string()) texts.push_back(item.get<std::string>());
  return texts;
}

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

// The largest over heads at the last record.
double last_largest(const RunRecords& run, const char* field) {
  const HeadSeries* const series = find_series(run, field);
  if (!series) return kUnknown;
  const auto LH = static_cast<std::ptrdiff_t>(run.layers * run.heads);
  double largest = kUnknown;
  for (auto it = series->values.end() - LH; it != series->values.end(); ++it)
    if (!(static_cast<double>(*it) <= largest) && !std::isnan(*it)) largest = static_cast<double>(*it);
  return largest;
}
double last_offset(const RunRecords& run) {
  const double offset = last_largest(run, "largest_row_mean");
  return std::isnan(offset) ? last_largest(run, "largest_lse") : offset;
}

// A number of the records that should be a step.
std::string whole(double x) { return std::fabs(x) < 1e15 ? count(static_cast<int64_t>(x)) : "–"; }

std::vector<double> doubles(const std::vector<int64_t>& steps) { return {steps.begin(), steps.end()}; }

// The mean over a window around each step, which does not lag as a running mean would.
std::vector<double> smoothed(const std::vector<double>& y) {
  const auto n = static_cast<std::ptrdiff_t>(y.size()), half = std::clamp<std::ptrdiff_t>(n / 80, 2, 60);
  std::vector<double> sums(y.size() + 1), counts(y.size() + 1), out(y.size());
  for (size_t k = 0; k < y.size(); ++k) {
    const bool good = std::isfinite(y[k]);
    sums[k + 1] = sums[k] + (good ? y[k] : 0), counts[k + 1] = counts[k] + good;
  }
  for (std::ptrdiff_t k = 0; k < n; ++k) {
    // The same on both sides, so that a slope at an end is no bend.
    const std::ptrdiff_t reach = std::min({half, k, n - 1 - k});
    const auto begin = static_cast<size_t>(k - reach), end = static_cast<size_t>(k + reach + 1);
    const double found = counts[end] - counts[begin];
    out[static_cast<size_t>(k)] =
        std::isfinite(y[static_cast<size_t>(k)]) && found > 0 ? (sums[end] - sums[begin]) / found : kUnknown;
  }
  return out;
}

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

struct State {
  const char *word, *style;
};
State state_of(const RunRecords& run, const Symptom& symptom) {
  if (!run.has_steps()) return {"no records", "unknown"};
  if (run.verdict) {
    const std::string cause = text_at(*run.verdict, "cause");
    if (cause == name(Cause::healthy)) return {"healthy", "good"};
    if (!cause.empty() && cause != name(Cause::not_established)) return {"derailed", "bad"};
  }
  if (symptom.kind == Symptom::Kind::none) return {"healthy", "good"};
  return {symptom.kind == Symptom::Kind::spikes ? "loss jumps" : "derailing", "bad"};
}

std::string badge(const State& state) {
  return fmt::format("<span class=\"state {}\">{}</span>", state.style, state.word);
}

const char* mark_style(RunEvent::Kind kind) {
  switch (kind) {
    case RunEvent::Kind::checkpoint:
      return "check";
    case RunEvent::Kind::plan_change:
      return "change";
    case RunEvent::Kind::finding:
      return "finding";
    default:
      return "guard";
  }
}

// Many checkpoints say no more than some, and what the guard changed is told once.
Lane lane_of(const RunRecords& run, const std::string& style) {
  Lane lane{run.label, style, {}};
  constexpr size_t kMostCheckpoints = 60, kMostHairlines = 4;
  std::set<int64_t> by_guard;  // steps from which its changes hold
  size_t checkpoints = 0, told = 0, n = 0;
  for (const RunEvent& event : run.events) {
    if (event.kind == RunEvent::Kind::guard_remedy) by_guard.insert(event.step + 1);
    (event.kind == RunEvent::Kind::checkpoint ? checkpoints : told)++;
  }
  const size_t every = checkpoints / kMostCheckpoints + 1;
  for (const RunEvent& event : run.events) {
    if (event.kind == RunEvent::Kind::checkpoint && n++ % every != 0) continue;
    if (event.kind == RunEvent::Kind::plan_change && by_guard.contains(event.step)) continue;
    const bool grave = event.kind == RunEvent::Kind::finding || event.kind == RunEvent::Kind::guard_roll_back;
    lane.marks.push_back({static_cast<double>(event.step), mark_style(event.kind),
                          fmt::format("{} at step {}{}{}", name(event.kind), event.step,
                                      event.words.empty() ? "" : ": ", event.words),
                          grave || (event.kind != RunEvent::Kind::checkpoint && told <= kMostHairlines)});
  }
  return lane;
}

}  // namespace

std::string verdict_part(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  const Symptom& symptom = data.symptoms[data.subject];
  std::string sentence, more, sure;
  if (run.verdict && !text_at(*run.verdict, "words").empty()) {
    std::tie(sentence, more) = first_sentence(text_at(*run.verdict, "words"));
    sure = text_at(*run.verdict, "certainty");
  } else if (!run.has_steps()) {
    sentence = fmt::format("Nothing is recorded of {} yet.", run.label);
  } else if (symptom.kind == Symptom::Kind::none) {
    sentence =
        data.runs.size() > 1
            ? "All runs are healthy by their records: no offset beyond need, no rise of the loss, no jumps."
            : "Healthy, by its records: no offset beyond need, no rise of the loss, no jumps.";
    sure = "as sure as records are: nothing was replayed";
  } else {
    sentence = fmt::format("Something is wrong in {}: {}.", run.label, symptom.words);
    more = "The cause is not established: no replay was made.";
  }
  std::string text = fmt::format(
      "<header class=\"verdict\">\n<p class=\"eyebrow\">Verdict · <span class=\"{}\">{}</span> "
      "{}</p>\n<h1>{}</h1>\n",
      colour_of(data, data.subject), escape(run.label), badge(state_of(run, symptom)), escape(sentence));
  if (!more.empty()) text += fmt::format("<p class=\"more\">{}</p>\n", escape(more));
  if (!sure.empty()) text += fmt::format("<p class=\"sure\">How sure? {}.</p>\n", escape(capital(sure)));
  if (!run.verdict && symptom.kind != Symptom::Kind::none)
    text +=
        missing("The cause is found by", fmt::format("evenkeel isolate {}", shell_word(run.folder.string())));
  if (run.has_steps()) {
    text += "<dl class=\"tiles\">\n";
    const std::string steps = run.setting("schedule", "steps");
    text +=
        tile(term("step", "steps"), count(run.steps.back() + 1), steps.empty() ? "" : "of " + escape(steps));
    double best = kUnknown;
    std::string best_label;
    for (size_t n = 0; n < data.runs.size(); ++n)
      if (n != data.subject && !(recent(data.runs[n].loss) >= best))
        best = recent(data.runs[n].loss), best_label = data.runs[n].label;
    text += tile(term("loss"), figure(recent(run.loss), 4),
                 std::isnan(best) ? "mean of the last 20 steps"
                                  : fmt::format("{} in {}", figure(best, 4), escape(best_label)));
    text += tile(term("offset", "largest offset"), figure(last_offset(run)),
                 fmt::format("no softmax needs more than {}", figure(kScoreUnit, 2)));
    text += tile(term("gradient norm"), figure(recent(run.gradient_norm)), "mean of the last 20 steps");
    if (const double ties = last_largest(run, "tied_rows"); !std::isnan(ties))
      text += tile(term("tie", "rows with ties"), figure(100 * ties, 2) + " %", "in the head that has most");
    text += "</dl>\n";
  }
  text += "</header>\n";
  // What could not be read belongs where it cannot be overlooked.
  std::string notes;
  for (const RunRecords& r : data.runs)
    for (const std::string& note : r.notes)
      notes += fmt::format("<li><b>{}</b>: {}</li>\n", escape(r.label), escape(note));
  for (const std::string& note : data.capture_notes) notes += fmt::format("<li>{}</li>\n", escape(note));
  if (!notes.empty())
    text += fmt::format(
        "<section id=\"notes\" class=\"notes\" aria-label=\"What is missing\"><h2>Not all is "
        "there</h2><ul>\n{}</ul></section>\n",
        notes);
  text +=
      "<nav class=\"contents\" aria-label=\"Contents\"><a href=\"#loss\">Loss</a><a href=\"#chain\">Chain</a>"
      "<a href=\"#norms\">Norms</a><a href=\"#ties\">Ties</a><a href=\"#residual\">Residual</a>"
      "<a href=\"#common\">Common mode</a><a href=\"#directions\">Directions</a><a "
      "href=\"#features\">Features</a>"
      "<a href=\"#bits\">Bits</a><a href=\"#remedies\">Remedies</a><a href=\"#lead\">Lead time</a>"
      "<a href=\"#repeat\">Repeat</a><a href=\"#words\">Words</a></nav>\n";
  return text;
}

std::string loss_part(const PageData& data) {
  Chart loss, norm;
  double highest = 0;
  bool any = false;
  for (size_t n = 0; n < data.runs.size(); ++n) {
    const RunRecords& run = data.runs[n];
    if (!run.has_steps()) continue;
    any = true;
    const std::string colour = colour_of(data, n);
    const size_t points = kPoints / std::max<size_t>(1, data.runs.size() / 4);
    const std::vector<double> x = doubles(run.steps);
    Line raw{run.label, colour + " raw", x, run.loss, {}, {}, false};
    Line mean{run.label, colour, x, smoothed(run.loss), {}, {}};
    // The fall of the first steps would flatten all that comes after.
    const size_t begun = mean.y.size() / 25;
    for (size_t k = begun; k < mean.y.size(); ++k)
      if (std::isfinite(mean.y[k])) highest = std::max(highest, mean.y[k]);
    loss.lines.insert(loss.lines.begin() + static_cast<std::ptrdiff_t>(loss.lines.size() / 2),
                      thin(raw, points));
    loss.lines.push_back(thin(mean, points));
    std::vector<double> valid_x, valid_y;
    for (size_t k = 0; k < run.steps.size(); ++k)
      if (std::isfinite(run.validation_loss[k]))
        valid_x.push_back(x[k]), valid_y.push_back(run.validation_loss[k]);
    if (!valid_x.empty())
      loss.lines.push_back(
          thin({run.label + ", validation", colour + " dashed", valid_x, valid_y, {}, {}}, points));
    norm.lines.push_back(thin({run.label, colour, x, smoothed(run.gradient_norm), {}, {}}, points));
    loss.lanes.push_back(lane_of(run, colour));
    if (const Symptom& symptom = data.symptoms[n]; symptom.kind != Symptom::Kind::none)
      loss.lanes.back().marks.push_back(
          {static_cast<double>(symptom.since), "symptom",
           fmt::format("symptom since step {}: {}", symptom.since, symptom.words), true});
    loss.least_left = norm.least_left = std::max(norm.least_left, lane_room(run.label));
  }
  if (!any) return section("loss", "The loss", "", missing("No step is recorded yet.", ""));
  loss.id = "loss-chart", loss.title = "Loss", loss.y_label = "loss, nats a token";
  loss.description =
      "Loss of each run against steps: thin the single steps, bold the mean around each; below, a lane of "
      "events a run.";
  if (highest > 0) loss.highest = 1.03 * highest;
  loss.height = 380 + 17 * static_cast<double>(data.runs.size());
  norm.id = "gradient-chart", norm.title = "Gradient norm", norm.y_label = "gradient norm, log axis";
  norm.description = "Norm of the whole gradient of each run against steps, smoothed, on a logarithmic axis.";
  norm.log_y = true, norm.height = 200;
  std::string key;
  const std::pair<const char*, std::string> kMarks[] = {
      {"check", term("checkpoint")},
      {"change", "change of the " + term("precision plan", "plan")},
      {"guard", term("guard")},
      {"symptom", "symptom, since when"},
      {"finding", term("finding")}};
  for (const auto& [style, meaning] : kMarks)
    key += fmt::format("<li>{} {}</li>", legend_mark(style), meaning);
  const std::string aside = fmt::format(
      "<p>Thin: single steps. Bold: the mean around each.</p><ul class=\"marks\">{}</ul><p "
      "class=\"hint\">Drag to zoom, double-click to "
      "go back; arrow keys walk through the steps of a chart that has the focus.</p>",
      key);
  return section(
      "loss", "The loss",
      fmt::format("{} of the runs, on one axis, with what happened to each.", term("loss", "Loss")),
      draw(loss) + draw(norm), aside);
}

namespace {

struct ChainLink {
  const char* name;
  std::string value, detail;  // HTML; empty value: not known
};

// A trial's part in the verdict, or nullptr.
const Json* part_of(const Json& verdict, std::string_view part) {
  for (const Json& entry : list_at(verdict, "parts"))
    if (entry.is_object() && text_at(entry, "part") == part) return &entry;
  return nullptr;
}
bool heals(const Json& part) {
  const auto found = part.find("heals");
  return found != part.end() && found->is_boolean() && found->get<bool>();
}

// The remedy that heals; of several, the one that the verdict names (zero_sum on few heads, then on all), then the first.
ChainLink remedy_link(const Json& verdict) {
  std::vector<VerdictPart> tried;
  for (const VerdictPart part : {VerdictPart::zero_sum, VerdictPart::zero_sum_all}) tried.push_back(part);
  for (size_t n = 0; n < kVerdictPartCount; ++n)
    if (kVerdictParts[n].is_remedy &&
        std::find(tried.begin(), tried.end(), static_cast<VerdictPart>(n)) == tried.end())
      tried.push_back(static_cast<VerdictPart>(n));
  std::string failed;
  for (const VerdictPart part : tried)
    if (const Json* const trial = part_of(verdict, name(part))) {
      if (heals(*trial))
        return {"remedy", escape(row_of(part).label),
                fmt::format("offset {} with it", figure(number_at(*trial, "offset")))};
      failed += (failed.empty() ? "" : ", ") + std::string(row_of(part).label);
    }
  if (failed.empty()) return {"remedy", "", ""};
  return {"remedy", "none of those tried", "not healed by " + escape(failed)};
}

std::string list_of_numbers(const std::set<int64_t>& numbers) {
  std::string text;
  for (const int64_t n : numbers) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return text;
}

}  // namespace

std::string chain_part(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  const Symptom& symptom = data.symptoms[data.subject];
  const std::string folder = shell_word(run.folder.string());
  std::vector<ChainLink> links = {{"symptom", "", ""}, {"layer", "", ""},  {"head", "", ""}, {"site", "", ""},
                                  {"bits", "", ""},    {"remedy", "", ""}, {"proof", "", ""}};
  const auto since = [](int64_t step) { return fmt::format("since step {}", count(step)); };
  switch (symptom.kind) {
    case Symptom::Kind::none:
      links[0] = {"symptom", "none", "records look healthy"};
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
  std::string evidence, bits;
  if (run.verdict) {
    const Json& v = *run.verdict;
    std::set<int64_t> layers, heads;
    for (const Json& entry : list_at(v, "heads"))
      if (entry.is_object()) {
        const double layer = number_at(entry, "layer"), head = number_at(entry, "head");
        if (layer >= 0 && layer < 1e6 && head >= 0 && head < 1e6)
          layers.insert(static_cast<int64_t>(layer)), heads.insert(static_cast<int64_t>(head));
      }
    if (!layers.empty()) {
      links[1] = {"layer", list_of_numbers(layers), "the smallest set whose FP32 heals"};
      links[2] = {"head", list_of_numbers(heads),
                  layers.size() > 1 ? "of these layers together" : "the smallest set whose FP32 heals"};
    }
    if (const auto sites = texts_at(v, "sites"); !sites.empty())
      links[3] = {"site", escape(joined(sites, ", ")),
                  "kept in " + escape(joined(texts_at(v, "formats"), ", "))};
    if (const auto found = v.find("bits"); found != v.end() && found->is_object()) {
      links[4] = {"bits", figure(number_at(*found, "error")),
                  "the worst addition's error; see <a href=\"#bits\">below</a>"};
    }
    links[5] = remedy_link(v);
    const Json *const cured = part_of(v, name(VerdictPart::cured)), *const alone = part_of(
                                                                        v, name(VerdictPart::alone_guilty));
    if (cured || alone)
      links[6] = {
          "proof", cured && alone && heals(*cured) && !heals(*alone) ? "both ways" : "one way",
          fmt::format("{}{}{}",
                      cured ? fmt::format("in FP32 it {}", heals(*cured) ? "heals" : "does not heal") : "",
                      cured && alone ? "; " : "",
                      alone ? fmt::format("alone it {}", heals(*alone) ? "stays healthy" : "derails") : "")};
    const auto chain = texts_at(v, "evidence");
    if (!chain.empty()) {
      evidence = "<details class=\"evidence\"><summary>The evidence, link by link</summary><ol>\n";
      for (const std::string& link : chain) evidence += fmt::format("<li>{}</li>\n", escape(link));
      evidence += "</ol></details>\n";
    }
  }
  std::string text = "<ol class=\"chain\">\n";
  for (const ChainLink& link : links) {
    const bool known = !link.value.empty();
    text += fmt::format(
        "<li class=\"{}\"><span class=\"link\">{}</span><span class=\"value\">{}</span><span "
        "class=\"detail\">{}</span></li>\n",
        known ? "known" : "open", link.name, known ? link.value : "–",
        known ? link.detail : "not established");
  }
  text += "</ol>\n" + evidence;
  const bool open =
      std::any_of(links.begin(), links.end(), [](const ChainLink& link) { return link.value.empty(); });
  if (open && symptom.kind != Symptom::Kind::none)
    text += missing(run.verdict ? "Some links are not established; a larger budget of replays may find them:"
                                : "The links that are open are found by replays of the run:",
                    fmt::format("evenkeel isolate {}{}", folder, run.verdict ? " --budget 80" : ""));
  return section(
      "chain", "From symptom to proof",
      fmt::format(
          "Each link is found by {}s of the run on its own batches, and is only named where they show it.",
          term("replay")),
      text);
}

std::string remedies_part(const PageData& data) {
  std::string table =
      "<div class=\"scroll\"><table class=\"runs\"><thead><tr><th scope=\"col\">run</th><th "
      "scope=\"col\" class=\"plan\">plan</th><th scope=\"col\">steps</th>"
      "<th scope=\"col\">loss</th><th scope=\"col\">offset</th><th scope=\"col\">gradient norm</th><th "
      "scope=\"col\">ties, %</th>"
      "<th scope=\"col\">state</th></tr></thead><tbody>\n";
  for (size_t n = 0; n < data.runs.size(); ++n) {
    const RunRecords& run = data.runs[n];
    const double ties = last_largest(run, "tied_rows");
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
        run.has_steps() ? count(run.steps.back() + 1) : "0", cell(recent(run.loss), 4),
        cell(last_offset(run), 3), cell(recent(run.gradient_norm), 3), cell(100 * ties, 2),
        badge(state_of(run, data.symptoms[n])));
  }
  table += "</tbody></table></div>\n";
  const RunRecords& run = data.runs[data.subject];
  if (run.verdict && !list_at(*run.verdict, "parts").empty()) {
    DotPlot plot;
    plot.id = "trials", plot.title = "Replays", plot.log_x = true;
    plot.x_label = "offset at the end of the replay, log axis";
    plot.description =
        "Each replay of the same stretch with one thing changed: how large the offset was at its end, and "
        "whether that counts as healed.";
    plot.guides.push_back({kDriftedOffset, "drifted beyond here"});
    for (const VerdictPartRow& part : kVerdictParts)
      if (const Json* const trial = part_of(*run.verdict, part.name)) {
        const double offset = number_at(*trial, "offset");
        const bool judged = trial->contains("heals");
        plot.dots.push_back(
            {std::string(part.label),
             fmt::format("{}{}", figure(offset), judged ? heals(*trial) ? " · heals" : " · derails" : ""),
             judged ? heals(*trial) ? "good" : "bad" : "unknown", offset});
      }
    const double begin = number_at(*run.verdict, "begin"), end = number_at(*run.verdict, "end");
    table += fmt::format(
        "<h3>The same stretch of {} again, one thing changed each time</h3><p class=\"lead\">Steps {} to {}, "
        "on the run's own batches.</p>{}",
        escape(run.label), whole(begin), whole(end), draw(plot));
  } else if (data.symptoms[data.subject].kind != Symptom::Kind::none) {
    table += missing("No replay compares remedies on this run yet:",
                     fmt::format("evenkeel isolate {}", shell_word(run.folder.string())));
  }
  if (data.runs.size() == 1)
    table += missing(
        "To compare runs, name several:",
        fmt::format("evenkeel report {} OTHER_RUN... -o report.html", shell_word(run.folder.string())));
  return section("remedies", "Remedies compared",
                 fmt::format("The runs of this page, then every {} that was tried on the one that ails.",
                             term("stabiliser")),
                 table);
}

std::string lead_part(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  const std::string lead =
      fmt::format("When each warning sign spoke in {}, and how long before the {} moved: its {}.",
                  escape(run.label), term("loss"), term("lead time"));
  if (data.leads.empty()) {
    if (!ails(run, data.symptoms[data.subject]))
      return section("lead", "Lead time of each indicator", "",
                     missing("No run of this page ails: there is nothing to warn of.", ""));
    return section("lead", "Lead time of each indicator", lead,
                   missing("No indicator could be judged on this run. They need records of every step:",
                           "evenkeel train ... --probe-every 50 --out NEW_RUN; evenkeel indicators --help"));
  }
  DotPlot plot;
  plot.id = "leads", plot.title = "Lead time", plot.x_label = "step at which it spoke";
  plot.description = "The step at which each indicator spoke; the rule is where the loss moved.";
  if (data.loss_moved) plot.guides.push_back({static_cast<double>(*data.loss_moved), "the loss moved"});
  std::string meanings;
  for (const LeadTime& l : data.leads) {
    const std::string spoke = data.loss_moved
                                  ? *data.loss_moved >= l.spoke
                                        ? fmt::format("{} steps before", count(*data.loss_moved - l.spoke))
                                        : fmt::format("{} steps after", count(l.spoke - *data.loss_moved))
                                  : fmt::format("step {}", count(l.spoke));
    plot.dots.push_back({l.name,
                         l.false_alarms > 0 ? fmt::format("{}, {} false", spoke, l.false_alarms) : spoke,
                         !data.loss_moved || l.spoke > *data.loss_moved ? "unknown"
                         : l.false_alarms > 0                           ? "bad"
                                                                        : "good",
                         static_cast<double>(l.spoke)});
    meanings += fmt::format("<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td></tr>\n",
                            escape(l.name), escape(l.meaning), escape(l.rule),
                            l.head >= 0 ? fmt::format("layer {} head {}", l.layer, l.head) : "the whole run");
  }
  const int64_t healthy = data.leads[0].healthy;
  return section(
      "lead", "Lead time of each indicator", lead,
      draw(plot) + fmt::format("<details class=\"data\"><summary>What each of them is</summary><div "
                               "class=\"scroll\"><table class=\"settings\"><thead><tr>"
                               "<th scope=\"col\">indicator</th><th scope=\"col\">is</th><th "
                               "scope=\"col\">rule</th><th scope=\"col\">spoke in</th></tr></thead>"
                               "<tbody>\n{}</tbody></table></div></details>\n",
                               meanings),
      fmt::format("<p>{}</p><p>{}</p>",
                  data.loss_moved ? fmt::format("The loss moved at step {}.", count(*data.loss_moved))
                                  : "The loss has not moved yet, or has no healthy twin to move from.",
                  healthy > 0 ? fmt::format("Each speaks at the lowest level that none of the {} healthy "
                                            "run{} of this page comes to.",
                                            healthy, healthy == 1 ? "" : "s")
                              : "No healthy run is on this page: levels are those for a run that stands "
                                "alone, and false alarms are not known."));
}

namespace {

std::string value_text(const TomlValue& value) {
  if (const auto* text = value.get_if<std::string>()) return *text;
  if (const auto* n = value.get_if<int64_t>()) return std::to_string(*n);
  if (const auto* x = value.get_if<double>()) return fmt::format("{}", *x);
  if (const auto* b = value.get_if<bool>()) return *b ? "true" : "false";
  if (const auto* list = value.get_if<TomlValue::Array>()) return fmt::format("{} entries", list->size());
  return "a table";
}

// "table.key" -> value, in the file's order.
std::vector<std::pair<std::string, std::string>> settings_of(const RunRecords& run) {
  std::vector<std::pair<std::string, std::string>> all;
  if (!run.config) return all;
  for (const auto& entry : run.config->entries()) {
    if (const TomlTable* const table = entry->value.get_if<TomlTable>())
      for (const auto& inner : table->entries())
        all.emplace_back(entry->key + "." + inner->key, value_text(inner->value));
    else
      all.emplace_back(entry->key, value_text(entry->value));
  }
  return all;
}

}  // namespace

std::string repeat_part(const PageData& data) {
  std::vector<std::vector<std::pair<std::string, std::string>>> settings;
  std::vector<std::string> keys;
  for (const RunRecords& run : data.runs) {
    settings.push_back(settings_of(run));
    for (const auto& [key, value] : settings.back())
      if (std::find(keys.begin(), keys.end(), key) == keys.end() && keys.size() < 500) keys.push_back(key);
  }
  std::string different, same;
  for (const std::string& key : keys) {
    std::set<std::string> values;
    std::string row = fmt::format("<tr><th scope=\"row\">{}</th>", escape(key));
    for (const auto& of_run : settings) {
      const auto found =
          std::find_if(of_run.begin(), of_run.end(), [&](const auto& s) { return s.first == key; });
      const std::string value = found == of_run.end() ? "–" : found->second;
      values.insert(value);
      row += fmt::format("<td>{}</td>", escape(value));
    }
    (values.size() > 1 ? different : same) += row + "</tr>\n";
  }
  std::string head = "<thead><tr><th scope=\"col\">setting</th>";
  for (size_t n = 0; n < data.runs.size(); ++n)
    head +=
        fmt::format("<th scope=\"col\" class=\"{}\">{}</th>", colour_of(data, n), escape(data.runs[n].label));
  head += "</tr></thead>";
  std::string text;
  if (!different.empty())
    text += fmt::format(
        "<h3>What differs</h3><div class=\"scroll\"><table "
        "class=\"settings\">{}<tbody>\n{}</tbody></table></div>\n",
        head, different);
  if (!same.empty())
    text += fmt::format(
        "<details class=\"data\"{}><summary>{}</summary><div class=\"scroll\"><table "
        "class=\"settings\">{}<tbody>\n{}</tbody></table></div></details>\n",
        "", data.runs.size() > 1 ? "What is the same in all runs" : "All settings", head, same);
  if (keys.empty())
    text += missing("No config.toml could be read: how these runs were made is not known.", "");

  std::string commands, all_runs;
  for (const RunRecords& run : data.runs) {
    const std::string folder = shell_word(run.folder.string());
    all_runs += " " + folder;
    if (run.config)
      commands += fmt::format("evenkeel train --config {} --out {}\n",
                              shell_word((run.folder / "config.toml").string()),
                              shell_word(run.folder.string() + "-again"));
  }
  const RunRecords& run = data.runs[data.subject];
  const std::string folder = shell_word(run.folder.string());
  if (data.symptoms[data.subject].kind != Symptom::Kind::none || run.verdict)
    commands += fmt::format("evenkeel isolate {}\n", folder);
  if (data.view)
    commands += fmt::format("evenkeel capture {} --layer {} --heads {} -o {}\n",
                            shell_word(fmt::format("{}@{}", run.folder.string(), data.view->step)),
                            data.view->layer, data.view->head, shell_word(data.view->file));
  commands += fmt::format("evenkeel report{} -o report.html\n", all_runs);
  text += fmt::format("<h3>Commands</h3><pre class=\"commands\" tabindex=\"0\"><code>{}</code></pre>\n",
                      escape(commands));
  return section("repeat", "Repeat it",
                 "A run repeats to the last bit from its own configuration, on the same backend; these are "
                 "the commands that made "
                 "what is on this page.",
                 text);
}

}  // namespace evenkeel
