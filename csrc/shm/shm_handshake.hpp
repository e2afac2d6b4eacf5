// How the ranks of a group come to share one memory file: rank 0 makes it and hands it to the others over an abstract
// unix socket. In steps that never wait; between them the ranks tell each other who failed.
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
  // Rank 0 only: the process of every rank as seen from here, 0 where it lives in another pid namespace.
  std::vector<pid_t> pids;
  // Other ranks: whether pids published by rank 0 mean the same processes here.
  bool pids_are_shared = true;
};

// Sizes that a memory file may have; the largest that the system grants is taken. Only what is written takes memory.
struct FileSizes {
  size_t least_bytes = 0;
  size_t most_bytes = 0;
};

// Collective. `use` runs on every rank that has the file: on rank 0 when the others have come and before they get the
// file, on them when they have it. Empty on every rank when a step, or `use`, threw on any of them: `reason` is then
// the same everywhere.
std::optional<Rendezvous> rendezvous(const ShmOptions& options, FileSizes sizes,
                                     const std::function<void(Rendezvous&)>& use, std::string& reason);

}  // namespace fsdp2x::cpu
