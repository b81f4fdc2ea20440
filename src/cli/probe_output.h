// What `evenkeel probe` found, as JSON and as text.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "diagnosis/head_analysis.h"
#include "diagnosis/probe_recorder.h"

namespace evenkeel::cli {

// The directions of one head's errors in two captures of its layer.
struct DirectionPair {
  size_t a, b;  // captures
  int64_t head;
  double cosine;
};

struct Probed {
  std::vector<Capture> captures;
  std::vector<std::vector<HeadProbe>> probes;                   // of each capture, by head
  std::vector<std::pair<std::string, ProbeHistory>> histories;  // by the run's name
  size_t capture = 0;                                           // that of the worst head
  int64_t head = 0;                                             // its place among the capture's heads
  HeadAnalysis analysis;                                        // of that head
  std::vector<DirectionPair> pairs;
  std::string next_command;
};

void print_json(const Probed& probed);
void print_text(const Probed& probed, bool colour);

}  // namespace evenkeel::cli
