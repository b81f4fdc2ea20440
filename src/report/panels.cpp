#include "report/panels.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "numerics/explain.h"
#include "report/html.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

// The first guilty head of a verdict.
std::optional<std::pair<int64_t, int64_t>> guilty_head(const RunRecords& run) {
  const std::vector<RecordObject> heads = run.verdict_record().objects("heads");
  if (heads.empty()) return {};
  const double layer = heads[0].number("layer").value_or(-1), head = heads[0].number("head").value_or(-1);
  const auto inside = [](double n, int64_t count_of) { return n >= 0 && n < static_cast<double>(count_of); };
  if (!inside(layer, run.metrics.layers) || !inside(head, run.metrics.heads)) return {};
  return std::pair(static_cast<int64_t>(layer), static_cast<int64_t>(head));
}

// The head whose offset is largest at the end.
std::optional<std::pair<int64_t, int64_t>> largest_head(const RunRecords& run) {
  const Series* const series = find_offset(run);
  if (!series) return {};
  const std::span<const double> last = series->row(series->steps.size() - 1);
  int64_t best = -1;
  double largest = -1;
  for (size_t n = 0; n < last.size(); ++n)
    if (last[n] > largest) largest = last[n], best = static_cast<int64_t>(n);
  if (best < 0) return {};
  return std::pair(best / run.metrics.heads, best % run.metrics.heads);
}

double number_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? kUnknown : record_number(*found).value_or(kUnknown);
}
std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || !found->is_string() ? "" : found->get<std::string>();
}

// Every digit: where bits are counted, a rounded decimal would be one more rounding.
std::string exactly(double x) {
  const std::string text = shortest(x);
  return text.starts_with('-') ? "−" + text.substr(1) : text;
}

// Two runs of the same name are distinguished by their folders.
void name_apart(std::vector<RunRecords>& runs) {
  std::vector<std::string> labels;
  for (const RunRecords& run : runs) labels.push_back(run.label);
  for (size_t n = 0; n < runs.size(); ++n)
    if (std::count(labels.begin(), labels.end(), labels[n]) > 1) runs[n].label = runs[n].folder.string();
}

}  // namespace

bool ails(const RunRecords& run, const Symptom& symptom) {
  if (const std::string cause = run.verdict_record().text("cause"); !cause.empty())
    return cause != name(Cause::healthy);
  return !symptom.is_healthy();
}

PageData page_data(std::vector<RunRecords> runs) {
  PageData data;
  data.runs = std::move(runs);
  name_apart(data.runs);
  for (const RunRecords& run : data.runs)
    data.symptoms.push_back(find_symptom(run_record(run.metrics, run.finding, run.events, run.warmup())));
  for (size_t n = data.runs.size(); n-- > 0;)
    if (ails(data.runs[n], data.symptoms[n])) data.subject = n;
  // One that is known to ail before one of which nothing is known.
  for (size_t n = data.runs.size(); n-- > 0;)
    if (const Symptom& found = data.symptoms[n];
        ails(data.runs[n], found) && (found.kind != Symptom::Kind::none || found.is_healthy()))
      data.subject = n;
  const RunRecords& run = data.runs[data.subject];
  const Symptom& symptom = data.symptoms[data.subject];
  if (const auto guilty = guilty_head(run))
    std::tie(data.layer, data.head) = *guilty;
  else if (symptom.kind == Symptom::Kind::offset)
    data.layer = symptom.layer, data.head = symptom.head;
  else if (const auto largest = largest_head(run))
    std::tie(data.layer, data.head) = *largest;
  return data;
}

std::string section(const std::string& id, const std::string& heading, const std::string& lead,
                    const std::string& content, const std::string& aside) {
  return fmt::format(
      "<section id=\"{}\" aria-labelledby=\"{}-h\">\n<header><h2 id=\"{}-h\">{}</h2>{}</header>\n"
      "<div class=\"beside\"><div class=\"drawings\">\n{}</div>{}</div>\n</section>\n",
      id, id, id, heading, lead.empty() ? "" : fmt::format("<p class=\"lead\">{}</p>", lead), content,
      aside.empty() ? "" : fmt::format("<aside>{}</aside>", aside));
}

std::string missing(const std::string& what, const std::string& command) {
  return fmt::format("<p class=\"missing\">{}{}</p>\n", escape(what),
                     command.empty() ? "" : fmt::format(" <code>{}</code>", escape(command)));
}

