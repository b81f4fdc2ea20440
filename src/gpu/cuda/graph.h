// Work of a stream, recorded once and launched again and again.
#pragma once

#include <functional>
#include <utility>

#include "gpu/cuda/check.h"

namespace evenkeel {

class Graph {
 public:
  Graph() = default;
  // What `work` puts on the stream, which does not run it now.
  static Graph record(cudaStream_t stream, const std::function<void()>& work);
  Graph(Graph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  ~Graph() {
    if (exec_) cudaGraphExecDestroy(exec_);
  }

  explicit operator bool() const { return exec_ != nullptr; }  // false: nothing is recorded
  void launch(cudaStream_t stream) const { check_cuda(cudaGraphLaunch(exec_, stream), "running a graph"); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace evenkeel
