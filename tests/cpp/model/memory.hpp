// What ranks share: the value of each word and cell, and which accesses happen before which, by vector clocks.
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
  // Its last write, and the last read of each rank; of words only where relaxed stores happen.
  int writer = -1;
  uint32_t written = 0;
  Clock reads{};
};

// What all runs so far have shown of a place. Accesses that cannot meet another rank's are no steps of their own; when
// a run shows that they can, the search begins again.
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

  // For a new run: all values and clocks are zero, what is known stays.
  void clear();
  int place_of(const void* address);
  const void* address(int at) const { return addresses_[static_cast<size_t>(at)]; }
  Place& operator[](int at) { return places_[static_cast<size_t>(at)]; }
  const Knowledge& known(int at) const { return knowledge_[static_cast<size_t>(at)]; }
  // What happens before the next access of `rank`.
  Clock& clock(int rank) { return clocks_[static_cast<size_t>(rank)]; }

  void learn(int at, uint32_t Knowledge::*ranks, int rank);
  void learn(int at, bool Knowledge::*fact);
  // Whether a run has shown something new since the last call.
  bool has_learned();

  // Another rank whose last access does not happen before the next one of `rank`; -1: there is none.
  int unordered_write(int at, int rank) const;
  int unordered_read(int at, int rank) const;
  // Accesses are counted where somebody asks about their order, and nowhere else: states differ by their clocks.
  void record_write(int at, int rank);
  void record_read(int at, int rank);
  // What rang until now is nothing to the next wait of `rank`, which loads its bell anew.
  void forget_rings(int rank);

  // Makes hash() fit the memory as it is now; true to what may still be asked: counts that every rank knows, and
  // distances between counts, are nothing to the future.
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
  std::array<std::vector<uint32_t>, kMaxWorld> counts_;  // of each rank, that some rank does not know; ascending
};

}  // namespace fsdp2x::model
