// Pages of a private mapping that this process has written to: found, and given up for what the file holds.
#pragma once

#include <cstddef>
#include <vector>

#include "shm/file_descriptor.hpp"

namespace fsdp2x::cpu {

// Whole pages, one behind the other.
struct PageRun {
  std::byte* begin = nullptr;
  size_t bytes = 0;
};

// The kernel tells whether a page is the file's or a copy that a write made (/proc/self/pagemap), whoever wrote it and
// however. Where it does not tell, every page counts as written. Belongs to the process that made it.
class PrivatePages {
 public:
  PrivatePages();

  // The copies among the pages that [begin, begin + bytes) touches, of a private mapping of shared memory.
  std::vector<PageRun> find(std::byte* begin, size_t bytes) const;
  // Afterwards the pages show what the shared memory holds. False when the kernel refused; errno says why.
  static bool drop(const std::vector<PageRun>& runs);

 private:
  FileDescriptor pagemap_;
};

}  // namespace fsdp2x::cpu