std::string colour_of(const PageData& data, size_t run) {
  constexpr size_t kColours = 8;  // page.css
  if (run == data.subject) return "c0";
  return fmt::format("c{}", (run < data.subject ? run + 1 : run) % kColours);
}

double recent(const std::vector<double>& values) {
  constexpr size_t kRecent = DivergenceWatch::kWindow;
  double sum = 0;
  size_t n = 0;
  for (size_t k = values.size(); k-- > 0 && n < kRecent;)
    if (std::isfinite(values[k])) sum += values[k], ++n;
  return n > 0 ? sum / static_cast<double>(n) : kUnknown;
}

std::string badge(const RunRecords& run, const Symptom& symptom) {
  const char *word = "healthy", *style = "good";
  const std::string cause = run.verdict_record().text("cause");
  const bool is_healthy = cause == name(Cause::healthy),
             established = !cause.empty() && cause != name(Cause::not_established);
  if (!run.has_steps())
    word = "no records", style = "unknown";
  else if (symptom.kind == Symptom::Kind::none && !symptom.is_healthy())
    word = "not established", style = "unknown";
  else if (established && !is_healthy)
    word = "failed", style = "bad";
  else if (!is_healthy && symptom.kind != Symptom::Kind::none)
    word = symptom.kind == Symptom::Kind::spikes ? "loss jumps" : "drifting", style = "bad";
  return fmt::format("<span class=\"state {}\">{}</span>", style, word);
}

double last_largest(const RunRecords& run, std::string_view field) {
  const Series* const series = find_series(run, field);
  if (!series) return kUnknown;
  double largest = kUnknown;
  for (const double value : series->row(series->steps.size() - 1))
    if (!std::isnan(value) && !(value <= largest)) largest = value;
  return largest;
}

double limit_of(const RunRecords& run) {
  const Series* const series = find_offset(run);
  if (!series || series->empty()) return limit_from_run({}).limit;
  const std::span<const double> last = series->row(series->steps.size() - 1);
  return limit_from_run({last.begin(), last.end()}).limit;
}
double last_offset(const RunRecords& run) {
  const double offset = last_largest(run, name(HeadFact::offset));
  return std::isnan(offset) ? last_largest(run, name(HeadFact::largest_lse)) : offset;
}

Line head_line(const Series& series, int64_t head) {
  Line line;
  for (size_t n = 0; n < series.steps.size(); ++n) {
    line.x.push_back(static_cast<double>(series.steps[n]));
    line.y.push_back(series.row(n)[static_cast<size_t>(head)]);
  }
  return line;
}

const Series* find_series(const RunRecords& run, std::string_view name) { return run.metrics.by_head(name); }

const Series* find_offset(const RunRecords& run) {
  const Series* const offset = find_series(run, name(HeadFact::offset));
  return offset ? offset : find_series(run, name(HeadFact::largest_lse));
}

