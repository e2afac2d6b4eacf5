// Runs a function as every rank of a group, each in a process of its own, and collects how they ended.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/shm_group.hpp"

namespace fsdp2x::ranks {

struct Outcome {
  bool ok = false;
  int exit_code = -1;   // -1: did not end by itself
  std::string message;  // of the exception that ended it
  double seconds = 0;   // until it ended
};

inline constexpr double kTimeoutS = 10.0;  // of the group: far more than any test takes
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
  for (int rank = 0; rank < options.world; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe");
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork");
    if (pid == 0) {
      ::close(ends[0]);
      cpu::ShmOptions own = options;
      own.rank = rank;
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
