// GPT-2 on a GPU in a build without CUDA: says so.
#include "base/error.h"
#include "model/gpt2.h"

namespace evenkeel {

std::unique_ptr<Gpt2> make_gpt2_cuda(const Gpt2Config&, uint64_t) { throw DataError("built without CUDA"); }

}  // namespace evenkeel
