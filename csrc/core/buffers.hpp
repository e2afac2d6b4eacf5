// Tracks the borrowers of an allocator's memory, in sizes only. The engine follows this rule for device buffers, and
// the planner simulates it. The caller owns the memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp2x {

// Rounds sizes up in steps of a sixteenth, so that buffers of similar units fit each other.
size_t size_class(size_t bytes);

// Counts temporary bytes and their peak. `whole`, unless null, counts them as well and must outlive this object.
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
    bool is_new = false;  // its memory was just allocated
  };

  // `keeps`: a released buffer serves the next borrower. Otherwise it is given back. `tally`: if not null, counts all
  // memory and must outlive this object.
  BufferLedger(bool keeps, MemoryTally* tally) : keeps_(keeps), tally_(tally) {}

  // Returns a free buffer of at least `bytes` and not much more than twice as many, if memory is kept. It takes the
  // smallest one, then the one released longest ago. Otherwise `bring(id, bytes)` brings memory and returns its size.
  // If it throws, nothing changes. Ids without memory are used again.
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
  // Calls `give_back(id)` if memory is not kept or was forgotten with close().
  template <class GiveBack>
  void release(int id, GiveBack&& give_back) {
    disown(id);
    if (!keeps_) give_back(id);
  }
  // Forgets the memory of a buffer.
  void close(int id);

  bool keeps() const { return keeps_; }
  void set_keeps(bool keeps) { keeps_ = keeps; }
  bool is_owned(int id) const { return static_cast<size_t>(id) < entries_.size() && entry(id).is_owned; }
  size_t bytes_of(int id) const { return entry(id).bytes; }
  size_t num_owned() const;
  size_t bytes() const;
  // Returns the kept bytes, or else the most that was borrowed at once, for reports.
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
