// Who borrows which memory of an allocator, in sizes only: the rule for device buffers, which the engine follows and
// the planner plays. The memory belongs to whoever brings it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp2x {

// Sizes in steps of a sixteenth, so that buffers of like units fit each other.
size_t size_class(size_t bytes);

// Bytes that come and go, and the most there were at once. `whole`, unless null, counts them as well and outlives this.
class MemoryTally {
 public:
  explicit MemoryTally(MemoryTally* whole = nullptr) : whole_(whole) {}

  void take(size_t bytes) {
    peak_bytes_ = std::max(peak_bytes_, bytes_ += bytes);
    if (whole_ != nullptr) whole_->take(bytes);
  }
  void give_back(size_t bytes) {
    bytes_ -= bytes;
    if (whole_ != nullptr) whole_->give_back(bytes);
  }
  void forget_peak() { peak_bytes_ = bytes_; }
  size_t peak_bytes() const { return peak_bytes_; }

 private:
  MemoryTally* whole_;
  size_t bytes_ = 0, peak_bytes_ = 0;
};

class BufferLedger {
 public:
  struct Acquired {
    int id = -1;
    bool is_new = false;  // its memory was just brought
  };

  // `keeps`: what is released serves the next borrower; otherwise it is given back. `tally`: counts all memory, unless
  // null, and outlives this.
  BufferLedger(bool keeps, MemoryTally* tally) : keeps_(keeps), tally_(tally) {}

  // Where memory is kept, a free buffer of at least `bytes` and not much more than twice as many: the smallest, then
  // the one released longest ago. Otherwise `bring(id, bytes)` brings memory and returns its size; what it throws
  // changes nothing. Ids without memory are used again.
  template <class Bring>
  Acquired acquire(size_t bytes, Bring&& bring) {
    Acquired found{keeps_ ? fitting(bytes) : -1, false};
    if (found.id < 0) {
      found = {unused(), true};
      open(found.id, bring(found.id, keeps_ ? size_class(bytes) : bytes));
    }
    own(found.id);
    return found;
  }
  // `give_back(id)` is called where memory is not kept, or forgotten with close().
  template <class GiveBack>
  void release(int id, GiveBack&& give_back) {
    disown(id);
    if (!keeps_) give_back(id);
  }
  // Its memory is gone.
  void close(int id);

  bool keeps() const { return keeps_; }
  void set_keeps(bool keeps) { keeps_ = keeps; }
  bool is_owned(int id) const { return static_cast<size_t>(id) < entries_.size() && entry(id).is_owned; }
  size_t bytes_of(int id) const { return entry(id).bytes; }
  size_t num_owned() const;
  size_t bytes() const;
  // For reports: what is kept, or else the most that was borrowed at once.
  size_t standing_bytes() const { return keeps_ ? bytes() : peak_owned_bytes_; }
  size_t peak_owned_bytes() const { return peak_owned_bytes_; }
  void forget_peak() { peak_owned_bytes_ = owned_bytes_; }
  size_t num_allocations() const { return num_allocations_; }

 private:
  struct Entry {
    size_t bytes = 0;
    bool has_memory = false;
    bool is_owned = false;
    uint64_t released_at = 0;
  };
  const Entry& entry(int id) const { return entries_[static_cast<size_t>(id)]; }
  int fitting(size_t bytes) const;  // -1: none
  int unused() const;
  void open(int id, size_t bytes);
  void own(int id);
  void disown(int id);

  bool keeps_;
  MemoryTally* tally_;
  std::vector<Entry> entries_;
  uint64_t num_releases_ = 0;
  size_t num_allocations_ = 0;
  size_t owned_bytes_ = 0, peak_owned_bytes_ = 0;
};

}  // namespace fsdp2x
