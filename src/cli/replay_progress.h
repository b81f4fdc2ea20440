// The progress line of a replay whose length is known once it has begun.
#pragma once

#include <optional>

#include "base/progress.h"

namespace evenkeel::cli {

class ReplayProgress {
 public:
  void show(int64_t done, int64_t all) {
    if (done == 0)
      line_.emplace("replay", all);
    else
      line_->advance();
  }

 private:
  std::optional<Progress> line_;
};

}  // namespace evenkeel::cli
