// The windows that a rank has mapped from the memfd: opened at the first use, kept until the group is destroyed.
#pragma once

#include <cstddef>
#include <map>
#include <utility>

#include "shm/process_guard.hpp"

namespace fsdp2x::cpu {

enum class View { read_write, read_only, isolated };

size_t page_bytes();

// One mapping of a range of the memfd. A forked child does not have it, and other mappings of the child may take its
// place.
class Mapping {
 public:
  Mapping() = default;
  // Throws Error if the system refuses.
  Mapping(int fd, size_t offset, size_t bytes, View view);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  ProcessGuard guard_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Mappings of one view, found again by file offset and size.
class Windows {
 public:
  explicit Windows(View view) : view_(view) {}
  // Returns the smallest window that begins at `offset` and holds `bytes`. A larger window is only reused if it existed
  // before a smaller one was made, so that equal arguments always give equal pointers.
  std::byte* get(int fd, size_t offset, size_t bytes);
  size_t count() const { return mappings_.size(); }

 private:
  View view_;
  std::map<std::pair<size_t, size_t>, Mapping> mappings_;
};

}  // namespace fsdp2x::cpu
