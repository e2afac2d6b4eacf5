// Hashes of states. Two states count as equal if their 64 bits agree. Among a million states, that is wrong once in 40
// million searches.
#pragma once

#include <cstdint>

namespace fsdp2x::model {

inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}
inline uint64_t mix(uint64_t a, uint64_t b) { return mix(mix(a) ^ (b * 0xff51afd7ed558ccdULL)); }

}  // namespace fsdp2x::model
