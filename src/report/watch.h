// The live view of runs: the report's page behind an HTTP server, drawn again when a folder changes. One drawing for each
// change, whatever the number of viewers, and none while nobody looks. Only reads the folders; they may vanish, come back
// and be rewritten. A request's path never reaches the file system.
//   /        the page
//   /events  server-sent events: the tag of the page, at once and whenever it is another
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "report/http_server.h"

namespace evenkeel {

// Names, sizes and times of all files of a run: as long as it is the same, so is the page. Empty: no such folder.
std::string folder_state(const std::filesystem::path& run);

class Watch {
 public:
  struct Options {
    std::string address = "127.0.0.1";
    int port = 5335;                           // 0: any that is free
    std::chrono::milliseconds interval{1000};  // between looks at the folders, at least
    HttpServer::Limits limits = {};
    // From the folders to the page.
    std::function<std::string(std::span<const std::filesystem::path>)> draw;
  };
  // Listens when this returns. DataError where it cannot.
  Watch(std::vector<std::filesystem::path> runs, Options options);

  const HttpServer& server() const { return server_; }
  void run();                      // until stop()
  void stop() { server_.stop(); }  // from any thread or signal handler
  int64_t drawings() const { return drawings_; }

 private:
  std::optional<HttpAnswer> answer(const HttpRequest& request, HttpClock::time_point arrived);
  void follow();  // the thread that looks and draws
  void look();

  const std::vector<std::filesystem::path> runs_;
  const Options options_;
  std::atomic<int64_t> drawings_ = 0;
  std::string state_;  // of the folders when the page was drawn; of the thread that draws

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool stopping_ = false, wanted_ = false;
  HttpAnswer page_;                    // status 0: none yet
  HttpClock::time_point looked_{};     // when the look began that page_ is of
  std::chrono::nanoseconds period_{};  // between looks
  HttpServer server_;                  // last: its handler uses the rest
};

}  // namespace evenkeel
