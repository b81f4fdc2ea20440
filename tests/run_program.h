// Runs the program under test as a user does, through a shell.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <string>

namespace evenkeel {

struct Output {
  int code = -1;  // -1: it did not start, or did not end by itself
  std::string out, err;
};

// `command` as a shell reads it. err stays empty: redirect it, and read what it was redirected to.
inline Output run_shell(const std::string& command) {
  Output output;
  std::FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return output;
  char buffer[4096];
  for (size_t count; (count = fread(buffer, 1, sizeof buffer, pipe)) > 0;) output.out.append(buffer, count);
  const int status = pclose(pipe);
  output.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return output;
}

}  // namespace evenkeel
