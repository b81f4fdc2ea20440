// Attention on a GPU in a build without CUDA: says so. cmake/cuda.cmake chooses between this and cuda/.
#include "attention/attention_cuda.h"
#include "base/error.h"

namespace evenkeel {
namespace {

[[noreturn]] void refuse() { throw DataError("built without CUDA"); }

}  // namespace

CudaSizes cuda_attention_sizes(const CudaAttention&, bool) { refuse(); }
KernelChoice attention_forward_cuda(const CudaAttention&, const CudaInputs&, const CudaForward&, bool, void*,
                                    void*) {
  refuse();
}
KernelChoice attention_backward_cuda(const CudaAttention&, const CudaInputs&, const DeviceTensor&,
                                     const CudaForward&, const CudaBackward&, bool, void*, void*) {
  refuse();
}

}  // namespace evenkeel
