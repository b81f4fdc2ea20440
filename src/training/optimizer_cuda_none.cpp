// The device optimiser in a build without CUDA: says so.
#include "base/error.h"
#include "training/optimizer.h"

namespace evenkeel {

std::unique_ptr<Optimizer> make_optimizer_cuda(const OptimizerConfig&, const ParameterTable&, Ranks*) {
  throw DataError("built without CUDA");
}

}  // namespace evenkeel
