// Freed CPU memory that serves the next requests of about its size. Otherwise malloc returns large memory to the
// system, which then clears new pages.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace fsdp2x {

class KeptMemory {
 public:
  // Keeps nothing smaller than `min_bytes`, because malloc does.
  explicit KeptMemory(size_t min_bytes) : min_bytes_(min_bytes) {}

  // Returns `bytes` of uninitialized memory. A large request first frees kept memory that is too small for it.
  at::Tensor take(size_t bytes);
  // Keeps the storage of `memory`. take() returns it when nothing else uses it.
  void keep(const at::Tensor& memory);
  void clear() { kept_.clear(); }

  // Returns whether memory of `size` bytes is no waste for a request of `bytes`.
  static bool is_alike(size_t size, size_t bytes);
  size_t num_allocations() const { return num_allocations_; }  // by take()

 private:
  size_t min_bytes_;
  std::vector<at::Storage> kept_;  // the oldest first
  size_t num_allocations_ = 0;
};

}  // namespace fsdp2x
