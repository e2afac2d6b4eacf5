// The layout of the memfd, and the records of the control area. docs/engine/shared_memory.md draws it, and this file
// has the numbers.
//
// Every record has one writer, the rank that it belongs to. The data of a rank is contiguous, so two ranks never write
// to the same cache line. Everything starts as zero: sequence numbers and epochs count from 1.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shm/shm_limits.hpp"
#include "shm/shm_word.hpp"

namespace fsdp2x::cpu {

inline constexpr uint64_t kShmMagic = 0x6d68732d78326468;  // changes with the layout below
inline constexpr size_t kSentenceBytes = 1024;

struct alignas(128) RankState {
  Word pid;         // as rank 0 sees it, 0 if the rank lives in another pid namespace
  Word closed;      // 1 when the rank destroyed its group
  Word failed;      // bytes of the message why the rank cannot continue, 0 while it can
  Word left;        // the pass that it left by an exception, see ShmProtocol::leave. 0: none, or it has begun another
  Word left_bytes;  // bytes of the message why
  Word num_posted;  // sequence of its last gather
  Word progress;    // position in the backward order
  // The event that the rank waits for now, 0 if none, so that two ranks never wait for each other.
  Word wanted_gather;     // sequence
  Word wanted_slot;       // slot and the use that it wants to begin, see make_wish()
  Word wanted_reduction;  // unit and epoch, likewise
  Word wanted_end;        // end of a reduction, likewise
  // Peers also write to these, so they have a separate cache line.
  alignas(128) Doorbell doorbell;
  Doorbell sleeping;
};

static_assert(kMaxSlots <= 65536 && kMaxUnits <= 65536, "a wish has 16 bits for the slot or the unit");
inline uint64_t make_wish(uint32_t index, uint64_t count) { return count << 16 | index; }
inline uint32_t wished_index(uint64_t wish) { return static_cast<uint32_t>(wish & 65535); }
inline uint64_t wished_count(uint64_t wish) { return wish >> 16; }

struct alignas(64) RingEntry {
  Word sequence;
  Word unit_and_slot;  // see pack_unit_and_slot()
  Word settings;
  Word slot_offset;
  Word bytes;
};

inline uint64_t pack_unit_and_slot(uint32_t unit, uint32_t slot) { return uint64_t{unit} << 32 | slot; }
inline uint32_t packed_unit(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
inline uint32_t packed_slot(uint64_t word) { return static_cast<uint32_t>(word); }

struct alignas(64) UnitRecord {
  Word posted;
  Word tag;
  Word scratch_offset;
  Word num_begun;   // forwards, see ForwardCounts
  Word num_raised;  // likewise
  Word consumed;
  Word num_skipped;  // synchronized backwards that ended without a reduction of this unit
};

// Offsets in the memfd for `world` ranks and a file of `total` bytes. The first half holds the control area and the
// gather arena. The second half is split into one scratch arena per rank. Pages take memory only after a write.
class ShmMap {
 public:
  ShmMap(int world, size_t total) : world_(static_cast<size_t>(world)), total_(total) {}

  size_t control_bytes() const { return align(units_offset() + world_ * kMaxUnits * sizeof(UnitRecord)); }
  size_t gather_offset() const { return control_bytes(); }
  size_t gather_bytes() const { return total_ / 2 - control_bytes(); }
  size_t scratch_offset(int rank) const { return total_ / 2 + static_cast<size_t>(rank) * scratch_bytes(); }
  size_t scratch_bytes() const { return total_ / 2 / world_ / kAlign * kAlign; }

  RankState& state(std::byte* control, int rank) const {
    return *reinterpret_cast<RankState*>(control + static_cast<size_t>(rank) * sizeof(RankState));
  }
  // Return the messages why the rank cannot continue, and why it left a pass.
  char* failure(std::byte* control, int rank) const { return sentence(control, 2 * static_cast<size_t>(rank)); }
  char* departure(std::byte* control, int rank) const { return sentence(control, 2 * static_cast<size_t>(rank) + 1); }
  RingEntry& entry(std::byte* control, int rank, uint64_t sequence) const {
    const size_t index = static_cast<size_t>(rank) * kRingEntries + sequence % kRingEntries;
    return *reinterpret_cast<RingEntry*>(control + ring_offset() + index * sizeof(RingEntry));
  }
  // Returns the use of `slot` that `rank` released last.
  Word& released(std::byte* control, int rank, uint32_t slot) const {
    const size_t index = static_cast<size_t>(rank) * kMaxSlots + slot;
    return *reinterpret_cast<Word*>(control + slots_offset() + index * sizeof(Word));
  }
  UnitRecord& unit(std::byte* control, int rank, uint32_t unit) const {
    const size_t index = static_cast<size_t>(rank) * kMaxUnits + unit;
    return *reinterpret_cast<UnitRecord*>(control + units_offset() + index * sizeof(UnitRecord));
  }

 private:
  static constexpr size_t kAlign = 65536;  // at least the page size of every machine
  static size_t align(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
  size_t sentences_offset() const { return align(world_ * sizeof(RankState)); }
  char* sentence(std::byte* control, size_t index) const {
    return reinterpret_cast<char*>(control + sentences_offset() + index * kSentenceBytes);
  }
  size_t ring_offset() const { return align(sentences_offset() + 2 * world_ * kSentenceBytes); }
  size_t slots_offset() const { return align(ring_offset() + world_ * kRingEntries * sizeof(RingEntry)); }
  size_t units_offset() const { return align(slots_offset() + world_ * kMaxSlots * sizeof(Word)); }

  size_t world_;
  size_t total_;
};

}  // namespace fsdp2x::cpu
