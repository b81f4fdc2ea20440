// The two kinds of error a user can cause. Everything else that is thrown is a fault of ours.
//   std::invalid_argument  a request that cannot be meant: unknown name, shapes that do not match   (exit 2)
//   DataError              a file or an environment that is not as it must be                       (exit 3)
// Messages say what was expected and what was found.
#pragma once

#include <fmt/format.h>

#include <stdexcept>

namespace evenkeel {

class DataError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// require(rows == 3, "[attention] expected 3 rows, got {}", rows);
template <class... Args>
void require(bool condition, fmt::format_string<Args...> message, Args&&... args) {
  if (!condition) throw std::invalid_argument(fmt::format(message, std::forward<Args>(args)...));
}

template <class... Args>
void require_data(bool condition, fmt::format_string<Args...> message, Args&&... args) {
  if (!condition) throw DataError(fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace evenkeel
