// The live view: one drawing a change whatever the number of viewers, none while nobody looks, and runs that vanish,
// return and grow. Then the command, with a run that trains. Everything is waited for, nothing slept through.
#include "report/watch.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <fstream>
#include <thread>

#include "base/error.h"
#include "http_client.h"
#include "run_folder.h"
#include "run_program.h"
#include "training/trainer.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

class WatchTest : public RunFolderTest {
 protected:
  void SetUp() override {
    RunFolderTest::SetUp();
    fs::create_directories(run());
    write("1\n");
  }
  void TearDown() override {
    stop();
    RunFolderTest::TearDown();
  }
  // A page is what the run's file says.
  void start() {
    Watch::Options options;
    options.port = 0;
    options.interval = std::chrono::milliseconds(1);
    options.draw = [](std::span<const fs::path> runs) {
      std::string text = "page: ";
      for (const fs::path& run : runs)
        text +=
            fs::exists(run / "metrics.jsonl") ? read_whole_file(run / "metrics.jsonl", 1000) : "nothing\n";
      if (text.find("fault") != std::string::npos) throw std::runtime_error("a planted fault");
      return text;
    };
    watch.emplace(std::vector<fs::path>{run()}, options);
    thread = std::thread([this] { watch->run(); });
    port = watch->server().port();
  }
  void stop() {
    if (!thread.joinable()) return;
    watch->stop();
    thread.join();
  }
  fs::path run() const { return folder / "run"; }
  void write(const std::string& text) const { write_whole_file(run() / "metrics.jsonl", text); }
  // The page as it is once `text` is on it: each event is heard, so that nothing is missed.
  std::string page_with(HttpClient& events, const std::string& text) {
    for (;;) {
      const std::string page = http_get(port, "/").body;
      if (page.find(text) != std::string::npos) return page;
      if (events.hear_until("\n\n").empty()) return "the server hung up";
    }
  }

  std::optional<Watch> watch;
  std::thread thread;
  int port = 0;
};

TEST_F(WatchTest, draws_once_for_each_change_whatever_the_number_of_viewers) {
  start();
  EXPECT_EQ(watch->drawings(), 0);  // nobody looks
  const HttpReply first = http_get(port, "/");
  EXPECT_EQ(first.body, "page: 1\n");
  EXPECT_EQ(first.field("Content-Type"), "text/html; charset=utf-8");
  EXPECT_EQ(watch->drawings(), 1);
  std::vector<std::unique_ptr<HttpClient>> viewers;
  for (int n = 0; n < 20; ++n) {
    viewers.push_back(std::make_unique<HttpClient>(port));
    viewers.back()->get("/events");
    viewers.back()->hear_until("event: page\ndata: ");
    EXPECT_EQ('"' + viewers.back()->hear_until("\n\n").substr(0, 16) + '"', first.field("ETag"));
    EXPECT_EQ(http_get(port, "/").body, "page: 1\n");
  }
  EXPECT_EQ(watch->drawings(), 1);
  write("2\n");
  std::string tag;
  for (const auto& viewer : viewers) {
    viewer->hear_until("event: page\ndata: ");
    tag = viewer->hear_until("\n\n").substr(0, 16);
    const HttpReply second = http_get(port, "/");
    EXPECT_EQ(second.body, "page: 2\n");
    EXPECT_EQ(second.field("ETag"), '"' + tag + '"');
  }
  EXPECT_EQ(watch->drawings(), 2);
  EXPECT_EQ(http_get(port, "/", "If-None-Match: \"" + tag + "\"\r\n").status, 304);
}

TEST_F(WatchTest, survives_a_run_that_vanishes_and_returns) {
  start();
  HttpClient events(port);
  events.get("/events");
  EXPECT_EQ(page_with(events, "1\n"), "page: 1\n");
  fs::remove_all(run());
  EXPECT_EQ(page_with(events, "nothing"), "page: nothing\n");
  std::ofstream(run()) << "a file in its place";
  fs::remove(run());
  fs::create_directories(run());
  write("again\n");
  EXPECT_EQ(page_with(events, "again"), "page: again\n");
  write("fault\n");  // of ours: the server goes on
  EXPECT_NE(page_with(events, "planted").find("could not be drawn"), std::string::npos);
  EXPECT_EQ(http_get(port, "/").status, 500);
  write("well\n");
  EXPECT_EQ(page_with(events, "well"), "page: well\n");
}

TEST_F(WatchTest, has_two_paths_and_no_files) {
  start();
  for (const char* path :
       {"/metrics.jsonl", "/run/metrics.jsonl", "/index.html", "/events/", "/text.txt", "/favicon.ico"})
    EXPECT_EQ(http_get(port, path).status, 404) << path;
  for (const char* path : {"/../text.txt", "/%2e%2e/text.txt", "/..%2ftext.txt", "//etc/passwd", "/%00"})
    EXPECT_EQ(http_get(port, path).status, 400) << path;
  EXPECT_EQ(watch->drawings(), 0);
}

