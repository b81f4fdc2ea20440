// What ranks need on GPUs. Without CUDA: memory and links that throw DataError, and no device to take.
#pragma once

#include <memory>

#include "training/ranks.h"

namespace evenkeel {

// Of several GPUs on a machine, the one of this rank becomes the current one; ranks beyond their number share.
void take_device(const Launch& launch);

// Memory of the current device, in the order of a stream (cudaStream_t). Sums have the host's bits.
std::unique_ptr<FloatMemory> make_device_memory(void* stream);

// NCCL (libnccl.so.2, found at run time) between the ranks' current devices, in the order of the stream. The result is
// nullptr on all ranks where it is not found on one of them, or two ranks share a GPU. The reason is in `why`.
std::unique_ptr<DeviceLink> connect_nccl(Ranks& ranks, void* stream, std::string& why);

}  // namespace evenkeel
