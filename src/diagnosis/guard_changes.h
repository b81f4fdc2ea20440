// What a guard changed in a run, by the run's records alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "records/run_records.h"

namespace evenkeel {

// Heads that had one plan before and have one behind.
struct GuardChange {
  int64_t step = 0;  // from which it holds
  std::vector<RunHead> heads;
  std::string before;  // empty: not known
  std::string after;   // the guard's clauses where the plan is not known
};

// Of every act of the guard (no warnings), in their order. At most kMostGuardActs of them, and so many heads of each: a file may
// hold any number.
inline constexpr size_t kMostGuardActs = 100, kMostGuardedHeads = 64;
std::vector<GuardChange> guard_changes(const RunRecords& run);

}  // namespace evenkeel
