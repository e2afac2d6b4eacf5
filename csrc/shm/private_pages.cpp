// Reads /proc/self/pagemap: eight bytes for each page of the address space.
#include "shm/private_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "shm/shm_windows.hpp"

namespace fsdp2x::cpu {

namespace {

constexpr uint64_t kPresent = uint64_t{1} << 63;
constexpr uint64_t kSwapped = uint64_t{1} << 62;
constexpr uint64_t kOfFile = uint64_t{1} << 61;  // or of shared memory

bool is_copy(uint64_t entry) { return (entry & (kPresent | kSwapped)) != 0 && (entry & kOfFile) == 0; }

void append(std::vector<PageRun>& runs, uintptr_t first_page, size_t num_pages) {
  auto* const begin = reinterpret_cast<std::byte*>(first_page * page_bytes());
  if (!runs.empty() && runs.back().begin + runs.back().bytes == begin) {
    runs.back().bytes += num_pages * page_bytes();
  } else {
    runs.push_back({begin, num_pages * page_bytes()});
  }
}

}  // namespace

PrivatePages::PrivatePages() : pagemap_(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}

std::vector<PageRun> PrivatePages::find(std::byte* begin, size_t bytes) const {
  std::vector<PageRun> runs;
  if (bytes == 0) return runs;
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page_bytes();
  const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + bytes + page_bytes() - 1) / page_bytes();
  std::array<uint64_t, 1024> entries;
  for (uintptr_t page = first; page < end; page += entries.size()) {
    const size_t num = std::min<size_t>(entries.size(), end - page);
    const auto wanted = static_cast<ssize_t>(num * sizeof(uint64_t));
    if (!pagemap_.valid() || ::pread(pagemap_.get(), entries.data(), static_cast<size_t>(wanted),
                                     static_cast<off_t>(page * sizeof(uint64_t))) != wanted) {
      append(runs, page, end - page);
      return runs;
    }
    for (size_t i = 0; i < num;) {
      size_t stop = i;
      while (stop < num && is_copy(entries[stop])) ++stop;
      if (stop > i) append(runs, page + i, stop - i);
      i = stop + 1;
    }
  }
  return runs;
}

bool PrivatePages::drop(const std::vector<PageRun>& runs) {
  return std::all_of(runs.begin(), runs.end(),
                     [](const PageRun& run) { return ::madvise(run.begin, run.bytes, MADV_DONTNEED) == 0; });
}

}  // namespace fsdp2x::cpu
