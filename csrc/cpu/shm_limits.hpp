// How much a group holds. Tests of the protocol have smaller rings (tests/cpp/model).
#pragma once

#include <cstdint>

namespace fsdp2x::cpu {

inline constexpr uint64_t kRingEntries = 4096;
inline constexpr uint32_t kMaxSlots = 65536;
inline constexpr uint32_t kMaxUnits = 65536;
inline constexpr int kMaxRanks = 1024;

}  // namespace fsdp2x::cpu
