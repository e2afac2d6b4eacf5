// Plans how a group is gathered if collectives write on a device. Each large parameter has one collective, directly
// into the slot. The rest is packed into one rank-major segment that is copied out. Built once per group, immutable.
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

// NCCL does not use 16-byte loads and stores if a rank's chunk does not start on such a boundary.
inline constexpr size_t kCollectiveAlignBytes = 16;

// Full parameters below this size are packed if a launch takes many collectives. Packing reads and writes them once
// more in device memory, which takes about 1 us for 1 MiB at 2-3 TB/s, on a separate stream. One more collective in the
// launch costs about as much on the host and on the device, whatever its size. This is an estimate, not measured on
// several GPUs.
inline constexpr size_t kPackBelowBytes = size_t{1} << 20;

inline constexpr size_t kPackEverything = std::numeric_limits<size_t>::max();  // larger than any parameter

// A collective for one parameter, or for one of its `outer` blocks. The chunk of rank r lies at slot_offset + r *
// chunk_bytes.
struct DirectGather {
  size_t param = 0;
  size_t slot_offset = 0;
  size_t chunk_bytes = 0;
};

struct GatherPlan {
  std::vector<DirectGather> direct;
  size_t segment_bytes = 0;            // of one rank in the staging, 0: nothing is packed
  std::vector<Copy> shard_to_slot;     // this rank's rows of the direct parameters: shard pool -> slot, with the cast
  std::vector<Copy> shard_to_segment;  // this rank's rows of the packed ones: shard pool -> its segment, with the cast
  std::vector<Copy> staging_to_slot;   // all ranks' rows of the packed ones: staging -> slot, joined
};

// Gathers a parameter directly if its chunks are aligned and the slot has room for all of them. It must also be one of
// a few large ones, or one of many very large ones. All others are packed. A parameter that is sharded along a later
// dim (stacked experts over more ranks than experts) has a collective for each block. Its block size counts, and the
// ranks must divide that dim. With pack_below_bytes 0, any size is large enough.
GatherPlan plan_gather(const Layout& layout, size_t pack_below_bytes);
// Plans it for a CPU, which takes memory for a prefetched group early. If packed parameters are over half of the group,
// all of them are packed, unless any size is large enough.
GatherPlan plan_gather_on_cpu(const Layout& layout, size_t pack_below_bytes);

// Places gradients in rank-major segments if collectives reduce those. Immutable.
//
//   packed   | rank 0: p0 | p1 | .. | flags | rank 1: p0 | p1 | .. | flags | ..
struct ReductionPlan {
  std::shared_ptr<const Layout> layout;  // trains the reduced parameters
  size_t segment_bytes = 0;              // of a rank: Layout::flagged_segment_bytes
  std::vector<Piece> pieces;             // of a segment, in order: one, or those of a large reduction on a device
  size_t gradient_bytes = 0;             // of all full gradients, in the compute dtype

  Piece whole() const { return {0, segment_bytes}; }
  // Returns the bytes of all ranks' segments, or of their largest piece.
  size_t buffer_bytes(bool in_pieces) const;
};

// Sizes of a device's reductions, in bytes of all ranks. Larger ones are reduced in pieces, one after the other, so
// that their buffer stays small next to the gradients. The default is more than a layer of 8 billion parameters needs
// in fp32, and less than the head of such a model. Its pieces are large enough for the bandwidth of NVLink.
struct PieceSizes {
  size_t whole_bytes = size_t{900} << 20;
  size_t piece_bytes = size_t{256} << 20;
};
inline constexpr PieceSizes kOnePiece{std::numeric_limits<size_t>::max(), 0};

// Plans the reduction of the parameters of `layout` that `trains` marks. Pieces cut parameters that are sharded along
// their first dim. Gradients are kept until the last piece is sent. So nothing is cut unless that needs less memory, as
// for bf16 gradients that are reduced in fp32, or if kernels do not compute a dtype.
ReductionPlan plan_reduction(const Layout& layout, const std::vector<bool>& trains, PieceSizes sizes = kOnePiece);

}  // namespace fsdp2x
