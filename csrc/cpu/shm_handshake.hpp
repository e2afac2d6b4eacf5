// How the ranks of a group meet: rank 0 makes the memfd and hands it to the others over an abstract unix socket.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <vector>

#include "cpu/file_descriptor.hpp"
#include "cpu/shm_group.hpp"

namespace fsdp2x::cpu {

using Deadline = std::chrono::steady_clock::time_point;

struct Meeting {
  FileDescriptor memory;
  size_t total_bytes = 0;
  // Rank 0 only: the process of every rank as seen from here, 0 where it lives in another pid namespace.
  std::vector<pid_t> pids;
  // Other ranks: whether pids published by rank 0 mean the same processes here.
  bool pids_are_shared = true;
  // Kept until all ranks have mapped the control area, so that a rank that dies meanwhile is noticed.
  std::vector<FileDescriptor> sockets;
};

// Throws Error when a peer does not come before `deadline`, belongs to another user or shows a wrong token.
Meeting meet(const ShmOptions& options, Deadline deadline);
// Rank 0, second half: gives `memory` to everyone. To be called when the control area is ready to be read.
void hand_out(const FileDescriptor& memory, const Meeting& meeting, const ShmOptions& options);

}  // namespace fsdp2x::cpu
