# CUDA: whether it is here, and how its kernels are compiled. Sets EVENKEEL_HAS_CUDA; without it the library has a
# stub that says "built without CUDA", and everything else is as it would be.

set(EVENKEEL_HAS_CUDA OFF)
if(NOT EVENKEEL_CUDA MATCHES "^(AUTO|ON|OFF|TRUE|FALSE|1|0)$")
  message(FATAL_ERROR "EVENKEEL_CUDA=${EVENKEEL_CUDA}: expected AUTO, ON or OFF")
endif()
if(EVENKEEL_CUDA AND EVENKEEL_SANITIZE AND NOT EVENKEEL_CUDA STREQUAL AUTO)
  message(FATAL_ERROR "EVENKEEL_CUDA=ON: expected OFF or AUTO with sanitizers, which know no device code")
endif()

# Does what is there do? `why` is empty, or says what is missing.
function(evenkeel_find_cuda why)
  set(${why} "" PARENT_SCOPE)
  if(EVENKEEL_CUDA_WORKS)
    return()
  endif()
  set(found ${CMAKE_CUDA_COMPILER})
  if(NOT found)
    set(found $ENV{CUDACXX})
  endif()
  if(NOT found)
    find_program(EVENKEEL_NVCC nvcc HINTS $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda PATH_SUFFIXES bin)
    set(found ${EVENKEEL_NVCC})
  endif()
  if(NOT found)
    set(${why} "no nvcc in PATH, CUDA_HOME/bin, CUDA_PATH/bin or /usr/local/cuda/bin" PARENT_SCOPE)
    return()
  endif()
  # check_language tries a compiler without failing, but only one that it finds itself.
  unset(CMAKE_CUDA_COMPILER CACHE)
  set(ENV{CUDACXX} ${found})
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(${why} "${found} does not work with ${CMAKE_CXX_COMPILER} (CMakeFiles/CMakeError.log says why)" PARENT_SCOPE)
  endif()
endfunction()

if(EVENKEEL_CUDA AND NOT EVENKEEL_SANITIZE)
  # Every kernel file names its own machines; CMake must not add one.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER} CACHE FILEPATH "nvcc's host compiler")
  evenkeel_find_cuda(missing_cuda)
  if(NOT missing_cuda)
    enable_language(CUDA)
    set(EVENKEEL_CUDA_WORKS ON CACHE INTERNAL "the CUDA compiler was tried")
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.5)  # the first with cudaGetDriverEntryPointByVersion
      set(missing_cuda "${CMAKE_CUDA_COMPILER} is of CUDA ${CMAKE_CUDA_COMPILER_VERSION}, older than 12.5")
    endif()
  endif()
  if(NOT missing_cuda)
    set(EVENKEEL_HAS_CUDA ON)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 does not know that nvcc has it
    message(STATUS "CUDA kernels: yes (CUDA ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_COMPILER})")
  elseif(EVENKEEL_CUDA STREQUAL AUTO)
    message(STATUS "CUDA kernels: no (${missing_cuda})")
  else()
    message(FATAL_ERROR "EVENKEEL_CUDA=ON: expected a CUDA compiler of version 12.5 or newer, found ${missing_cuda}")
  endif()
endif()

# The table of kernel families: a row is a name, the machines its code is made for, its files. Files of src/*/cuda that
# no row names are for all machines. Another family (sm_80 alone, say) is another row.
set(cuda_families hopper ampere any_plan norms)
# Only so: -arch=sm_90a also makes a compute_90 pass, which knows neither wgmma nor setmaxnreg.
set(cuda_machines_hopper -gencode=arch=compute_90a,code=sm_90a)
set(cuda_files_hopper src/attention/cuda/hopper_forward.cu src/attention/cuda/hopper_forward_bf16.cu
                      src/attention/cuda/hopper_forward_fp16.cu src/attention/cuda/hopper_forward_facts.cu
                      src/attention/cuda/hopper_forward_large_bf16.cu
                      src/attention/cuda/hopper_forward_large_fp16.cu
                      src/attention/cuda/hopper_forward_large_forms_bf16.cu
                      src/attention/cuda/hopper_forward_large_forms_fp16.cu
                      src/attention/cuda/hopper_backward.cu
                      src/attention/cuda/hopper_backward_bf16.cu src/attention/cuda/hopper_backward_fp16.cu
                      src/attention/cuda/hopper_backward_large_bf16.cu
                      src/attention/cuda/hopper_backward_large_fp16.cu
                      src/attention/cuda/hopper_backward_large_forms_bf16.cu
                      src/attention/cuda/hopper_backward_large_forms_fp16.cu
                      src/attention/cuda/hopper_delta.cu src/attention/cuda/hopper_fact_pass.cu
                      src/attention/cuda/hopper_fp8.cu)

