// The facts of a head by the names of the records: a row for each, with how those of a step's parts make the step's.
#pragma once

#include <span>
#include <vector>

#include "model/model.h"
#include "records/schema.h"

namespace evenkeel {

double value_of(const HeadFacts& facts, HeadFact fact);
// (L H): of every head.
std::vector<double> values_of(std::span<const HeadFacts> heads, HeadFact fact);

// As numbers in the order of HeadFact, for ranks to send.
void append_numbers(const HeadFacts& facts, std::vector<double>& numbers);
// Of several parts with as many rows each. parts: kHeadFactCount numbers each.
HeadFacts combined_facts(std::span<const double* const> parts);

}  // namespace evenkeel
