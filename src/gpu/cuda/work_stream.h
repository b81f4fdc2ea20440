// A stream of one's own, and what is put on it besides kernels: copies, and marks of the device's clock.
#pragma once

#include <cstddef>
#include <optional>

#include "gpu/cuda/check.h"
#include "gpu/cuda/clock.h"
#include "gpu/device_memory.h"
#include "gpu/owned.h"

namespace evenkeel {

class WorkStream {
 public:
  // preferred: where its kernels and another stream's both wait for a multiprocessor, its own come first. What runs already
  // runs on.
  explicit WorkStream(bool preferred = false) {
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
    check_cuda(
        cudaStreamCreateWithPriority(owned_.place(), cudaStreamNonBlocking, preferred ? greatest : least),
        "making a stream");
  }
  WorkStream(const WorkStream&) = delete;
  WorkStream& operator=(const WorkStream&) = delete;
  operator cudaStream_t() const { return owned_.get(); }

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
  Owned<cudaStream_t, cudaStreamDestroy> owned_;
};

}  // namespace evenkeel
