// The secret that the ranks of one job share. It is never printed, and no message quotes it.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace evenkeel {

// EVENKEEL_SECRET, or what the file EVENKEEL_SECRET_FILE holds, less white space at its end; empty where neither is set.
// DataError where it is shorter than kShortestSecret, or where others than its owner may read the file.
inline constexpr size_t kShortestSecret = 16;  // bytes: whoever hears ranks join may try to guess it
std::string secret_of_environment(const std::function<const char*(const char*)>& environment);

// For ranks of one user on one machine, where no secret is set. It is random, made on first use and kept in a file that
// only this user can read. DataError where that cannot be; it says what to set instead.
std::string secret_of_user();

}  // namespace evenkeel
