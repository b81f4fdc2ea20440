#include "base/threads.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace evenkeel {
namespace {

class Threads : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_thread_count(GetParam()); }
  void TearDown() override { set_thread_count(static_cast<int>(std::thread::hardware_concurrency())); }
};

TEST_P(Threads, every_item_once_and_workers_in_range) {
  std::vector<std::atomic<int>> seen(1000);
  parallel_for(1000, [&](int64_t item, int worker) {
    EXPECT_GE(worker, 0);
    EXPECT_LT(worker, GetParam());
    ++seen[static_cast<size_t>(item)];
  });
  for (const auto& count : seen) EXPECT_EQ(count, 1);
  parallel_for(0, [](int64_t, int) { FAIL(); });
}

TEST_P(Threads, an_exception_comes_back_and_the_pool_goes_on) {
  EXPECT_THROW(parallel_for(100,
                            [](int64_t item, int) {
                              if (item == 37) throw std::runtime_error("37");
                            }),
               std::runtime_error);
  std::atomic<int> count = 0;
  parallel_for(100, [&](int64_t, int) { ++count; });
  EXPECT_EQ(count, 100);
}

TEST_P(Threads, nested_calls_run_on_their_thread) {
  std::atomic<int> count = 0;
  parallel_for(10, [&](int64_t, int outer) {
    parallel_for(10, [&](int64_t, int inner) {
      EXPECT_EQ(inner, outer);
      ++count;
    });
  });
  EXPECT_EQ(count, 100);
}

TEST_P(Threads, two_callers_at_once) {
  std::atomic<int> count = 0;
  const auto caller = [&] {
    for (int n = 0; n < 50; ++n) parallel_for(20, [&](int64_t, int) { ++count; });
  };
  std::thread other(caller);
  caller();
  other.join();
  EXPECT_EQ(count, 2000);
}

// A child of fork() has none of its parent's threads.
TEST_P(Threads, a_child_has_threads_of_its_own) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer allows no threads in a child";
#endif
  parallel_for(10, [](int64_t, int) {});
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> count = 0;
    for (int n = 0; n < 3; ++n) parallel_for(100, [&](int64_t, int) { ++count; });
    _exit(count == 300 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  std::atomic<int> count = 0;
  parallel_for(100, [&](int64_t, int) { ++count; });
  EXPECT_EQ(count, 100);
}

TEST(Background, tasks_come_one_after_the_other_and_are_done_in_the_end) {
  std::vector<int> done;  // unguarded: never two at once
  {
    Background background;
    background.wait();  // for nothing
    for (int n = 0; n < 100; ++n) background.start([&done, n] { done.push_back(n); });
    background.wait();
    EXPECT_EQ(done.size(), 100u);
    background.start([&done] { done.push_back(100); });
  }
  for (int n = 0; n <= 100; ++n) EXPECT_EQ(done[static_cast<size_t>(n)], n);
}

TEST(Background, an_exception_comes_back_once_and_the_next_task_runs) {
  Background background;
  int done = 0;
  background.start([] { throw std::runtime_error("first"); });
  EXPECT_THROW(background.wait(), std::runtime_error);
  background.wait();
  background.start([] { throw std::runtime_error("second"); });
  background.settle();
  EXPECT_THROW(background.start([&done] { ++done; }), std::runtime_error);
  background.start([&done] { ++done; });
  background.wait();
  EXPECT_EQ(done, 1);
  background.start([] { throw std::runtime_error("lost"); });
}

INSTANTIATE_TEST_SUITE_P(Counts, Threads, ::testing::Values(1, 2, 5));

}  // namespace
}  // namespace evenkeel
