// A group's gradients in a wire format.
//
//   W packed segments (+ errors) --encode--> W segments --all-to-all--> W segments of this rank's rows --sum--> rows
#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "engine/memory/wire_program.hpp"
#include "engine/transport/segment_plans.hpp"

namespace fsdp2x {

class WireGradients {
 public:
  // Makes `kept` those of the plan, in the group's format, unless it has them. `plan`: of the packed segments, with
  // everything packed. It must outlive the result. Throws unless gradients are reduced in fp32.
  static WireGradients& of(std::unique_ptr<WireGradients>& kept, const ParamGroup& group, const SegmentPlan& plan);
  WireGradients(const SegmentPlan& plan, WireFormat format);

  size_t segment_bytes() const { return segment_bytes_; }  // of one rank
  size_t bytes() const { return segment_bytes_ * static_cast<size_t>(plan_.layout->world()); }
  // Encodes the packed segments, laid end to end, into as many in the format.
  const WireProgram& to_segments() const { return to_segments_; }
  // Sums the received segments in rank order into this rank's rows, flags included.
  const WireProgram& to_rows() const { return to_rows_; }
  // Returns where the format keeps the rounding errors, which are added to the next gradient. Null: nowhere.
  void* errors(at::Device device);
  // Undefined until there are any. Zeros drop the errors, so that the next gradient is encoded as the first one was.
  const at::Tensor& kept_errors() const { return errors_; }
  size_t error_bytes() const { return errors_.defined() ? errors_.nbytes() : 0; }

 private:
  const SegmentPlan& plan_;
  WireFormat format_;
  size_t segment_bytes_ = 0;
  WireProgram to_segments_, to_rows_;
  at::Tensor errors_;  // laid out like segments
};

}  // namespace fsdp2x
