#include "report/run_records.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/json_lines.h"
#include "base/whole_file.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kSchema = 1;                      // of the records that this program knows
constexpr int64_t kLargestStep = int64_t{1} << 40;  // a step that no run comes to
constexpr int64_t kMostHeads = int64_t{1} << 16;    // L H
constexpr size_t kLargestFile = size_t{1} << 26;    // bytes, of the files that are read whole

// By head, every step: the names that probe_recorder.h and trainer.h give them.
constexpr const char* kFacts[] = {"largest_score",  "largest_row_mean", "mean_lse",
                                  "largest_lse",    "tied_rows",        "residual_mean",
                                  "residual_error", "residual_rms",     "delta_rms"};

std::optional<int64_t> step_at(const Json& object) {
  const auto found = object.find("step");
  if (found == object.end() || !found->is_number_integer()) return {};
  const auto step = found->get<int64_t>();
  if (step < 0 || step > kLargestStep) return {};
  return step;
}

// (L, H) numbers, appended to a series; nothing where they are not of the run's shape, which the first that is read gives.
void append_heads(const Json& value, int64_t step, RunRecords& run, HeadSeries& series) {
  if (!value.is_array() || value.empty() || !value[0].is_array() || value[0].empty()) return;
  const auto L = static_cast<int64_t>(value.size()), H = static_cast<int64_t>(value[0].size());
  if (run.layers == 0 && L * H <= kMostHeads) run.layers = L, run.heads = H;
  if (L != run.layers) return;
  std::vector<float> row;
  for (const Json& layer : value) {
    if (!layer.is_array() || static_cast<int64_t>(layer.size()) != run.heads) return;
    for (const Json& n : layer) row.push_back(static_cast<float>(json_number(n).value_or(kUnknown)));
  }
  series.steps.push_back(step);
  series.values.insert(series.values.end(), row.begin(), row.end());
}

// Records of a step that comes again, or of a later one, hold no longer: the run went back.
void cut_from(int64_t step, RunRecords& run) {
  const auto keep = [step](const std::vector<int64_t>& steps) {
    return static_cast<size_t>(std::lower_bound(steps.begin(), steps.end(), step) - steps.begin());
  };
  const size_t n = keep(run.steps);
  run.steps.resize(n), run.loss.resize(n), run.gradient_norm.resize(n), run.validation_loss.resize(n);
  const auto heads = static_cast<size_t>(run.layers * run.heads);
  for (auto* all : {&run.facts, &run.probes})
    for (auto& [name, series] : *all) {
      series.steps.resize(keep(series.steps));
      series.values.resize(series.steps.size() * heads);
    }
  run.norm_steps.resize(keep(run.norm_steps));
  for (auto& [name, values] : run.norms) values.resize(std::min(values.size(), run.norm_steps.size()));
}

void read_probe(const Json& probe, int64_t step, RunRecords& run) {
  for (const auto& [name, value] : probe.items())
    if (value.is_array()) append_heads(value, step, run, run.probes[name]);
  const auto norms = probe.find("norms");
  if (norms == probe.end() || !norms->is_object()) return;
  for (const auto& [name, value] : norms->items()) {
    std::vector<double>& values = run.norms[name];
    values.resize(run.norm_steps.size(), kUnknown);
    values.push_back(json_number(value).value_or(kUnknown));
  }
  run.norm_steps.push_back(step);
  for (auto& [name, values] : run.norms) values.resize(run.norm_steps.size(), kUnknown);
}

void note_schema(const Json& object, const char* file, RunRecords& run) {
  const auto found = object.find("schema");
  if (found != object.end() && found->is_number_integer() && found->get<int64_t>() > kSchema)
    run.notes.push_back(
        fmt::format("{} is of schema {}, which is newer than the {} that this program knows: what has "
                    "another name there is not shown",
                    file, found->get<int64_t>(), kSchema));
}

Json parse_object(std::string_view text, const char* file, RunRecords& run) {
  Json json;
  // A limit to the depth: the parser's own memory is on the heap, but whoever walks a value recurses.
  constexpr int kDeepest = 64;
  bool too_deep = false;
  const Json::parser_callback_t watch = [&](int depth, Json::parse_event_t, Json&) {
    too_deep |= depth > kDeepest;
    return depth <= kDeepest;
  };
  try {
    json = Json::parse(text, watch, /*allow_exceptions=*/true);
  } catch (const std::exception&) {
    json = Json(Json::value_t::discarded);
  }
  if (!json.is_object() || too_deep) {
    run.notes.push_back(fmt::format("{} is there, but it is no JSON object: it is not shown", file));
    return Json::object();
  }
  note_schema(json, file, run);
  return json;
}

