// Runs grids on the host, with blocks and threads in a chosen order.
#include "grid.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>

namespace fsdp2x::ptx {

namespace {

// Memory of exactly the requested bytes, so that AddressSanitizer detects an access beyond them.
class Memory {
 public:
  explicit Memory(size_t bytes) {
    if (::posix_memalign(&data_, kAlignment, bytes) != 0) std::abort();
    std::memset(data_, kGarbage, bytes);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(data_); }
  char* data() const { return static_cast<char*>(data_); }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr int kGarbage = 0xa5;  // tests must not rely on unwritten memory
  void* data_ = nullptr;
};

std::vector<unsigned> in_order(unsigned num, Order order, std::mt19937& random) {
  std::vector<unsigned> numbers(num);
  std::iota(numbers.begin(), numbers.end(), 0u);
  if (order == Order::reverse) std::reverse(numbers.begin(), numbers.end());
  if (order == Order::random) std::shuffle(numbers.begin(), numbers.end(), random);
  return numbers;
}

[[noreturn]] void fail(const Kernel& kernel, const char* what) {
  std::fprintf(stderr, "%s: %s\n", kernel.name, what);
  std::abort();
}

// Runs threads that may wait: each until it waits, then the next one.
void run_block(const Kernel& kernel, std::vector<Fiber>& threads) {
  for (;;) {
    size_t num_ended = 0, num_at_barrier = 0;
    for (Fiber& thread : threads) {
      if (!thread.has_ended() && !thread.is_at_barrier()) thread.resume();
      num_ended += thread.has_ended() ? 1 : 0;
      num_at_barrier += thread.is_at_barrier() ? 1 : 0;
    }
    if (num_ended == threads.size()) return;
    if (num_at_barrier == threads.size()) {
      for (Fiber& thread : threads) thread.resume();
      continue;
    }
    if (num_ended + num_at_barrier == threads.size()) fail(kernel, "threads have ended, others wait at a barrier");
    ::sched_yield();  // the rest waits for another block, which another thread runs
  }
}

}  // namespace

void run_grid(const Kernel& kernel, const void* const* arguments, unsigned num_blocks, unsigned num_threads,
              Order order) {
  if (num_threads > kernel.max_threads) fail(kernel, "more threads in a block than it was compiled for");
  size_t param_bytes = 0;
  for (const Place& place : kernel.params) param_bytes = std::max(param_bytes, place.offset + place.bytes);
  const Memory params(param_bytes);
  for (size_t i = 0; i < kernel.params.size(); ++i) {
    std::memcpy(params.data() + kernel.params[i].offset, arguments[i], kernel.params[i].bytes);
  }
  static std::atomic<unsigned> num_grids = 0;
  std::mt19937 random(++num_grids);
  for (const unsigned block : in_order(num_blocks, order, random)) {
    const Memory shared(kernel.shared_bytes);
    Thread thread = {{}, {num_threads, 1, 1}, {block, 0, 0}, {num_blocks, 1, 1}, params.data(), shared.data()};
    std::vector<Thread> contexts(kernel.start == nullptr ? 0 : num_threads);
    std::vector<Fiber> fibers;
    for (const unsigned i : in_order(num_threads, order, random)) {
      thread.tid = {i, 0, 0};
      if (kernel.start == nullptr) {
        kernel.run(thread);
      } else {
        contexts[i] = thread;  // the coroutine keeps a reference
        fibers.push_back(kernel.start(contexts[i]));
      }
    }
    if (!fibers.empty()) run_block(kernel, fibers);
  }
}

}  // namespace fsdp2x::ptx
