// Reads /proc/self/pagemap: eight bytes for each page of the address space.
#include "cpu/private_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu/shm_windows.hpp"

namespace fsdp2x::cpu {

namespace {

constexpr uint64_t kPresent = uint64_t{1} << 63;
constexpr uint64_t kSwapped = uint64_t{1} << 62;
constexpr uint64_t kOfFile = uint64_t{1} << 61;  // or of shared memory

bool is_copy(uint64_t entry) { return (entry & (kPresent | kSwapped)) != 0 && (entry & kOfFile) == 0; }

bool drop(uintptr_t first_page, size_t num_pages) {
  return ::madvise(reinterpret_cast<void*>(first_page * page_bytes()), num_pages * page_bytes(), MADV_DONTNEED) == 0;
}

}  // namespace

PrivatePages::PrivatePages() : pagemap_(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}

bool PrivatePages::discard(std::byte* begin, size_t bytes) const {
  if (bytes == 0) return true;
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page_bytes();
  const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + bytes + page_bytes() - 1) / page_bytes();
  std::array<uint64_t, 1024> entries;
  for (uintptr_t page = first; page < end; page += entries.size()) {
    const size_t num = std::min<size_t>(entries.size(), end - page);
    const auto wanted = static_cast<ssize_t>(num * sizeof(uint64_t));
    if (!pagemap_.valid() || ::pread(pagemap_.get(), entries.data(), static_cast<size_t>(wanted),
                                     static_cast<off_t>(page * sizeof(uint64_t))) != wanted) {
      return drop(page, end - page);
    }
    for (size_t i = 0; i < num;) {
      size_t stop = i;
      while (stop < num && is_copy(entries[stop])) ++stop;
      if (stop > i && !drop(page + i, stop - i)) return false;
      i = stop + 1;
    }
  }
  return true;
}

}  // namespace fsdp2x::cpu
