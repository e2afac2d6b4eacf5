// Counts of a rank's forwards, for comparison between ranks.
#pragma once

#include <cstdint>

namespace fsdp2x {

// Counts forwards under grad that have begun, and how many of them raised. The counts identify ranks that raised alone
// and continued.
struct ForwardCounts {
  uint64_t num_begun = 0, num_raised = 0;
};

}  // namespace fsdp2x
