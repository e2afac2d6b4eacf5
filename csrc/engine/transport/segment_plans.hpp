// Places gradients in rank-major segments. If collectives send them, each set of trainable parameters has one plan, and
// freezing parameters makes another one. If peers read them, one plan has all parameters. Neither re-shards.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/gather_plan.hpp"

namespace fsdp2x {

class ParamGroup;

struct SegmentPlan : ReductionPlan {
  // Copies one float per parameter, and zeros up to flags_numel(), to the end of all W segments.
  Copy flags_to_segments;
  size_t flags_numel() const { return static_cast<size_t>(flags_to_segments.piece_numel); }
  bool has_flags() const { return flags_numel() != 0; }
  std::shared_ptr<void> prepared;  // made at the first run by the one device layer that runs it
  // Return copies of a full gradient of that dtype into the W segments, laid end to end. The reference stays valid as
  // long as the plan.
  const std::vector<Copy>& copies_of(size_t param, DType type);
  // Does the reverse: returns a gradient that was packed into `segments`, flat and in the dtype `type`.
  at::Tensor unpacked(size_t param, DType type, const void* segments, at::Device device);

 private:
  std::map<std::pair<size_t, DType>, std::vector<Copy>> copies_;
};

class SegmentPlans {
 public:
  explicit SegmentPlans(PieceSizes sizes = kOnePiece) : sizes_(sizes) {}
  // Returns the plan of the parameters that are trainable now.
  SegmentPlan& of(const ParamGroup& group);
  // Returns the plan of all parameters, without flags. `is_wide`: in the reduce dtype, else in ParamShape::packed().
  SegmentPlan& of_all(const ParamGroup& group, bool is_wide);

 private:
  PieceSizes sizes_;
  std::map<std::vector<bool>, SegmentPlan> plans_;
  std::optional<SegmentPlan> wide_, narrow_;
};

}  // namespace fsdp2x
