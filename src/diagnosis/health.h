// What a healthy offset is: the one definition that verdict, isolate, guard, indicators and the page share.
//
// Softmax does not see the mean of a row's scores, so nothing pulls it back. How large it is in a healthy run depends on
// text, size and learning rate, so no fixed number separates healthy from drifting heads. A head *drifts* where its offset
// stays above kDriftTimes times its healthy level and doubles. A diagnosis does not wait for the doubling: whatever is above
// at the end of the record drifts. The healthy level is the median offset over heads (a drift begins in one or two of them):
//   of the FP32 control of the same stretch, where there is one (isolate always replays one);
//   of the run's own heads otherwise.
#pragma once

#include <cmath>
#include <string>
#include <vector>

namespace evenkeel {

// The natural unit of scores: of two that lie further apart, the smaller is lost in an FP32 row sum.
inline const double kScoreUnit = 24 * std::log(2.0);
// Healthy models of 13.8 M parameters had a head at 6.5 times the median of all (117 of 18) and none at 8.
inline constexpr double kDriftTimes = 8;
// No head is said to drift below the first: healthy heads of small models came to 2.6 units. Beyond the second every head
// is, unless an FP32 control says otherwise: the median is no healthy level where most heads have drifted.
inline const double kLowestDriftLimit = 4 * kScoreUnit, kHighestDriftLimit = 32 * kScoreUnit;

struct DriftLimit {
  double limit = kLowestDriftLimit;  // of the offset
  double level = 0;                  // the healthy level: the median over heads
  bool of_control = false;           // of an FP32 control; otherwise of the run itself
};
// of_heads: (L H) offsets of one step or stretch; what is not a number counts as infinite.
DriftLimit limit_from_run(const std::vector<double>& of_heads);
// Also at least twice the largest head of the control, which is healthy by definition: it starts from a checkpoint that
// may have drifted already.
DriftLimit limit_from_control(const std::vector<double>& of_heads);
// "limit 160: 8 times 20, the median head of the FP32 control"
std::string in_words(const DriftLimit& limit);
// An offset for a reader: three digits, all of them from 1,000 to a million ("8.35", "739", "10257").
std::string offset_text(double offset);

// The same in whole numbers, as those that are compared with a limit are written ("85", "10257", "1e+308").
std::string whole_text(double offset);
// What drift is, in a sentence for a reader: "The offset of a head stays above 8 times its healthy level and ..."
std::string drift_in_words();

// Where the guard acts: half way to the limit, so that it acts before a head has drifted; never below
// kLowestDriftLimit. Of offsets or, in the guard, of log-sum-exps.
double mend_limit(const std::vector<double>& of_heads);

}  // namespace evenkeel
