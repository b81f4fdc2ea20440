// Order between streams.
#pragma once

#include "gpu/cuda/check.h"

namespace evenkeel {

// A place in one stream that another one waits for.
class StreamMark {
 public:
  StreamMark() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "making an event"); }
  ~StreamMark() { cudaEventDestroy(event_); }
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;
  void set(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "marking a stream"); }
  void wait_in(cudaStream_t stream) const {
    check_cuda(cudaStreamWaitEvent(stream, event_, 0), "waiting for another stream");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace evenkeel
