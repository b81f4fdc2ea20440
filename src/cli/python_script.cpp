#include "cli/python_script.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <utility>

#include "base/error.h"
#include "base/json_text.h"

namespace evenkeel::cli {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

fs::path program_folder() {
  std::error_code ignored;
  return fs::read_symlink("/proc/self/exe", ignored).parent_path();
}

fs::path find_script(const std::string& name) {
  const fs::path program = program_folder();
  for (const fs::path& folder : {program, program / ".." / "python", fs::current_path() / "python",
                                 fs::path(EVENKEEL_SOURCE_DIR) / "python"})
    if (fs::exists(folder / name)) return folder / name;
  return {};
}

std::vector<std::string> python_candidates() {
  if (const char* asked = std::getenv("EVENKEEL_PYTHON")) return {asked};
  return {"python3", "/usr/bin/python3"};
}

PythonScript::Start PythonScript::start(const std::string& name, const std::vector<std::string>& arguments) {
  const fs::path script = find_script(name);
  if (script.empty()) return {nullptr, {}, fmt::format("python/{} is not here", name)};
  std::string why_not = "no python3";
  for (const std::string& python : python_candidates()) {
    std::unique_ptr<PythonScript> running(new PythonScript(python, script.string(), arguments));
    if (running->process_ < 0) continue;
    if (const auto line = running->read_line()) {
      Json greeting = try_parse_json(*line);
      require_data(greeting.is_object(), "{}: expected a JSON object, found '{}'", running->words_, *line);
      return {std::move(running), std::move(greeting), ""};
    }
    const int code = running->wait();
    if (code == 127) continue;
    require_data(code == kNoPackage, "{} failed with exit code {}", running->words_, code);
    why_not = fmt::format("no PyTorch that {} could use", python);
  }
  return {nullptr, {}, why_not};
}

PythonScript::PythonScript(const std::string& python, const std::string& script,
                           const std::vector<std::string>& arguments)
    : words_(python + " " + script) {
  // Closed on exec, but for the ends that the script gets as its own.
  int to[2], from[2];
  require_data(pipe2(to, O_CLOEXEC) == 0, "cannot make a pipe for {}", words_);
  require_data(pipe2(from, O_CLOEXEC) == 0, "cannot make a pipe for {}", words_);
  std::vector<std::string> texts = {python, script};
  texts.insert(texts.end(), arguments.begin(), arguments.end());
  std::vector<char*> words;
  for (std::string& text : texts) words.push_back(text.data());
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
  if (posix_spawnp(&process_, python.c_str(), &actions, nullptr, words.data(), environ) != 0) process_ = -1;
  posix_spawn_file_actions_destroy(&actions);
  close(to[0]);
  close(from[1]);
  to_ = fdopen(to[1], "w");
  from_ = fdopen(from[0], "r");
  std::signal(SIGPIPE, SIG_IGN);  // a script that has ended is an error with words
}

PythonScript::~PythonScript() {
  if (to_) std::fclose(std::exchange(to_, nullptr));
  wait();
  if (from_) std::fclose(from_);
}

int PythonScript::wait() {
  const pid_t process = std::exchange(process_, -1);
  int status = 0;
  if (process < 0 || waitpid(process, &status, 0) != process) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::optional<std::string> PythonScript::read_line() {
  char* line = nullptr;
  size_t size = 0;
  const ssize_t got = getline(&line, &size, from_);
  std::optional<std::string> text;
  if (got > 0) text = std::string(line, static_cast<size_t>(got));
  std::free(line);
  return text;
}

Json PythonScript::ask(const Json& question) {
  fmt::print(to_, "{}\n", question.dump());
  std::fflush(to_);
  const auto line = read_line();
  if (!line) throw DataError(fmt::format("{} ended with exit code {} instead of an answer", words_, wait()));
  Json answer = try_parse_json(*line);
  require_data(answer.is_object(), "{}: expected a JSON object, found '{}'", words_, *line);
  return answer;
}

}  // namespace evenkeel::cli
