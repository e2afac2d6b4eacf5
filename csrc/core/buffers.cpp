// Tracks the borrowers of an allocator's memory, in sizes only.
#include "core/buffers.hpp"

#include <bit>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "core/layout.hpp"

namespace fsdp2x {

size_t size_class(size_t bytes) { return align_up(bytes, std::max<size_t>(std::bit_ceil(bytes) / 32, kAlignBytes)); }

int BufferLedger::fitting(size_t bytes) const {
  int best = -1;
  const auto rank = [this](int id) { return std::pair(entry(id).bytes, entry(id).released_at); };
  for (int id = 0; id < static_cast<int>(entries_.size()); ++id) {
    const Entry& buffer = entry(id);
    if (buffer.is_owned || !buffer.has_memory || buffer.bytes < bytes || buffer.bytes > 2 * size_class(bytes)) continue;
    if (best < 0 || rank(id) < rank(best)) best = id;
  }
  return best;
}

int BufferLedger::unused() const {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [](const Entry& entry) { return !entry.has_memory; });
  return static_cast<int>(found - entries_.begin());
}

void BufferLedger::open(int id, size_t bytes) {
  if (static_cast<size_t>(id) == entries_.size()) entries_.emplace_back();
  Entry& buffer = entries_[static_cast<size_t>(id)];
  buffer.bytes = bytes;
  buffer.has_memory = true;
  if (tally_ != nullptr) tally_->take(bytes);
  ++num_allocations_;
}

void BufferLedger::own(int id) {
  entries_[static_cast<size_t>(id)].is_owned = true;
  owned_bytes_ += bytes_of(id);
  peak_owned_bytes_ = std::max(peak_owned_bytes_, owned_bytes_);
}

void BufferLedger::disown(int id) {
  Entry& buffer = entries_.at(static_cast<size_t>(id));
  if (!buffer.is_owned) throw Error("fsdp2x: buffer " + std::to_string(id) + " was released twice");
  buffer.is_owned = false;
  buffer.released_at = ++num_releases_;
  owned_bytes_ -= buffer.bytes;
}

void BufferLedger::close(int id) {
  Entry& buffer = entries_.at(static_cast<size_t>(id));
  if (tally_ != nullptr) tally_->give_back(buffer.bytes);
  buffer.bytes = 0;
  buffer.has_memory = false;
}

size_t BufferLedger::num_owned() const {
  return static_cast<size_t>(
      std::count_if(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.is_owned; }));
}

size_t BufferLedger::bytes() const {
  size_t total = 0;
  for (const Entry& buffer : entries_) total += buffer.bytes;
  return total;
}

}  // namespace fsdp2x
