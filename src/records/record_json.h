// Objects of records: fields by the names of the schema, old names included; numbers that JSON has no word for.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "records/schema.h"

namespace evenkeel {

// One object of a file. Tolerant: what is not there, or is of another kind, is nothing.
class RecordObject {
 public:
  // REQUIRES: the object outlives this.
  RecordObject(const nlohmann::json& object, RecordFile file, std::string_view inside = {})
      : object_(object), file_(file), inside_(inside) {}

  // By the table's name, else by an alias; nullptr: not there. REQUIRES: a row of the table.
  const nlohmann::json* find(std::string_view name) const;
  std::optional<double> number(std::string_view name) const;  // NaN: recorded, and not a number
  std::optional<int64_t> step(std::string_view name = "step") const;
  std::optional<bool> flag(std::string_view name) const;
  std::string text(std::string_view name) const;                // empty: none
  std::vector<std::string> texts(std::string_view name) const;  // those of a list that are texts
  std::vector<double> numbers(std::string_view name) const;     // empty where one of them is none
  std::vector<RecordObject> objects(std::string_view name) const;
  std::optional<RecordObject> object(std::string_view name) const;

  const nlohmann::json& json() const { return object_; }

 private:
  const nlohmann::json& object_;
  RecordFile file_;
  std::string_view inside_;
};

// A number of a record, as json_lines.h writes it; null, which older programs wrote for what is not finite, is NaN.
std::optional<double> record_number(const nlohmann::json& value);
// A step that a run can be at: a whole number, at least 0, at most kLargestStep.
inline constexpr int64_t kLargestStep = int64_t{1} << 40;
std::optional<int64_t> record_step(const nlohmann::json& value);
// (L, H) numbers, flat; empty where they are not of that shape. With L = 0 the shape is taken from them.
std::vector<double> record_heads(const nlohmann::json& value, int64_t& L, int64_t& H);
inline constexpr int64_t kMostHeads = int64_t{1} << 16;  // L H

// Five digits: a record of every step and head is read by eyes and thresholds.
double five_digits(double x);
// (L, H) as a list of lists; values: (L H).
nlohmann::json heads_json(int64_t L, int64_t H, const std::vector<double>& values);

// The names of an object, and of the objects in it, that the table does not have; for tests of writers.
std::vector<std::string> unknown_names(const nlohmann::json& object, RecordFile file,
                                       std::string_view inside = {});

// The whole text of a file of a folder; nothing where there is none. DataError where it is no regular file, larger than
// `limit` bytes, or cannot be read: nothing that a folder holds makes a reader wait.
std::optional<std::string> read_record(const std::filesystem::path& folder, RecordFile file,
                                       size_t limit = size_t{1} << 26);
// A JSON object of one of the files that hold one; DataError as above, and where it is none.
std::optional<nlohmann::json> read_json_record(const std::filesystem::path& folder, RecordFile file,
                                               size_t limit = size_t{1} << 26);
// Strict enough to be walked: an object, nested at most 64 deep; nothing otherwise.
std::optional<nlohmann::json> parse_json_record(std::string_view text);
// There whole or not at all.
void write_json_record(const std::filesystem::path& folder, RecordFile file, const nlohmann::json& object);

}  // namespace evenkeel
