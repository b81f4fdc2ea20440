// The files of a run's folder and every field in them: one table. Writers and readers take names from here and nowhere
// else; a name that has changed keeps its old ones as aliases, so that old folders still read. The keys of config.toml are
// listed by training/run_config.cpp, which writes them; those that others read are here.
//
// Numbers are written with every digit or, of each head at every step, with five. JSON has no word for NaN and infinities:
// they are the strings "NaN", "Infinity" and "-Infinity". A reader also takes the bare words that Python's json writes, and
// null, as NaN.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string_view>

namespace evenkeel {

// A number that the records do not have.
inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

enum class RecordFile {
  config,    // everything needed to repeat the run
  metrics,   // an object a step
  guard,     // an object an event of the guard
  findings,  // what ended the run before its time
  isolate,   // every replay that was made
  verdict,   // what isolate found
};
inline constexpr std::array<std::string_view, 6> kRecordFileNames = {
    "config.toml", "metrics.jsonl", "guard.jsonl", "findings.json", "isolate.json", "verdict.json"};
constexpr std::string_view name(RecordFile file) { return kRecordFileNames[static_cast<size_t>(file)]; }
std::filesystem::path record_path(const std::filesystem::path& folder, RecordFile file);
inline constexpr int kRecordSchema = 1;  // of every file

enum class FieldShape {
  number,
  text,
  flag,
  numbers,     // a list
  texts,       // a list
  per_head,    // (L, H): a list of lists
  flat_heads,  // (L H): a list
  object,
  objects,  // a list
};

struct RecordField {
  RecordFile file;
  std::string_view inside;  // the field whose object, or objects, it belongs to; empty: the line or the file
  std::string_view name;
  std::string_view aliases;  // older names, with blanks between
  FieldShape shape;
  std::string_view unit;  // empty: none, or a word
  std::string_view meaning;
};
// Sorted by nothing: files, then the order in which they are read. Facts of heads are in the order of HeadFact.
extern const std::span<const RecordField> kRecordFields;

// By its name or an alias; nullptr: none.
const RecordField* find_field(RecordFile file, std::string_view inside, std::string_view name);

// What every step may have of each head. The names are those of the fields of metrics.jsonl.
enum class HeadFact {
  largest_score,
  offset,
  mean_lse,
  largest_lse,
  key_share,
  tied_rows,
  leak_mean,
  leak_error,
  leak_rms,
  delta_rms,
};
inline constexpr std::array<std::string_view, 10> kHeadFactNames = {
    "largest_score", "offset",    "mean_lse",   "largest_lse", "key_share",
    "tied_rows",     "leak_mean", "leak_error", "leak_rms",    "delta_rms"};
inline constexpr size_t kHeadFactCount = kHeadFactNames.size();
constexpr std::string_view name(HeadFact fact) { return kHeadFactNames[static_cast<size_t>(fact)]; }

}  // namespace evenkeel
