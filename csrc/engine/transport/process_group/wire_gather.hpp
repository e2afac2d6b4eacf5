// A group's weights in a wire format. This rank's rows are encoded once for a forward and its backward. Every rank
// decodes the rows of all ranks, including its own, into the slot, so all ranks compute with the same bits.
//
//   shard pool --encode--> segment (kept) --all-gather--> W segments --decode--> slot
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/wire_layout.hpp"
#include "engine/params/param_group.hpp"

namespace fsdp2x {

// The number of the forward that a gather belongs to, also in its backward: see Transport::begin_forward. Gathers
// outside of a forward always encode, because the user may have written to the shards.
inline constexpr uint64_t kNoForward = 0;

class WireGather {
 public:
  WireGather(const Layout& layout, WireFormat format);

  WireFormat format() const { return wire_.format(); }
  size_t segment_bytes() const { return wire_.segment_bytes(); }
  // Returns this rank's segment, as bytes. It is encoded again unless it was made for this forward and torch's version
  // counters show no write to a shard since.
  const at::Tensor& segment(const Gil& gil, const ParamGroup& group, uint64_t forward);
  // Decodes the segments of all ranks, laid end to end, into the slot.
  void decode(const void* segments, void* slot) const;
  size_t kept_bytes() const { return kept_.defined() ? kept_.nbytes() : 0; }

 private:
  void encode(const void* pool, std::byte* segment) const;
  void decode(const WireRows& rows, int64_t begin, int64_t end, const std::byte* segments, std::byte* slot) const;

  const Layout& layout_;
  WireLayout wire_;
  std::vector<WireRows> rows_;
  at::Tensor kept_;
  uint64_t kept_for_ = kNoForward;
  uint64_t kept_versions_ = 0;  // see ParamGroup::shard_versions
};

}  // namespace fsdp2x
