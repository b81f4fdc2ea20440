# Every tests/*_test.cpp is a test program; they are globbed, so that none can be orphaned. Those in tests/gpu need a GPU.
# Labels: `slow` are the tests that take more than ten seconds of one core, `quick` all others, `gpu` those of a GPU.
enable_testing()
find_package(GTest REQUIRED)
# What the thread sanitizer watches: the pool, the server, the live view, ranks, background writers, the trainer over them.
set(threaded_tests threads_test http_test watch_test ranks_test ranks_cli_test trainer_test capture_test)
# Checks of the sources and of the objects: once is enough, in the ordinary build.
set(source_tests layering_test size_test tree_test)
set(slow_tests ampere_test hopper_heads_test attention_bounds_test browser_test conform_test demo_cli_test derail_test guard_test isolate_test judge_test pytorch_test
               ranks_cli_test rounding_test study_test torch_attention_test torch_run_test torch_watch_test)

# Those whose own code computes for long.
set(computing_tests attention_bounds_test attention_rows_test rounding_test ampere_decode_test ampere_test hopper_backward_test hopper_heads_test judge_test conform_test)

# Those with include folders or definitions of their own, set below.
set(other_options cuda_emulator_test any_plan_prepare_test any_plan_variants_test ampere_decode_test ampere_test hopper_backward_test hopper_forward_test hopper_fp8_test hopper_heads_test cli_test rounding_test attention_problem_test)

# evenkeel_label(TEST...): quick or slow. Slow ones start first, so that none of them runs alone at the end.
function(evenkeel_label)
  foreach(test ${ARGN})
    set(label quick)
    set(cost 1)
    if(test IN_LIST slow_tests)
      set(label slow)
      set(cost 1000)
    endif()
    set_tests_properties(${test} PROPERTIES LABELS ${label} COST ${cost})
  endforeach()
endfunction()

# What most tests include, compiled once: a quarter to a third of the compiler's time for them.
set(common_headers <gtest/gtest.h> <fmt/format.h> <nlohmann/json.hpp> <filesystem> <fstream>)