void note_faults(const JsonLinesResult& result, const char* file, RunRecords& run) {
  if (result.fault_count > 0)
    run.notes.push_back(
        fmt::format("{}: {} of {} lines cannot be read and {} left out, the first of them line {}", file,
                    result.fault_count, result.lines, result.fault_count == 1 ? "is" : "are",
                    result.faults.empty() ? 0 : result.faults[0].line));
  if (result.torn_bytes > 0)
    run.notes.push_back(
        fmt::format("{} ends in the middle of a line: the run is still being written, or was killed", file));
}

void take_step(const Json& line, RunRecords& run) {
  const std::optional<int64_t> step = step_at(line);
  if (!step) return;
  note_schema(line, "metrics.jsonl", run);
  if (run.has_steps() && *step <= run.steps.back()) cut_from(*step, run);
  run.steps.push_back(*step);
  run.loss.push_back(number_at(line, "loss"));
  run.gradient_norm.push_back(number_at(line, "gradient_norm"));
  run.validation_loss.push_back(number_at(line, "validation_loss"));
  for (const char* fact : kFacts)
    if (const auto found = line.find(fact); found != line.end())
      append_heads(*found, *step, run, run.facts[fact]);
  if (const auto probe = line.find("probe"); probe != line.end() && probe->is_object()) {
    // Of a step before the line's, where it was computed beside the training; never of one before the last probe's.
    int64_t after = 0;
    for (const auto& [name, series] : run.probes)
      if (!series.steps.empty()) after = std::max(after, series.steps.back() + 1);
    read_probe(*probe, std::clamp(step_at(*probe).value_or(*step), std::min(after, *step), *step), run);
  }
}

void note_metrics(const JsonLinesResult& result, RunRecords& run) {
  note_faults(result, "metrics.jsonl", run);
  if (!run.has_steps()) run.notes.emplace_back("metrics.jsonl holds no step yet");
}

RunEvent::Kind guard_kind(const std::string& name) {
  return name == "remedy"      ? RunEvent::Kind::guard_remedy
         : name == "roll_back" ? RunEvent::Kind::guard_roll_back
                               : RunEvent::Kind::guard_warning;
}

// The text of one of the run's files, or a note.
std::optional<std::string> text_of(const fs::path& file, RunRecords& run, const char* without) {
  std::error_code error;
  if (!fs::exists(file, error)) {
    if (without) run.notes.push_back(fmt::format("{} is missing: {}", file.filename().string(), without));
    return {};
  }
  try {
    return read_whole_file(file, kLargestFile);
  } catch (const std::exception& fault) {
    run.notes.emplace_back(fault.what());
    return {};
  }
}

// Names of folders: "step-300".
std::optional<int64_t> checkpoint_step(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  int64_t step = 0;
  if (!name.starts_with(kPrefix)) return {};
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0 || step > kLargestStep) return {};
  return step;
}

void find_captures(const fs::path& folder, RunRecords& run) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    if (it->path().extension() == ".safetensors" && it->is_regular_file(error))
      run.captures.push_back(it->path());
  std::sort(run.captures.begin(), run.captures.end());
}

}  // namespace

double number_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? kUnknown : json_number(*found).value_or(kUnknown);
}
std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || !found->is_string() ? "" : found->get<std::string>();
}

void read_metrics(std::string_view text, RunRecords& run) {
  note_metrics(
      parse_json_lines(text, "metrics.jsonl", [&](const JsonLine& line) { take_step(line.object, run); }),
      run);
}

void read_guard(std::string_view text, RunRecords& run) {
  const JsonLinesResult result = parse_json_lines(text, "guard.jsonl", [&](const JsonLine& line) {
    if (const std::optional<int64_t> step = step_at(line.object))
      run.events.push_back({guard_kind(text_at(line.object, "kind")), *step, text_at(line.object, "words")});
  });
  note_faults(result, "guard.jsonl", run);
}

void read_findings(std::string_view text, RunRecords& run) {
  const Json json = parse_object(text, "findings.json", run);
  const auto found = json.find("findings");
  if (found == json.end() || !found->is_array()) return;
  for (const Json& one : *found) {
    if (!one.is_object()) continue;
    const std::optional<int64_t> step = step_at(one);
    if (!step) continue;
    run.finding = Finding{*step, text_at(one, "kind"), text_at(one, "words")};
    run.events.push_back({RunEvent::Kind::finding, *step, run.finding->words});
  }
}

