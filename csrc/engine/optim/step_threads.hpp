// An optimizer's threads for steps on the host. They may be bound to cores, and work while the caller does. No torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "shm/process_guard.hpp"

namespace fsdp2x {

// They start with the first work, take it in the order of begin(), and end with this object, after all that was begun.
// In a forked child they start again. One thread at a time may call.
class StepThreads {
 public:
  // `cores`: where they may run; empty: wherever their maker may.
  StepThreads(size_t num_threads, std::vector<int> cores);
  ~StepThreads();
  StepThreads(const StepThreads&) = delete;
  StepThreads& operator=(const StepThreads&) = delete;

  // Calls run(begin, end) for ranges that together are [0, total), several at the same time, and returns at once.
  // `done` is called, and both are destroyed, by finish().
  void begin(int64_t total, std::function<void(int64_t, int64_t)> run, std::function<void()> done);
  // Returns when no range is left or runs.
  void wait() const;
  // The same, calls what `done` says, and throws the first exception of a range.
  void finish();

  size_t num_threads() const { return num_threads_; }

 private:
  struct State;
  void start();

  size_t num_threads_;
  std::vector<int> cores_;
  cpu::ProcessGuard process_;
  std::unique_ptr<State> state_;
};

}  // namespace fsdp2x
