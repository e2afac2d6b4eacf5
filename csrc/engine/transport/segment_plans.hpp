// How gradients get into the rank-major segments of transports that reduce-scatter: one plan per set of trainable
// parameters. Freezing makes another plan, it never re-shards.
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
  // One float per parameter, and zeros up to flags_numel() -> what lies behind the rows of all W segments.
  Copy flags_to_segments;
  size_t flags_numel() const { return static_cast<size_t>(flags_to_segments.piece_numel); }
  std::shared_ptr<void> prepared;  // of the one device layer that runs it, made at the first run
  // A whole gradient of that dtype -> the W segments laid end to end. The reference stays valid with the plan.
  const std::vector<Copy>& copies_of(size_t param, DType type);
  // The other way: a gradient that was packed into `segments` in the dtype `type`, flat.
  at::Tensor unpacked(size_t param, DType type, const at::Tensor& segments);

 private:
  std::map<std::pair<size_t, DType>, std::vector<Copy>> copies_;
};

class SegmentPlans {
 public:
  // Of the parameters that are trainable now.
  SegmentPlan& of(const ParamGroup& group);

 private:
  std::map<std::vector<bool>, SegmentPlan> plans_;
};

}  // namespace fsdp2x
