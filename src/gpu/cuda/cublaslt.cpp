#include "gpu/cuda/cublaslt.h"

#include "base/error.h"
#include "gpu/shared_library.h"

namespace evenkeel {

const CublasLt& cublaslt() {
  static const CublasLt loaded = [] {
    SharedLibrary library{"libcublasLt.so.13", "libcublasLt.so.12"};
    CublasLt found;
    library.find(found.create, "cublasLtCreate");
    library.find(found.destroy, "cublasLtDestroy");
    library.find(found.get_version, "cublasLtGetVersion");
    library.find(found.status_string, "cublasLtGetStatusString");
    library.find(found.matmul, "cublasLtMatmul");
    library.find(found.desc_create, "cublasLtMatmulDescCreate");
    library.find(found.desc_destroy, "cublasLtMatmulDescDestroy");
    library.find(found.desc_set, "cublasLtMatmulDescSetAttribute");
    library.find(found.layout_create, "cublasLtMatrixLayoutCreate");
    library.find(found.layout_destroy, "cublasLtMatrixLayoutDestroy");
    library.find(found.layout_set, "cublasLtMatrixLayoutSetAttribute");
    library.find(found.preference_create, "cublasLtMatmulPreferenceCreate");
    library.find(found.preference_destroy, "cublasLtMatmulPreferenceDestroy");
    library.find(found.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    library.find(found.heuristic, "cublasLtMatmulAlgoGetHeuristic");
    library.find(found.check, "cublasLtMatmulAlgoCheck");
    require_data(
        library.missing().empty(),
        "no cuBLASLt: {} (expected version 12 or newer; LD_LIBRARY_PATH adds a folder; it comes with "
        "CUDA, and with Python's package nvidia-cublas)",
        library.missing());
    return found;
  }();
  return loaded;
}

void check_blas(cublasStatus_t status, const char* doing) {
  require_data(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: {}: {}", doing, cublaslt().status_string(status));
}

}  // namespace evenkeel
