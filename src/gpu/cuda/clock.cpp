#include "gpu/cuda/clock.h"

#include <algorithm>

namespace evenkeel {

void PhaseClock::begin(const char* name, double flops, double bytes) {
  phases_.push_back({TimeMark(), name, flops, bytes});
  phases_.back().start.set(stream_);
}

void PhaseClock::add_to(std::vector<PhaseTime>& times) const {
  for (size_t n = 0; n + 1 < phases_.size(); ++n) {
    const Phase& phase = phases_[n];
    if (!*phase.name) continue;
    auto time =
        std::find_if(times.begin(), times.end(), [&](const PhaseTime& t) { return t.name == phase.name; });
    if (time == times.end()) time = times.insert(times.end(), {phase.name, 0, 0, 0, 0});
    time->seconds += phases_[n + 1].start.seconds_since(phase.start);
    time->flops += phase.flops;
    time->bytes += phase.bytes;
    ++time->launches;
  }
}

}  // namespace evenkeel
