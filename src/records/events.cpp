#include "records/events.h"

#include "base/error.h"
#include "base/json_lines.h"
#include "records/record_json.h"

namespace evenkeel {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::vector<Finding> findings_in(const Json& json) {
  std::vector<Finding> all;
  for (const RecordObject& one : RecordObject(json, RecordFile::findings).objects("findings"))
    if (const std::optional<int64_t> step = one.step())
      all.push_back({*step, one.text("kind"), one.text("words")});
  return all;
}

void write_finding(const fs::path& folder, const Finding& finding) {
  write_json_record(
      folder, RecordFile::findings,
      {{"schema", kRecordSchema},
       {"findings",
        Json::array({{{"step", finding.step}, {"kind", finding.kind}, {"words", finding.words}}})}});
}

void remove_findings(const fs::path& folder) {
  std::error_code error;
  fs::remove(record_path(folder, RecordFile::findings), error);
}

std::optional<Finding> read_finding(const fs::path& folder) {
  try {
    const std::optional<Json> json = read_json_record(folder, RecordFile::findings);
    if (!json) return {};
    const std::vector<Finding> all = findings_in(*json);
    return all.empty() ? std::nullopt : std::optional(all.back());
  } catch (const DataError&) {
    return {};
  }
}

Json to_json(const GuardEvent& event, int64_t H) {
  Json heads = Json::array();
  for (const int64_t head : event.heads) heads.push_back({head / H, head % H});
  Json json = {{"step", event.step},
               {"kind", name(event.kind)},
               {"heads", heads},
               {"plan", event.clauses},
               {"words", event.words}};
  if (event.to >= 0) json["to"] = event.to;
  if (!event.next_command.empty()) json["next_command"] = event.next_command;
  return json;
}

void append_guard_event(const fs::path& folder, const GuardEvent& event, int64_t H) {
  JsonLinesWriter record(record_path(folder, RecordFile::guard));
  record.write(to_json(event, H));
  record.sync();
}

}  // namespace evenkeel
