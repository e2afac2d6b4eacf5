// How the gradients of a group lie in rank-major segments, for transports that reduce-scatter: one plan per set of
// trainable parameters. Freezing makes another plan, it never re-shards. Gradients that are reduced from where autograd
// made them have no place in segments; their rows lie behind those of the others.
//
//   packed   | rank 0: p0 | p2 | .. | flags | rank 1: p0 | p2 | .. | flags | ..      p1: as autograd made it
//   rows     | p0 | p2 | .. | flags | p1 |
#pragma once

#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/layout.hpp"

namespace fsdp2x {

class ParamGroup;

inline constexpr size_t kPackEverything = std::numeric_limits<size_t>::max();  // so large is no parameter

struct SegmentPlan {
  std::shared_ptr<const Layout> layout;  // of the rows
  std::shared_ptr<const Layout> packed;  // of the segments: trains what is packed alone; else `layout` itself
  std::vector<size_t> direct;            // parameters that are not packed
  size_t segment_bytes = 0;              // of `packed`: Layout::flagged_segment_bytes
  size_t rows_bytes = 0;                 // of a rank: its segment, and the rows of what is not packed
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

class SegmentPlans {
 public:
  // Of the parameters that are trainable now. Smaller gradients than `pack_below_bytes` are packed.
  SegmentPlan& of(const ParamGroup& group, size_t pack_below_bytes = kPackEverything);

 private:
  std::map<std::pair<std::vector<bool>, size_t>, SegmentPlan> plans_;
};

}  // namespace fsdp2x
