// A group's gradients in a wire format. Each rank's part is encoded, sent in one all-to-all, and summed in fp32 in rank
// order. The int8 rounding errors are kept and added to the next gradient.
//
//   W packed segments (+ errors) --encode--> W segments --all-to-all--> W segments of this rank's rows --sum--> rows
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "core/wire_layout.hpp"
#include "engine/transport/segment_plans.hpp"

namespace fsdp2x {

class WireReduction {
 public:
  // `plan`: of the packed segments, in fp32. It must outlive this object.
  WireReduction(const SegmentPlan& plan, WireFormat format);

  WireFormat format() const { return wire_.format(); }
  const SegmentPlan& plan() const { return plan_; }
  size_t segment_bytes() const { return wire_.segment_bytes(); }
  // Encodes the packed segments, laid end to end, into as many in the format. A parameter that is not `filled` is sent
  // as zeros and keeps its errors.
  void encode(const void* packed, const std::vector<uint8_t>& filled, void* segments);
  // Sums the received segments in rank order into this rank's rows, flags included.
  void sum(const void* segments, void* rows) const;
  // Drops the errors, so that the next gradient is encoded as the first one was.
  void forget_errors();
  size_t error_bytes() const { return errors_.defined() ? errors_.nbytes() : 0; }

 private:
  void encode(size_t param, int rank, const std::byte* packed, std::byte* segment, bool is_filled);

  const SegmentPlan& plan_;
  WireLayout wire_;
  at::Tensor errors_;  // laid out like segments, undefined until there are any
};

}  // namespace fsdp2x
