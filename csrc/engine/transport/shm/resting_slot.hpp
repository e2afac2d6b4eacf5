// The slot that stores the shards of a group, so that a gather copies nothing. See docs/engine/resting_shards.md.
#pragma once

#include <memory>

#include "core/slots.hpp"
#include "engine/params/param_group.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {

// Returns the post of the group's running gather for its peers, with the settings of its unit.
cpu::GatherPost post_of(const ParamGroup& group);

// All ranks agree on whether a group has such a slot. Whether this rank's shards rest there at the moment, or lie in a
// pool and are copied, may differ between ranks.
class RestingSlot {
 public:
  // Returns null if shards have to be cast, permuted, or filled in by Python. Called for the same groups in the same
  // order on every rank.
  static std::unique_ptr<RestingSlot> make(const std::shared_ptr<cpu::ShmGroup>& memory, SlotLedger& ledger,
                                           ParamGroup& group);

  // Begins a gather, counts it, and returns its slot. end_use() ends it.
  const Slot& begin_use();
  void end_use() { is_used_ = false; }
  bool is_used() const { return is_used_; }
  std::byte* shared() const { return views_->shared(); }
  // Writes this rank's rows before `post` is published to the peers. If there is something to write, waits until the
  // last gather is no longer read.
  void write_rows(ParamGroup& group, const cpu::GatherPost& post);

  // Opens the shards for an optimizer's step: they are written where peers will read them. Returns false without a
  // change if a rank (this one included) may still read them or know an address of them.
  bool open(ParamGroup& group) const;
  // Moves the shards back to a pool.
  void give_back(ParamGroup& group) const;

 private:
  RestingSlot(std::shared_ptr<cpu::ShmGroup> memory, const Slot& slot, const ParamGroup& group);
  // Returns whether no rank reads the slot, and this process is the rank that writes.
  bool is_unread() const {
    return memory_->is_here() && memory_->slot_is_released(static_cast<uint32_t>(slot_.id), slot_.num_uses);
  }

  std::shared_ptr<cpu::ShmGroup> memory_;
  Slot slot_;
  bool is_used_ = false;
  std::shared_ptr<cpu::ShardViews> views_;
};

}  // namespace fsdp2x
