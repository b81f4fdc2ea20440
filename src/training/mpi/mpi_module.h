/* Between the program and libevenkeel_mpi.so, the only part that knows MPI: the program itself starts where there is
   no MPI. Plain C, so that neither needs the other's C++ library. MPI's errors end the job with MPI's own words. */
#ifndef EVENKEEL_MPI_MODULE_H
#define EVENKEEL_MPI_MODULE_H

#include <stddef.h>

#define EVENKEEL_MPI_INTERFACE 1 /* grows with every change of what follows */

struct evenkeel_mpi {
  int interface;
  /* Joins the job. */
  void (*start)(int* rank, int* size);
  /* send, receive: (size, bytes); bytes below 2^31 */
  void (*exchange)(const void* send, void* receive, size_t bytes);
  /* send: (bytes); receive: (size, bytes) */
  void (*gather)(const void* send, void* receive, size_t bytes);
  /* Ends every rank; does not return. */
  void (*abort)(int code);
  /* Leaves the job, all ranks together. */
  void (*finish)(void);
};

#define EVENKEEL_MPI_SYMBOL "evenkeel_mpi_module"

#endif
