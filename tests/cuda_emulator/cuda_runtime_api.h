// The names of CUDA's runtime that headers of host code use. On the CPU nothing calls it.
#pragma once

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
inline cudaError_t cudaGetLastError() { return 0; }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return 0;
}
