// The device's clock.
#pragma once

#include <utility>
#include <vector>

#include "gpu/cuda/check.h"
#include "gpu/phase_time.h"

namespace evenkeel {

// When a stream comes to a place.
class TimeMark {
 public:
  TimeMark() { check_cuda(cudaEventCreate(&event_), "making an event"); }
  TimeMark(TimeMark&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  TimeMark& operator=(TimeMark&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~TimeMark() {
    if (event_) cudaEventDestroy(event_);
  }

  void set(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "timing"); }
  void wait() const { check_cuda(cudaEventSynchronize(event_), "running on the device"); }
  // REQUIRES: the work up to both marks is done.
  double seconds_since(const TimeMark& begin) const {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin.event_, event_), "timing");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Marks between the phases of a stream's work.
class PhaseClock {
 public:
  explicit PhaseClock(cudaStream_t stream) : stream_(stream) {}

  void begin(const char* name, double flops, double bytes);
  void end() { begin("", 0, 0); }
  // Adds all phases so far. REQUIRES: the work is done.
  void add_to(std::vector<PhaseTime>& phases) const;

 private:
  struct Phase {
    TimeMark start;
    const char* name;
    double flops, bytes;
  };
  cudaStream_t stream_;
  std::vector<Phase> phases_;
};

}  // namespace evenkeel
