// Makes the n-th call of a system call, or of operator new, fail in this process. Programs must be linked with --wrap
// of every function in kFunctions (tests/cpp/CMakeLists.txt).
#pragma once

#include <array>
#include <cstddef>

namespace fsdp2x::faults {

inline constexpr std::array kFunctions = {"memfd_create", "ftruncate", "fcntl",       "socket",  "bind",    "listen",
                                          "accept4",      "connect",   "send",        "recv",    "sendmsg", "recvmsg",
                                          "getsockopt",   "fstat",     "mmap",        "madvise", "open",    "pread",
                                          "poll",         "syscall",   "operator new"};

// Counts calls of this process from now on. The `call`-th (from 1; 0: none) of kFunctions[function] fails with `error`.
void arm(size_t function, int call, int error);
void disarm();

// No call counts or fails while it lives.
class Pause {
 public:
  Pause();
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  bool was_counting_;
};

// Calls since the last arm.
int num_calls(size_t function);

}  // namespace fsdp2x::faults
