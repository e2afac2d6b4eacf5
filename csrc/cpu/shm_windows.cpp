// mmap for windows of the memfd.
#include "cpu/shm_windows.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "core/error.hpp"

namespace fsdp2x::cpu {

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

Mapping::Mapping(int fd, size_t offset, size_t bytes, View view) : bytes_(bytes) {
  const int protection = view == View::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  const int sharing = view == View::isolated ? MAP_PRIVATE : MAP_SHARED;
  void* data = ::mmap(nullptr, bytes, protection, sharing | MAP_NORESERVE, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    throw Error("shared memory: cannot map " + std::to_string(bytes) + " bytes (" + std::strerror(errno) +
                "): check `ulimit -v` and the number of mappings (vm.max_map_count)");
  }
  data_ = static_cast<std::byte*>(data);
  // A child that wrote here would write into its parent's rank. Where this is refused ProcessGuard still stands.
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
  const size_t page = page_bytes();
  const size_t rounded = (bytes + page - 1) / page * page;
  const auto found = mappings_.lower_bound({offset, rounded});
  if (found != mappings_.end() && found->first.first == offset) return found->second.data();
  const auto added = mappings_.emplace(std::pair(offset, rounded), Mapping(fd, offset, rounded, view_)).first;
  mapped_bytes_ += rounded;
  return added->second.data();
}

}  // namespace fsdp2x::cpu
