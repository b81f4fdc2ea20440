#include "base/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace evenkeel {

Progress::Progress(std::string label, int64_t total)
    : label_(std::move(label)), total_(total), visible_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (visible_) fmt::print(stderr, "\r\033[K");
}

void Progress::advance(int64_t amount) {
  std::lock_guard lock(mutex_);
  done_ += amount;
  const Clock::time_point now = Clock::now();
  if (!visible_ || now - shown_ < std::chrono::milliseconds(100)) return;
  shown_ = now;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double rate = static_cast<double>(done_) / seconds;
  fmt::print(stderr, "\r\033[K{} {}/{} ({:.1f} a second, {:.0f} s left)", label_, done_, total_, rate,
             static_cast<double>(total_ - done_) / rate);
  std::fflush(stderr);
}

}  // namespace evenkeel
