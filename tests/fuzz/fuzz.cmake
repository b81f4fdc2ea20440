# The fuzz targets, tests/fuzz/*_fuzz.cpp, in two forms.
#   EVENKEEL_FUZZ=ON (clang): libFuzzer with address and undefined-behaviour sanitizers; a test is some seconds of it.
#   otherwise: each target only runs the inputs of its corpus; part of the ordinary tests, and any compiler will do.
# The corpus of plan_fuzz.cpp is the folder corpus/plan.
set(EVENKEEL_FUZZ_SECONDS 60 CACHE STRING "seconds all fuzzers take together, two at a time")
enable_testing()
file(GLOB fuzz_sources CONFIGURE_DEPENDS tests/fuzz/*_fuzz.cpp)
list(LENGTH fuzz_sources fuzz_count)
math(EXPR fuzz_seconds "${EVENKEEL_FUZZ_SECONDS} / ((${fuzz_count} + 1) / 2)")  # two at a time

if(EVENKEEL_FUZZ)
  # Everything but the kernels: parsers do not call them, and what is not called is not linked.
  set_target_properties(evenkeel evenkeel_shared evenkeel_core PROPERTIES EXCLUDE_FROM_ALL ON)
  foreach(target ${cpu_targets})
    set_target_properties(kernels_${target} PROPERTIES EXCLUDE_FROM_ALL ON)
  endforeach()
  add_library(fuzzed_core STATIC ${library_sources})
  target_include_directories(fuzzed_core PUBLIC src)
  target_link_libraries(fuzzed_core PUBLIC ${fmt_library} nlohmann_json::nlohmann_json Threads::Threads)
  target_compile_options(fuzzed_core PUBLIC -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
                                            -Wno-unknown-warning-option)
endif()

foreach(source ${fuzz_sources})
  get_filename_component(fuzzer ${source} NAME_WE)
  string(REGEX REPLACE "_fuzz$" "" subject ${fuzzer})
  set(corpus ${CMAKE_SOURCE_DIR}/tests/fuzz/corpus/${subject})
  add_executable(${fuzzer} ${source})
  target_include_directories(${fuzzer} PRIVATE tests)
  if(EVENKEEL_FUZZ)
    target_link_libraries(${fuzzer} PRIVATE fuzzed_core)
    target_link_options(${fuzzer} PRIVATE -fsanitize=fuzzer,address,undefined)
    # New inputs go to a folder that is empty at the start, so that every run begins alike.
    add_test(NAME ${fuzzer} COMMAND sh -c
             "rm -rf found-${subject} && mkdir found-${subject} && exec \"$@\"" sh
             $<TARGET_FILE:${fuzzer}> -seed=1 -max_total_time=${fuzz_seconds} -timeout=10 -rss_limit_mb=1024 -max_len=1024
             -dict=${CMAKE_SOURCE_DIR}/tests/fuzz/words.dict -close_fd_mask=1 -print_final_stats=1
             -artifact_prefix=${CMAKE_BINARY_DIR}/${subject}- found-${subject} ${corpus})
  else()
    target_sources(${fuzzer} PRIVATE tests/fuzz/replay.cpp)
    target_link_libraries(${fuzzer} PRIVATE evenkeel_core)
    add_test(NAME ${fuzzer} COMMAND ${fuzzer} ${corpus})
    evenkeel_label(${fuzzer})
  endif()
endforeach()
if(EVENKEEL_FUZZ)
  # A page may draw captures, which takes the kernels. The fuzzed runs have none: what is not called may be missing.
  target_link_options(run_records_fuzz PRIVATE -Wl,--unresolved-symbols=ignore-all)
endif()
if(TARGET options_fuzz)
  target_sources(options_fuzz PRIVATE src/cli/options.cpp)
endif()
