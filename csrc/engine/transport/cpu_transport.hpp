// The transports of a CPU: slots, packed gradients, and sums. A gradient is packed into W rank-major segments, and a
// reduction is W sources of this rank's rows, which are summed in rank order. This class serves a world of one rank,
// whose only source is its own segment. Its subclasses exchange rows with other ranks.
#pragma once

#include <ATen/ATen.h>

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/params/reduced_rows.hpp"
#include "engine/transport/segment_plans.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

class CpuTransport : public Transport {
 public:
  // `alignment`: of slots and scratches.
  explicit CpuTransport(size_t alignment);

  const char* name() const override { return "local"; }
  void register_group(const std::shared_ptr<ParamGroup>& group) override;
  void begin_gather(ParamGroup& group, bool pools_stand_still) override;
  void finish_gather(ParamGroup&) override {}
  void release_gather(ParamGroup& group) override;
  void write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) override;
  bool needs_room(const ParamGroup& group, std::optional<size_t> param) override;
  void make_room(ParamGroup&) override {}
  void pack_into_segment(ParamGroup& group, size_t param, const at::Tensor& gradient) override;
  std::vector<at::Tensor> take_packed(ParamGroup& group) override;
  void begin_reduce(ParamGroup& group, ForwardCounts forwards) override;
  bool needs_empty_reduction(const ParamGroup& group) const override { return group.reduces_unused(); }
  Finished finish_reduce(ParamGroup& group, bool flush) override;
  std::shared_ptr<const Layout> segment_layout(ParamGroup& group) override;
  bool abandon_reduce(ParamGroup& group) override;
  void publish_progress(uint64_t) override {}
  TransportStats stats() const override;

 protected:
  // A group's packed gradients, from the first pack until the reduction has read them.
  struct Packed {
    SegmentPlan* plan = nullptr;  // null: nothing is packed
    std::byte* data = nullptr;    // W segments, laid end to end
    bool is_wide = true;          // everything is in the reduce dtype
    std::vector<uint8_t> filled;  // by parameter
    std::vector<uint8_t> sent;    // likewise, with those that are reduced as zeros
    Slot slot;                    // of the scratch
    SegmentPlans plans;
  };
  // This rank's rows in a reduction that all ranks have posted.
  struct Joined {
    at::Tensor summed;               // a segment, undefined: `sources` are to be summed
    std::vector<RowSource> sources;  // in rank order
    std::shared_ptr<void> memory;    // of the sources
  };
  Packed& packed_of(const ParamGroup& group) { return packed_[group.index()]; }
  const Packed& packed_of(const ParamGroup& group) const { return packed_[group.index()]; }

  // --- what a subclass exchanges, and in which memory ---
  // Returns the plan of a group's segments. With flags, gaps are sent as zeros.
  virtual SegmentPlan& plan_of(ParamGroup& group, bool is_wide) {
    return packed_of(group).plans.of_all(group, is_wide);
  }
  // Takes and frees memory for packed segments. close_packed also forgets them.
  virtual std::byte* open_packed(ParamGroup& group, size_t bytes);
  virtual void close_packed(ParamGroup& group);
  // Ends the use of posted segments.
  virtual void close_posted(ParamGroup& group) { close_packed(group); }
  // Notifies the peers of packed segments.
  virtual void post_reduce(ParamGroup& /*group*/, ForwardCounts /*forwards*/) {}
  // Returns nothing if a peer posts later, see finish_reduce.
  virtual std::optional<Joined> join_reduce(ParamGroup& group, bool flush);

  void open_scratch(ParamGroup& group);
  // Returns memory that calls close_posted when it is freed.
  std::shared_ptr<void> posted_memory(ParamGroup& group);
  // Takes a slot for the next gather, in new or kept memory of `slot_memory_`.
  void open_slot(ParamGroup& group);
  static void write_rows(ParamGroup& group);
  virtual at::Tensor take(size_t bytes);  // of a slot
  virtual std::byte* scratch_memory(const Slot& slot);

  SlotLedger gather_ledger_;
  SlotLedger scratch_ledger_;
  std::vector<at::Tensor> slot_memory_;  // by slot, undefined: it has none

 private:
  void open(ParamGroup& group, bool is_wide);
  // Moves packed gradients to a wide scratch.
  void widen(ParamGroup& group);
  void fill_gaps(ParamGroup& group);
  void pre_divide(ParamGroup& group, double divisor);

  std::deque<Packed> packed_;  // by group
  std::vector<at::Tensor> scratch_memory_;
  size_t num_allocations_ = 0;
};

}  // namespace fsdp2x
