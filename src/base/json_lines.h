// Files of JSON objects, one a line, that only grow: metrics.jsonl. A writer that is killed leaves whole
// lines and at most one torn one at the end, which the next writer cuts off and a reader reports.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/whole_file.h"

namespace evenkeel {

class JsonLinesWriter {
 public:
  struct Options {
    // How much of an existing file is kept (JsonLine::end of the last line that still holds); a run that goes
    // on from a checkpoint keeps the steps before it. All whole lines by default.
    std::optional<uint64_t> keep = {};
    // Lines gathered before they are handed to the system. A killed process loses those not handed over.
    size_t lines_a_flush = 1;
    // Each flush waits for the disk: then a dead machine loses no more than a dead process does.
    bool sync = false;
  };
  JsonLinesWriter(const std::filesystem::path& path, Options options);
  explicit JsonLinesWriter(const std::filesystem::path& path) : JsonLinesWriter(path, Options()) {}
  ~JsonLinesWriter();  // flushes; an error here is lost, so flush() before
  JsonLinesWriter(const JsonLinesWriter&) = delete;
  JsonLinesWriter& operator=(const JsonLinesWriter&) = delete;

  // REQUIRES: an object, its strings in UTF-8. JSON has no word for NaN and infinities: they become the
  // strings "NaN", "Infinity" and "-Infinity", which json_number() reads. On a DataError (a full disk) the
  // line is still in the hands of the writer; the next flush tries again.
  void write(const nlohmann::json& object);
  void flush();
  void sync();
  // Bytes of a torn line that were cut off at the start.
  uint64_t torn_bytes() const { return torn_bytes_; }

 private:
  AppendFile file_;
  Options options_;
  uint64_t torn_bytes_ = 0;
  std::string waiting_;  // whole lines
  size_t lines_waiting_ = 0;
};

// The same with words for the numbers that are not finite.
nlohmann::json json_with_words(const nlohmann::json& value);
// A number as JsonLinesWriter wrote it; nothing if it is none.
std::optional<double> json_number(const nlohmann::json& value);

struct JsonLine {
  size_t number;  // from 1
  uint64_t end;   // offset of the first byte behind it
  const nlohmann::json& object;
};

// What a file held besides good lines. Empty lines count as faults, too: no writer of ours makes them.
struct JsonLinesResult {
  struct Fault {
    size_t line;
    std::string message;  // begins with file:line:
  };
  static constexpr size_t kMostFaults = 100;  // whose messages are kept

  size_t lines = 0;         // whole ones, good and bad
  uint64_t whole_size = 0;  // the end of the last whole line
  std::vector<Fault> faults;
  size_t fault_count = 0;
  size_t torn_bytes = 0;  // behind the last newline: what a killed writer left; never read
};

// Calls back for every line that holds an object (names once in each, nested at most 64 deep), in order. The bare words NaN,
// Infinity and -Infinity, which Python's json writes, are taken as JsonLinesWriter's strings. A bad line is a fault and ends
// nothing; only a file that is no regular file, or cannot be read, is a DataError.
JsonLinesResult read_json_lines(const std::filesystem::path& path,
                                const std::function<void(const JsonLine&)>& take);
JsonLinesResult parse_json_lines(std::string_view text, const std::string& file,
                                 const std::function<void(const JsonLine&)>& take);

}  // namespace evenkeel
