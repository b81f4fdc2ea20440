#include "report/watch.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

// FNV-1a: the same page has the same tag, from another server, too.
std::string tag_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3;
  return fmt::format("{:016x}", hash);
}

std::string event_of(const std::string& tag) { return fmt::format("event: page\ndata: {}\n\n", tag); }

}  // namespace

std::string folder_state(const fs::path& run) {
  constexpr size_t kMostFiles = 10'000;  // a run has some dozens; this may be another folder
  std::vector<std::string> lines;
  std::error_code error;
  fs::recursive_directory_iterator at(run, fs::directory_options::skip_permission_denied, error);
  for (; !error && at != fs::recursive_directory_iterator() && lines.size() < kMostFiles;
       at.increment(error)) {
    struct stat found {};
    // What is being written has a name with a dot; it counts once it has its own. What is gone by now counts as gone.
    if (at->path().filename().native().starts_with('.')) {
      at.disable_recursion_pending();
      continue;
    }
    if (::lstat(at->path().c_str(), &found) != 0) continue;
    lines.push_back(fmt::format("{} {} {} {}.{:09}\n", at->path().native(), found.st_ino, found.st_size,
                                found.st_mtim.tv_sec, found.st_mtim.tv_nsec));
  }
  std::sort(lines.begin(), lines.end());
  std::string state;
  for (const std::string& line : lines) state += line;
  return state;
}

Watch::Watch(std::vector<fs::path> runs, Options options)
    : runs_(std::move(runs)),
      options_(std::move(options)),
      page_{.status = 0},
      period_(options_.interval),
      server_(options_.address, options_.port, options_.limits,
              [this](const HttpRequest& request, HttpClock::time_point arrived) {
                return answer(request, arrived);
              }) {}

std::optional<HttpAnswer> Watch::answer(const HttpRequest& request, HttpClock::time_point arrived) {
  const std::lock_guard lock(mutex_);
  if (request.path == "/") {
    if (page_.status != 0 && looked_ + period_ >= arrived) return page_;
    wanted_ = true;
    changed_.notify_one();
    return {};
  }
  if (request.path == "/events") {
    // A reader whose server ended tries again every second.
    std::string first = "retry: 1000\n\n";
    if (page_.status != 0) first += event_of(page_.tag);
    return HttpAnswer{.type = "text/event-stream",
                      .body = std::make_shared<const std::string>(std::move(first)),
                      .stream = true};
  }
  return HttpAnswer{
      .status = 404,
      .body = std::make_shared<const std::string>("expected / or /events, found another path\n")};
}

void Watch::run() {
  std::thread follower([this] { follow(); });
  server_.run();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  follower.join();
}

void Watch::follow() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_until(lock, std::max(looked_ + period_, HttpClock::now() + options_.interval),
                          [this] { return stopping_ || wanted_; });
      if (stopping_) return;
      if (!wanted_ && (server_.streams() == 0 || HttpClock::now() < looked_ + period_)) continue;
      wanted_ = false;
    }
    look();
  }
}

void Watch::look() {
  const auto began = HttpClock::now();
  std::string state;
  for (const fs::path& run : runs_) state += folder_state(run) + '\n';
  HttpAnswer page{.status = 0};
  if (drawings_ == 0 || state != state_) {
    state_ = state;  // of before the drawing: what changes meanwhile is drawn next time
    page.type = "text/html; charset=utf-8";
    std::string text;
    try {
      text = options_.draw(runs_);
      page.status = 200;
    } catch (const std::exception& error) {  // out of memory, say: the next change tries again
      text = fmt::format("the page could not be drawn: {}\n", error.what());
      page.status = 500;
      page.type = "text/plain; charset=utf-8";
    }
    page.tag = tag_of(text);
    page.body = std::make_shared<const std::string>(std::move(text));
    ++drawings_;
  }
  bool is_new = false;
  {
    const std::lock_guard lock(mutex_);
    looked_ = began;
    if (page.status != 0) {
      is_new = page.tag != page_.tag;
      page_ = page;
      // Drawing takes a fifth of one core at most: the rest is the run's.
      period_ = std::max<std::chrono::nanoseconds>(options_.interval, 5 * (HttpClock::now() - began));
    }
  }
  if (is_new)
    server_.publish(event_of(page.tag));
  else
    server_.wake();
}

}  // namespace evenkeel
