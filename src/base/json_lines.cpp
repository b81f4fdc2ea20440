#include "base/json_lines.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/error.h"
#include "base/text.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

constexpr int kDeepest = 64;
constexpr size_t kLongestLine = size_t{1} << 26;
constexpr size_t kPiece = size_t{1} << 20;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool has_only_finite(const Json& value) {
  if (value.is_number_float()) return std::isfinite(value.get_ref<const double&>());
  return !value.is_structured() || std::all_of(value.begin(), value.end(), has_only_finite);
}

// The bare words of Python's json, outside strings, as strings.
std::string with_quoted_words(std::string_view line) {
  std::string out;
  bool in_string = false;
  for (size_t n = 0; n < line.size();) {
    if (in_string) {
      if (line[n] == '\\' && n + 1 < line.size()) out += line[n++];
      in_string = line[n] != '"';
      out += line[n++];
      continue;
    }
    size_t length = 0;
    for (const std::string_view word : {"NaN", "Infinity", "-Infinity"})
      if (line.substr(n).starts_with(word)) length = word.size();
    if (length > 0) {
      out += fmt::format("\"{}\"", line.substr(n, length));
      n += length;
      continue;
    }
    in_string = line[n] == '"';
    out += line[n++];
  }
  return out;
}

// How much of the file is whole lines: the place behind the last newline at or before `size`.
uint64_t whole_size(const AppendFile& file, uint64_t size) {
  while (size > 0) {
    const size_t piece = static_cast<size_t>(std::min<uint64_t>(size, kPiece));
    const size_t newline = file.read_at(size - piece, piece).rfind('\n');
    if (newline != std::string::npos) return size - piece + newline + 1;
    size -= piece;
  }
  return 0;
}

// Refuses what the library would let pass: names given twice (the last would win) and nesting without end.
class Strictness {
 public:
  bool operator()(int depth, Json::parse_event_t event, const Json& value) {
    if (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start) {
      require_data(depth < kDeepest, "nesting of at most {}, found more", kDeepest);
      if (event == Json::parse_event_t::object_start) names_.push_back(0);
    } else if (event == Json::parse_event_t::key) {
      ++names_.back();
    } else if (event == Json::parse_event_t::object_end) {
      require_data(names_.back() == value.size(), "each name of an object once, found {} names for {} values",
                   names_.back(), value.size());
      names_.pop_back();
    }
    return true;
  }

 private:
  std::vector<size_t> names_;  // how many, of each object that is open
};

// Takes a file in pieces, gives lines.
class LineParser {
 public:
  LineParser(const std::string& file, const std::function<void(const JsonLine&)>& take)
      : file_(file), take_(take) {}

  void feed(std::string_view piece) {
    for (;;) {
      const size_t newline = piece.find('\n');
      // Of a line that is too long, no more is kept than shows it.
      const std::string_view part = piece.substr(0, newline);
      line_size_ += part.size();
      line_.append(part.substr(0, kLongestLine + 1 - std::min(line_.size(), kLongestLine + 1)));
      if (newline == std::string_view::npos) return;
      piece.remove_prefix(newline + 1);
      end_line();
    }
  }

  JsonLinesResult finish() {
    result_.torn_bytes = line_size_;
    return std::move(result_);
  }

 private:
  void end_line() {
    ++result_.lines;
    result_.whole_size += line_size_ + 1;
    std::optional<Json> object;
    try {
      require_data(line_size_ <= kLongestLine, "at most {} bytes, found {}", kLongestLine, line_size_);
      require_data(line_size_ > 0, "a JSON object, found an empty line");
      require_data(line_.find('\0') == std::string::npos, "a JSON object, found a NUL byte");
      try {
        object = Json::parse(line_, Strictness());
      } catch (const Json::parse_error&) {
        const std::string quoted = with_quoted_words(line_);
        if (quoted == line_) throw;
        object = Json::parse(quoted, Strictness());
      }
      require_data(object->is_object(), "a JSON object, found {} {}", object->is_array() ? "an" : "a",
                   object->type_name());
    } catch (const DataError& error) {
      add_fault(error.what());
      object.reset();
    } catch (const Json::exception& error) {
      const std::string_view what = error.what();
      const size_t reason = what.find(": ");  // behind the library's own numbering
      add_fault(fmt::format("a JSON object, found '{}': {}", shown(line_),
                            shown(what.substr(reason == what.npos ? 0 : reason + 2), 120)));
    }
    line_.clear();
    line_size_ = 0;
    if (object) take_({result_.lines, result_.whole_size, *object});
  }

