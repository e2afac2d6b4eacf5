// Finds pages of a private mapping that this process has written to, and drops them so that the file shows again.
#pragma once

#include <cstddef>
#include <vector>

#include "shm/file_descriptor.hpp"

namespace fsdp2x::cpu {

// Consecutive complete pages.
struct PageRun {
  std::byte* begin = nullptr;
  size_t bytes = 0;
};

// The kernel reports for every page whether it belongs to the file or is a copy made by a write (/proc/self/pagemap).
// It covers every writer. If the kernel does not report it, every page counts as written. The object belongs to the
// process that made it.
class PrivatePages {
 public:
  PrivatePages();

  // Returns the copies among the pages that [begin, begin + bytes) touches, in a private mapping of shared memory.
  std::vector<PageRun> find(std::byte* begin, size_t bytes) const;
  // Drops the copies, so that the pages show the shared memory again. Returns false if the kernel refused, with errno
  // set.
  static bool drop(const std::vector<PageRun>& runs);

 private:
  FileDescriptor pagemap_;
};

}  // namespace fsdp2x::cpu
