// mmap for windows of the memfd.
#include "shm/shm_windows.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/error.hpp"
#include "core/layout.hpp"
#include "shm/huge_pages.hpp"

namespace fsdp2x::cpu {
namespace {

// Maps at an address that differs from `offset` by a multiple of the huge page size, as the kernel requires for huge
// pages.
void* map(int fd, size_t offset, size_t bytes, int protection, int sharing) {
  const int flags = sharing | MAP_NORESERVE;
  const auto position = static_cast<off_t>(offset);
  if (bytes >= kHugePageBytes) {
    const size_t room = bytes + kHugePageBytes;
    void* const reserved = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved != MAP_FAILED) {
      const size_t before = (offset - reinterpret_cast<uintptr_t>(reserved)) % kHugePageBytes;
      auto* const begin = static_cast<std::byte*>(reserved) + before;
      void* const data = ::mmap(begin, bytes, protection, flags | MAP_FIXED, fd, position);
      const int error = errno;
      if (data == MAP_FAILED) {
        ::munmap(reserved, room);
      } else {
        if (before > 0) ::munmap(reserved, before);
        ::munmap(begin + bytes, kHugePageBytes - before);
      }
      errno = error;
      return data;
    }
  }
  return ::mmap(nullptr, bytes, protection, flags, fd, position);
}

}  // namespace

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

Mapping::Mapping(int fd, size_t offset, size_t bytes, View view) : bytes_(bytes) {
  const int protection = view == View::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  const int sharing = view == View::isolated ? MAP_PRIVATE : MAP_SHARED;
  void* data = map(fd, offset, bytes, protection, sharing);
  if (data == MAP_FAILED) {
    throw Error("shared memory: cannot map " + std::to_string(bytes) + " bytes (" + std::strerror(errno) +
                "). Check `ulimit -v` and the number of mappings (vm.max_map_count).");
  }
  data_ = static_cast<std::byte*>(data);
  // A child that wrote here would write into its parent's rank. If the kernel refuses this, ProcessGuard still
  // protects.
  ::madvise(data, bytes, MADV_DONTFORK);
}

Mapping::Mapping(Mapping&& other) noexcept
    : guard_(other.guard_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(guard_, other.guard_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr && guard_.is_here()) ::munmap(data_, bytes_);
}

std::byte* Windows::get(int fd, size_t offset, size_t bytes) {
  const size_t rounded = align_up(bytes, page_bytes());
  const auto found = mappings_.lower_bound({offset, rounded});
  if (found != mappings_.end() && found->first.first == offset) return found->second.data();
  const auto added = mappings_.emplace(std::pair(offset, rounded), Mapping(fd, offset, rounded, view_)).first;
  // Make huge pages at the first writable mapping, before other views read.
  if (view_ == View::read_write) fill_with_huge_pages(added->second.data(), rounded);
  return added->second.data();
}

}  // namespace fsdp2x::cpu
