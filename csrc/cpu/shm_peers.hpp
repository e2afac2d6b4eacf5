// Waiting for the other ranks of a group, waking them, and noticing that one is gone.
#pragma once

#include <poll.h>
#include <sched.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/file_descriptor.hpp"
#include "cpu/shm_map.hpp"
#include "cpu/shm_options.hpp"

namespace fsdp2x::cpu {

// "12.3 s"
std::string seconds_text(double seconds);

class Peers {
 public:
  // `where(rank)` says for a timeout what that rank did last.
  Peers(const ShmOptions& options, ShmMap map, std::byte* control, std::function<std::string(int)> where);

  // Opens the peers' processes by the pids that rank 0 published; without it only closing and timeouts end a wait.
  void watch();

  RankState& state(int rank) const { return map_.state(control_, rank); }

  // Wakes the peers that sleep. Call it after every store that somebody may wait for.
  void ring() const;

  // done(rank) for every peer, without waiting.
  template <class Done>
  bool all_done(const Done& done) const;

  // Returns when done(rank) is true for every peer. Throws Error when a peer for which it is false is dead or closed,
  // when any rank has failed, and after the group's timeout. `describe()` names what is waited for; it is called only
  // for an error.
  template <class Done, class Describe>
  void wait(const Done& done, const Describe& describe);

 private:
  using Clock = std::chrono::steady_clock;

  static void pause();
  uint32_t begin_sleep() const;
  void sleep(uint32_t bell, Clock::time_point deadline) const;
  void end_sleep() const;

  // Looks at every peer's process once; afterwards is_dead() answers.
  void look();
  bool is_dead(int rank) const { return dead_[static_cast<size_t>(rank)]; }
  bool is_closed(int rank) const { return state(rank).closed.load(std::memory_order_acquire) != 0; }
  bool has_failed(int rank) const { return state(rank).failed.load(std::memory_order_acquire) != 0; }
  [[noreturn]] void fail_failed(int rank, const std::string& what) const;
  [[noreturn]] void fail_gone(int rank, const std::string& what, double waited_s) const;
  [[noreturn]] void fail_timeout(int rank, const std::string& what, double waited_s) const;
  std::string name(int rank) const;
  // "; rank 2 (pid 7) has died": a peer that waits in vain is often not the cause.
  std::string other_dead(int rank) const;

  const ShmOptions& options_;
  ShmMap map_;
  std::byte* control_;
  std::function<std::string(int)> where_;
  int num_pauses_;
  int num_yields_;
  bool watching_ = false;
  std::vector<FileDescriptor> processes_;
  std::vector<pollfd> polled_;
  std::vector<bool> dead_;
};

template <class Done>
bool Peers::all_done(const Done& done) const {
  bool all = true;
  for (int rank = 0; rank < options_.world; ++rank) {
    if (rank != options_.rank && !done(rank)) all = false;
  }
  return all;
}

template <class Done, class Describe>
void Peers::wait(const Done& done, const Describe& describe) {
  for (int i = 0; i < num_pauses_; ++i) {
    if (all_done(done)) return;
    pause();
  }
  for (int i = 0; i < num_yields_; ++i) {
    if (all_done(done)) return;
    ::sched_yield();
  }
  const auto start = Clock::now();
  const auto deadline =
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.timeout_s));
  while (true) {
    const uint32_t bell = begin_sleep();
    const bool ready = all_done(done);
    if (!ready) sleep(bell, deadline);
    end_sleep();
    if (ready || all_done(done)) return;

    const auto now = Clock::now();
    const double waited_s = std::chrono::duration<double>(now - start).count();
    look();
    for (int rank = 0; rank < options_.world; ++rank) {
      if (has_failed(rank)) fail_failed(rank, describe());
      if (rank == options_.rank || done(rank)) continue;
      // What a rank did before it went is still there, hence the second look.
      if ((is_dead(rank) || is_closed(rank)) && !done(rank)) fail_gone(rank, describe(), waited_s);
    }
    for (int rank = 0; now >= deadline && rank < options_.world; ++rank) {
      if (rank != options_.rank && !done(rank)) fail_timeout(rank, describe(), waited_s);
    }
    if (options_.on_wait) options_.on_wait();
  }
}

}  // namespace fsdp2x::cpu
