// Work of a stream, recorded once and launched again and again.
#pragma once

#include <functional>

#include "gpu/cuda/check.h"
#include "gpu/owned.h"

namespace evenkeel {

class Graph {
 public:
  Graph() = default;
  // What `work` puts on the stream, which does not run it now.
  static Graph record(cudaStream_t stream, const std::function<void()>& work);

  explicit operator bool() const { return exec_.get() != nullptr; }  // false: nothing is recorded
  void launch(cudaStream_t stream) const {
    check_cuda(cudaGraphLaunch(exec_.get(), stream), "running a graph");
  }

 private:
  Owned<cudaGraphExec_t, cudaGraphExecDestroy> exec_;
};

}  // namespace evenkeel
