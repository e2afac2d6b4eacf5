// Distinguishes a process from the children that it forks. A child inherits the memory, the sockets, and the
// descriptors of its parent, but it is not the parent's rank.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace fsdp2x::cpu {

namespace detail {
// Number of forks between the first process and this one. One load distinguishes a child from its parent.
extern std::atomic<uint64_t> fork_generation;
}  // namespace detail

// Remembers the process that made it.
class ProcessGuard {
 public:
  ProcessGuard();

  bool is_here() const { return generation_ == detail::fork_generation.load(std::memory_order_relaxed); }
  // Throws Error in a forked child. `what` is the rejected action, for example "run unit 'layers.0'".
  void require(const char* what) const {
    if (!is_here()) refuse(what, "");
  }
  void require(const char* what, const std::string& name) const {
    if (!is_here()) refuse(what, name);
  }

 private:
  [[noreturn]] void refuse(const char* what, const std::string& name) const;

  uint64_t generation_;
  pid_t pid_;
};

}  // namespace fsdp2x::cpu
