// The stores of a rank that have not taken effect yet, and which of them may be next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "model/hashing.hpp"
#include "model/memory.hpp"

namespace fsdp2x::model {

struct Pending {
  int place = 0;
  uint64_t value = 0;
  Clock released{};
  bool releases = false;
  bool is_barrier = false;  // a release fence: later entries must not overtake earlier ones
};

class StoreBuffer {
 public:
  bool empty() const { return entries_.empty(); }
  void push(const Pending& entry) {
    if (!entry.is_barrier || !entries_.empty()) entries_.push_back(entry);
  }

  // Returns the newest store to `place`, which the rank itself sees. nullptr: none.
  const Pending* find(int place) const {
    const auto found = std::find_if(entries_.rbegin(), entries_.rend(), [place](const Pending& entry) {
      return !entry.is_barrier && entry.place == place;
    });
    return found != entries_.rend() ? &*found : nullptr;
  }

  // Returns the entries that may take effect now.
  std::vector<size_t> ready() const {
    std::vector<size_t> ready;
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Pending& entry = entries_[i];
      const auto overtakes = [&entry](const Pending& before) {
        return before.is_barrier || before.place == entry.place;
      };
      const bool is_held = entry.releases || entry.is_barrier;
      if (i == 0 ||
          (!is_held && std::none_of(entries_.begin(), entries_.begin() + static_cast<ptrdiff_t>(i), overtakes))) {
        ready.push_back(i);
      }
    }
    return ready;
  }

  Pending take(size_t i) {
    const Pending entry = entries_[i];
    entries_.erase(entries_.begin() + static_cast<ptrdiff_t>(i));
    while (!entries_.empty() && entries_.front().is_barrier) entries_.pop_front();
    return entry;
  }

  uint64_t hash(const Memory& memory) const {
    uint64_t hash = entries_.size();
    for (const Pending& entry : entries_) {
      hash = mix(hash, mix(static_cast<uint64_t>(entry.place), entry.value));
      hash = mix(hash, (entry.is_barrier ? 1 : 0) + (entry.releases ? 2 : 0));
      hash = mix(hash, memory.hash(entry.released));
    }
    return hash;
  }

 private:
  std::deque<Pending> entries_;
};

}  // namespace fsdp2x::model
