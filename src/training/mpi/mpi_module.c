#include "training/mpi/mpi_module.h"

#include <mpi.h>

static void start(int* rank, int* size) {
  int provided = 0;
  MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, rank);
  MPI_Comm_size(MPI_COMM_WORLD, size);
}

static void exchange(const void* send, void* receive, size_t bytes) {
  MPI_Alltoall(send, (int)bytes, MPI_BYTE, receive, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
}

static void gather(const void* send, void* receive, size_t bytes) {
  MPI_Allgather(send, (int)bytes, MPI_BYTE, receive, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
}

static void end(int code) { MPI_Abort(MPI_COMM_WORLD, code); }

static void finish(void) { MPI_Finalize(); }

__attribute__((visibility("default"))) const struct evenkeel_mpi evenkeel_mpi_module = {
    EVENKEEL_MPI_INTERFACE, start, exchange, gather, end, finish};
