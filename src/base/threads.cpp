#include "base/threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace evenkeel {
namespace {

thread_local int current_worker = -1;  // >= 0 inside a parallel_for body
bool threads_were_asked_for = false;   // by set_thread_count; otherwise there is one for each core

// DataError, with words, where the system refuses.
std::thread start_thread(std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw DataError(fmt::format("cannot start a thread: {}", error.code().message()));
  }
}

class Pool {
 public:
  explicit Pool(int count) {
    try {
      for (int worker = 1; worker < count; ++worker)
        threads_.push_back(start_thread([this, worker] { serve(worker); }));
    } catch (const DataError& error) {
      const size_t started = threads_.size();
      end();  // those that did start wait for work, and must not outlive what they wait on
      throw DataError(fmt::format("expected to start {} threads, the system refused after {}: {}; {}", count,
                                  started + 1, error.what(),
                                  threads_were_asked_for
                                      ? "--threads N sets fewer"
                                      : "'taskset -c 0' before the command leaves it one core"));
    }
  }
  ~Pool() { end(); }

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  void run(int64_t items, const std::function<void(int64_t, int)>& body) {
    std::lock_guard one_caller(callers_);
    {
      std::lock_guard lock(mutex_);
      body_ = &body;
      items_ = items;
      next_.store(0);
      busy_ = static_cast<int>(threads_.size());
      failure_ = nullptr;
      ++generation_;
    }
    wake_.notify_all();
    work(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    body_ = nullptr;
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void end() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  void serve(int worker) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return ending_ || generation_ != seen; });
      if (ending_) return;
      seen = generation_;
      lock.unlock();
      work(worker);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  void work(int worker) {
    current_worker = worker;
    try {
      for (int64_t item; (item = next_.fetch_add(1)) < items_;) (*body_)(item, worker);
    } catch (...) {
      next_.store(items_);
      std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
    current_worker = -1;
  }

  std::vector<std::thread> threads_;
  std::mutex callers_, mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int64_t, int)>* body_ = nullptr;
  int64_t items_ = 0;
  std::atomic<int64_t> next_{0};
  int busy_ = 0;
  uint64_t generation_ = 0;
  bool ending_ = false;
  std::exception_ptr failure_;
};

std::mutex pool_mutex;
int wanted_threads = 0;
std::shared_ptr<Pool> pool;

// A child of fork() has one thread, and a pool whose threads are not there: left as it is, neither used nor destroyed.
// The mutex is held over the fork, so that the child finds it in order.
void handle_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    ::pthread_atfork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); },
                     [] {
                       new std::shared_ptr<Pool>(std::move(pool));
                       current_worker = -1;
                       pool_mutex.unlock();
                     });
  });
}

// Cores that this process may use: fewer than the machine's under taskset and in some containers.
int usable_cores() {
  cpu_set_t set;
  const int allowed = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
  return std::max(1, allowed > 0 ? allowed : static_cast<int>(std::thread::hardware_concurrency()));
}

std::shared_ptr<Pool> current_pool() {
  handle_forks();
  std::lock_guard lock(pool_mutex);
  if (wanted_threads == 0) wanted_threads = usable_cores();
  if (!pool || pool->size() != wanted_threads) {
    pool.reset();
    pool = std::make_shared<Pool>(wanted_threads);
  }
  return pool;
}

}  // namespace

int thread_count() {
  std::lock_guard lock(pool_mutex);
  if (wanted_threads == 0) wanted_threads = usable_cores();
  return wanted_threads;
}

void set_thread_count(int count) {
  std::lock_guard lock(pool_mutex);
  wanted_threads = std::clamp(count, 1, 1024);
  threads_were_asked_for = true;
}

Background::~Background() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !task_; });
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Background::start(std::function<void()> task) {
  wait();
  {
    std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = start_thread([this] { serve(); });  // waits for the mutex
    task_ = std::move(task);
  }
  changed_.notify_all();
}

void Background::settle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !task_; });
}

void Background::wait() {
  settle();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Background::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ending_ || task_; });
    if (!task_) return;
    lock.unlock();
    std::exception_ptr failure;
    try {
      task_();  // nobody else touches it before it is empty
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    task_ = nullptr;
    failure_ = failure;
    changed_.notify_all();
  }
}

void parallel_for(int64_t items, const std::function<void(int64_t, int)>& body) {
  if (items <= 0) return;
  if (current_worker >= 0) {  // nested: this thread has its items already
    for (int64_t item = 0; item < items; ++item) body(item, current_worker);
    return;
  }
  current_pool()->run(items, body);
}

}  // namespace evenkeel
