// NCCL, found at run time. What is used of nccl.h is declared here: its binary interface has been the same through all
// of version 2, so that the program is built without that header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace evenkeel {

struct Nccl {
  using Status = int;  // 0: success
  struct Id {          // ncclUniqueId
    char bytes[128];
  };
  using Communicator = void*;         // ncclComm_t
  static constexpr int kFloat32 = 7;  // ncclFloat32

  Status (*version)(int*);
  Status (*unique_id)(Id*);
  Status (*join)(Communicator*, int size, Id, int rank);
  Status (*abort)(Communicator);
  Status (*destroy)(Communicator);
  Status (*send)(const void*, size_t, int type, int rank, Communicator, cudaStream_t);
  Status (*receive)(void*, size_t, int type, int rank, Communicator, cudaStream_t);
  Status (*begin_group)();
  Status (*end_group)();
  const char* (*words)(Status);
};

// Returns what is missing; empty: loaded.
std::string load_nccl(Nccl& nccl);

}  // namespace evenkeel
