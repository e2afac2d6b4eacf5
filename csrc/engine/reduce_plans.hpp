// How the gradients of a group lie in rank-major segments, for transports that reduce-scatter: one plan per set of
// trainable parameters. Freezing makes another plan, it never re-shards.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/layout.hpp"

namespace fsdp2x {

class Group;

struct ReducePlan {
  std::shared_ptr<const Layout> layout;
  size_t segment_bytes = 0;  // Layout::flagged_segment_bytes
  // One float per parameter, and zeros up to flags_numel() -> what lies behind the rows of all W segments.
  Copy flags_to_segments;
  size_t flags_numel() const { return static_cast<size_t>(flags_to_segments.piece_numel); }
  std::shared_ptr<void> prepared;  // of the one device layer that runs it, made at the first run
  // A whole gradient of that dtype -> the W segments laid end to end. The reference stays valid with the plan.
  const std::vector<Copy>& copies_of(size_t param, DType type);
  // Whether a rank's segment has every parameter where the group's gradient pool has it.
  bool is_pool(const Layout& pool) const;

 private:
  std::map<std::pair<size_t, DType>, std::vector<Copy>> copies_;
};

class ReducePlans {
 public:
  // Of the parameters that are trainable now.
  ReducePlan& of(const Group& group);

 private:
  std::map<std::vector<bool>, ReducePlan> plans_;
};

}  // namespace fsdp2x
