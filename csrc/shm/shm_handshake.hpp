// Lets the ranks of a group share one memory file: rank 0 makes it and sends it to the others over an abstract unix
// socket. The steps never wait. Between them, the ranks report failures to each other.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shm/file_descriptor.hpp"
#include "shm/shm_options.hpp"

namespace fsdp2x::cpu {

struct Rendezvous {
  FileDescriptor memory;
  size_t total_bytes = 0;
  // Rank 0 only: the process of every rank as seen from here, 0 if it lives in another pid namespace.
  std::vector<pid_t> pids;
  // Other ranks: whether pids published by rank 0 mean the same processes here.
  bool pids_are_shared = true;
};

// Allowed sizes of a memory file. The largest that the system grants is used. Only written pages take memory.
struct FileSizes {
  size_t least_bytes = 0;
  size_t most_bytes = 0;
};

// Collective. `use` runs on every rank that has the file: on rank 0 after the others have come and before they get the
// file, on the others once they have it. If a step or `use` threw on any rank, returns nullopt on all of them, with the
// same `reason`.
std::optional<Rendezvous> rendezvous(const ShmOptions& options, FileSizes sizes,
                                     const std::function<void(Rendezvous&)>& use, std::string& reason);

}  // namespace fsdp2x::cpu
