// Finds elements that differ from an earlier copy, and updates the copy, in one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp2x::cpu {

struct Changes {
  std::vector<int64_t> positions;  // ascending
  std::vector<std::byte> values;   // one element each
  bool has_more = false;           // than requested; then both lists are invalid
};

// Compares elements of `element_bytes` (a power of two up to 16) as bits: a zero of the other sign or a NaN of another
// payload is a change. Appends to `changes`, with `first` as the position of the first element, until there are `max`
// in all. `held` takes the values of `now` up to that point.
void take_changes(void* held, const void* now, size_t element_bytes, int64_t first, int64_t numel, int64_t max,
                  Changes& changes);

}  // namespace fsdp2x::cpu
