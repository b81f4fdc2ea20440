// A stream of one's own, and what is put on it besides kernels: copies, and marks of the device's clock.
#pragma once

#include <cstddef>
#include <optional>

#include "gpu/cuda/check.h"
#include "gpu/cuda/clock.h"
#include "gpu/device_memory.h"

namespace evenkeel {

class WorkStream {
 public:
  WorkStream() = default;
  WorkStream(const WorkStream&) = delete;
  WorkStream& operator=(const WorkStream&) = delete;
  operator cudaStream_t() const { return static_cast<cudaStream_t>(owned_.get()); }

  void copy_up(void* to, const void* from, size_t bytes) const {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, *this), "copying to the device");
  }
  void copy_down(void* to, const void* from, size_t bytes) const {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, *this), "copying from the device");
  }
  void wait() const { check_cuda(cudaStreamSynchronize(*this), "running on the device"); }

  // What follows belongs to this phase. Costs nothing while nobody times.
  void phase(const char* name, double flops = 0, double bytes = 0) {
    if (clock) clock->begin(name, flops, bytes);
  }
  std::optional<PhaseClock> clock;  // set while phases are timed

 private:
  DeviceStream owned_;
};

}  // namespace evenkeel
