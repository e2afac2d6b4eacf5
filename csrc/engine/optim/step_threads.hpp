// An optimizer's threads for steps on the host, which work while the caller does. No torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "shm/process_guard.hpp"

namespace fsdp2x {

// They start with the first work, take it in the order of begin(), and end with this object, after all that was begun.
// In a forked child they start again. One thread at a time may call.
class StepThreads {
 public:
  explicit StepThreads(size_t num_threads);
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

 private:
  struct State;
  void start();

  size_t num_threads_;
  cpu::ProcessGuard process_;
  std::unique_ptr<State> state_;
};

}  // namespace fsdp2x
