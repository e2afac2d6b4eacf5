// The capacity of a group, and how long a rank spins before it sleeps. Tests of the protocol use smaller numbers
// (tests/cpp/model).
#pragma once

#include <cstdint>

namespace fsdp2x::cpu {

inline constexpr uint64_t kRingEntries = 4096;
inline constexpr uint32_t kMaxSlots = 65536;
inline constexpr uint32_t kMaxUnits = 65536;
inline constexpr int kMaxRanks = 1024;

// Pauses and yields before a sleep. A peer without a free core cannot arrive while this rank spins.
inline constexpr int kPauses = 300;
inline constexpr int kYields = 100;
inline constexpr int kPausesCrowded = 8;
inline constexpr int kYieldsCrowded = 20;

}  // namespace fsdp2x::cpu
