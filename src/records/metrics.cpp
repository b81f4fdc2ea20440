#include "records/metrics.h"

#include <algorithm>
#include <limits>
#include <unordered_map>

#include "base/error.h"
#include "records/record_json.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// A step is at most so far behind the one before it: beyond, its number is damaged.
constexpr int64_t kMostSkipped = int64_t{1} << 24;

// Names of a step's or of a probe's numbers by head, aliases included, to the table's name.
const std::unordered_map<std::string_view, std::string_view>& head_names(std::string_view inside) {
  const auto make = [](std::string_view of) {
    std::unordered_map<std::string_view, std::string_view> names;
    for (const RecordField& field : kRecordFields) {
      if (field.file != RecordFile::metrics || field.inside != of || field.shape != FieldShape::per_head)
        continue;
      names[field.name] = field.name;
      for (size_t begin = 0; begin < field.aliases.size();) {
        const size_t end = std::min(field.aliases.find(' ', begin), field.aliases.size());
        names[field.aliases.substr(begin, end - begin)] = field.name;
        begin = end + 1;
      }
    }
    return names;
  };
  static const auto of_step = make(""), of_probe = make("probe");
  return inside.empty() ? of_step : of_probe;
}

size_t fact_index(std::string_view name) {
  return static_cast<size_t>(std::find(kHeadFactNames.begin(), kHeadFactNames.end(), name) -
                             kHeadFactNames.begin());
}

void append(Series& series, int64_t step, size_t line, std::span<const double> values) {
  series.width = values.size();
  series.steps.push_back(step);
  series.lines.push_back(line);
  series.values.insert(series.values.end(), values.begin(), values.end());
}

void keep_lines(Series& series, size_t lines) {
  const auto kept = static_cast<size_t>(std::lower_bound(series.lines.begin(), series.lines.end(), lines) -
                                        series.lines.begin());
  series.steps.resize(kept), series.lines.resize(kept), series.values.resize(kept * series.width);
}

template <class Action>
void for_all_series(Metrics& metrics, Action action) {
  for (Series* series :
       {&metrics.loss, &metrics.gradient_norm, &metrics.validation_loss, &metrics.probe_loss})
    action(*series);
  for (Series& series : metrics.facts) action(series);
  for (auto* all : {&metrics.probes})
    for (auto& [name, series] : *all) action(series);
  for (auto& [name, series] : metrics.norms) action(series);
}

void take_number(Metrics& metrics, const RecordObject& line, std::string_view name, int64_t step,
                 Series& series) {
  const Json* const value = line.find(name);
  if (!value) return;
  if (const std::optional<double> x = record_number(*value))
    append(series, step, metrics.steps.size() - 1, std::span(&*x, 1));
  else
    ++metrics.misshapen;
}

void take_heads(Metrics& metrics, const Json& value, int64_t step, Series& series) {
  const std::vector<double> values = record_heads(value, metrics.layers, metrics.heads);
  if (values.empty())
    ++metrics.misshapen;
  else
    append(series, step, metrics.steps.size() - 1, values);
}

void take_probe(Metrics& metrics, const RecordObject& probe, const RecordObject& line, int64_t line_step) {
  // Of a step before the line's, where it was computed beside the training; never of one before the last probe's.
  int64_t after = 0;
  for (const auto& [name, series] : metrics.probes)
    if (!series.empty()) after = std::max(after, series.steps.back() + 1);
  const std::optional<int64_t> own = probe.step();
  const int64_t step = std::clamp(own.value_or(line_step), std::min(after, line_step), line_step);
  const size_t place = metrics.steps.size() - 1;
  // Its own loss; the first version's records have only the line's.
  const double loss = (own ? probe.number("loss") : line.number("loss")).value_or(kUnknown);
  append(metrics.probe_loss, step, place, std::span(&loss, 1));
  for (const auto& [key, value] : probe.json().items())
    if (const auto found = head_names("probe").find(key); found != head_names("probe").end()) {
      auto series = metrics.probes.find(found->second);
      if (series == metrics.probes.end())
        series = metrics.probes.emplace(std::string(found->second), Series()).first;
      take_heads(metrics, value, step, series->second);
    }
  if (const std::optional<RecordObject> norms = probe.object("norms"))
    for (const auto& [weight, value] : norms->json().items()) {
      const double norm = record_number(value).value_or(kUnknown);
      append(metrics.norms[weight], step, place, std::span(&norm, 1));
    }
}

}  // namespace

std::span<const double> Series::of_line(size_t line) const {
  const auto found = std::lower_bound(lines.begin(), lines.end(), line);
  if (found == lines.end() || *found != line) return {};
  return row(static_cast<size_t>(found - lines.begin()));
}

const Series* Metrics::by_head(std::string_view name) const {
  const size_t fact = fact_index(name);
  if (fact < kHeadFactCount && !facts[fact].empty()) return &facts[fact];
  const auto found = probes.find(name);
  return found != probes.end() && !found->second.empty() ? &found->second : nullptr;
}

std::vector<double> Metrics::by_line(const Series& series) const {
  std::vector<double> values(steps.size(), kUnknown);
  for (size_t n = 0; n < series.lines.size(); ++n) values[series.lines[n]] = series.values[n];
  return values;
}