# One machine code for all of 8.x, one for Hopper; PTX for what comes after. Nothing of these asks which machine it is, so one
# PTX serves all: a third of the compiler's time, which is minutes here. (The backward pass asks: on Hopper the memory adds four
# numbers with one instruction. So it is made for all machines.)
set(cuda_machines_ampere "-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]")
set(cuda_files_ampere src/attention/cuda/ampere_forward.cu)

set(cuda_machines_any_plan ${cuda_machines_ampere})
set(cuda_files_any_plan src/attention/cuda/any_plan.cu src/attention/cuda/any_plan_forward.cu
                        src/attention/cuda/any_plan_backward_rows.cu src/attention/cuda/any_plan_backward_keys.cu)

set(cuda_machines_all -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90
                      -gencode=arch=compute_80,code=compute_80)  # PTX for what comes after

# The same PTX does for the norms: of 130 kernels, 127 have the machine code that PTX of Hopper's own makes.
set(cuda_machines_norms ${cuda_machines_ampere})
set(cuda_files_norms src/model/cuda/layer_norm.cu)

# Files with many instances of their kernels: alone, so that the cores share them. All others are joined where sources are.
set(cuda_files_alone ${cuda_files_ampere} src/attention/cuda/ampere_backward.cu
                     ${cuda_files_any_plan} ${cuda_files_norms}
                     src/attention/cuda/hopper_forward_bf16.cu src/attention/cuda/hopper_forward_fp16.cu
                     src/attention/cuda/hopper_forward_facts.cu src/attention/cuda/hopper_backward_bf16.cu
                     src/attention/cuda/hopper_backward_fp16.cu src/attention/cuda/hopper_forward_large_bf16.cu
                     src/attention/cuda/hopper_forward_large_fp16.cu src/attention/cuda/hopper_backward_large_bf16.cu
                     src/attention/cuda/hopper_backward_large_fp16.cu
                     src/attention/cuda/hopper_forward_large_forms_bf16.cu
                     src/attention/cuda/hopper_forward_large_forms_fp16.cu
                     src/attention/cuda/hopper_backward_large_forms_bf16.cu
                     src/attention/cuda/hopper_backward_large_forms_fp16.cu)

# nvcc's -O is of host code, which launches kernels and computes nothing; kernels are optimised in any case.
set(CMAKE_CUDA_FLAGS_RELEASE "-O1 -DNDEBUG")

# Flags of a target's .cu files. By default nvcc keeps IEEE division, roots and subnormals. It does fuse a * b + c,
# so kernels that must not fuse say so themselves (__fmul_rn, __fadd_rn). Line numbers, for compute-sanitizer and profilers,
# do not change the code; they make every program four times as large, and are for builds with GPU tests.
function(evenkeel_cuda_flags target)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF
                        CUDA_VISIBILITY_PRESET hidden CUDA_RUNTIME_LIBRARY Static
                        CUDA_COMPILER_LAUNCHER ${CMAKE_SOURCE_DIR}/scripts/nvcc_checked)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:$<$<BOOL:${EVENKEEL_GPU_TESTS}>:-lineinfo>;-Xcompiler=-Wall,-Wextra,-ffp-contract=off,-Wno-psabi>")
endfunction()

# Adds all of src/*/cuda to the target, each kernel file for its family's machines.
function(evenkeel_add_cuda_kernels target)
  file(GLOB sources CONFIGURE_DEPENDS src/*/cuda/*.cu src/*/cuda/*.cpp)
  file(GLOB kernels CONFIGURE_DEPENDS src/*/cuda/*.cu)
  set_source_files_properties(${kernels} PROPERTIES COMPILE_OPTIONS "${cuda_machines_all}")
  foreach(family ${cuda_families})
    list(TRANSFORM cuda_files_${family} PREPEND ${CMAKE_SOURCE_DIR}/ OUTPUT_VARIABLE files)
    foreach(file ${files})
      if(NOT file IN_LIST kernels)
        message(FATAL_ERROR "cmake/cuda.cmake: family ${family} names ${file}, which is not there")
      endif()
    endforeach()
    set_source_files_properties(${files} PROPERTIES COMPILE_OPTIONS "${cuda_machines_${family}}")
  endforeach()
  if(EVENKEEL_JOIN)
    list(TRANSFORM cuda_files_alone PREPEND ${CMAKE_SOURCE_DIR}/ OUTPUT_VARIABLE alone)
    list(REMOVE_ITEM sources ${alone})
    evenkeel_join(sources ${sources})
    list(PREPEND sources ${alone})
  endif()
  target_sources(${target} PRIVATE ${sources})
  evenkeel_cuda_flags(${target})
  # The runtime goes in statically; the driver is found at run time, or is not there.
  find_package(CUDAToolkit REQUIRED)
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(${target} PUBLIC CUDA::cudart_static)
endfunction()
