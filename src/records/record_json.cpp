#include "records/record_json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/json_lines.h"
#include "base/whole_file.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int kDeepest = 64;

}  // namespace

const Json* RecordObject::find(std::string_view name) const {
  const auto found = object_.find(name);
  if (found != object_.end()) return &*found;
  const RecordField* const field = find_field(file_, inside_, name);
  require(field != nullptr, "[records] expected a field of {}, got {}{}{}", evenkeel::name(file_), inside_,
          inside_.empty() ? "" : ".", name);
  for (size_t begin = 0; begin < field->aliases.size();) {
    const size_t end = std::min(field->aliases.find(' ', begin), field->aliases.size());
    const auto old = object_.find(field->aliases.substr(begin, end - begin));
    if (old != object_.end()) return &*old;
    begin = end + 1;
  }
  return nullptr;
}

std::optional<double> RecordObject::number(std::string_view name) const {
  const Json* const value = find(name);
  return value ? record_number(*value) : std::nullopt;
}

std::optional<int64_t> RecordObject::step(std::string_view name) const {
  const Json* const value = find(name);
  return value ? record_step(*value) : std::nullopt;
}

std::optional<bool> RecordObject::flag(std::string_view name) const {
  const Json* const value = find(name);
  if (!value || !value->is_boolean()) return {};
  return value->get<bool>();
}

std::string RecordObject::text(std::string_view name) const {
  const Json* const value = find(name);
  return value && value->is_string() ? value->get<std::string>() : "";
}

std::vector<std::string> RecordObject::texts(std::string_view name) const {
  std::vector<std::string> all;
  const Json* const value = find(name);
  if (value && value->is_array())
    for (const Json& one : *value)
      if (one.is_string()) all.push_back(one.get<std::string>());
  return all;
}

std::vector<double> RecordObject::numbers(std::string_view name) const {
  std::vector<double> all;
  const Json* const value = find(name);
  if (!value || !value->is_array()) return all;
  for (const Json& one : *value) {
    const std::optional<double> x = record_number(one);
    if (!x) return {};
    all.push_back(*x);
  }
  return all;
}

std::vector<RecordObject> RecordObject::objects(std::string_view name) const {
  std::vector<RecordObject> all;
  const Json* const value = find(name);
  if (value && value->is_array())
    for (const Json& one : *value)
      if (one.is_object()) all.emplace_back(one, file_, name);
  return all;
}

std::optional<RecordObject> RecordObject::object(std::string_view name) const {
  const Json* const value = find(name);
  if (!value || !value->is_object()) return {};
  return RecordObject(*value, file_, name);
}

std::optional<double> record_number(const Json& value) {
  if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
  return json_number(value);
}

std::optional<int64_t> record_step(const Json& value) {
  if (!value.is_number_integer()) return {};
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(kLargestStep)) return {};
  const auto step = value.get<int64_t>();
  if (step < 0 || step > kLargestStep) return {};
  return step;
}

std::vector<double> record_heads(const Json& value, int64_t& L, int64_t& H) {
  if (!value.is_array() || value.empty() || !value[0].is_array() || value[0].empty()) return {};
  const auto layers = static_cast<int64_t>(value.size()), heads = static_cast<int64_t>(value[0].size());
  if (layers > kMostHeads || heads > kMostHeads || layers * heads > kMostHeads) return {};
  if (L != 0 && (layers != L || heads != H)) return {};
  std::vector<double> out;
  out.reserve(static_cast<size_t>(layers * heads));
  for (const Json& layer : value) {
    if (!layer.is_array() || static_cast<int64_t>(layer.size()) != heads) return {};
    for (const Json& number : layer)
      out.push_back(record_number(number).value_or(std::numeric_limits<double>::quiet_NaN()));
  }
  L = layers, H = heads;
  return out;
}

double five_digits(double x) {
  if (!std::isnormal(x)) return x;
  char text[16];  // -1.2345e-308
  const auto written = std::to_chars(text, text + sizeof text, x, std::chars_format::scientific, 4);
  std::from_chars(text, written.ptr, x);
  return x;
}

Json heads_json(int64_t L, int64_t H, const std::vector<double>& values) {
  require(static_cast<int64_t>(values.size()) == L * H, "[records] expected {} x {} numbers, got {}", L, H,
          values.size());
  Json out = Json::array();
  for (int64_t l = 0; l < L; ++l) {
    const auto first = values.begin() + l * H;
    out.push_back(std::vector<double>(first, first + H));
  }
  return out;
}

std::vector<std::string> unknown_names(const Json& object, RecordFile file, std::string_view inside) {
  std::vector<std::string> unknown;
  const auto add = [&](const Json& inner, const std::string& key) {
    for (std::string& name : unknown_names(inner, file, key)) unknown.push_back(std::move(name));
  };
  for (const auto& [key, value] : object.items()) {
    const RecordField* const field = find_field(file, inside, key);
    if (!field || field->name != key) {
      unknown.push_back(std::string(inside) + (inside.empty() ? "" : ".") + key);
      continue;
    }
    // Only objects whose names the table lists: those of weights and of explanations are their own.
    const std::string_view name = key;  // clang 14 captures no structured binding
    const bool listed = std::any_of(kRecordFields.begin(), kRecordFields.end(),
                                    [&](const RecordField& f) { return f.file == file && f.inside == name; });
    if (!listed) continue;
    if (value.is_object()) add(value, key);
    if (value.is_array())
      for (const Json& one : value)
        if (one.is_object()) add(one, key);
  }
  return unknown;
}

std::optional<std::string> read_record(const fs::path& folder, RecordFile file, size_t limit) {
  const fs::path path = record_path(folder, file);
  std::error_code error;
  if (!fs::exists(path, error)) return {};
  return read_regular_file(path, limit);
}

std::optional<Json> parse_json_record(std::string_view text) {
  // A limit to the depth: the parser's own memory is on the heap, but whoever walks a value recurses.
  bool too_deep = false;
  const Json::parser_callback_t watch = [&](int depth, Json::parse_event_t, Json&) {
    too_deep |= depth > kDeepest;
    return depth <= kDeepest;
  };
  Json json = Json::parse(text, watch, /*allow_exceptions=*/false);
  if (too_deep || !json.is_object()) return {};
  return json;
}

std::optional<Json> read_json_record(const fs::path& folder, RecordFile file, size_t limit) {
  const std::optional<std::string> text = read_record(folder, file, limit);
  if (!text) return {};
  std::optional<Json> json = parse_json_record(*text);
  require_data(json.has_value(), "{}: expected a JSON object, found something else",
               record_path(folder, file).string());
  return json;
}

void write_json_record(const fs::path& folder, RecordFile file, const Json& object) {
  write_whole_file(record_path(folder, file), json_with_words(object).dump(1) + "\n", Links::replaced);
}

}  // namespace evenkeel