TEST_F(WatchTest, state_of_a_folder_tells_of_every_change_but_files_under_way) {
  std::string before = folder_state(run());
  const auto changes = [&](auto&& change) {
    change();
    const std::string after = folder_state(run());
    return std::exchange(before, after) != after;
  };
  EXPECT_FALSE(changes([] {}));
  EXPECT_TRUE(changes([&] { std::ofstream(run() / "metrics.jsonl", std::ios::app) << "2\n"; }));
  EXPECT_TRUE(changes([&] { write("1\n3\n"); }));  // the same size, another file
  EXPECT_TRUE(changes([&] { fs::create_directories(run() / "checkpoints/step-1"); }));
  EXPECT_TRUE(changes([&] { std::ofstream(run() / "checkpoints/step-1/model") << "x"; }));
  EXPECT_TRUE(changes([&] { fs::remove_all(run() / "checkpoints"); }));
  // The folder's own time is not part of it.
  EXPECT_FALSE(changes([&] { std::ofstream(run() / ".findings.json.partial") << "x"; }));
  EXPECT_TRUE(changes([&] { fs::remove_all(run()); }));
  EXPECT_EQ(before, "");
  EXPECT_EQ(folder_state(folder / "text.txt"), "");
}

// --- the command

class WatchCommand : public RunFolderTest {
 protected:
  // Reads the URL from its standard output.
  void start(const std::string& arguments) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    process = fork();
    if (process == 0) {
      dup2(ends[1], 1);
      close(ends[0]);
      execl("/bin/sh", "sh", "-c", ("exec " + std::string(EVENKEEL_PROGRAM) + " watch " + arguments).c_str(),
            nullptr);
      _exit(127);
    }
    close(ends[1]);
    out = fdopen(ends[0], "r");
    const std::string url = line();
    const size_t colon = url.rfind(':');
    ASSERT_NE(colon, std::string::npos) << url;
    port = std::atoi(url.c_str() + colon + 1);
  }
  std::string line() const {
    char buffer[1000];
    return std::fgets(buffer, sizeof buffer, out) ? buffer : "";
  }
  void TearDown() override {
    if (process > 0) {
      kill(process, SIGKILL);
      waitpid(process, nullptr, 0);
    }
    if (out) std::fclose(out);
    RunFolderTest::TearDown();
  }
  int end_by(int signal) {
    kill(process, signal);
    int status = 0;
    waitpid(std::exchange(process, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  pid_t process = -1;
  std::FILE* out = nullptr;
  int port = 0;
};

TEST_F(WatchCommand, shows_a_run_that_trains_stops_and_goes_on_until_it_is_ended) {
  const fs::path run = folder / "run & <b>run</b>";
  const auto next_page = [&](HttpClient& events) {
    events.hear_until("event: page");
    return events.hear_until("\n\n");
  };
  {
    auto trainer = Trainer::start(run, tiny());
    start(fmt::format("--port 0 '{}'", run.string()));
    HttpClient events(port);
    events.get("/events");
    const HttpReply before = http_get(port, "/");
    EXPECT_EQ(before.status, 200);
    EXPECT_EQ(before.body.find("<b>run</b>"), std::string::npos);  // names are text
    next_page(events);
    for (int n = 0; n < 6; ++n) trainer->step();
    trainer->save();
    const std::string tag = next_page(events);
    EXPECT_FALSE(tag.empty());
    EXPECT_NE(http_get(port, "/").field("ETag"), before.field("ETag"));
  }
  HttpClient events(port);
  events.get("/events");
  next_page(events);
  auto again = Trainer::resume(run);
  while (!again->done()) again->step();
  again->save();
  EXPECT_FALSE(next_page(events).empty());
  fs::remove_all(run);
  EXPECT_FALSE(next_page(events).empty());
  EXPECT_EQ(http_get(port, "/").status, 200);
  EXPECT_EQ(end_by(SIGINT), 0);
  EXPECT_TRUE(events.hears_the_end());
  EXPECT_EQ(line(), "Ctrl-C ends it\n");
  EXPECT_EQ(line().substr(0, 6), "ended;");
}

// Files that a reader would wait for, or read without end.
TEST_F(WatchCommand, ends_at_the_first_interrupt_beside_pipes_and_devices) {
  const fs::path run = folder / "run";
  fs::create_directories(run);
  ASSERT_EQ(::mkfifo((run / "config.toml").c_str(), 0600), 0);
  ASSERT_EQ(::mkfifo((run / "guard.jsonl").c_str(), 0600), 0);
  fs::create_symlink("/dev/zero", run / "metrics.jsonl");
  fs::create_symlink("/dev/zero", run / "verdict.json");
  start(fmt::format("--port 0 '{}'", run.string()));
  const HttpReply page = http_get(port, "/");
  EXPECT_EQ(page.status, 200);
  EXPECT_NE(page.body.find("expected a regular file, found a pipe"), std::string::npos);
  EXPECT_NE(page.body.find("expected a regular file, found a device"), std::string::npos);
  EXPECT_EQ(end_by(SIGINT), 0);
}

TEST_F(WatchCommand, says_what_it_expected) {
  const struct {
    std::string arguments;
    int code;
    const char* words;
  } table[] = {
      {"", 2, "RUN"},
      {"--port 70000 .", 2, "from 0 to 65535"},
      {(folder / "absent").string(), 3, "nothing there"},
      {(folder / "text.txt").string(), 3, "expected a run's folder"},
      {"--address no.such.host.invalid " + folder.string(), 3, "expected an address of this machine"},
  };
  for (const auto& [arguments, code, words] : table) {
    const Output output = run_shell(std::string(EVENKEEL_PROGRAM) + " watch " + arguments + " 2>&1");
    EXPECT_EQ(output.code, code) << output.out;
    EXPECT_NE(output.out.find(words), std::string::npos) << output.out;
  }
}

}  // namespace
}  // namespace evenkeel
