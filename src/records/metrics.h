// metrics.jsonl: one object a step. The writer of its lines, and the one reader, which gives columns.
//   every step       step, loss, gradient_norm, lr, tokens_per_second
//   some or all      the facts of every head (HeadFact), validation_loss, an event of the guard
//   every n-th       probe: a full set of probes; of its own step, which may lie before the line's
// Tolerant: a file may be damaged, torn, of another program or not yet there; what can be read is taken, and what cannot is
// counted. A step that comes again, or one before the last, means that the run went back: what was recorded from there on
// is replaced.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_lines.h"
#include "records/schema.h"

namespace evenkeel {

// Numbers at those steps that have them.
struct Series {
  std::vector<int64_t> steps;  // ascending
  std::vector<size_t> lines;   // (steps): place in Metrics::steps of the line that has them
  std::vector<double> values;  // (steps, width); NaN: recorded, and not a number
  size_t width = 1;            // 1, or L H

  bool empty() const { return steps.empty(); }
  std::span<const double> row(size_t n) const { return std::span(values).subspan(n * width, width); }
  // The row of a line; empty: the line has none.
  std::span<const double> of_line(size_t line) const;
};

struct Metrics {
  std::vector<int64_t> steps;  // a line each, ascending
  std::vector<uint64_t> ends;  // (steps): the byte behind the line
  Series loss, gradient_norm, validation_loss;
  int64_t layers = 0, heads = 0;  // L, H; 0: nothing is recorded by head
  std::array<Series, kHeadFactCount> facts;
  std::map<std::string, Series, std::less<>> probes;  // by the table's name; steps are the probes' own
  Series probe_loss;                                  // of the probes' own steps
  std::map<std::string, Series> norms;                // of weights, by name

  // --- what could not be taken
  JsonLinesResult file;
  int64_t without_step = 0;  // lines
  int64_t went_back = 0;     // times
  int64_t misshapen = 0;     // fields that should be numbers, or (L, H) numbers, and are not
  int64_t schema = 0;        // the highest that a line names

  bool empty() const { return steps.empty(); }
  const Series& of(HeadFact fact) const { return facts[static_cast<size_t>(fact)]; }
  // A fact of every step or, where that is not recorded, a probe; nullptr: neither.
  const Series* by_head(std::string_view name) const;
  // A value a line, or a value a step from 0 on; NaN where it is not recorded. The latter is empty where the steps lie so
  // far apart that one of them must be damaged.
  std::vector<double> by_line(const Series& series) const;
  std::vector<double> by_step(const Series& series) const;

  // The next line. Everything that is read comes through here.
  void take(const JsonLine& line);
};

// L, H: of the run, where they are known; 0: the first line that has some decides.
struct HeadShape {
  int64_t layers = 0, heads = 0;
};
// DataError where there is no such file, or none that is a regular file and can be read.
Metrics read_metrics(const std::filesystem::path& folder, HeadShape shape = {});
Metrics parse_metrics(std::string_view text, HeadShape shape = {});
// Why no record could be read, though the file is there; empty where one could. file: its name, for the words.
std::string why_nothing_was_read(const Metrics& metrics, const std::string& file);
// What a reader should know of the file besides its numbers, a sentence each: what could not be taken, and how it ends.
std::vector<std::string> notes_of(const JsonLinesResult& result, RecordFile file);
std::vector<std::string> notes_of(const Metrics& metrics);
// The same as read_metrics, or a DataError that says that no record could be read, and why.
Metrics read_some_metrics(const std::filesystem::path& folder, HeadShape shape = {});

// --- Writing. Whoever has something to say of a step adds it to the step's line; one writer writes it.
void add_number(nlohmann::json& line, std::string_view name, double value);
// Numbers of every head, (L H). digits: five, unless a reader needs them all.
void add_fact(nlohmann::json& line, HeadFact fact, int64_t L, int64_t H, const std::vector<double>& values,
              bool every_digit = false);

class MetricsWriter {
 public:
  // keep: how many bytes of an existing file hold (Metrics::ends); all whole lines by default.
  explicit MetricsWriter(const std::filesystem::path& folder, std::optional<uint64_t> keep = {});
  void write(const nlohmann::json& line);
  void sync();

 private:
  JsonLinesWriter file_;
};

}  // namespace evenkeel
