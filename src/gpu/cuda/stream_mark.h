// Order between streams.
#pragma once

#include "gpu/cuda/check.h"
#include "gpu/owned.h"

namespace evenkeel {

// A place in one stream that another one waits for.
class StreamMark {
 public:
  StreamMark() {
    check_cuda(cudaEventCreateWithFlags(event_.place(), cudaEventDisableTiming), "making an event");
  }
  void set(cudaStream_t stream) { check_cuda(cudaEventRecord(event_.get(), stream), "marking a stream"); }
  void wait_in(cudaStream_t stream) const {
    check_cuda(cudaStreamWaitEvent(stream, event_.get(), 0), "waiting for another stream");
  }

 private:
  Owned<cudaEvent_t, cudaEventDestroy> event_;
};

}  // namespace evenkeel
