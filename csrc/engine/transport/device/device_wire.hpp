// Chooses which weights and gradients of a group are coded on a device, and where. The layouts are those of the CPU, so
// CPU and device ranks could decode each other's segments.
//
//   weights     shard pool --encode--> own segment --all-gather--> W segments --decode--> slot
//   gradients   W packed segments (+ errors) --encode--> W segments --all-to-all--> W segments --sum--> rows
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "core/wire_layout.hpp"
#include "engine/memory/copy_program.hpp"
#include "engine/memory/wire_program.hpp"
#include "engine/transport/device/device_context.hpp"
#include "engine/transport/segment_plans.hpp"

namespace fsdp2x {

struct DeviceWireWeights {
  DeviceWireWeights(const Layout& layout, WireFormat format);

  size_t segment_bytes = 0;  // of one rank
  WireProgram to_segment, to_slot;
  CopyProgram plain_to_segment, plain_to_slot;  // parameters in their own dtype
};

class DeviceWireGradients {
 public:
  // `plan`: of the packed segments, in fp32, with everything packed. It must outlive this object.
  DeviceWireGradients(const SegmentPlan& plan, WireFormat format);

  WireFormat format() const { return format_; }
  const SegmentPlan& plan() const { return plan_; }
  // Returns the bytes of all ranks' segments.
  size_t bytes() const { return segment_bytes_ * static_cast<size_t>(plan_.layout->world()); }
  // Encodes the packed segments, laid end to end, into as many in the format. A parameter that is not `filled` is sent
  // as zeros and keeps its errors. Errors are used in the order of the current lane.
  void encode(DeviceLayer& layer, const void* packed, const std::vector<uint8_t>& filled, void* segments);
  // Sums the received segments in rank order, divides, and writes this rank's rows with their flags.
  void sum(DeviceLayer& layer, const void* segments, double divisor, void* rows) const;
  // Drops the errors, so that the next gradient is encoded as the first one was. Called on the encoding lane. A graph
  // may own their memory.
  void forget_errors(DeviceContext& context);
  size_t error_bytes() const { return errors_.defined() ? errors_.nbytes() : 0; }

 private:
  const SegmentPlan& plan_;
  WireFormat format_;
  size_t segment_bytes_ = 0;
  WireProgram to_segments_, to_rows_;
  at::Tensor errors_;  // laid out like segments, undefined until there are any
};

}  // namespace fsdp2x
