// Waits for the other ranks of a group, wakes them, and notices if one is gone.
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

#include "shm/file_descriptor.hpp"
#include "shm/shm_map.hpp"
#include "shm/shm_options.hpp"

namespace fsdp2x::cpu {

// Returns, for example, "12.3 s".
std::string seconds_text(double seconds);

// The state of a peer during a wait. elsewhere: the peer comes only after this rank has continued.
enum class Seen { late, done, elsewhere };

inline Seen seen(Seen seen) { return seen; }
inline Seen seen(bool is_done) { return is_done ? Seen::done : Seen::late; }

// A rank that has left a pass may have begun another one meanwhile, which it reports. A waiting rank checks after this
// time.
inline constexpr double kPatienceS = 0.5;

class Peers {
 public:
  // `where(rank)` returns the last action of that rank, for the timeout message.
  Peers(const ShmOptions& options, ShmMap map, std::byte* control, std::function<std::string(int)> where);

  // Opens the peers' processes by the pids that rank 0 published. Without this, only closing and timeouts end a wait.
  void watch();

  RankState& state(int rank) const { return map_.state(control_, rank); }

  // Wakes the peers that sleep. Call it after every store that a peer may wait for.
  void ring() const;

  // Sets the passes of the current wait, 0: none. Ranks that have left one of them will not come. Neither will ranks
  // that have left another pass, if this rank does not know it yet.
  void set_passes(uint64_t pass, uint64_t forward);
  // Notes that this rank has left that pass.
  void note_left(uint64_t pass) { own_.left = pass; }
  // Returns why this rank leaves its pass, if a peer's departure is the reason. Otherwise empty.
  const std::string& followed() const { return followed_; }

  // Combines the results of see(rank) (a Seen, or whether the rank is done) for all peers, without waiting.
  template <class See>
  Seen see_all(const See& see) const;

  // Returns true when see(rank) is done for every peer, false as soon as one is elsewhere. Throws Error if a late peer
  // is dead, closed, or has left this rank's pass, if any rank has failed, and after the group's timeout. `describe()`
  // names the awaited event and is called only for an error.
  template <class See, class Describe>
  bool wait(const See& see, const Describe& describe);

 private:
  using Clock = std::chrono::steady_clock;

  static void pause();
  uint32_t begin_sleep() const;
  void sleep(uint32_t bell, Clock::time_point deadline) const;
  void end_sleep() const;

  // Checks every peer's process once. is_dead() returns the result.
  void look();
  bool is_dead(int rank) const { return dead_[static_cast<size_t>(rank)]; }
  bool is_closed(int rank) const { return state(rank).closed.load(std::memory_order_acquire) != 0; }
  bool has_failed(int rank) const { return state(rank).failed.load(std::memory_order_acquire) != 0; }
  bool has_left(int rank) const {
    const uint64_t left = state(rank).left.load(std::memory_order_acquire);
    if (left == 0 || own_.pass == 0) return false;
    return left == own_.pass || left == own_.forward ||
           (left != own_.left && left != known_left_[static_cast<size_t>(rank)]);
  }
  [[noreturn]] void fail_failed(int rank, const std::string& what) const;
  [[noreturn]] void fail_gone(int rank, const std::string& what, double waited_s) const;
  [[noreturn]] void fail_left(int rank, const std::string& what, double waited_s);
  [[noreturn]] void fail_timeout(int rank, const std::string& what, double waited_s) const;
  std::string name(int rank) const;
  // Returns, for example, "; rank 2 (pid 7) has died": the awaited peer is often not the cause.
  std::string other_dead(int rank) const;

  // Spins before a wait sleeps.
  struct Patience {
    int num_pauses, num_yields;
  };
  struct Passes {
    uint64_t pass = 0, forward = 0;  // see set_passes()
    uint64_t left = 0;
  };

  const ShmOptions& options_;
  ShmMap map_;
  std::byte* control_;
  std::function<std::string(int)> where_;
  Patience patience_;
  bool watching_ = false;
  Passes own_;
  std::vector<uint64_t> known_left_;  // by rank: the pass of the last error
  std::string followed_;
  std::vector<FileDescriptor> processes_;
  std::vector<pollfd> polled_;
  std::vector<bool> dead_;
};

template <class See>
Seen Peers::see_all(const See& see) const {
  Seen all = Seen::done;
  for (int rank = 0; rank < options_.world; ++rank) {
    if (rank == options_.rank) continue;
    const Seen state = seen(see(rank));
    if (state == Seen::elsewhere) return state;
    if (state == Seen::late) all = state;
  }
  return all;
}

template <class See, class Describe>
bool Peers::wait(const See& see, const Describe& describe) {
  Seen all = see_all(see);
  for (int i = 0; all == Seen::late && i < patience_.num_pauses; ++i, all = see_all(see)) pause();
  for (int i = 0; all == Seen::late && i < patience_.num_yields; ++i, all = see_all(see)) ::sched_yield();
  if (all != Seen::late) return all == Seen::done;
  const auto start = Clock::now();
  const auto deadline =
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.timeout_s));
  while (true) {
    const uint32_t bell = begin_sleep();
    all = see_all(see);
    if (all == Seen::late) sleep(bell, deadline);
    end_sleep();
    if (all == Seen::late) all = see_all(see);
    if (all != Seen::late) return all == Seen::done;

    const auto now = Clock::now();
    const double waited_s = std::chrono::duration<double>(now - start).count();
    look();
    const auto is_late = [&](int rank) { return rank != options_.rank && seen(see(rank)) == Seen::late; };
    for (int rank = 0; rank < options_.world; ++rank) {
      if (has_failed(rank)) fail_failed(rank, describe());
      // Check again, because the peer may have finished its part before it went.
      if ((is_dead(rank) || is_closed(rank)) && is_late(rank)) fail_gone(rank, describe(), waited_s);
      if (waited_s >= kPatienceS && has_left(rank) && is_late(rank)) fail_left(rank, describe(), waited_s);
    }
    for (int rank = 0; now >= deadline && rank < options_.world; ++rank) {
      if (is_late(rank)) fail_timeout(rank, describe(), waited_s);
    }
    if (options_.on_wait) options_.on_wait();
  }
}

}  // namespace fsdp2x::cpu
