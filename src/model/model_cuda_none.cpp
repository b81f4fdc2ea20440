// GPT-2 and matrix products on a GPU in a build without CUDA: says so. cmake/cuda.cmake chooses between this and
// cuda/.
#include "base/error.h"
#include "model/device_product.h"
#include "model/model.h"

namespace evenkeel {
namespace {

[[noreturn]] void refuse() { throw DataError("built without CUDA"); }

}  // namespace

struct DeviceProducts::State {};
DeviceProducts::DeviceProducts(void*) { refuse(); }
DeviceProducts::~DeviceProducts() = default;
void DeviceProducts::multiply(const DeviceProduct&) { refuse(); }
ProductChoices product_choices() { return {}; }

std::unique_ptr<Model> make_model_cuda(const ModelConfig&, uint64_t) { refuse(); }
std::vector<PhaseTime> time_phases_cuda(Model&, const Batch&, const StepContext&, int) { refuse(); }

}  // namespace evenkeel
