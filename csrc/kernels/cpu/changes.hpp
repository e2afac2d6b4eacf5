// Which elements differ from what was held before, found and taken over in one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp2x::cpu {

struct Changes {
  std::vector<int64_t> positions;  // ascending
  std::vector<std::byte> values;   // one element each
  bool has_more = false;           // than was asked for; then both are of no use
};

// Elements of `element_bytes`, a power of two up to 16, as bits: zeros of the other sign and NaNs of other payloads are
// changes. Appends to `changes`, with `first` as the position of the first element, until there are `max` in all;
// `held` becomes `now` as far as that goes.
void take_changes(void* held, const void* now, size_t element_bytes, int64_t first, int64_t numel, int64_t max,
                  Changes& changes);

}  // namespace fsdp2x::cpu
