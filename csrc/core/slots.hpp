// The slot ledger: tracks the owner of each temporary piece of an arena. It only counts offsets, and the owner of the
// arena maps the memory. Deterministic: the same calls in the same order give the same offsets on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp2x {

struct Slot {
  int id = -1;            // stable index of the slot, counted from 0 in order of creation
  size_t offset = 0;      // from the arena's start, a multiple of the page size
  size_t bytes = 0;       // capacity: the requested bytes, rounded up to pages
  uint64_t num_uses = 0;  // how often it was acquired, this use included
};

class SlotLedger {
 public:
  // `page_bytes`: every slot's offset and capacity is a multiple of it.
  explicit SlotLedger(size_t page_bytes);

  // Returns the free slot with the smallest capacity that fits `bytes` and is at most twice as large, the lowest id
  // among equals. Otherwise makes a new slot at the end of the arena. Never waits. Throws if `bytes` is 0.
  Slot acquire(size_t bytes, const std::string& owner);
  // Makes a permanent slot of one owner at the end of the arena. The owner counts its uses. The slot is not owned in
  // the sense of acquire(), and only reserved_bytes() counts it. It begins at a multiple of `alignment`, which must be
  // a multiple of the page size. Throws if `bytes` is 0.
  Slot reserve(size_t bytes, const std::string& owner, size_t alignment);
  // Counts another use of a slot by its owner, who never gave it back. Throws if the slot is not owned.
  Slot reuse(int id);
  // Throws if the slot is not owned.
  void release(int id);

  size_t num_owned() const;
  size_t num_slots() const { return slots_.size(); }
  size_t arena_bytes() const { return arena_bytes_; }            // of temporary slots
  size_t reserved_bytes() const { return end_ - arena_bytes_; }  // of permanent slots, with the gaps before them
  size_t peak_owned_bytes() const { return peak_owned_bytes_; }
  const Slot& slot(int id) const { return slots_[index_of(id)].slot; }
  // Returns the owned slots in words, such as "slot 0 (4096 bytes): layers.0", for errors and tests.
  std::vector<std::string> owners() const;

 private:
  struct Entry {
    Slot slot;
    std::string owner;
    bool owned = false;
    bool reserved = false;
  };
  size_t whole_pages(size_t bytes, const std::string& owner) const;
  Entry& add(size_t bytes, const std::string& owner);
  size_t index_of(int id) const;  // throws if the slot does not exist
  Entry& owned_entry(int id);

  size_t page_bytes_;
  std::vector<Entry> slots_;
  size_t end_ = 0;  // end of the arena
  size_t arena_bytes_ = 0;
  size_t owned_bytes_ = 0;
  size_t peak_owned_bytes_ = 0;
};

// Lists owners in an error.
std::string listed(const std::vector<std::string>& owners);

}  // namespace fsdp2x
