// Runs a function as every rank of a group, each in a separate process, and collects the results.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x::ranks {

struct Outcome {
  bool ok = false;
  int exit_code = -1;   // -1: did not end by itself
  std::string message;  // of the exception that ended it
  double seconds = 0;   // until it ended
};

inline constexpr double kTimeoutS = 10.0;  // of the group, far more than any test takes
inline constexpr double kPatienceS = 40.0;

// For checks inside a rank, where a gtest assertion would be lost.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("not true: " + what);
}

inline void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

inline std::string random_text(size_t bytes) {
  std::string raw(bytes, '\0');
  if (::getrandom(raw.data(), raw.size(), 0) != static_cast<ssize_t>(bytes)) throw std::runtime_error("getrandom");
  std::string text;
  for (const char c : raw) text += "0123456789abcdef"[static_cast<unsigned char>(c) % 16];
  return text;
}

inline cpu::ShmOptions fresh_options(int world, double timeout_s = kTimeoutS) {
  cpu::ShmOptions options;
  options.world = world;
  options.socket_name = "fsdp2x-test-" + random_text(16);
  options.token = random_text(32);
  options.timeout_s = timeout_s;
  return options;
}

// Stops a rank until another one has ended, like a sleep that is always long enough.
class Gate {
 public:
  Gate() {
    if (::pipe(ends_) != 0) throw std::runtime_error("pipe");
  }
  ~Gate() {
    for (const int end : ends_) ::close(end);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  class Opening {
   public:
    explicit Opening(int end) : end_(end) {}
    ~Opening() {
      if (::write(end_, "", 1) != 1) std::abort();
    }
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;

   private:
    int end_;
  };

  // Opens the gate at the end of the scope, also after an exception.
  [[nodiscard]] Opening open_at_end() const { return Opening(ends_[1]); }

  void wait() const {
    char byte = 0;
    require(::read(ends_[0], &byte, 1) == 1, "the gate was opened");
  }

 private:
  int ends_[2];
};

// Memory through which the processes of a run exchange strings, as ranks do over their process group.
class Board {
 public:
  explicit Board(int world) : world_(world) {
    void* data = ::mmap(nullptr, sizeof(Place) * static_cast<size_t>(world), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::runtime_error("mmap");
    places_ = static_cast<Place*>(data);
  }
  ~Board() { ::munmap(places_, sizeof(Place) * static_cast<size_t>(world_)); }
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  std::vector<std::string> exchange(int rank, const std::string& mine) {
    const uint64_t round = places_[rank].round.load() + 1;
    std::array<char, kTextBytes>& text = places_[rank].texts[round % 2];  // a peer may still read the one before
    text = {};
    mine.copy(text.data(), kTextBytes - 1);
    places_[rank].round.store(round);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(kTimeoutS);
    std::vector<std::string> said;
    for (int peer = 0; peer < world_; ++peer) {
      while (places_[peer].round.load() < round) {
        if (std::chrono::steady_clock::now() > deadline) {
          throw std::runtime_error("rank " + std::to_string(peer) + " did not come to the exchange");
        }
        sleep_ms(1);
      }
      said.emplace_back(places_[peer].texts[round % 2].data());
    }
    return said;
  }

 private:
  static constexpr size_t kTextBytes = 2048;
  struct Place {
    std::atomic<uint64_t> round;
    std::array<std::array<char, kTextBytes>, 2> texts;
  };
  int world_;
  Place* places_;
};

// Throws Error with the reason if the ranks cannot share memory.
inline std::unique_ptr<cpu::ShmGroup> enter(const cpu::ShmOptions& options) {
  std::string reason;
  auto group = cpu::ShmGroup::create(options, reason);
  if (!group) throw Error(reason);
  return group;
}

// Waits for all ranks of a run.
inline void meet_all(const cpu::ShmOptions& options) { options.exchange(""); }

using Body = std::function<void(const cpu::ShmOptions&)>;

[[noreturn]] inline void run_child(const cpu::ShmOptions& options, const Body& body, int pipe) {
  int code = 0;
  try {
    body(options);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    code = ::write(pipe, text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 1 : 2;
  }
  ::_exit(code);
}

inline std::vector<Outcome> run(const cpu::ShmOptions& options, const Body& body) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  struct Child {
    pid_t pid;
    int pipe;
  };
  std::vector<Child> children;
  Board board(options.world);
  for (int rank = 0; rank < options.world; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe");
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork");
    if (pid == 0) {
      ::close(ends[0]);
      cpu::ShmOptions own = options;
      own.rank = rank;
      own.exchange = [&board, rank](const std::string& mine) { return board.exchange(rank, mine); };
      run_child(own, body, ends[1]);
    }
    ::close(ends[1]);
    children.push_back({pid, ends[0]});
  }
  std::vector<Outcome> outcomes(children.size());
  size_t num_left = children.size();
  std::vector<bool> ended(children.size(), false);
  while (num_left > 0) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    for (size_t i = 0; i < children.size(); ++i) {
      int status = 0;
      if (ended[i]) continue;
      if (seconds > kPatienceS) ::kill(children[i].pid, SIGKILL);
      if (::waitpid(children[i].pid, &status, seconds > kPatienceS ? 0 : WNOHANG) != children[i].pid) continue;
      ended[i] = true;
      --num_left;
      outcomes[i].seconds = seconds;
      outcomes[i].exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      outcomes[i].ok = outcomes[i].exit_code == 0;
      char buffer[4096];
      for (ssize_t got; (got = ::read(children[i].pipe, buffer, sizeof(buffer))) > 0;) {
        outcomes[i].message.append(buffer, static_cast<size_t>(got));
      }
      ::close(children[i].pipe);
    }
    if (num_left > 0) sleep_ms(2);
  }
  return outcomes;
}

// Runs `body` as rank 0. Rank 1 runs `peer`, then lives and does nothing. Returns how rank 0 ended.
inline Outcome run_alone(double timeout_s, const std::function<void(cpu::ShmGroup&)>& body,
                         const std::function<void(std::unique_ptr<cpu::ShmGroup>&)>& peer = nullptr) {
  const Gate ended;
  const auto outcomes = run(fresh_options(2, timeout_s), [&](const cpu::ShmOptions& options) {
    auto group = enter(options);
    if (options.rank == 1) {
      if (peer) peer(group);
      return ended.wait();
    }
    const auto opening = ended.open_at_end();
    body(*group);
  });
  return outcomes[0];
}

inline void expect_all_ok(const std::vector<Outcome>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_TRUE(outcomes[rank].ok) << "rank " << rank << " ended with code " << outcomes[rank].exit_code << ": "
                                   << outcomes[rank].message;
  }
}

inline void expect_error(const Outcome& outcome, const std::vector<std::string>& parts) {
  EXPECT_EQ(outcome.exit_code, 1) << outcome.message;
  for (const std::string& part : parts) {
    EXPECT_NE(outcome.message.find(part), std::string::npos) << "'" << part << "' is not in: " << outcome.message;
  }
}

}  // namespace fsdp2x::ranks
