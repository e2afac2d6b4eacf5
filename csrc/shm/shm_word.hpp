// The protocol's accesses to shared memory: words, fences, and the two futex calls. All communication of ranks during
// the life of a group goes through this file. So tests can compile the protocol against their own words and explore
// every order of accesses (tests/cpp/model).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace fsdp2x::cpu {

using Word = std::atomic<uint64_t>;
using Doorbell = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8, "shared memory needs lock-free 64-bit atomics");
static_assert(Doorbell::is_always_lock_free && sizeof(Doorbell) == 4, "a futex is a 32-bit word");

inline void fence(std::memory_order order) { std::atomic_thread_fence(order); }

// Sleeps until it is woken, for at most `limit` (below a second). Does not sleep if `bell` no longer has `value`. It
// may return early: the caller checks again.
inline void sleep_on(Doorbell& bell, uint32_t value, std::chrono::nanoseconds limit) {
  const timespec timeout = {0, static_cast<long>(limit.count())};
  ::syscall(SYS_futex, &bell, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

inline void wake(Doorbell& bell) { ::syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace fsdp2x::cpu
