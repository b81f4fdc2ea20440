// The check of a GPU request before anything is launched: pure host code, in every build, tested without a GPU.
// Internal to src/attention. All throw std::invalid_argument with what was expected and what was found.
#pragma once

#include "attention/attention_cuda.h"

namespace evenkeel {

// The problem checked and completed: scale and fact_sequences set, one plan where all heads have the same.
CudaAttention complete(const CudaAttention& problem);

// Tensors and buffers of one pass of a complete problem, for the kernel that was chosen.
void check_forward(const CudaAttention& problem, AttentionKernel kernel, const CudaSizes& sizes,
                   const CudaInputs& in, const CudaForward& out, bool with_facts, const void* workspace);
void check_backward(const CudaAttention& problem, AttentionKernel kernel, const CudaSizes& sizes,
                    const CudaInputs& in, const DeviceTensor& grad_output, const CudaForward& saved,
                    const CudaBackward& out, bool with_facts, const void* workspace);

}  // namespace evenkeel
