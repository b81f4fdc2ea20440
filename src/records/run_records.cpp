#include "records/run_records.h"

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

void note_schema(int64_t schema, RecordFile file, RunRecords& run) {
  if (schema > kRecordSchema)
    run.notes.push_back(
        fmt::format("{} is of schema {}, which is newer than the {} that this program knows: what has "
                    "another name there is not shown",
                    name(file), schema, kRecordSchema));
}

std::optional<Json> parse_noted(std::string_view text, RecordFile file, RunRecords& run) {
  std::optional<Json> json = parse_json_record(text);
  if (!json) {
    run.notes.push_back(fmt::format("{} is there, but it is no JSON object: it is not shown", name(file)));
    return {};
  }
  const auto schema = RecordObject(*json, file).number("schema").value_or(0);
  if (schema > 0 && schema < 1e9) note_schema(static_cast<int64_t>(schema), file, run);
  return json;
}

void add_notes(const std::vector<std::string>& notes, RunRecords& run) {
  run.notes.insert(run.notes.end(), notes.begin(), notes.end());
}

RunEvent::Kind event_kind(const std::string& guard_kind) {
  return guard_kind == name(GuardEvent::Kind::remedy)      ? RunEvent::Kind::guard_remedy
         : guard_kind == name(GuardEvent::Kind::roll_back) ? RunEvent::Kind::guard_roll_back
                                                           : RunEvent::Kind::guard_warning;
}

// [[layer, head], ...]: those that a run can have.
std::vector<RunHead> heads_of(const RecordObject& event) {
  std::vector<RunHead> heads;
  const Json* const list = event.find("heads");
  if (!list || !list->is_array()) return heads;
  for (const Json& pair : *list) {
    if (!pair.is_array() || pair.size() != 2 || heads.size() >= static_cast<size_t>(kMostHeads)) continue;
    const auto layer = record_step(pair[0]), head = record_step(pair[1]);
    if (layer && head && *layer < kMostHeads && *head < kMostHeads)
      heads.push_back({static_cast<int>(*layer), static_cast<int>(*head)});
  }
  return heads;
}

