// A queue of ranges under one lock: a range takes a hundred times as long as the lock.
#include "engine/optim/step_threads.hpp"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace fsdp2x {

namespace {

// About a megabyte of parameters: short enough that threads end together, and that a busy core delays little.
constexpr int64_t kRangeNumel = int64_t{1} << 18;

}  // namespace

struct StepThreads::State {
  struct Work {
    int64_t total;
    std::function<void(int64_t, int64_t)> run;
    std::function<void()> done;
    int64_t next = 0;
  };

  std::mutex mutex;
  std::condition_variable has_work, is_idle;
  std::deque<Work> works;  // references stay valid while others are added
  size_t current = 0;      // those before it have no range left
  size_t num_running = 0;
  bool ends = false;
  std::exception_ptr error;
  std::vector<std::thread> threads;

  bool has_range() {
    while (current < works.size() && works[current].next == works[current].total) ++current;
    return current < works.size();
  }

  void serve() {
    std::unique_lock lock(mutex);
    while (true) {
      has_work.wait(lock, [this] { return ends || has_range(); });
      if (!has_range()) return;
      Work& work = works[current];
      const int64_t begin = work.next;
      const int64_t end = work.next = std::min(begin + kRangeNumel, work.total);
      ++num_running;
      lock.unlock();
      std::exception_ptr raised;
      try {
        work.run(begin, end);
      } catch (...) {
        raised = std::current_exception();
      }
      lock.lock();
      if (raised && !error) error = raised;
      if (--num_running == 0 && !has_range()) is_idle.notify_all();
    }
  }

  void wait() {
    std::unique_lock lock(mutex);
    is_idle.wait(lock, [this] { return num_running == 0 && !has_range(); });
  }
};

StepThreads::StepThreads(size_t num_threads) : num_threads_(std::max<size_t>(num_threads, 1)) {}

StepThreads::~StepThreads() {
  if (!state_) return;
  if (!process_.is_here()) {  // a fork copied neither the threads nor the end of their work
    static_cast<void>(state_.release());
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->ends = true;
  }
  state_->has_work.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

void StepThreads::start() {
  if (!process_.is_here()) {
    static_cast<void>(state_.release());
    process_ = cpu::ProcessGuard();
  }
  if (state_) return;
  state_ = std::make_unique<State>();
  for (size_t i = 0; i < num_threads_; ++i) {
    std::thread& thread = state_->threads.emplace_back([state = state_.get()] { state->serve(); });
    ::pthread_setname_np(thread.native_handle(), "fsdp2x_step");
  }
}

void StepThreads::begin(int64_t total, std::function<void(int64_t, int64_t)> run, std::function<void()> done) {
  start();
  {
    const std::lock_guard lock(state_->mutex);
    state_->works.push_back({total, std::move(run), std::move(done)});
  }
  state_->has_work.notify_all();
}

void StepThreads::wait() const {
  if (state_ && process_.is_here()) state_->wait();
}

void StepThreads::finish() {
  if (!state_ || !process_.is_here()) return;
  state_->wait();
  const std::deque<State::Work> works = std::exchange(state_->works, {});
  state_->current = 0;
  const std::exception_ptr error = std::exchange(state_->error, nullptr);
  for (const State::Work& work : works) {
    if (work.done) work.done();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace fsdp2x
