// How a group is gathered where collectives write on a device: large parameters one collective each, straight into the
// slot; the rest packed into one rank-major segment that is copied out. Built once per group, immutable.
//
//   slot     | p0: chunk of rank 0 | chunk of rank 1 | .. | chunk W-1 |pad| p1: ...        every chunk 16-byte aligned
//   staging  | rank 0: p2 | p3 | .. |pad| rank 1: p2 | p3 | .. |pad| ..                    every segment 64-byte
//   aligned
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <vector>

#include "core/layout.hpp"

namespace fsdp2x {

// NCCL leaves its 16-byte loads and stores where a rank's chunk does not start on such a boundary.
inline constexpr size_t kCollectiveAlignBytes = 16;

// Below this many bytes, whole, they are packed where a launch takes many collectives. Packing costs them once more in
// and out of device memory: of 1 MiB about 1 us at 2-3 TB/s, on a stream of its own. One more collective in the launch
// costs about as much on the host and on the device, whatever its size. An estimate, not measured on several GPUs.
inline constexpr size_t kPackBelowBytes = size_t{1} << 20;

inline constexpr size_t kPackEverything = std::numeric_limits<size_t>::max();  // so large is no parameter

// A collective for one parameter, or for one of its `outer` blocks: rank r's chunk lies at slot_offset + r *
// chunk_bytes.
struct DirectGather {
  size_t param = 0;
  size_t slot_offset = 0;
  size_t chunk_bytes = 0;
};

struct GatherPlan {
  std::vector<DirectGather> direct;
  size_t segment_bytes = 0;            // of one rank in the staging; 0: nothing is packed
  std::vector<Copy> shard_to_slot;     // this rank's rows of the direct parameters: shard pool -> slot, with the cast
  std::vector<Copy> shard_to_segment;  // this rank's rows of the packed ones: shard pool -> its segment, with the cast
  std::vector<Copy> staging_to_slot;   // all ranks' rows of the packed ones: staging -> slot, joined
};

// A parameter is gathered directly when its chunks are aligned, the slot has room for all, and it is one of few large
// ones, or one of many very large ones; otherwise it is packed. One that is cut along another dim than the first, as
// stacked experts are over more ranks than experts, has a collective for each block, whose size counts, where the ranks
// divide that dim. With pack_below_bytes 0: any.
GatherPlan plan_gather(const Layout& layout, size_t pack_below_bytes);

// How gradients lie in rank-major segments, where collectives reduce those. Immutable.
//
//   packed   | rank 0: p0 | p1 | .. | flags | rank 1: p0 | p1 | .. | flags | ..
struct ReductionPlan {
  std::shared_ptr<const Layout> layout;  // trains what is reduced
  size_t segment_bytes = 0;              // of a rank: Layout::flagged_segment_bytes
};

// Of the parameters of `layout` that `trains` names.
ReductionPlan plan_reduction(const Layout& layout, const std::vector<bool>& trains);

}  // namespace fsdp2x
