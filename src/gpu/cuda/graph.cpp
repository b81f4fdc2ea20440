#include "gpu/cuda/graph.h"

namespace evenkeel {

Graph Graph::record(cudaStream_t stream, const std::function<void()>& work) {
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording a graph");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    throw;
  }
  check_cuda(cudaStreamEndCapture(stream, &graph), "recording a graph");
  Graph made;
  // Kernels have the priorities of the streams that they were recorded from, other than all that of the launch's stream.
  const cudaError_t status =
      cudaGraphInstantiate(made.exec_.place(), graph, cudaGraphInstantiateFlagUseNodePriority);
  cudaGraphDestroy(graph);
  check_cuda(status, "making a graph");
  return made;
}

}  // namespace evenkeel
