// A pool of threads and one verb. Which thread runs which item is not fixed, so items must not share results:
// that is how the thread count never changes a bit.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace evenkeel {

// The number of threads parallel_for uses: all of the machine's by default. At least 1.
int thread_count();
void set_thread_count(int count);

// body(item, worker) for every item in [0, items), in any order; worker in [0, thread_count()) names the
// thread, for scratch memory. Returns when all are done; the first exception thrown is thrown again here (DataError where
// threads cannot start). A call within a body runs its items in order on that thread. A child of fork() has its own pool.
void parallel_for(int64_t items, const std::function<void(int64_t item, int worker)>& body);

// One task at a time, beside whoever hands it over: what must not hold up the caller, in its order.
class Background {
 public:
  Background() = default;
  ~Background();  // waits; what a task threw is lost, so wait() before
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  void start(std::function<void()> task);  // waits for the task before
  void wait();                             // until there is none; throws what the task threw
  void settle();                           // the same, and leaves what it threw to the next wait

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;  // empty: none
  std::exception_ptr failure_;
  bool ending_ = false;
  std::thread thread_;  // from the first task on
};

}  // namespace evenkeel
