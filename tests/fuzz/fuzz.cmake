# The fuzz targets, tests/fuzz/*_fuzz.cpp, in two forms.
#   With the address sanitizer and a compiler that has libFuzzer (clang): a test, label `fuzz`, is some seconds of fuzzing.
#   Otherwise each target only runs the inputs of its corpus; part of the ordinary tests, and any compiler will do.
# The corpus of plan_fuzz.cpp is the folder corpus/plan.
set(EVENKEEL_FUZZ_SECONDS 60 CACHE STRING "seconds all fuzzers take together, two at a time")
file(GLOB fuzz_sources CONFIGURE_DEPENDS tests/fuzz/*_fuzz.cpp)
list(LENGTH fuzz_sources fuzz_count)
math(EXPR fuzz_seconds "${EVENKEEL_FUZZ_SECONDS} / ((${fuzz_count} + 1) / 2)")  # two at a time

if(NOT EVENKEEL_FUZZING)
  add_library(fuzz_replay OBJECT tests/fuzz/replay.cpp)
  target_include_directories(fuzz_replay PRIVATE tests)
  target_link_libraries(fuzz_replay PRIVATE evenkeel_core)
  target_compile_options(fuzz_replay PRIVATE -O0)
endif()
foreach(source ${fuzz_sources})
  get_filename_component(fuzzer ${source} NAME_WE)
  string(REGEX REPLACE "_fuzz$" "" subject ${fuzzer})
  set(corpus ${CMAKE_SOURCE_DIR}/tests/fuzz/corpus/${subject})
  add_executable(${fuzzer} ${source})
  target_include_directories(${fuzzer} PRIVATE tests)
  target_link_libraries(${fuzzer} PRIVATE evenkeel_core)
  if(EVENKEEL_FUZZING)
    target_compile_options(${fuzzer} PRIVATE -fsanitize=fuzzer-no-link)
    target_link_options(${fuzzer} PRIVATE -fsanitize=fuzzer)
    # New inputs go to a folder that is empty at the start, so that every run begins alike.
    add_test(NAME ${fuzzer} COMMAND sh -c
             "rm -rf found-${subject} && mkdir found-${subject} && exec \"$@\"" sh
             $<TARGET_FILE:${fuzzer}> -seed=1 -max_total_time=${fuzz_seconds} -timeout=10 -rss_limit_mb=1024 -max_len=1024
             -dict=${CMAKE_SOURCE_DIR}/tests/fuzz/words.dict -close_fd_mask=1 -print_final_stats=1
             -artifact_prefix=${CMAKE_BINARY_DIR}/${subject}- found-${subject} ${corpus})
    set_tests_properties(${fuzzer} PROPERTIES LABELS fuzz)
  else()
    target_sources(${fuzzer} PRIVATE $<TARGET_OBJECTS:fuzz_replay>)
    target_compile_options(${fuzzer} PRIVATE -O0)  # it calls the library once a file
    add_test(NAME ${fuzzer} COMMAND ${fuzzer} ${corpus})
    evenkeel_label(${fuzzer})
  endif()
endforeach()
target_sources(options_fuzz PRIVATE src/cli/options.cpp)
