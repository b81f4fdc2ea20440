// Faults by name. A failing kernel's outputs are compared with those of the definition with one known fault put in.
// The fault that explains most of the failing forms is named.
#pragma once

#include <string>
#include <vector>

#include "diagnosis/conform_judge.h"

namespace evenkeel {

// The faults that explain failures of the report, the most telling first; one without a known explanation is named by
// what is seen. Calls the kernel a few times again.
std::vector<NamedFault> name_faults(const FormsReport& report, const FormKernel& kernel,
                                    const JudgeOptions& options);

// "the conditions of pytorch 196678, trl 7181 (a mask, ...)" of a form of public_bugs; empty of others.
std::string public_bug_words(const ConformForm& form);
// Those of public_bugs whose forms the kernel fails in the way they were failed.
std::vector<std::string> public_bugs_met(const FormsReport& report);

}  // namespace evenkeel
