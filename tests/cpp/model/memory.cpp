// Places, races between accesses, and hashes that do not depend on how often something happened.
#include "model/memory.hpp"

#include <algorithm>
#include <utility>

#include "model/hashing.hpp"

namespace fsdp2x::model {

void join(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

void Memory::clear() {
  for (Place& place : places_) place = Place();
  for (Clock& clock : clocks_) clock = {};
}

int Memory::place_of(const void* address) {
  const auto [found, is_new] = index_.try_emplace(address, static_cast<int>(index_.size()));
  if (is_new) {
    addresses_.push_back(address);
    places_.emplace_back();
    knowledge_.emplace_back();
  }
  return found->second;
}

void Memory::learn(int at, uint32_t Knowledge::*ranks, int rank) {
  Knowledge& known = knowledge_[static_cast<size_t>(at)];
  const bool was_shared = known.is_shared();
  known.*ranks |= 1U << rank;
  if (known.is_shared() != was_shared) has_learned_ = true;
}

void Memory::learn(int at, bool Knowledge::*fact) {
  bool& known = knowledge_[static_cast<size_t>(at)].*fact;
  if (!known) has_learned_ = true;
  known = true;
}

bool Memory::has_learned() { return std::exchange(has_learned_, false); }

int Memory::unordered_write(int at, int rank) const {
  const Place& place = places_[static_cast<size_t>(at)];
  if (place.writer < 0 || place.writer == rank) return -1;
  const auto writer = static_cast<size_t>(place.writer);
  return place.written > clocks_[static_cast<size_t>(rank)][writer] ? place.writer : -1;
}

int Memory::unordered_read(int at, int rank) const {
  const Place& place = places_[static_cast<size_t>(at)];
  for (size_t other = 0; other < clocks_.size(); ++other) {
    if (static_cast<int>(other) == rank) continue;
    if (place.reads[other] > clocks_[static_cast<size_t>(rank)][other]) return static_cast<int>(other);
  }
  return -1;
}

void Memory::record_write(int at, int rank) {
  Place& place = (*this)[at];
  place.writer = rank;
  place.written = ++clock(rank)[static_cast<size_t>(rank)];
  place.reads = {};
}

void Memory::record_read(int at, int rank) {
  (*this)[at].reads[static_cast<size_t>(rank)] = ++clock(rank)[static_cast<size_t>(rank)];
}

void Memory::forget_rings(int rank) {
  for (size_t at = 0; at < places_.size(); ++at) {
    if (knowledge_[at].is_bell && (knowledge_[at].loaded_by & 1U << rank) != 0) places_[at].base = places_[at].value;
  }
}

void Memory::add_count(size_t rank, uint32_t count) {
  const auto knows = [rank, count](const Clock& clock) { return clock[rank] >= count; };
  if (!std::all_of(clocks_.begin(), clocks_.end(), knows)) counts_[rank].push_back(count);
}

void Memory::begin_hash() {
  for (auto& counts : counts_) counts.clear();
  for (const Place& place : places_) {
    if (place.writer >= 0) add_count(static_cast<size_t>(place.writer), place.written);
    for (size_t rank = 0; rank < clocks_.size(); ++rank) {
      if (place.reads[rank] != 0) add_count(rank, place.reads[rank]);
    }
  }
  for (auto& counts : counts_) std::sort(counts.begin(), counts.end());
}

uint32_t Memory::rank_of(size_t rank, uint32_t count) const {
  const auto& counts = counts_[rank];
  return static_cast<uint32_t>(std::upper_bound(counts.begin(), counts.end(), count) - counts.begin());
}

uint64_t Memory::hash(const Clock& clock) const {
  uint64_t hash = 0;
  for (size_t rank = 0; rank < clocks_.size(); ++rank) hash = hash << 16 | rank_of(rank, clock[rank]);
  return mix(hash);
}

uint64_t Memory::hash_of_all() const {
  uint64_t hash = 0;
  for (const Clock& clock : clocks_) hash = mix(hash, this->hash(clock));
  for (size_t at = 0; at < places_.size(); ++at) {
    const Place& place = places_[at];
    // A doorbell is only compared with the value that its owner loaded last, and never returns to it.
    const uint64_t value = knowledge_[at].is_bell ? (place.value != place.base ? 1 : 0) : place.value;
    // A count of zero is below all others, so untouched places hash as if they did not exist.
    const uint64_t written = place.writer < 0 ? 0 : rank_of(static_cast<size_t>(place.writer), place.written);
    const uint64_t writer = written == 0 ? 0 : static_cast<uint64_t>(place.writer);
    const uint64_t order = mix(this->hash(place.released), mix(this->hash(place.reads), writer << 32 | written));
    hash += mix(mix(at, value), order) - mix(mix(at, 0), mix(mix(0), mix(mix(0), 0)));
  }
  return hash;
}

}  // namespace fsdp2x::model
