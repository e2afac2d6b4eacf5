// Replaces csrc/shm/shm_limits.hpp: a small ring that wraps after few gathers, and ranks that sleep immediately.
#pragma once

#include <cstdint>

namespace fsdp2x::cpu {

inline constexpr uint64_t kRingEntries = 4;
inline constexpr uint32_t kMaxSlots = 8;
inline constexpr uint32_t kMaxUnits = 8;
inline constexpr int kMaxRanks = 4;

inline constexpr int kPauses = 0;
inline constexpr int kYields = 0;
inline constexpr int kPausesCrowded = 0;
inline constexpr int kYieldsCrowded = 0;

}  // namespace fsdp2x::cpu
