#include "attention/cuda/hopper_host.h"
#include "base/error.h"

namespace evenkeel::hopper {
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

CUtensorMap tensor_map(const DeviceTensor& tensor, int64_t D, int64_t rows, int64_t heads, int64_t batch,
                       int box_rows) {
  const cuuint64_t extent[4] = {static_cast<cuuint64_t>(D), static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  cuuint64_t stride[3];  // bytes; of an axis of one element any valid one will do
  const int64_t elements[3] = {rows > 1 ? tensor.stride[2] : 8, heads > 1 ? tensor.stride[1] : 8,
                               batch > 1 ? tensor.stride[0] : 8};
  for (int axis = 0; axis < 3; ++axis) stride[axis] = static_cast<cuuint64_t>(elements[axis]) * 2;
  const cuuint32_t box[4] = {kBoxFeatures, static_cast<cuuint32_t>(box_rows), 1, 1}, step[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode_function()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, tensor.data, extent, stride, box, step,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require_data(status == CUDA_SUCCESS,
               "[attention] the driver made no tensor map: error {} for shape ({}, {}, {}, {}), strides of "
               "{}, {} and {} "
               "bytes, address {}",
               static_cast<int>(status), batch, heads, rows, D, stride[2], stride[1], stride[0], tensor.data);
  return map;
}

CUtensorMap query_map(const CudaAttention& p, const DeviceTensor& tensor, int box_rows) {
  const bool packed = p.query_offsets;
  return tensor_map(tensor, p.D, packed ? p.query_rows : p.T, p.H, packed ? 1 : p.B, box_rows);
}

CUtensorMap key_map(const CudaAttention& p, const DeviceTensor& tensor, int box_rows) {
  const bool packed = p.key_offsets;
  return tensor_map(tensor, p.D, packed ? p.key_rows : p.N, p.G, packed ? 1 : p.B, box_rows);
}

int multiprocessors() { return cuda_device().multiprocessors; }

Saved saved_layout(const CudaAttention& p, void* saved) {
  const Stabiliser s = p.plans[0].stabiliser;
  const bool consistent = s == Stabiliser::consistent, wide = consistent || s == Stabiliser::wide_output;
  const size_t rows = static_cast<size_t>(p.B * p.H * p.T);
  auto* const base = static_cast<uint8_t*>(saved);
  Saved out;
  // Nothing lies between the pieces: D is a multiple of 8, so each starts where its elements may.
  if (wide) {
    out.residue = reinterpret_cast<int8_t*>(base);
    out.bytes += rows * static_cast<size_t>(p.D);
  }
  if (consistent) {
    out.row_max = reinterpret_cast<float*>(base + out.bytes);
    out.bytes += rows * sizeof(float);
    out.row_sum = reinterpret_cast<float*>(base + out.bytes);
    out.bytes += rows * sizeof(float);
  }
  return out;
}

}  // namespace evenkeel::hopper
