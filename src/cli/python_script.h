// Scripts of python/ as helpers of a command: found, started, talked to in lines of JSON.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace evenkeel::cli {

// The exit code of a script that misses a package.
inline constexpr int kNoPackage = 77;

std::filesystem::path program_folder();
// Beside the program, one folder up, here, or in the tree it was built from; empty: nowhere.
std::filesystem::path find_script(const std::string& name);
// EVENKEEL_PYTHON alone, where it is set; else python3, and the system's own where another one comes first.
std::vector<std::string> python_candidates();

// A running script. Lines go to its standard input; its standard output is lines of JSON.
class PythonScript {
 public:
  // What the script said first, or why there is none.
  struct Start {
    std::unique_ptr<PythonScript> script;
    nlohmann::ordered_json greeting;
    std::string why_not;
  };
  // Tries the candidates in turn, until one says something before it ends.
  static Start start(const std::string& name, const std::vector<std::string>& arguments);
  ~PythonScript();  // closes its input and waits for its end
  PythonScript(const PythonScript&) = delete;
  PythonScript& operator=(const PythonScript&) = delete;

  // DataError where the script ends instead of an answer. {"error": WORDS} is an answer: what that means is the caller's to say.
  nlohmann::ordered_json ask(const nlohmann::ordered_json& question);

 private:
  PythonScript(const std::string& python, const std::string& script,
               const std::vector<std::string>& arguments);
  std::optional<std::string> read_line();
  int wait();  // its exit code, -1 where it has none

  std::string words_;  // for messages
  pid_t process_ = -1;
  std::FILE *to_ = nullptr, *from_ = nullptr;
};

}  // namespace evenkeel::cli
