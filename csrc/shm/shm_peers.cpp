// Futexes, pidfds, and the messages for a peer that does not come.
//
// No wake-up is lost. A waiter announces that it sleeps, then checks its condition once more. A peer stores the value,
// then checks whether the waiter sleeps. A full fence on both sides makes sure that one of the two sees the other.
#include "shm/shm_peers.hpp"

#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>

#include "core/error.hpp"
#include "shm/shm_limits.hpp"

namespace fsdp2x::cpu {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);
const std::string kFollowed = "gave up because ";

// Returns the number of cores that this process may run on.
int num_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", seconds);
  return text;
}

Peers::Peers(const ShmOptions& options, ShmMap map, std::byte* control, std::function<std::string(int)> where)
    : options_(options),
      map_(map),
      control_(control),
      where_(std::move(where)),
      patience_(options.world > num_cores() ? Patience{kPausesCrowded, kYieldsCrowded} : Patience{kPauses, kYields}),
      known_left_(static_cast<size_t>(options.world), 0),
      processes_(static_cast<size_t>(options.world)),
      polled_(static_cast<size_t>(options.world), pollfd{-1, POLLIN, 0}),
      dead_(static_cast<size_t>(options.world), false) {}

void Peers::watch() {
  watching_ = true;
  for (int rank = 0; rank < options_.world; ++rank) {
    const auto pid = static_cast<pid_t>(state(rank).pid.load(std::memory_order_acquire));
    if (rank == options_.rank || pid == 0) continue;
    const auto index = static_cast<size_t>(rank);
    processes_[index] = FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    polled_[index].fd = processes_[index].get();
  }
}

void Peers::pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void Peers::ring() const {
  fence(std::memory_order_seq_cst);
  for (int rank = 0; rank < options_.world; ++rank) {
    RankState& peer = state(rank);
    if (rank == options_.rank || peer.sleeping.load(std::memory_order_relaxed) == 0) continue;
    peer.doorbell.fetch_add(1);
    wake(peer.doorbell);
  }
}

uint32_t Peers::begin_sleep() const {
  RankState& own = state(options_.rank);
  own.sleeping.store(1);
  const uint32_t bell = own.doorbell.load();
  fence(std::memory_order_seq_cst);
  return bell;
}

void Peers::sleep(uint32_t bell, Clock::time_point deadline) const {
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now());
  const auto slice = std::clamp<std::chrono::nanoseconds>(left, std::chrono::nanoseconds(0), kSlice);
  sleep_on(state(options_.rank).doorbell, bell, slice);
}

void Peers::end_sleep() const { state(options_.rank).sleeping.store(0, std::memory_order_relaxed); }

void Peers::look() {
  if (!watching_) return;
  for (pollfd& item : polled_) item.revents = 0;
  ::poll(polled_.data(), polled_.size(), 0);
  for (int rank = 0; rank < options_.world; ++rank) {
    const auto index = static_cast<size_t>(rank);
    const auto pid = static_cast<pid_t>(state(rank).pid.load(std::memory_order_relaxed));
    if (rank == options_.rank || pid == 0) continue;
    const bool watched = processes_[index].valid();
    const bool gone = watched ? (polled_[index].revents & POLLIN) != 0 : ::kill(pid, 0) != 0 && errno == ESRCH;
    if (gone) dead_[index] = true;
  }
}

std::string Peers::name(int rank) const {
  const uint64_t pid = state(rank).pid.load(std::memory_order_relaxed);
  return options_.name(rank) + (pid != 0 ? " (pid " + std::to_string(pid) + ")" : "");
}

std::string Peers::other_dead(int rank) const {
  for (int other = 0; other < options_.world; ++other) {
    if (other != rank && is_dead(other) && !is_closed(other)) return "; " + name(other) + " has died";
  }
  return "";
}

void Peers::set_passes(uint64_t pass, uint64_t forward) {
  own_.pass = pass;
  own_.forward = forward;
  followed_.clear();
}

void Peers::fail_failed(int rank, const std::string& what) const {
  const std::string text(map_.failure(control_, rank), state(rank).failed.load(std::memory_order_acquire));
  if (rank == options_.rank) throw Error(text);
  throw Error(text + " (" + options_.name(options_.rank) + " waited in " + what + ")");
}

void Peers::fail_gone(int rank, const std::string& what, double waited_s) const {
  const std::string who = "shared memory: " + name(rank);
  const std::string waiting = " while " + options_.name(options_.rank) + " waited for it in " + what + " (for " +
                              seconds_text(waited_s) + ")" + other_dead(rank);
  if (is_closed(rank)) {
    throw Error(who + " closed its shared-memory group" + waiting +
                ". Every rank must run the same steps and keep its model until all of them are done.");
  }
  throw Error(who + " died" + waiting + ". Its own output says why. Restart all ranks.");
}

void Peers::fail_left(int rank, const std::string& what, double waited_s) {
  known_left_[static_cast<size_t>(rank)] = state(rank).left.load(std::memory_order_relaxed);
  const std::string why(map_.departure(control_, rank), state(rank).left_bytes.load(std::memory_order_relaxed));
  followed_ = why.starts_with(kFollowed) ? why : kFollowed + name(rank) + " " + why;
  throw Error("shared memory: " + name(rank) + " " + why + "; " + options_.name(options_.rank) + " waited for it in " +
              what + " (for " + seconds_text(waited_s) + ")" + other_dead(rank) +
              ". If one rank raises, all ranks must skip that step or restart from a checkpoint.");
}

void Peers::fail_timeout(int rank, const std::string& what, double waited_s) const {
  throw Error("shared memory: " + options_.name(options_.rank) + " waited " + seconds_text(waited_s) + " for " +
              name(rank) + " in " + what + ". That rank is alive and " + where_(rank) + other_dead(rank) +
              ". Check its stack (it hangs or runs other code), or raise `timeout` if it is only slow.");
}

}  // namespace fsdp2x::cpu
