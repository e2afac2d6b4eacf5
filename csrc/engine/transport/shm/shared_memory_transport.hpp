// The CPU transport whose ranks can read each other's memory: all ranks of the group on one host, or a single rank.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine/torch/parallel.hpp"
#include "engine/transport/segment_plans.hpp"
#include "engine/transport/shm/resting_slot.hpp"
#include "engine/transport/transport.hpp"
#include "kernels/cpu/kernels.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {

class SharedMemoryTransport final : public Transport {
 public:
  // `group` is null for a world of one rank. Slots and scratches are then private memory.
  explicit SharedMemoryTransport(std::shared_ptr<cpu::ShmGroup> group);
  ~SharedMemoryTransport() override;

  const char* name() const override { return group_ ? "shm" : "local"; }
  std::shared_ptr<cpu::ShmGroup> shared_group() const override { return group_; }
  void register_group(const std::shared_ptr<ParamGroup>& group) override;
  void begin_gather(ParamGroup& group, bool pools_stand_still) override;
  void finish_gather(ParamGroup& group) override;
  void release_gather(ParamGroup& group) override;
  void write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) override;
  bool open_shards(ParamGroup& group) override;
  void give_back_shards(ParamGroup& group) override;
  bool needs_room(const ParamGroup& group, std::optional<size_t> param) override;
  void make_room(ParamGroup& group) override;
  void pack_into_segment(ParamGroup& group, size_t param, const at::Tensor& gradient) override;
  std::vector<at::Tensor> take_packed(ParamGroup& group) override;
  void begin_reduce(ParamGroup& group, ForwardCounts forwards) override;
  bool needs_empty_reduction(const ParamGroup& group) const override;
  Finished finish_reduce(ParamGroup& group, bool flush) override;
  std::shared_ptr<const Layout> segment_layout(ParamGroup& group) override {
    return scratch_of(group).plans.of(group).layout;
  }
  bool abandon_reduce(ParamGroup& group) override;
  void publish_progress(uint64_t position) override;
  void skip_reduce(ParamGroup& group) override;
  TransportStats stats() const override;

 private:
  friend class SummedRows;
  // Form of a gradient in a scratch: absent, in ParamShape::packed(), or in the reduce dtype of a wide scratch.
  enum Packed : uint8_t { kNotPacked = 0, kPacked = 1, kPackedWide = 2 };
  // A group's packed gradients, from the first pack until the reduction is finished.
  struct Scratch {
    Slot slot;
    std::byte* data = nullptr;    // null: none
    std::vector<uint8_t> filled;  // by parameter, see Packed
    bool wide = false;            // everything is in the reduce dtype
    uint64_t epoch = 0;           // of the last posted reduction
    uint64_t layout_tag = 0;      // a hash of the group's layout
    SegmentPlans plans;           // of sums for replicas
  };
  struct Closing {  // a scratch that a peer may still read
    uint32_t group;
    uint64_t epoch;
    int slot;
    uint64_t position;
  };
  // A group's gathers since its first one.
  struct Gathers {
    bool have_begun = false;
    std::unique_ptr<RestingSlot> resting;  // null: a slot of the ledger for each gather
  };
  RestingSlot* resting_slot(ParamGroup& group);
  Scratch& scratch_of(const ParamGroup& group) { return scratches_[group.index()]; }
  // Returns a hash of the group's layout and divisor. Ranks compare it, so that unit number n means the same on all
  // ranks.
  uint64_t tag_of_reduction(const ParamGroup& group);
  void post_rows(ParamGroup& group);
  static void write_rows(ParamGroup& group);
  void open_scratch(ParamGroup& group);
  void acquire_scratch(ParamGroup& group, bool wide);
  void widen_scratch(ParamGroup& group);  // moves packed gradients to a wide scratch
  struct PackedGradient {
    DType type;
    std::byte* data;
  };
  // Returns where `param` lies in a scratch of any rank that packed it as `how`.
  static PackedGradient packed_gradient(const ParamGroup& group, size_t param, std::byte* scratch, uint8_t how);
  // Hands this rank's scratch to the peers after this rank has read theirs.
  void close_scratch(ParamGroup& group);
  void sweep_closing();
  // The scratches of all ranks and, per rank, which parameters are in them.
  struct Sources {
    std::vector<std::byte*> scratches;
    std::vector<const uint8_t*> filled;
    bool any_filled(size_t param) const;
  };
  Sources sources_of(const ParamGroup& group);
  // Sums of this rank's rows, in memory that every reduction reuses.
  struct RowSums {
    std::vector<cpu::ReducePiece> pieces;
    std::vector<const void*> pointers;
    std::vector<DType> types;
    Items items;  // the pieces' elements
  };
  // Begin the sums, add one piece for a parameter (completed with its sources), and run them all.
  void begin_rows(const ParamGroup& group, const Sources& sources);
  void add_rows(const ParamGroup& group, const Sources& sources, size_t param, cpu::ReducePiece piece);
  void sum_rows();
  void sum_into(const ParamGroup& group, const Sources& sources, const GradientTargets& targets);
  std::unique_ptr<ReducedRows> sum_into_segment(ParamGroup& group);  // for groups that are staged
  void fill_unused(ParamGroup& group);                               // zeros for parameters without a gradient
  void predivide(ParamGroup& group);                                 // see ParamGroup::pre_divisor
  double before_sum(const ParamGroup& group) const;
  // Memory by slot id, used without a group.
  struct PrivateMemory {
    std::vector<at::Tensor> gathers, scratches;
    size_t num_allocations = 0;
  };
  std::byte* private_memory(std::vector<at::Tensor>& memory, const Slot& slot);

  std::shared_ptr<cpu::ShmGroup> group_;
  SlotLedger gather_ledger_;
  SlotLedger scratch_ledger_;
  PrivateMemory private_;
  std::deque<Closing> closing_;
  uint64_t gather_sequence_ = 0;
  std::atomic<bool> gathers_ = false;  // a thread gathers
  std::vector<Gathers> gathers_of_;    // by group
  std::vector<Scratch> scratches_;     // by group
  RowSums row_sums_;
};

}  // namespace fsdp2x
