// Freed CPU memory that serves the next requests of about its size.
#include "engine/transport/process_group/kept_memory.hpp"

#include <algorithm>

#include "engine/memory/storage.hpp"

namespace fsdp2x {

namespace {

// The next unit takes at most two buffers: its slot and its packed gradients.
constexpr size_t kMaxKept = 2;
// Kept memory serves requests that are smaller by at most this fraction. Requests below the fraction leave it kept.
constexpr size_t kFraction = 8;
// Additional room: a unit's slot and its gradients for all ranks differ by less. Untouched pages take no memory.
constexpr size_t kRoomFraction = 256;

}  // namespace

bool KeptMemory::is_alike(size_t size, size_t bytes) { return size <= bytes || size - bytes <= size / kFraction; }

at::Tensor KeptMemory::take(size_t bytes) {
  const auto numel = static_cast<int64_t>(bytes);
  const auto fits = [bytes](const at::Storage& kept) {
    const bool is_used = kept.use_count() > 1;  // by reduced rows or a backend
    return kept.nbytes() >= bytes && is_alike(kept.nbytes(), bytes) && !is_used;
  };
  if (const auto found = std::ranges::find_if(kept_, fits); found != kept_.end()) {
    const at::Storage storage = std::move(*found);
    kept_.erase(found);
    return at::empty({0}, at::kByte).set_(storage, 0, {numel});
  }
  std::erase_if(kept_, [bytes](const at::Storage& kept) { return bytes > kept.nbytes() / kFraction; });
  ++num_allocations_;
  const size_t room = bytes < min_bytes_ ? 0 : bytes / kRoomFraction;
  const at::Tensor memory = at::empty({numel + static_cast<int64_t>(room)}, at::kByte);
  return room == 0 ? memory : typed(memory, DType::byte, 0, bytes);
}

void KeptMemory::keep(const at::Tensor& memory) {
  if (memory.nbytes() < min_bytes_) return;
  if (kept_.size() == kMaxKept) kept_.erase(kept_.begin());
  kept_.push_back(memory.storage());
}

}  // namespace fsdp2x
