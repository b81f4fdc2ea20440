#include "gpu/shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace evenkeel {

SharedLibrary::SharedLibrary(std::initializer_list<const char*> files) {
  for (const char* file : files) {
    if ((handle_ = dlopen(file, RTLD_NOW | RTLD_LOCAL))) {
      file_ = file;
      missing_.clear();
      return;
    }
    missing_ += fmt::format("{}{}", missing_.empty() ? "no " : ", no ", file);
  }
  missing_ += " where the system's loader looks";
}

void* SharedLibrary::symbol(const char* name) {
  if (!handle_) return nullptr;
  void* const found = dlsym(handle_, name);
  if (!found && missing_.empty()) missing_ = fmt::format("{} has no function {}", file_, name);
  return found;
}

}  // namespace evenkeel
