// What the page shows, part by part, from records that are there or are not. No file is read here.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "diagnosis/verdict.h"
#include "records/run_records.h"
#include "report/capture_view.h"
#include "report/chart.h"

namespace evenkeel {

// When one indicator raised its alarm in the subject.
struct LeadTime {
  std::string name, meaning, rule;
  int64_t alarm = 0;                      // step
  int64_t layer = -1, head = -1;          // where; -1: of the whole run
  int64_t healthy = 0, false_alarms = 0;  // healthy runs that it was judged on; those with an alarm
};

struct PageData {
  std::vector<RunRecords> runs;   // at least one
  std::vector<Symptom> symptoms;  // (runs)
  size_t subject = 0;             // the run that the page is about: the first that ails
  int64_t layer = -1, head = -1;  // its head of interest; -1: none is known
  std::shared_ptr<const CaptureView> view;
  std::vector<std::string> capture_notes;
  std::vector<LeadTime> leads;        // in the order of their alarms
  std::optional<int64_t> loss_moved;  // step
};

// Symptoms, subject and head of interest, from the runs alone. REQUIRES: at least one run.
PageData page_data(std::vector<RunRecords> runs);

// Everything inside <main>.
std::string body_of(const PageData& data);

// --- its parts, in the order of the page
std::string verdict_part(const PageData& data);
std::string offset_panel(const PageData& data);  // the main signal
std::string loss_part(const PageData& data);
std::string chain_part(const PageData& data);
std::string guard_part(const PageData& data);      // empty where no guard acted
std::string run_panels(const PageData& data);      // spectral norms to the leak
std::string capture_panels(const PageData& data);  // (PK)^T X to the guilty addition
std::string remedies_part(const PageData& data);
std::string lead_part(const PageData& data);
std::string repeat_part(const PageData& data);

// --- for them
// A section: what it shows in a sentence, its drawings, and remarks beside them. All HTML.
std::string section(const std::string& id, const std::string& heading, const std::string& lead,
                    const std::string& content, const std::string& aside = "");
// What is not there, and the command that makes it.
std::string missing(const std::string& what, const std::string& command);
// The addition that errs most, as numerics/explain writes it in JSON: of the capture, without one of the verdict; null: none.
nlohmann::json worst_addition(const PageData& data);
// It, bit by bit.
std::string bits_of(const nlohmann::json& explanation);
// Does the run's own verdict, or without one its symptom, say that it ails, or that its health is not known?
bool ails(const RunRecords& run, const Symptom& symptom);
// What the guard did, a paragraph for every run in which it acted.
std::string guard_words(const PageData& data);
// The same in one or two words, as a badge.
std::string badge(const RunRecords& run, const Symptom& symptom);
// The largest over heads at the last record, by the records' name; of the offset, or else of the log-sum-exp. NaN: none.
double last_largest(const RunRecords& run, std::string_view field);
double last_offset(const RunRecords& run);
// Of drift, by the run's own heads at the last record.
double limit_of(const RunRecords& run);
// The class of a run's colour: the subject has the first.
std::string colour_of(const PageData& data, size_t run);
// Mean of the last 20 recorded values that are finite; NaN for none.
double recent(const std::vector<double>& values);
// One head's values.
Line head_line(const Series& series, int64_t head);
// Of facts, else of probes, by the records' name; nullptr: none.
const Series* find_series(const RunRecords& run, std::string_view name);
// The offset by head or, where that is not recorded, the log-sum-exp; nullptr: neither.
const Series* find_offset(const RunRecords& run);

}  // namespace evenkeel