file(GLOB test_sources CONFIGURE_DEPENDS tests/*_test.cpp)
foreach(source ${test_sources})
  get_filename_component(test ${source} NAME_WE)
  # Clang's optimiser needs many minutes for these kernels, and without it they run for as long. In the Release build they have
  # the checks below, the emulator's own, and memory between forbidden pages.
  if(EVENKEEL_SANITIZE AND (test IN_LIST source_tests OR test MATCHES "^(ampere|ampere_decode|hopper_heads)_test$"))
    continue()
  elseif(EVENKEEL_SANITIZE STREQUAL thread AND NOT test IN_LIST threaded_tests)
    continue()
  endif()
  add_executable(${test} ${source})
  target_include_directories(${test} PRIVATE tests)
  target_compile_definitions(${test} PRIVATE EVENKEEL_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
                                             EVENKEEL_PROGRAM="$<TARGET_FILE:evenkeel>")
  # The tests' own code is compiled quickly: what takes time when they run lies in the library.
  set(level -O0)
  if(test IN_LIST computing_tests)
    set(level -O1)
  endif()
  # clang's optimiser needs more than ten minutes for these kernels with checks of addresses; -O0 takes half a minute.
  if(EVENKEEL_SANITIZE AND test STREQUAL hopper_backward_test)
    set(level -O0)
  endif()
  # GCC forgets in precompiled headers that gtest's macros are a system header's.
  target_compile_options(${test} PRIVATE ${level} $<$<CXX_COMPILER_ID:GNU>:-Wno-dangling-else>)
  target_link_libraries(${test} PRIVATE evenkeel_core GTest::gtest_main)
  add_dependencies(${test} evenkeel)
  add_test(NAME ${test} COMMAND ${test})
  evenkeel_label(${test})
  # One set of them: for programs that are compiled with the same options.
  if(level STREQUAL -O0 AND NOT test IN_LIST other_options)
    if(NOT headers_of)
      set(headers_of ${test})
      target_precompile_headers(${test} PRIVATE ${common_headers})
    else()
      target_precompile_headers(${test} REUSE_FROM ${headers_of})
    endif()
  endif()
endforeach()
if(EVENKEEL_SANITIZE STREQUAL thread)
  return()
endif()
find_library(mpfr_library mpfr REQUIRED)
if(TARGET round_block_test)
  target_link_libraries(round_block_test PRIVATE ${mpfr_library} gmp)
endif()
if(TARGET rounding_test)
  target_link_libraries(rounding_test PRIVATE ${mpfr_library} gmp)
  # The host code of the CUDA headers judges our roundings where they are found; nothing of CUDA is linked.
  find_path(cuda_header_folder cuda_fp8.h HINTS $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda PATH_SUFFIXES include)
  if(cuda_header_folder)
    target_include_directories(rounding_test SYSTEM PRIVATE ${cuda_header_folder})
    target_compile_definitions(rounding_test PRIVATE EVENKEEL_HAVE_CUDA_HEADERS)
  endif()
endif()

# Kernels compiled for the CPU: the emulator's instructions stand before the device's. nvcc's pragmas mean nothing there. An index
# outside of an array of registers ends the program.
foreach(test cuda_emulator_test any_plan_prepare_test any_plan_variants_test ampere_decode_test ampere_test hopper_backward_test hopper_forward_test hopper_fp8_test hopper_heads_test)
  if(TARGET ${test})
    target_include_directories(${test} BEFORE PRIVATE tests/cuda_emulator)
    target_compile_options(${test} PRIVATE -Wno-unknown-pragmas -Wno-unused-function -Wno-sign-compare)
    if(NOT EVENKEEL_SANITIZE)
      target_compile_options(${test} PRIVATE -fsanitize=bounds -fsanitize-undefined-trap-on-error)
    endif()
  endif()
endforeach()
foreach(test hopper_forward_test hopper_backward_test hopper_heads_test)
  if(TARGET ${test})
    target_sources(${test} PRIVATE src/attention/cuda/hopper_host.cpp)
  endif()
endforeach()

# Compares the words of the library with those of the C interface.
if(TARGET attention_problem_test)
  target_link_libraries(attention_problem_test PRIVATE evenkeel_shared)
endif()

# The C interface, as a C program meets it: nothing but the header and the shared library.
enable_language(C)
add_executable(c_api_test tests/c_api_test.c tests/form_kernel.c)
set_target_properties(c_api_test PROPERTIES C_STANDARD 99 C_EXTENSIONS OFF
                      LINKER_LANGUAGE CXX)  # the sanitizers' part for C++ lies in the shared library
target_compile_options(c_api_test PRIVATE -pedantic -Werror)
target_link_libraries(c_api_test PRIVATE evenkeel_shared m)
# A kernel of someone else for `conform --library`: the header and nothing of ours.
add_library(form_kernel MODULE tests/form_kernel.c)
target_include_directories(form_kernel PRIVATE include)
target_link_libraries(form_kernel PRIVATE m)
if(TARGET cli_test)
  target_compile_definitions(cli_test PRIVATE EVENKEEL_FORM_KERNEL="$<TARGET_FILE:form_kernel>")
  add_dependencies(cli_test form_kernel)
endif()
add_test(NAME c_api_test COMMAND c_api_test)
evenkeel_label(c_api_test)

# The Python package over the same library. Skipped (exit code 77), and said so, where no Python has PyTorch; a library with
# sanitizers cannot be loaded by a Python without.
if(NOT EVENKEEL_SANITIZE)
  file(GLOB python_tests CONFIGURE_DEPENDS tests/python/*_test.py)
  foreach(source ${python_tests})
    get_filename_component(test ${source} NAME_WE)
    add_test(NAME ${test} COMMAND ${CMAKE_SOURCE_DIR}/tests/python/run_test.sh ${source})
    set_tests_properties(${test} PROPERTIES SKIP_RETURN_CODE 77 ENVIRONMENT
      "EVENKEEL_LIBRARY=$<TARGET_FILE:evenkeel_shared>;EVENKEEL_PROGRAM=$<TARGET_FILE:evenkeel>")
    evenkeel_label(${test})
  endforeach()
endif()

# Each says that it was skipped (exit code 77) where there is no GPU. One at a time: they share it.
if(EVENKEEL_GPU_TESTS AND EVENKEEL_HAS_CUDA)
  file(GLOB gpu_test_sources CONFIGURE_DEPENDS tests/gpu/*_test.cpp)
  find_program(compute_sanitizer compute-sanitizer HINTS ${CUDAToolkit_BIN_DIR})
  foreach(source ${gpu_test_sources})
    get_filename_component(test ${source} NAME_WE)
    add_executable(${test} ${source} tests/gpu/gpu_main.cpp)
    target_include_directories(${test} PRIVATE tests)
    target_include_directories(${test} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    target_compile_definitions(${test} PRIVATE EVENKEEL_PROGRAM="$<TARGET_FILE:evenkeel>")
    add_dependencies(${test} evenkeel)
    target_link_libraries(${test} PRIVATE evenkeel_core GTest::gtest)
    target_link_options(${test} PRIVATE -static-libstdc++ -static-libgcc)
    add_test(NAME ${test} COMMAND ${test})
    set(gpu_tests ${test})
    # Small shapes with every access of the device checked.
    if(compute_sanitizer)
      add_test(NAME ${test}_memcheck COMMAND ${compute_sanitizer} --error-exitcode 1 $<TARGET_FILE:${test}>)
      set_tests_properties(${test}_memcheck PROPERTIES ENVIRONMENT EVENKEEL_SMALL=1)
      list(APPEND gpu_tests ${test}_memcheck)
    endif()
    set_tests_properties(${gpu_tests} PROPERTIES LABELS gpu RESOURCE_LOCK gpu SKIP_RETURN_CODE 77)
  endforeach()
  # The same demands on the Ampere-class kernels, which other machines than Hopper choose.
  add_test(NAME hopper_test_ampere COMMAND hopper_test)
  set_tests_properties(hopper_test_ampere PROPERTIES ENVIRONMENT EVENKEEL_KERNELS=ampere LABELS gpu RESOURCE_LOCK gpu
                       SKIP_RETURN_CODE 77)
  # Asks the chip how it adds; a longer run with more batches is a command of its own.
  add_executable(tensor_core_chip tools/tensor_core_chip.cu)
  target_include_directories(tensor_core_chip PRIVATE tools)
  set_source_files_properties(tools/tensor_core_chip.cu PROPERTIES COMPILE_OPTIONS "${cuda_machines_hopper}")
  evenkeel_cuda_flags(tensor_core_chip)
  target_link_libraries(tensor_core_chip PRIVATE evenkeel_core)
  target_link_options(tensor_core_chip PRIVATE -static-libstdc++ -static-libgcc)
  add_test(NAME tensor_core_chip COMMAND tensor_core_chip --batches 4)
  set_tests_properties(tensor_core_chip PROPERTIES LABELS gpu RESOURCE_LOCK gpu
                       SKIP_REGULAR_EXPRESSION "expected a Hopper GPU")
endif()

if(NOT EVENKEEL_SANITIZE)
  add_test(NAME nvcc_checked_test COMMAND ${CMAKE_SOURCE_DIR}/tests/nvcc_checked_test.sh
           ${CMAKE_SOURCE_DIR}/scripts/nvcc_checked)
  add_test(NAME gpu_queue_test COMMAND ${CMAKE_SOURCE_DIR}/tests/gpu_queue_test.sh ${CMAKE_SOURCE_DIR}/scripts/gpu)
  add_test(NAME wrapper_test COMMAND ${CMAKE_SOURCE_DIR}/tests/wrapper_test.sh ${CMAKE_SOURCE_DIR}/evenkeel)
  add_test(NAME install_test COMMAND ${CMAKE_SOURCE_DIR}/tests/install_test.sh ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR})
  evenkeel_label(install_test)
  add_test(NAME clang_format_test COMMAND ${CMAKE_SOURCE_DIR}/tests/clang_format_test.sh ${CMAKE_SOURCE_DIR})
  set_tests_properties(clang_format_test PROPERTIES SKIP_RETURN_CODE 77)
  add_test(NAME spelling_test COMMAND ${CMAKE_SOURCE_DIR}/tests/spelling_test.sh ${CMAKE_SOURCE_DIR})
  set_tests_properties(spelling_test PROPERTIES SKIP_RETURN_CODE 77)
  # Alone: a browser and a run that trains keep two cores busy.
  add_test(NAME browser_test COMMAND ${CMAKE_SOURCE_DIR}/tests/browser/browser_test.sh $<TARGET_FILE:evenkeel>
           ${CMAKE_BINARY_DIR}/browser)
  set_tests_properties(browser_test PROPERTIES SKIP_RETURN_CODE 77 PROCESSORS 2)
  evenkeel_label(nvcc_checked_test gpu_queue_test wrapper_test clang_format_test spelling_test browser_test)
  # First, since two places at once are free at the beginning alone: it would wait for the end of all others.
  set_tests_properties(browser_test PROPERTIES COST 2000)
  foreach(target ${cpu_targets})
    if(NOT target STREQUAL baseline)
      add_test(NAME kernel_symbols_test_${target} COMMAND ${CMAKE_SOURCE_DIR}/tests/kernel_symbols_test.sh
               ${CMAKE_CXX_COMPILER} ${target} $<TARGET_OBJECTS:kernels_${target}> COMMAND_EXPAND_LISTS)
      evenkeel_label(kernel_symbols_test_${target})
    endif()
  endforeach()
endif()

include(tests/fuzz/fuzz.cmake)
