// One line on a terminal's standard error that says how far long work is and when it will end. Silent
// elsewhere. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace evenkeel {

class Progress {
 public:
  Progress(std::string label, int64_t total);
  ~Progress();  // clears the line
  void advance(int64_t amount = 1);

 private:
  using Clock = std::chrono::steady_clock;
  std::mutex mutex_;
  std::string label_;
  int64_t total_, done_ = 0;
  Clock::time_point start_ = Clock::now(), shown_{};
  bool visible_;
};

}  // namespace evenkeel
