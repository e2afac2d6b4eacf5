// The CPU transport whose ranks can read each other's memory: all ranks of the group on one host, or a single rank.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels.hpp"
#include "cpu/shm_group.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

class HostTransport final : public Transport {
 public:
  // `group` is null for a world of one rank: slots and scratches are then private memory.
  explicit HostTransport(std::shared_ptr<cpu::ShmGroup> group);
  ~HostTransport() override;

  const char* name() const override { return group_ ? "shm" : "local"; }
  std::shared_ptr<cpu::ShmGroup> shared_group() const override { return group_; }
  void register_group(Group& group) override;
  void begin_gather(Group& group) override;
  void finish_gather(Group& group) override;
  void release_gather(Group& group) override;
  void write_pool(Group& group, const CopyProgram& rows, const void* slot) override;
  void pack(Group& group, size_t param, const at::Tensor& gradient) override;
  void begin_reduce(Group& group) override;
  bool needs_empty_reduction(const Group& group) const override;
  bool finish_reduce(Group& group, bool flush) override;
  std::shared_ptr<const Layout> reduce_plan(Group& group) override;
  bool abandon_reduce(Group& group) override;
  void publish_progress(uint64_t position) override;
  TransportStats stats() const override;

 private:
  struct Closing {  // a scratch some peer may still read
    uint32_t group;
    uint64_t epoch;
    int slot;
    uint64_t position;
  };
  void post_rows(Group& group);
  void open_scratch(Group& group);
  void acquire_scratch(Group& group, bool wide);
  void widen_scratch(Group& group);  // what is packed moves to a wide one
  struct PackedGradient {
    DType type;
    std::byte* data;
  };
  // Where `param` lies in a scratch of this or another rank that packed it so.
  static PackedGradient packed_gradient(const Group& group, size_t param, std::byte* scratch, uint8_t how);
  void close_scratch(Group& group);
  void sweep_closing();
  // The scratches of all ranks and, per rank, which parameters are in them.
  struct Sources {
    std::vector<std::byte*> scratches;
    std::vector<const uint8_t*> filled;
    bool any_filled(size_t param) const;
  };
  Sources sources_of(Group& group);
  // Sums of this rank's rows: begun, one piece added for a parameter (completed with its sources), all run.
  void begin_rows(const Group& group, const Sources& sources);
  void add_rows(const Group& group, const Sources& sources, size_t param, cpu::ReducePiece piece);
  void sum_rows();
  void sum(Group& group);               // straight into `.grad`
  void sum_into_segment(Group& group);  // for groups that are staged
  void consume(Group& group);
  static void fill_unused(Group& group);  // zeros for parameters without a gradient
  void predivide(Group& group);           // see pre_divisor
  double before_sum(const Group& group) const;
  std::byte* private_memory(std::vector<at::Tensor>& memory, const Slot& slot);

  std::shared_ptr<cpu::ShmGroup> group_;
  SlotLedger gather_ledger_;
  SlotLedger scratch_ledger_;
  std::vector<at::Tensor> gather_memory_;   // per slot id; only without a group
  std::vector<at::Tensor> scratch_memory_;  // per slot id; only without a group
  std::deque<Closing> closing_;
  size_t num_allocations_ = 0;  // private memory; a group counts its windows
  uint64_t gather_sequence_ = 0;
  std::atomic<bool> gathers_ = false;  // some thread does
  std::vector<uint64_t> epochs_;       // reductions posted, per group
  uint32_t num_groups_ = 0;
  // Reused by every reduction.
  std::vector<cpu::ReducePiece> pieces_;
  std::vector<const void*> pointers_;
  std::vector<DType> types_;
};

}  // namespace fsdp2x
