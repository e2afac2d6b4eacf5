// The slot ledger: a linear search over few slots, so that the choice is plain to see and the same on every rank.
#include "core/slots.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace fsdp2x {

SlotLedger::SlotLedger(size_t page_bytes) : page_bytes_(page_bytes) {
  if (page_bytes == 0) throw Error("slot ledger: the page size must be positive, got 0");
}

Slot SlotLedger::acquire(size_t bytes, const std::string& owner) {
  if (bytes == 0) throw Error("slot ledger: '" + owner + "' asked for a slot of 0 bytes");
  const size_t needed = (bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  Entry* best = nullptr;
  for (Entry& entry : slots_) {
    const size_t capacity = entry.slot.bytes;
    if (entry.owned || capacity < needed || capacity > 2 * needed) continue;
    if (best == nullptr || capacity < best->slot.bytes) best = &entry;
  }
  if (best == nullptr) {
    Entry entry;
    entry.slot.id = static_cast<int>(slots_.size());
    entry.slot.offset = arena_bytes_;
    entry.slot.bytes = needed;
    slots_.push_back(entry);
    best = &slots_.back();
    arena_bytes_ += needed;
  }
  best->owned = true;
  best->owner = owner;
  ++best->slot.num_uses;
  owned_bytes_ += best->slot.bytes;
  peak_owned_bytes_ = std::max(peak_owned_bytes_, owned_bytes_);
  return best->slot;
}

SlotLedger::Entry& SlotLedger::owned_entry(int id) {
  if (id < 0 || static_cast<size_t>(id) >= slots_.size()) {
    throw Error("slot ledger: slot " + std::to_string(id) + " does not exist, there are " +
                std::to_string(slots_.size()) + "; owned now: " + owners());
  }
  Entry& entry = slots_[static_cast<size_t>(id)];
  if (!entry.owned) {
    throw Error("slot ledger: slot " + std::to_string(id) + " was released twice, its last owner was '" + entry.owner +
                "'; owned now: " + owners());
  }
  return entry;
}

Slot SlotLedger::reuse(int id) {
  Entry& entry = owned_entry(id);
  ++entry.slot.num_uses;
  return entry.slot;
}

void SlotLedger::release(int id) {
  Entry& entry = owned_entry(id);
  entry.owned = false;
  owned_bytes_ -= entry.slot.bytes;
}

size_t SlotLedger::num_owned() const {
  return static_cast<size_t>(std::count_if(slots_.begin(), slots_.end(), [](const Entry& e) { return e.owned; }));
}

size_t SlotLedger::owned_bytes() const { return owned_bytes_; }

const Slot& SlotLedger::slot(int id) const {
  if (id < 0 || static_cast<size_t>(id) >= slots_.size()) {
    throw Error("slot ledger: slot " + std::to_string(id) + " does not exist, there are " +
                std::to_string(slots_.size()));
  }
  return slots_[static_cast<size_t>(id)].slot;
}

std::string SlotLedger::owners() const {
  std::string text;
  for (const Entry& entry : slots_) {
    if (!entry.owned) continue;
    if (!text.empty()) text += "; ";
    text +=
        "slot " + std::to_string(entry.slot.id) + " (" + std::to_string(entry.slot.bytes) + " bytes): " + entry.owner;
  }
  return text.empty() ? "empty" : text;
}

}  // namespace fsdp2x
