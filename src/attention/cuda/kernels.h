// The two families of GPU kernels, as attention_cuda.cpp calls them. Problems are checked and complete here: scale
// is set, `plans` has one plan or H, and the family takes the problem. Internal to src/attention.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/attention_cuda.h"

namespace evenkeel {

// Any plan, any stabiliser, sm_80 and up (mma.sync). Head sizes up to 128.
CudaSizes any_plan_sizes(const CudaAttention& problem, bool with_facts);
void any_plan_forward(const CudaAttention& problem, const CudaInputs& in, const CudaForward& out,
                      void* workspace, cudaStream_t stream);
void any_plan_backward(const CudaAttention& problem, const CudaInputs& in, const DeviceTensor& grad_output,
                       const CudaForward& saved, const CudaBackward& out, void* workspace,
                       cudaStream_t stream);

// flash2's sites with one of the fast stabilisers, BF16, sm_90a (TMA, wgmma). Head sizes up to 128, multiples of 8:
// those up to 64 run as 64, others as 128, the rest of the tile filled with zeros by the copy engine.
CudaSizes hopper_sizes(const CudaAttention& problem);
void hopper_forward(const CudaAttention& problem, const CudaInputs& in, const CudaForward& out,
                    void* workspace, cudaStream_t stream);
void hopper_backward(const CudaAttention& problem, const CudaInputs& in, const DeviceTensor& grad_output,
                     const CudaForward& saved, const CudaBackward& out, void* workspace, cudaStream_t stream);

}  // namespace evenkeel
