// Where the time of a call on the GPU goes, phase by phase. Plain C++, in every build.
#pragma once

#include <cstdint>
#include <string>

namespace evenkeel {

struct PhaseTime {
  std::string name;
  double seconds;       // of one call
  double flops, bytes;  // that it must do and move; 0: not counted
  int64_t launches;     // calls that were marked with this name
};

}  // namespace evenkeel