void read_config(std::string_view text, RunRecords& run) {
  try {
    run.config = parse_toml(text, "config.toml");
  } catch (const std::exception& fault) {
    run.notes.push_back(fmt::format("config.toml cannot be read: {}", fault.what()));
    return;
  }
  // [attention] changes = [{ step = 3000, clauses = "..." }]
  const TomlValue* const attention = run.config->find("attention");
  const TomlTable* const table = attention ? attention->get_if<TomlTable>() : nullptr;
  const TomlValue* const changes = table ? table->find("changes") : nullptr;
  const TomlValue::Array* const list = changes ? changes->get_if<TomlValue::Array>() : nullptr;
  if (!list) return;
  for (const TomlValue& change : *list) {
    const TomlTable* const entry = change.get_if<TomlTable>();
    if (!entry) continue;
    const TomlValue *const step = entry->find("step"), *const clauses = entry->find("plan");
    const int64_t* const number = step ? step->get_if<int64_t>() : nullptr;
    const std::string* const words = clauses ? clauses->get_if<std::string>() : nullptr;
    if (number && *number >= 0 && *number <= kLargestStep)
      run.events.push_back({RunEvent::Kind::plan_change, *number, words ? *words : ""});
  }
}

void read_verdict(std::string_view text, RunRecords& run) {
  Json json = parse_object(text, "verdict.json", run);
  if (!json.empty()) run.verdict = std::move(json);
}

RunRecords read_run(const fs::path& folder) {
  RunRecords run;
  run.folder = folder;
  // "runs/a/" is a, too.
  run.label = (folder.has_filename() ? folder : folder.parent_path()).filename().string();
  if (run.label.empty()) run.label = folder.string();
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    run.notes.emplace_back("there is no such folder");
    return run;
  }
  if (const auto text = text_of(folder / "config.toml", run, "how the run was made is not known"))
    read_config(*text, run);
  if (fs::exists(folder / "metrics.jsonl", error)) {
    try {
      // In pieces, not mapped: a run that rolls back shortens the file under its readers.
      note_metrics(read_json_lines(folder / "metrics.jsonl",
                                   [&](const JsonLine& line) { take_step(line.object, run); }),
                   run);
    } catch (const std::exception& fault) {
      run.notes.emplace_back(fault.what());
    }
  } else {
    run.notes.emplace_back("metrics.jsonl is missing: no step is recorded yet");
  }
  if (const auto text = text_of(folder / "guard.jsonl", run, nullptr)) read_guard(*text, run);
  if (const auto text = text_of(folder / "findings.json", run, nullptr)) read_findings(*text, run);
  if (const auto text = text_of(folder / "verdict.json", run, nullptr)) read_verdict(*text, run);
  for (fs::directory_iterator it(folder / "checkpoints", error), end; !error && it != end;
       it.increment(error))
    if (const auto step = checkpoint_step(it->path().filename().string()))
      run.events.push_back({RunEvent::Kind::checkpoint, *step, ""});
  find_captures(folder, run);
  find_captures(folder / "captures", run);
  std::stable_sort(run.events.begin(), run.events.end(),
                   [](const RunEvent& a, const RunEvent& b) { return a.step < b.step; });
  return run;
}

std::string RunRecords::setting(std::string_view table_name, std::string_view key) const {
  if (!config) return "";
  const TomlValue* const table_value = config->find(table_name);
  const TomlTable* const table = table_value ? table_value->get_if<TomlTable>() : nullptr;
  const TomlValue* const value = table ? table->find(key) : nullptr;
  if (!value) return "";
  if (const auto* text = value->get_if<std::string>()) return *text;
  if (const auto* n = value->get_if<int64_t>()) return std::to_string(*n);
  if (const auto* x = value->get_if<double>()) return fmt::format("{}", *x);
  if (const auto* b = value->get_if<bool>()) return *b ? "true" : "false";
  return "";
}

RunRecord RunRecords::record() const {
  RunRecord out;
  out.finding = finding;
  // By step, so that gaps show; not where a damaged step would make that a desert.
  constexpr int64_t kSparsest = 64;
  if (has_steps() && steps.back() <= kSparsest * static_cast<int64_t>(steps.size()) + 1024) {
    out.loss.assign(static_cast<size_t>(steps.back() + 1), kUnknown);
    out.gradient_norm = out.loss;
    for (size_t n = 0; n < steps.size(); ++n) {
      out.loss[static_cast<size_t>(steps[n])] = loss[n];
      out.gradient_norm[static_cast<size_t>(steps[n])] = gradient_norm[n];
    }
  }
  out.layers = layers, out.heads = heads;
  for (const char* name : {"largest_row_mean", "largest_lse"}) {
    const auto found = facts.find(name);
    if (found == facts.end() || found->second.steps.empty()) continue;
    const HeadSeries& series = found->second;
    const auto LH = static_cast<std::ptrdiff_t>(layers * heads);
    out.offset_is = name;
    out.fact_steps = series.steps;
    for (size_t n = 0; n < series.steps.size(); ++n) {
      const auto row = series.values.begin() + static_cast<std::ptrdiff_t>(n) * LH;
      out.offset.emplace_back(row, row + LH);
    }
    break;
  }
  return out;
}

}  // namespace evenkeel
