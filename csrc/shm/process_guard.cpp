// The count of forks, kept by a handler that runs in every child.
#include "shm/process_guard.hpp"

#include <pthread.h>
#include <unistd.h>

#include "core/error.hpp"

namespace fsdp2x::cpu {

namespace detail {
std::atomic<uint64_t> fork_generation{0};
}  // namespace detail

namespace {

void count_fork() { detail::fork_generation.fetch_add(1, std::memory_order_relaxed); }

// Returns false if the system has no memory for the handler: children would then look like their parents.
bool is_watching() {
  static const bool watching = ::pthread_atfork(nullptr, nullptr, &count_fork) == 0;
  return watching;
}

}  // namespace

ProcessGuard::ProcessGuard() : generation_(detail::fork_generation.load(std::memory_order_relaxed)), pid_(::getpid()) {
  if (!is_watching()) throw Error("fsdp2x: the system refused a handler for forks (pthread_atfork): out of memory");
}

void ProcessGuard::refuse(const char* what, const std::string& name) const {
  throw Error("fsdp2x: a forked child (pid " + std::to_string(::getpid()) + ") cannot " + what +
              (name.empty() ? "" : " '" + name + "'") +
              ", because the model and its connections to other ranks belong to process " + std::to_string(pid_) +
              ". Compute in that process, or load a separate model in a child that is started by 'spawn' or "
              "'forkserver' (DataLoader(multiprocessing_context=\"spawn\")).");
}

}  // namespace fsdp2x::cpu
