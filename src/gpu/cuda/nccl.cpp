#include "gpu/cuda/nccl.h"

#include "gpu/shared_library.h"

namespace evenkeel {

std::string load_nccl(Nccl& nccl) {
  SharedLibrary library{"libnccl.so.2"};
  library.find(nccl.version, "ncclGetVersion");
  library.find(nccl.unique_id, "ncclGetUniqueId");
  library.find(nccl.join, "ncclCommInitRank");
  library.find(nccl.abort, "ncclCommAbort");
  library.find(nccl.destroy, "ncclCommDestroy");
  library.find(nccl.send, "ncclSend");
  library.find(nccl.receive, "ncclRecv");
  library.find(nccl.begin_group, "ncclGroupStart");
  library.find(nccl.end_group, "ncclGroupEnd");
  library.find(nccl.words, "ncclGetErrorString");
  return library.missing();
}

}  // namespace evenkeel
