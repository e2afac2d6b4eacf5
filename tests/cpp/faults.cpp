// The wrappers: each counts its calls, and fails at the chosen one.
#include "faults.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <new>

namespace fsdp2x::faults {
namespace {

constexpr size_t kNone = kFunctions.size();
std::array<std::atomic<int>, kFunctions.size()> counts;
std::atomic<bool> counting{false};
std::atomic<size_t> armed_function{kNone};
std::atomic<int> armed_call{0};
std::atomic<int> armed_error{0};

constexpr size_t index_of(const char* name) {
  for (size_t i = 0; i < kFunctions.size(); ++i) {
    const char* left = kFunctions[i];
    const char* right = name;
    while (*left != '\0' && *left == *right) {
      ++left;
      ++right;
    }
    if (*left == *right) return i;
  }
  return kNone;
}

}  // namespace

void arm(size_t function, int call, int error) {
  for (auto& count : counts) count = 0;
  armed_function = function;
  armed_call = call;
  armed_error = error;
  counting = true;
}

void disarm() { counting = false; }

Pause::Pause() : was_counting_(counting.exchange(false)) {}
Pause::~Pause() { counting = was_counting_; }

int num_calls(size_t function) { return counts[function].load(); }

// Whether this call is the one that fails.
bool fails(size_t function) {
  if (!counting.load(std::memory_order_relaxed)) return false;
  const int call = ++counts[function];
  if (armed_function != function || armed_call != call) return false;
  errno = armed_error;
  return true;
}

}  // namespace fsdp2x::faults

using fsdp2x::faults::fails;
using fsdp2x::faults::index_of;

#define FSDP2X_WRAP(result, name, parameters, arguments, failure) \
  result __real_##name parameters;                                \
  result __wrap_##name parameters {                               \
    constexpr size_t index = index_of(#name);                     \
    static_assert(index < fsdp2x::faults::kFunctions.size());     \
    if (fails(index)) return failure;                             \
    return __real_##name arguments;                               \
  }

extern "C" {
FSDP2X_WRAP(int, memfd_create, (const char* name, unsigned flags), (name, flags), -1)
FSDP2X_WRAP(int, ftruncate, (int fd, off_t size), (fd, size), -1)
FSDP2X_WRAP(int, socket, (int domain, int type, int protocol), (domain, type, protocol), -1)
FSDP2X_WRAP(int, bind, (int fd, const sockaddr* at, socklen_t size), (fd, at, size), -1)
FSDP2X_WRAP(int, listen, (int fd, int num), (fd, num), -1)
FSDP2X_WRAP(int, accept4, (int fd, sockaddr* at, socklen_t* size, int flags), (fd, at, size, flags), -1)
FSDP2X_WRAP(int, connect, (int fd, const sockaddr* at, socklen_t size), (fd, at, size), -1)
FSDP2X_WRAP(ssize_t, send, (int fd, const void* data, size_t size, int flags), (fd, data, size, flags), -1)
FSDP2X_WRAP(ssize_t, recv, (int fd, void* data, size_t size, int flags), (fd, data, size, flags), -1)
FSDP2X_WRAP(ssize_t, sendmsg, (int fd, const msghdr* message, int flags), (fd, message, flags), -1)
FSDP2X_WRAP(ssize_t, recvmsg, (int fd, msghdr* message, int flags), (fd, message, flags), -1)
FSDP2X_WRAP(int, getsockopt, (int fd, int level, int name, void* value, socklen_t* size),
            (fd, level, name, value, size), -1)
FSDP2X_WRAP(int, fstat, (int fd, struct stat* status), (fd, status), -1)
FSDP2X_WRAP(void*, mmap, (void* at, size_t size, int protection, int flags, int fd, off_t offset),
            (at, size, protection, flags, fd, offset), MAP_FAILED)
FSDP2X_WRAP(int, madvise, (void* at, size_t size, int advice), (at, size, advice), -1)
FSDP2X_WRAP(ssize_t, pread, (int fd, void* data, size_t size, off_t offset), (fd, data, size, offset), -1)
FSDP2X_WRAP(int, poll, (pollfd * items, nfds_t num, int timeout), (items, num, timeout), -1)

int __real_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  if (fails(index_of("fcntl"))) return -1;
  return __real_fcntl(fd, command, argument);
}

int __real_open(const char* path, int flags, ...);
int __wrap_open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = va_arg(arguments, mode_t);
  va_end(arguments);
  if (fails(index_of("open"))) return -1;
  return __real_open(path, flags, mode);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
  va_list arguments;
  va_start(arguments, number);
  std::array<long, 6> values;
  for (long& value : values) value = va_arg(arguments, long);
  va_end(arguments);
  if (fails(index_of("syscall"))) return -1;
  return __real_syscall(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}

void* __real__Znwm(size_t size);
void* __wrap__Znwm(size_t size) {
  if (fails(index_of("operator new"))) throw std::bad_alloc();
  return __real__Znwm(size);
}
}
