// Whether single steps with a loss far above their neighbours' owe it to their text.
#pragma once

#include "diagnosis/replays.h"
#include "diagnosis/verdict.h"

namespace evenkeel {

// Sequences of the steps that jump most against those of as many ordinary steps, by the model that stands before `begin`.
BadSequences find_bad_sequences(const Replays& replays, const RunRecord& record, const Symptom& symptom,
                                int64_t begin);

}  // namespace evenkeel
