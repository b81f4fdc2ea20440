# Sanitizers: flags, and what the fuzzers count.
#   EVENKEEL_SANITIZE=address   address and undefined-behaviour sanitizers; with clang the fuzzers too (EVENKEEL_FUZZING)
#   EVENKEEL_SANITIZE=thread    the thread sanitizer
# Clang's and GCC's `undefined` find the same; clang compiles sanitized code in half of GCC's time.

if(NOT EVENKEEL_SANITIZE MATCHES "^(address|thread)$")
  message(FATAL_ERROR "EVENKEEL_SANITIZE=${EVENKEEL_SANITIZE}: expected OFF, address or thread")
endif()
string(REPLACE address address,undefined sanitizers ${EVENKEEL_SANITIZE})
add_compile_options(-fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
add_link_options(-fsanitize=${sanitizers})
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  # What sources ask for is GCC's word for it.
  string(TOUPPER ${EVENKEEL_SANITIZE} word)
  add_compile_definitions(__SANITIZE_${word}__)
endif()

# No optimising of the files that use JSON, of report and command line, and of the tests. They compute little, and optimising
# what the sanitizers add to them takes half of the compiler's time (isolate.cpp with clang 14: 13 s, else 6).
file(GLOB instrumented CONFIGURE_DEPENDS src/*/*.cpp)
foreach(source ${instrumented})
  evenkeel_uses_json(uses_json ${source})
  if(uses_json OR source MATCHES "/src/(cli|report)/")
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS -O0)
  endif()
endforeach()

# The parsers tell libFuzzer which of their branches an input takes. All other files are sanitized like these, but count no
# branches: that costs a third of the compiler's time and more of the tests'.
set(EVENKEEL_FUZZING OFF)
if(EVENKEEL_SANITIZE STREQUAL address)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS -fsanitize=fuzzer)
  check_cxx_source_compiles("extern \"C\" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }" EVENKEEL_LIBFUZZER)
  unset(CMAKE_REQUIRED_FLAGS)
  set(EVENKEEL_FUZZING ${EVENKEEL_LIBFUZZER})
endif()
if(EVENKEEL_FUZZING)
  file(GLOB parsers CONFIGURE_DEPENDS src/base/*.cpp src/records/*.cpp src/report/*.cpp src/numerics/explain*.cpp
       src/numerics/format.cpp src/numerics/rounding.cpp src/attention/precision_plan.cpp src/training/batch_record.cpp
       src/training/token*.cpp src/training/pretokenize.cpp src/diagnosis/capture.cpp src/cli/options.cpp)
  set_property(SOURCE ${parsers} APPEND PROPERTY COMPILE_OPTIONS -fsanitize=fuzzer-no-link)
endif()
