// A shared library found at run time: the program is built and starts without it.
// Never closed: what the library made may outlive whoever asked for it.
#pragma once

#include <initializer_list>
#include <string>

namespace evenkeel {

class SharedLibrary {
 public:
  // The first of these files that the system's loader finds.
  explicit SharedLibrary(std::initializer_list<const char*> files);

  // Sets `function` to the library's function of that name; null where there is none.
  template <class Function>
  void find(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(symbol(name));
  }

  // Empty while the library was found and has every function that was asked for; else what is missing.
  const std::string& missing() const { return missing_; }

 private:
  void* symbol(const char* name);

  void* handle_ = nullptr;
  std::string file_, missing_;
};

}  // namespace evenkeel
