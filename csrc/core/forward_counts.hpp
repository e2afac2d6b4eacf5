// How many forwards a rank has run, as ranks compare it.
#pragma once

#include <cstdint>

namespace fsdp2x {

// Forwards under grad that have begun, and how many of them raised. They identify ranks that raised alone and
// continued.
struct ForwardCounts {
  uint64_t num_begun = 0, num_raised = 0;
};

}  // namespace fsdp2x
