#include "gpu/cuda/tensor_map.h"

#include "base/error.h"
#include "gpu/cuda/check.h"

namespace evenkeel::gpu {
namespace {

// The driver's function, found at run time: nothing of the driver is linked.
PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    check_cuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
        "looking for cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess)
      throw DataError("the driver has no cuTensorMapEncodeTiled (CUDA 12)");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return function;
}

}  // namespace

CUtensorMap tensor_map(void* data, const std::array<int64_t, 4>& size, const std::array<int64_t, 4>& stride,
                       int box_rows) {
  cuuint64_t extent[4], bytes[3];  // features first
  for (size_t axis = 0; axis < 4; ++axis) extent[axis] = static_cast<cuuint64_t>(size[3 - axis]);
  for (size_t axis = 0; axis < 3; ++axis) {
    constexpr int64_t kAnyValid = 8;  // of an axis of one element
    bytes[axis] = 2 * static_cast<cuuint64_t>(size[2 - axis] > 1 ? stride[2 - axis] : kAnyValid);
  }
  const cuuint32_t box[4] = {kBoxFeatures, static_cast<cuuint32_t>(box_rows), 1, 1}, step[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const auto encode = [&] {
    return encode_function()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, data, extent, bytes, box, step,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has not called the runtime yet has no context (autograd's backward threads are such); the runtime gives
    // it the device's own, also while a stream is captured.
    int device = 0;
    check_cuda(cudaGetDevice(&device), "looking for the device of this thread");
    check_cuda(cudaSetDevice(device), "choosing the device of this thread");
    status = encode();
  }
  require_data(
      status == CUDA_SUCCESS,
      "[gpu] the driver made no tensor map: error {} for shape ({}, {}, {}, {}), strides of {}, {} and "
      "{} bytes, address {}",
      static_cast<int>(status), size[0], size[1], size[2], size[3], bytes[2], bytes[1], bytes[0], data);
  return map;
}

}  // namespace evenkeel::gpu