  void add_fault(const std::string& expected) {
    if (++result_.fault_count <= JsonLinesResult::kMostFaults)
      result_.faults.push_back(
          {result_.lines, fmt::format("{}:{}: expected {}", file_, result_.lines, expected)});
  }

  const std::string& file_;
  const std::function<void(const JsonLine&)>& take_;
  std::string line_;
  size_t line_size_ = 0;
  JsonLinesResult result_;
};

}  // namespace

JsonLinesWriter::JsonLinesWriter(const std::filesystem::path& path, Options options)
    : file_(path), options_(options) {
  require(options.lines_a_flush > 0, "[json_lines] expected to flush after 1 line or more, found 0");
  const uint64_t whole = whole_size(file_, file_.size());
  torn_bytes_ = file_.size() - whole;
  const uint64_t keep = options.keep.value_or(whole);
  require_data(keep <= whole && whole_size(file_, keep) == keep,
               "{}: expected a line to end at {}, the place to go on from, found none", path.string(), keep);
  if (keep < file_.size()) file_.truncate(keep);
}

JsonLinesWriter::~JsonLinesWriter() {
  try {
    flush();
  } catch (const DataError&) {
  }
}

void JsonLinesWriter::write(const Json& object) {
  require(object.is_object(), "[json_lines] expected an object, found a {}", object.type_name());
  try {
    waiting_ += has_only_finite(object) ? object.dump() : json_with_words(object).dump();
    waiting_ += '\n';
  } catch (const Json::exception&) {
    throw std::invalid_argument("[json_lines] expected strings in UTF-8, found one that is not");
  }
  if (++lines_waiting_ >= options_.lines_a_flush) flush();
}

void JsonLinesWriter::flush() {
  if (waiting_.empty()) return;
  file_.append(waiting_);
  waiting_.clear();
  lines_waiting_ = 0;
  if (options_.sync) file_.sync();
}

void JsonLinesWriter::sync() {
  flush();
  file_.sync();
}

Json json_with_words(const Json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>()))
    return std::isnan(value.get<double>()) ? "NaN" : value.get<double>() > 0 ? "Infinity" : "-Infinity";
  Json copy = value;
  if (copy.is_structured())
    for (Json& element : copy) element = json_with_words(element);
  return copy;
}

std::optional<double> json_number(const Json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "NaN") return kNan;
  if (value == "Infinity") return kInfinity;
  if (value == "-Infinity") return -kInfinity;
  return {};
}

JsonLinesResult parse_json_lines(std::string_view text, const std::string& file,
                                 const std::function<void(const JsonLine&)>& take) {
  LineParser parser(file, take);
  parser.feed(text);
  return parser.finish();
}

JsonLinesResult read_json_lines(const std::filesystem::path& path,
                                const std::function<void(const JsonLine&)>& take) {
  // Read, not mapped: a writer may cut off a torn line meanwhile.
  const std::string name = path.string();
  const auto reason = [] { return std::generic_category().message(errno); };
  const FileDescriptor file = open_regular_file(path);
  LineParser parser(name, take);
  std::string piece(kPiece, '\0');
  for (;;) {
    const ssize_t got = ::read(file.get(), piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    require_data(got >= 0, "{}: cannot read it: {}", name, reason());
    if (got == 0) return parser.finish();
    parser.feed(std::string_view(piece).substr(0, static_cast<size_t>(got)));
  }
}

}  // namespace evenkeel
