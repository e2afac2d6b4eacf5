// A translated kernel, and functions that run a grid of it: its threads one after the other, in a chosen order.
//
// A kernel is a function that runs one thread to its end. If threads of a block wait for each other, it is a coroutine,
// and a block has one coroutine per thread.
#pragma once

#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace fsdp2x::ptx {

struct Dim {
  unsigned x, y, z;
};

// A thread's position, and the memory that it can access.
struct Thread {
  Dim tid, ntid, ctaid, nctaid;
  const char* params;
  char* shared;  // of its block
};

// A thread that can wait. Owns the coroutine.
class Fiber {
 public:
  struct promise_type {
    bool is_at_barrier = false;
    Fiber get_return_object() { return Fiber(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::abort(); }
  };
  // `co_await Fiber::Wait{true}` waits until every thread of the block waits so. With false, it gives the others a
  // turn.
  struct Wait {
    bool is_at_barrier;
    bool await_ready() const { return false; }
    void await_suspend(std::coroutine_handle<promise_type> handle) const {
      handle.promise().is_at_barrier = is_at_barrier;
    }
    void await_resume() const {}
  };

  explicit Fiber(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Fiber(Fiber&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (handle_) handle_.destroy();
  }

  bool has_ended() const { return handle_.done(); }
  bool is_at_barrier() const { return !has_ended() && handle_.promise().is_at_barrier; }
  // Resumes until it waits again, or ends.
  void resume() {
    handle_.promise().is_at_barrier = false;
    handle_.resume();
  }

 private:
  std::coroutine_handle<promise_type> handle_;
};

struct Place {
  size_t offset, bytes;
};

// A translated kernel entry and its properties.
struct Kernel {
  const char* name;
  void (*run)(const Thread&);     // null for one that waits
  Fiber (*start)(const Thread&);  // null for one that does not
  std::span<const Place> params;
  size_t shared_bytes;
  unsigned max_threads;        // of a block
  std::span<uint8_t> reached;  // by number of the instruction: 1 when a thread has reached it
};

enum class Order { forward, reverse, random };

// Runs every thread of every block and returns after all have ended. `arguments`: the address of each parameter.
// Several threads may call it at once. Ends the process where a device would fail or hang.
void run_grid(const Kernel& kernel, const void* const* arguments, unsigned num_blocks, unsigned num_threads,
              Order order);

}  // namespace fsdp2x::ptx
