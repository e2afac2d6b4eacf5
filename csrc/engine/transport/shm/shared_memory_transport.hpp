// The transport between ranks of one host, which read each other's memory.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/transport/cpu_transport.hpp"
#include "engine/transport/shm/resting_slot.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {

class SharedMemoryTransport final : public CpuTransport {
 public:
  explicit SharedMemoryTransport(std::shared_ptr<cpu::ShmGroup> group);

  const char* name() const override { return "shm"; }
  std::shared_ptr<cpu::ShmGroup> shared_group() const override { return group_; }
  void register_group(const std::shared_ptr<ParamGroup>& group) override;
  void begin_gather(ParamGroup& group, bool pools_stand_still) override;
  void finish_gather(ParamGroup& group) override;
  void release_gather(ParamGroup& group) override;
  bool open_shards(ParamGroup& group) override;
  void give_back_shards(ParamGroup& group) override;
  void make_room(ParamGroup& group) override;
  bool needs_empty_reduction(const ParamGroup& group) const override;
  void publish_progress(uint64_t position) override { group_->publish_progress(position); }
  void skip_reduce(ParamGroup& group) override { group_->skip_reduction(group.index()); }
  TransportStats stats() const override;

 private:
  struct Closing {  // a scratch that a peer may still read
    uint32_t group;
    uint64_t epoch;
    int slot;
    uint64_t position;
  };
  struct PerGroup {
    bool has_gathered = false;
    std::unique_ptr<RestingSlot> resting;  // null: a slot of the ledger for each gather
    uint64_t epoch = 0;                    // of the last posted reduction
    uint64_t layout_tag = 0;               // a hash of the group's layout
  };
  void post_reduce(ParamGroup& group, ForwardCounts forwards) override;
  std::optional<Joined> join_reduce(ParamGroup& group, bool flush) override;
  void close_posted(ParamGroup& group) override;
  std::byte* scratch_memory(const Slot& slot) override;
  RestingSlot* resting_slot(ParamGroup& group);
  // Returns a hash of the group's layout and divisor. Ranks compare it, so that unit number n means the same on all
  // ranks.
  uint64_t tag_of_reduction(const ParamGroup& group) const;
  void post_rows(ParamGroup& group);
  void sweep_closing();

  std::shared_ptr<cpu::ShmGroup> group_;
  std::deque<Closing> closing_;
  uint64_t gather_sequence_ = 0;
  std::atomic<bool> gathers_ = false;  // a thread gathers
  std::vector<PerGroup> groups_;
};

}  // namespace fsdp2x
