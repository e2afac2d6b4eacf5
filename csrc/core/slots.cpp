// The slot ledger: a linear search over few slots, so that the choice is simple and the same on every rank.
#include "core/slots.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/layout.hpp"

namespace fsdp2x {

SlotLedger::SlotLedger(size_t page_bytes) : page_bytes_(page_bytes) {
  if (page_bytes == 0) throw Error("slot ledger: the page size must be positive, got 0");
}

SlotLedger::Entry& SlotLedger::add(size_t bytes, const std::string& owner) {
  Entry entry;
  entry.slot.id = static_cast<int>(slots_.size());
  entry.slot.offset = end_;
  entry.slot.bytes = bytes;
  entry.owner = owner;
  slots_.push_back(entry);
  end_ += bytes;
  return slots_.back();
}

size_t SlotLedger::whole_pages(size_t bytes, const std::string& owner) const {
  if (bytes == 0) throw Error("slot ledger: '" + owner + "' asked for a slot of 0 bytes");
  return align_up(bytes, page_bytes_);
}

Slot SlotLedger::acquire(size_t bytes, const std::string& owner) {
  const size_t needed = whole_pages(bytes, owner);
  Entry* best = nullptr;
  for (Entry& entry : slots_) {
    const size_t capacity = entry.slot.bytes;
    if (entry.owned || entry.reserved || capacity < needed || capacity > 2 * needed) continue;
    if (best == nullptr || capacity < best->slot.bytes) best = &entry;
  }
  if (best == nullptr) {
    best = &add(needed, owner);
    arena_bytes_ += needed;
  }
  best->owned = true;
  best->owner = owner;
  ++best->slot.num_uses;
  owned_bytes_ += best->slot.bytes;
  peak_owned_bytes_ = std::max(peak_owned_bytes_, owned_bytes_);
  return best->slot;
}

Slot SlotLedger::reserve(size_t bytes, const std::string& owner, size_t alignment) {
  const size_t needed = whole_pages(bytes, owner);
  end_ = align_up(end_, alignment);
  Entry& entry = add(needed, owner);
  entry.reserved = true;
  return entry.slot;
}

size_t SlotLedger::index_of(int id) const {
  if (id < 0 || static_cast<size_t>(id) >= slots_.size()) {
    throw Error("slot ledger: slot " + std::to_string(id) + " is not one of the " + std::to_string(slots_.size()) +
                " slots. Owned now: " + listed(owners()));
  }
  return static_cast<size_t>(id);
}

SlotLedger::Entry& SlotLedger::owned_entry(int id) {
  Entry& found = slots_[index_of(id)];
  if (!found.owned) {
    throw Error("slot ledger: slot " + std::to_string(id) +
                (found.reserved ? " is reserved for '" + found.owner + "'"
                                : " was released twice. Its last owner was '" + found.owner + "'") +
                ". Owned now: " + listed(owners()));
  }
  return found;
}

Slot SlotLedger::reuse(int id) {
  Entry& found = owned_entry(id);
  ++found.slot.num_uses;
  return found.slot;
}

void SlotLedger::release(int id) {
  Entry& entry = owned_entry(id);
  entry.owned = false;
  owned_bytes_ -= entry.slot.bytes;
}

size_t SlotLedger::num_owned() const {
  return static_cast<size_t>(std::count_if(slots_.begin(), slots_.end(), [](const Entry& e) { return e.owned; }));
}

std::vector<std::string> SlotLedger::owners() const {
  std::vector<std::string> owned;
  for (const Entry& entry : slots_) {
    if (!entry.owned) continue;
    owned.push_back("slot " + std::to_string(entry.slot.id) + " (" + std::to_string(entry.slot.bytes) +
                    " bytes): " + entry.owner);
  }
  return owned;
}

std::string listed(const std::vector<std::string>& owners) {
  std::string text;
  for (const std::string& owner : owners) text += (text.empty() ? "" : "; ") + owner;
  return text.empty() ? "nothing" : text;
}

}  // namespace fsdp2x