std::string bits_of(const Json& e) {
  if (!e.is_object()) return "";
  const auto list = [&](const char* key) {
    const auto found = e.find(key);
    return found != e.end() && found->is_array() ? *found : Json::array();
  };
  const auto truth = [](const Json& object, const char* key) {
    const auto found = object.find(key);
    return found != object.end() && found->is_boolean() && found->get<bool>();
  };
  constexpr size_t kLongest = 72;  // bits of a row
  const auto cells = [](std::string_view digits, const char* style) {
    std::string text;
    for (const char c : digits.substr(0, kLongest))
      text += c == '.' ? "<i class=\"point\">.</i>"
                       : fmt::format("<b class=\"{}\">{}</b>", style, c == '1' ? 1 : 0);
    if (digits.size() > kLongest) text += "<i>…</i>";
    return text;
  };
  // Every row on one grid: the point in the same column, so that the carry is seen to leave it.
  size_t before_point = 1;
  const std::string exact_digits = text_at(e, "exact_digits");
  const auto whole_places = [](const std::string& digits) {
    return std::min(digits.find('.'), digits.size());
  };
  before_point = std::max(before_point, whole_places(exact_digits));
  for (const Json& term_of : list("aligned"))
    if (term_of.is_object()) before_point = std::max(before_point, whole_places(text_at(term_of, "digits")));
  const auto row = [&](const std::string& what, bool negative, const std::string& digits,
                       const std::string& cells_html, const std::string& remark) {
    const size_t places = std::min(whole_places(digits), size_t{16});
    std::string blank;
    for (size_t n = places; n < std::min(before_point, size_t{16}); ++n) blank += "<b class=\"none\"></b>";
    return fmt::format("<tr><th scope=\"row\">{}</th><td class=\"bits\"><i>{}</i>{}{}</td><td>{}</td></tr>\n",
                       what, negative ? "−" : "+", blank, cells_html, remark);
  };
  std::string text = "<div class=\"scroll\"><table class=\"addition\"><tbody>\n";
  for (const Json& term_of : list("aligned")) {
    if (!term_of.is_object()) continue;
    const std::string digits = text_at(term_of, "digits");
    const double shift = number_at(term_of, "shift");
    text += row(escape(text_at(term_of, "name")), truth(term_of, "negative"), digits, cells(digits, "kept"),
                shift > 0 ? fmt::format("moved {} place{} right to the common exponent", figure(shift, 1),
                                        shift == 1 ? "" : "s")
                          : "");
  }
  if (!exact_digits.empty())
    text += row("exact sum", truth(e, "exact_negative"), exact_digits, cells(exact_digits, "kept"),
                truth(e, "carry_out") ? "a carry leaves the point: one more bit will fall off" : "");
  for (const Json& r : list("roundings")) {
    if (!r.is_object()) continue;
    const std::string kept = text_at(r, "kept"), cut = text_at(r, "cut");
    if (kept.empty()) continue;
    const std::string_view rest = cut;
    const std::string direction = text_at(r, "direction");
    const double value = number_at(r, "value");
    text += row(fmt::format("to {}", escape(text_at(r, "rounding"))), value < 0, kept,
                cells(kept, "kept") + "<i class=\"edge\"></i>" +
                    cells(rest.substr(0, std::min<size_t>(1, rest.size())), "round") +
                    (rest.size() > 1 ? cells(rest.substr(1), "sticky") : ""),
                direction == "exact"
                    ? "nothing is lost"
                    : fmt::format("goes {} to {}", direction == "up" ? "away from zero" : "toward zero",
                                  exactly(value)));
  }
  text += "</tbody></table></div>\n";
  text += fmt::format(
      "<p class=\"reading\"><span class=\"swatch kept\"></span> kept · <span class=\"swatch round\"></span> "
      "{} · "
      "<span class=\"swatch sticky\"></span> {}</p>\n",
      term("round bit"), term("sticky bit", "sticky bits"));
  text += fmt::format(
      "<p class=\"reading\"><code>{}</code> is {} exactly and is stored as {}: an error of {}, {} of a "
      "step.</p>\n",
      escape(text_at(e, "expression")), exactly(number_at(e, "exact")), exactly(number_at(e, "value")),
      figure(number_at(e, "error"), 4), figure(number_at(e, "error_steps"), 2));
  return text;
}

std::string body_of(const PageData& data) {
  const std::string sections =
      offset_panel(data) + loss_part(data) + chain_part(data) + guard_part(data) + run_panels(data) +
      capture_panels(data) + remedies_part(data) + lead_part(data) + repeat_part(data) +
      section("words", "Words", "Every term of this page in one sentence.", glossary());
  static constexpr std::pair<const char*, const char*> kContents[] = {{"offset", "Offset"},
                                                                      {"loss", "Loss"},
                                                                      {"chain", "Chain"},
                                                                      {"guard", "Guard"},
                                                                      {"norms", "Norms"},
                                                                      {"heads", "W_Q"},
                                                                      {"ties", "Ties"},
                                                                      {"leak", "Leak"},
                                                                      {"probes", "Not recorded"},
                                                                      {"capture", "Inside a head"},
                                                                      {"directions", "Directions"},
                                                                      {"features", "Features"},
                                                                      {"bits", "Bits"},
                                                                      {"remedies", "Remedies"},
                                                                      {"lead", "Lead time"},
                                                                      {"repeat", "Repeat"},
                                                                      {"words", "Words"}};
  std::string contents = "<nav class=\"contents\" aria-label=\"Contents\">";
  for (const auto& [id, label] : kContents)
    if (sections.find(fmt::format("<section id=\"{}\"", id)) != std::string::npos)
      contents += fmt::format("<a href=\"#{}\">{}</a>", id, label);
  return verdict_part(data) + contents + "</nav>\n" + sections;
}

}  // namespace evenkeel
