// The shared memory of ranks: the value of each word and cell, and the happens-before order by vector clocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace fsdp2x::model {

inline constexpr int kMaxWorld = 4;
using Clock = std::array<uint32_t, kMaxWorld>;

void join(Clock& into, const Clock& other);

struct Place {  // a word, or a cell
  uint64_t value = 0;
  uint64_t base = 0;  // of a doorbell: what its owner loaded last
  Clock released{};   // what an acquiring load learns
  // Its last write, and the last read of each rank. For words, only if relaxed stores occur.
  int writer = -1;
  uint32_t written = 0;
  Clock reads{};
};

// Knowledge about a place from all runs so far. Accesses that cannot meet another rank's are no separate steps. If a
// run shows that they can, the search starts again.
struct Knowledge {
  uint32_t stored_by = 0;  // sets of ranks
  uint32_t loaded_by = 0;
  bool is_bell = false;
  bool has_relaxed_stores = false;
  bool is_contended = false;  // a relaxed access was not ordered with another rank's

  bool is_shared() const {
    const uint32_t all = stored_by | loaded_by;
    return stored_by != 0 && (all & (all - 1)) != 0;
  }
};

class Memory {
 public:
  explicit Memory(int world) : clocks_(static_cast<size_t>(world)) {}

  // Starts a new run: all values and clocks become zero, and knowledge stays.
  void clear();
  int place_of(const void* address);
  const void* address(int at) const { return addresses_[static_cast<size_t>(at)]; }
  Place& operator[](int at) { return places_[static_cast<size_t>(at)]; }
  const Knowledge& known(int at) const { return knowledge_[static_cast<size_t>(at)]; }
  // Returns the clock of what happens before the next access of `rank`.
  Clock& clock(int rank) { return clocks_[static_cast<size_t>(rank)]; }

  void learn(int at, uint32_t Knowledge::*ranks, int rank);
  void learn(int at, bool Knowledge::*fact);
  // Returns whether a run has shown something new since the last call.
  bool has_learned();

  // Returns another rank whose last access does not happen before the next one of `rank`. -1: none.
  int unordered_write(int at, int rank) const;
  int unordered_read(int at, int rank) const;
  // Record accesses. They are only counted if their order matters, because clocks distinguish states.
  void record_write(int at, int rank);
  void record_read(int at, int rank);
  // Forgets earlier rings, since the next wait of `rank` loads its bell again.
  void forget_rings(int rank);

  // Prepares hash() for the current memory. It leaves out counts that every rank knows, and distances between counts,
  // because these cannot matter in the future.
  void begin_hash();
  uint64_t hash(const Clock& clock) const;
  uint64_t hash_of_all() const;

 private:
  uint32_t rank_of(size_t rank, uint32_t count) const;
  void add_count(size_t rank, uint32_t count);

  std::unordered_map<const void*, int> index_;
  std::vector<const void*> addresses_;
  std::vector<Place> places_;
  std::vector<Knowledge> knowledge_;
  std::vector<Clock> clocks_;
  bool has_learned_ = false;
  std::array<std::vector<uint32_t>, kMaxWorld> counts_;  // counts of each rank that some rank does not know, ascending
};

}  // namespace fsdp2x::model
