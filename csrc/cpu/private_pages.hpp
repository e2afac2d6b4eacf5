// Pages of a private mapping that this process has written to: found, and given up for what the file holds.
#pragma once

#include <cstddef>

#include "cpu/file_descriptor.hpp"

namespace fsdp2x::cpu {

// The kernel tells whether a page is the file's or a copy that a write made (/proc/self/pagemap), whoever wrote it and
// however. Where it does not tell, every page counts as written. Belongs to the process that made it.
class PrivatePages {
 public:
  PrivatePages();

  // Afterwards [begin, begin + bytes), of a private mapping of shared memory, shows what the shared memory holds; so do
  // the rest of the pages it lies in. False when the kernel refused; errno says why.
  bool discard(std::byte* begin, size_t bytes) const;

 private:
  FileDescriptor pagemap_;
};

}  // namespace fsdp2x::cpu
