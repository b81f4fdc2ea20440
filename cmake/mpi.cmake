# MPI: a module of its own beside the program, which loads it when mpirun starts several ranks. Without MPI everything
# else is as it would be.

option(EVENKEEL_MPI "the module for MPI, where MPI is found" ON)
# Not under sanitizers: MPI's own leaks are not ours to report.
if(EVENKEEL_MPI AND NOT EVENKEEL_SANITIZE)
  enable_language(C)
  find_package(MPI QUIET COMPONENTS C)
  if(MPI_C_FOUND)
    message(STATUS "MPI: yes (${MPI_C_LIBRARY_VERSION_STRING}${MPI_C_LIBRARIES})")
    add_library(evenkeel_mpi MODULE src/training/mpi/mpi_module.c)
    target_include_directories(evenkeel_mpi PRIVATE src)
    target_link_libraries(evenkeel_mpi PRIVATE MPI::MPI_C)
    set_target_properties(evenkeel_mpi PROPERTIES C_VISIBILITY_PRESET hidden)
    add_dependencies(evenkeel_core evenkeel_mpi)  # wherever a program is built, the module lies beside it
  else()
    message(STATUS "MPI: no (libopenmpi-dev is not installed)")
  endif()
endif()
