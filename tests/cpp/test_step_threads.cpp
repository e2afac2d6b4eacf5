// Threads of optimizer steps: every element once, errors, the end of the object with work left, forked children.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "engine/optim/step_threads.hpp"

namespace fsdp2x {
namespace {

std::vector<std::atomic<int>> fill(StepThreads& threads, const std::vector<int64_t>& totals, bool waits) {
  std::vector<std::atomic<int>> counts(3'000'000);
  int64_t first = 0;
  size_t num_done = 0;
  for (const int64_t total : totals) {
    threads.begin(
        total,
        [&counts, first](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++counts[static_cast<size_t>(first + i)];
        },
        [&num_done] { ++num_done; });
    first += total;
    if (waits) threads.wait();
  }
  threads.finish();
  EXPECT_EQ(num_done, totals.size());
  return counts;
}

TEST(StepThreads, RunsEveryElementOnce) {
  for (const size_t num_threads : {1, 2, 5}) {
    StepThreads threads(num_threads);
    for (const std::vector<int64_t>& totals :
         {std::vector<int64_t>{}, {0}, {1}, {0, 7, 0}, {1 << 18, 1, 1 << 19}, {900'001, 0, 3, 1'000'000}}) {
      int64_t total = 0;
      for (const int64_t one : totals) total += one;
      const auto counts = fill(threads, totals, num_threads == 2);
      for (size_t i = 0; i < counts.size(); ++i) ASSERT_EQ(counts[i], i < static_cast<size_t>(total) ? 1 : 0) << i;
    }
  }
}

TEST(StepThreads, FinishThrowsTheFirstErrorAndGoesOn) {
  StepThreads threads(2);
  bool is_done = false;
  const auto fail = [](int64_t begin, int64_t) {
    if (begin > 0) throw std::runtime_error("no memory for a range");
  };
  threads.begin(int64_t{1} << 20, fail, [&] { is_done = true; });
  EXPECT_THROW(threads.finish(), std::runtime_error);
  EXPECT_TRUE(is_done);
  EXPECT_EQ(fill(threads, {5}, false)[4], 1);
}

TEST(StepThreads, EndsBehindWhatWasBegun) {
  std::atomic<int> num_ranges = 0;
  {
    StepThreads threads(1);
    threads.begin(
        int64_t{1} << 20,
        [&](int64_t, int64_t) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          ++num_ranges;
        },
        nullptr);
  }
  EXPECT_EQ(num_ranges, 4);
}

TEST(StepThreads, AForkedChildStartsItsOwn) {
  auto threads = std::make_unique<StepThreads>(1);
  fill(*threads, {5}, false);
  threads->begin(
      1, [](int64_t, int64_t) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }, nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    threads->wait();
    const bool is_right = fill(*threads, {5}, false)[4] == 1;
    threads.reset();
    ::_exit(is_right ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  threads->finish();
}

}  // namespace
}  // namespace fsdp2x
