// Places gradients in the rank-major segments of transports that reduce-scatter. Each set of trainable parameters has
// one plan. Freezing parameters makes another plan and never re-shards.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/gather_plan.hpp"

namespace fsdp2x {

class ParamGroup;

struct SegmentPlan : ReductionPlan {
  // Copies one float per parameter, and zeros up to flags_numel(), to the end of all W segments.
  Copy flags_to_segments;
  size_t flags_numel() const { return static_cast<size_t>(flags_to_segments.piece_numel); }
  std::shared_ptr<void> prepared;  // made at the first run by the one device layer that runs it
  // Return copies of a full gradient of that dtype into the W segments, laid end to end. The reference stays valid as
  // long as the plan.
  const std::vector<Copy>& copies_of(size_t param, DType type);
  // Does the reverse: returns a gradient that was packed into `segments` in the dtype `type`, flat.
  at::Tensor unpacked(size_t param, DType type, const at::Tensor& segments);

 private:
  std::map<std::pair<size_t, DType>, std::vector<Copy>> copies_;
};

class SegmentPlans {
 public:
  explicit SegmentPlans(PieceSizes sizes = kOnePiece) : sizes_(sizes) {}
  // Returns the plan of the parameters that are trainable now.
  SegmentPlan& of(const ParamGroup& group);

 private:
  PieceSizes sizes_;
  std::map<std::vector<bool>, SegmentPlan> plans_;
};

}  // namespace fsdp2x
