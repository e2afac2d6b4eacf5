// A group's weights in a wire format: this rank's rows are encoded once for a forward and its backward, and those of
// all ranks, its own among them, are decoded into the slot, so that every rank computes with the same bits.
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

// The forward that a gather is for, or whose backward: see Transport::begin_forward. Gathers that are for none encode
// whatever the user may just have written.
inline constexpr uint64_t kNoForward = 0;

class WireGather {
 public:
  WireGather(const Layout& layout, WireFormat format);

  WireFormat format() const { return wire_.format(); }
  size_t segment_bytes() const { return wire_.segment_bytes(); }
  // This rank's segment, of bytes, encoded anew unless it was for this forward and no shard was written to since, as
  // far as torch's version counters say. Needs the GIL.
  const at::Tensor& segment(const ParamGroup& group, uint64_t forward);
  // The segments of all ranks, laid end to end -> the slot.
  void decode(const void* segments, void* slot) const;
  size_t kept_bytes() const { return kept_.defined() ? kept_.nbytes() : 0; }

 private:
  void encode(const void* pool, std::byte* segment) const;
  void decode(const WireRows& rows, int64_t begin, int64_t end, const std::byte* segments, std::byte* slot) const;
  static std::vector<uint64_t> versions_of(const ParamGroup& group);

  const Layout& layout_;
  WireLayout wire_;
  std::vector<WireRows> rows_;
  at::Tensor kept_;
  uint64_t kept_for_ = kNoForward;
  std::vector<uint64_t> kept_versions_;  // by parameter
};

}  // namespace fsdp2x