// The text of one of the run's files, or a note.
std::optional<std::string> text_of(RecordFile file, RunRecords& run, const char* without) {
  try {
    std::optional<std::string> text = read_record(run.folder, file);
    if (!text && without) run.notes.push_back(fmt::format("{} is missing: {}", name(file), without));
    return text;
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

// [model] layers and heads, where both are there.
HeadShape shape_of(const RunRecords& run) {
  const auto number = [&](const char* key) {
    const int64_t n = run.whole_setting("model", key).value_or(0);
    return n <= kMostHeads ? n : 0;
  };
  const HeadShape shape{number("layers"), number("heads")};
  return shape.layers > 0 && shape.heads > 0 ? shape : HeadShape{};
}

// Readers of one event and of one change of the plan: steps that a run can be at.
void read_changes(RunRecords& run) {
  const TomlValue* const attention = run.config->find("attention");
  const TomlTable* const table = attention ? attention->get_if<TomlTable>() : nullptr;
  const TomlValue* const changes = table ? table->find("changes") : nullptr;
  const TomlValue::Array* const list = changes ? changes->get_if<TomlValue::Array>() : nullptr;
  if (!list) return;
  for (const TomlValue& change : *list) {
    const TomlTable* const entry = change.get_if<TomlTable>();
    if (!entry) continue;
    const TomlValue *const step = entry->find("step"), *const plan = entry->find("plan");
    const int64_t* const number = step ? step->get_if<int64_t>() : nullptr;
    const std::string* const words = plan ? plan->get_if<std::string>() : nullptr;
    if (number && *number >= 0 && *number <= kLargestStep)
      run.events.push_back(
          {RunEvent::Kind::plan_change, *number, words ? *words : "", words ? *words : "", *number});
  }
}

}  // namespace

std::string read_config_text(const fs::path& folder) {
  const std::optional<std::string> text = read_record(folder, RecordFile::config);
  std::error_code error;
  require_data(text.has_value(),
               "{}: expected a run's folder, as `evenkeel train` or evenkeel.Monitor writes it, found {}",
               folder.string(), fs::is_regular_file(folder, error) ? "a file" : "no config.toml in it");
  return *text;
}

void write_config_text(const fs::path& folder, const std::string& text) {
  write_whole_file(record_path(folder, RecordFile::config), text, Links::replaced);
}

void take_metrics(Metrics metrics, RunRecords& run) {
  run.metrics = std::move(metrics);
  const Metrics& m = run.metrics;
  run.loss = m.by_line(m.loss);
  run.gradient_norm = m.by_line(m.gradient_norm);
  run.validation_loss = m.by_line(m.validation_loss);
  note_schema(m.schema, RecordFile::metrics, run);
  add_notes(notes_of(m), run);
  if (!run.has_steps()) run.notes.emplace_back("metrics.jsonl holds no step yet");
}

void read_guard(std::string_view text, RunRecords& run) {
  const JsonLinesResult result =
      parse_json_lines(text, std::string(name(RecordFile::guard)), [&](const JsonLine& line) {
        const RecordObject event(line.object, RecordFile::guard);
        if (const std::optional<int64_t> step = event.step())
          run.events.push_back({event_kind(event.text("kind")), *step, event.text("words"),
                                event.text("plan"), event.step("to").value_or(*step + 1), heads_of(event)});
      });
  add_notes(notes_of(result, RecordFile::guard), run);
}

void read_findings(std::string_view text, RunRecords& run) {
  const std::optional<Json> json = parse_noted(text, RecordFile::findings, run);
  if (!json) return;
  for (const Finding& finding : findings_in(*json)) {
    run.finding = finding;
    run.events.push_back({RunEvent::Kind::finding, finding.step, finding.words});
  }
}

void read_config(std::string_view text, RunRecords& run) {
  try {
    run.config = parse_toml(text, std::string(name(RecordFile::config)));
  } catch (const std::exception& fault) {
    run.notes.push_back(fmt::format("config.toml cannot be read: {}", fault.what()));
    return;
  }
  read_changes(run);
}

void read_verdict(std::string_view text, RunRecords& run) {
  std::optional<Json> json = parse_noted(text, RecordFile::verdict, run);
  if (json && !json->empty()) run.verdict = std::move(*json);
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
  if (const auto text = text_of(RecordFile::config, run, "how the run was made is not known"))
    read_config(*text, run);
  if (fs::exists(record_path(folder, RecordFile::metrics), error)) {
    try {
      take_metrics(read_metrics(folder, shape_of(run)), run);
      run.unreadable = why_nothing_was_read(run.metrics, record_path(folder, RecordFile::metrics).string());
    } catch (const std::exception& fault) {
      run.notes.emplace_back(fault.what());
      run.unreadable = fault.what();
    }
  } else {
    run.notes.emplace_back("metrics.jsonl is missing: no step is recorded yet");
  }
  if (const auto text = text_of(RecordFile::guard, run, nullptr)) read_guard(*text, run);
  if (const auto text = text_of(RecordFile::findings, run, nullptr)) read_findings(*text, run);
  if (const auto text = text_of(RecordFile::verdict, run, nullptr)) read_verdict(*text, run);
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

bool is_run_folder(const std::filesystem::path& folder) {
  std::error_code error;
  return std::filesystem::exists(record_path(folder, RecordFile::config), error) ||
         std::filesystem::exists(record_path(folder, RecordFile::metrics), error);
}

std::vector<std::filesystem::path> runs_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> found;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    if (is_run_folder(at->path())) found.push_back(at->path());
  std::sort(found.begin(), found.end());
  return found;
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

std::optional<int64_t> RunRecords::whole_setting(std::string_view table, std::string_view key) const {
  const std::string text = setting(table, key);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return {};
  return value;
}

RecordObject RunRecords::verdict_record() const {
  static const Json kNone = Json::object();
  return RecordObject(verdict ? *verdict : kNone, RecordFile::verdict);
}

}  // namespace evenkeel
