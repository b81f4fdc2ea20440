// What the fuzz targets share. A target hands over text of any kind; a parser may accept it, or refuse it
// with one of the two errors a user can cause. Anything else (a crash, another exception, a result that does
// not survive being written and read again) ends the process, which is how libFuzzer learns of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "base/error.h"

namespace evenkeel::fuzz {

inline std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Runs f. False: it refused the input as it should.
template <class Function>
bool accepts(Function&& f) {
  try {
    f();
    return true;
  } catch (const std::invalid_argument&) {
  } catch (const DataError&) {
  }
  return false;
}

inline void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz: does not hold: %s\n", what);
  std::abort();
}

}  // namespace evenkeel::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