std::vector<double> Metrics::by_step(const Series& series) const {
  // One step in so many is recorded, behind so many that are not: a run goes on in a folder of its own.
  constexpr int64_t kSparsest = 64, kMostBefore = 1 << 14;
  if (empty() || steps.back() > kMostBefore + kSparsest * static_cast<int64_t>(steps.size())) return {};
  std::vector<double> values(static_cast<size_t>(steps.back() + 1), kUnknown);
  for (size_t n = 0; n < series.lines.size(); ++n)
    values[static_cast<size_t>(steps[series.lines[n]])] = series.values[n];
  return values;
}

void Metrics::take(const JsonLine& json) {
  const RecordObject line(json.object, RecordFile::metrics);
  const std::optional<int64_t> step = line.step();
  if (!step || *step - (steps.empty() ? -1 : steps.back()) > kMostSkipped) {
    ++without_step;
    return;
  }
  if (!steps.empty() && *step <= steps.back()) {
    ++went_back;
    const auto kept =
        static_cast<size_t>(std::lower_bound(steps.begin(), steps.end(), *step) - steps.begin());
    steps.resize(kept), ends.resize(kept);
    for_all_series(*this, [&](Series& series) { keep_lines(series, kept); });
  }
  steps.push_back(*step);
  ends.push_back(json.end);
  if (const auto found = line.number("schema"); found && *found > static_cast<double>(schema) && *found < 1e9)
    schema = static_cast<int64_t>(*found);
  take_number(*this, line, "loss", *step, loss);
  take_number(*this, line, "gradient_norm", *step, gradient_norm);
  take_number(*this, line, "validation_loss", *step, validation_loss);
  for (const auto& [key, value] : json.object.items())
    if (const auto found = head_names("").find(key); found != head_names("").end())
      take_heads(*this, value, *step, facts[fact_index(found->second)]);
  if (const std::optional<RecordObject> probe = line.object("probe")) take_probe(*this, *probe, line, *step);
}

Metrics read_metrics(const fs::path& folder, HeadShape shape) {
  Metrics metrics;
  metrics.layers = shape.layers, metrics.heads = shape.heads;
  // In pieces, not mapped: a run that rolls back shortens the file under its readers.
  metrics.file = read_json_lines(record_path(folder, RecordFile::metrics),
                                 [&](const JsonLine& line) { metrics.take(line); });
  return metrics;
}

Metrics parse_metrics(std::string_view text, HeadShape shape) {
  Metrics metrics;
  metrics.layers = shape.layers, metrics.heads = shape.heads;
  metrics.file = parse_json_lines(text, std::string(name(RecordFile::metrics)),
                                  [&](const JsonLine& line) { metrics.take(line); });
  return metrics;
}

std::string why_nothing_was_read(const Metrics& metrics, const std::string& file) {
  if (!metrics.empty()) return "";
  const std::string expected =
      fmt::format("{}: no record could be read: expected a line a step, found ", file);
  if (metrics.file.lines == 0)
    return expected + (metrics.file.torn_bytes > 0 ? "a torn line" : "an empty file");
  return expected + fmt::format("{} lines of which {} are no JSON objects and {} have no step",
                                metrics.file.lines, metrics.file.fault_count, metrics.without_step);
}

Metrics read_some_metrics(const fs::path& folder, HeadShape shape) {
  Metrics metrics = read_metrics(folder, shape);
  const std::string why = why_nothing_was_read(metrics, record_path(folder, RecordFile::metrics).string());
  require_data(why.empty(), "{}", why);
  return metrics;
}

std::vector<std::string> notes_of(const JsonLinesResult& result, RecordFile file) {
  std::vector<std::string> notes;
  if (result.fault_count > 0)
    notes.push_back(
        fmt::format("{}: {} of {} lines cannot be read and {} left out, the first of them line {}",
                    name(file), result.fault_count, result.lines, result.fault_count == 1 ? "is" : "are",
                    result.faults.empty() ? 0 : result.faults[0].line));
  if (result.torn_bytes > 0)
    notes.push_back(fmt::format(
        "{} ends in the middle of a line: the run is still being written, or was killed", name(file)));
  return notes;
}

std::vector<std::string> notes_of(const Metrics& metrics) {
  std::vector<std::string> notes = notes_of(metrics.file, RecordFile::metrics);
  const auto add = [&](int64_t count, const char* of_one, const char* of_several) {
    if (count > 0)
      notes.push_back(
          fmt::format("{}: {} {}", name(RecordFile::metrics), count, count == 1 ? of_one : of_several));
  };
  add(metrics.without_step, "line has no step that a run can be at and is left out",
      "lines have no step that a run can be at and are left out");
  add(metrics.misshapen,
      "field that should be a number, or numbers by layer and head, is none and is left out",
      "fields that should be numbers, or numbers by layer and head, are none and are left out");
  return notes;
}

void add_number(Json& line, std::string_view name, double value) {
  require(find_field(RecordFile::metrics, "", name) != nullptr,
          "[records] expected a field of metrics.jsonl, got {}", name);
  line[std::string(name)] = value;
}

void add_fact(Json& line, HeadFact fact, int64_t L, int64_t H, const std::vector<double>& values,
              bool every_digit) {
  std::vector<double> written = values;
  if (!every_digit)
    for (double& value : written) value = five_digits(value);
  line[std::string(name(fact))] = heads_json(L, H, written);
}

MetricsWriter::MetricsWriter(const fs::path& folder, std::optional<uint64_t> keep)
    : file_(record_path(folder, RecordFile::metrics), {.keep = keep}) {}
void MetricsWriter::write(const Json& line) { file_.write(line); }
void MetricsWriter::sync() { file_.sync(); }

}  // namespace evenkeel
