# Every tests/*_test.cpp is a test program; they are globbed, so that none can be orphaned.
enable_testing()
find_package(GTest REQUIRED)
file(GLOB test_sources CONFIGURE_DEPENDS tests/*_test.cpp)
foreach(source ${test_sources})
  get_filename_component(test ${source} NAME_WE)
  add_executable(${test} ${source})
  target_include_directories(${test} PRIVATE tests)
  target_compile_definitions(${test} PRIVATE EVENKEEL_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
                                             EVENKEEL_PROGRAM="$<TARGET_FILE:evenkeel>")
  target_link_libraries(${test} PRIVATE evenkeel_core GTest::gtest_main)
  add_dependencies(${test} evenkeel)
  add_test(NAME ${test} COMMAND ${test})
endforeach()
find_library(mpfr_library mpfr REQUIRED)
if(TARGET rounding_test)
  target_link_libraries(rounding_test PRIVATE ${mpfr_library} gmp)
  # The host code of the CUDA headers judges our roundings where they are found; nothing of CUDA is linked.
  find_path(cuda_header_folder cuda_fp8.h HINTS $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda PATH_SUFFIXES include)
  if(cuda_header_folder)
    target_include_directories(rounding_test SYSTEM PRIVATE ${cuda_header_folder})
    target_compile_definitions(rounding_test PRIVATE EVENKEEL_HAVE_CUDA_HEADERS)
  endif()
endif()

# Checks of the sources and of the objects: once is enough, in the ordinary build.
if(NOT EVENKEEL_SANITIZE)
  add_test(NAME clang_format_test COMMAND ${CMAKE_SOURCE_DIR}/tests/clang_format_test.sh ${CMAKE_SOURCE_DIR})
  set_tests_properties(clang_format_test PROPERTIES SKIP_RETURN_CODE 77)
  foreach(target ${cpu_targets})
    if(NOT target STREQUAL baseline)
      add_test(NAME kernel_symbols_test_${target} COMMAND ${CMAKE_SOURCE_DIR}/tests/kernel_symbols_test.sh
               ${CMAKE_CXX_COMPILER} ${target} $<TARGET_OBJECTS:kernels_${target}> COMMAND_EXPAND_LISTS)
    endif()
  endforeach()
endif()

include(tests/fuzz/fuzz.cmake)
