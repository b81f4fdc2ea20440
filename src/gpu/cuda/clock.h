// The device's clock.
#pragma once

#include <vector>

#include "gpu/cuda/check.h"
#include "gpu/owned.h"
#include "gpu/phase_time.h"

namespace evenkeel {

// When a stream comes to a place.
class TimeMark {
 public:
  TimeMark() { check_cuda(cudaEventCreate(event_.place()), "making an event"); }

  void set(cudaStream_t stream) { check_cuda(cudaEventRecord(event_.get(), stream), "timing"); }
  void wait() const { check_cuda(cudaEventSynchronize(event_.get()), "running on the device"); }
  // REQUIRES: the work up to both marks is done.
  double seconds_since(const TimeMark& begin) const {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin.event_.get(), event_.get()), "timing");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  Owned<cudaEvent_t, cudaEventDestroy> event_;
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
