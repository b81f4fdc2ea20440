// Ranks on GPUs in a build without CUDA: it says so.
#include "base/error.h"
#include "training/device_ranks.h"

namespace evenkeel {

void take_device(const Launch&) {}

std::unique_ptr<FloatMemory> make_device_memory(void*) { throw DataError("built without CUDA"); }

std::unique_ptr<DeviceLink> connect_nccl(Ranks&, void*, std::string&) {
  throw DataError("built without CUDA");
}

}  // namespace evenkeel
