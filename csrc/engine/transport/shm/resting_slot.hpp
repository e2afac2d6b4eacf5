// The slot of a group whose shards rest in it: a gather then has nothing to copy. See docs/engine/resting_shards.md.
#pragma once

#include <memory>

#include "core/slots.hpp"
#include "engine/params/param_group.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {

// The gather of a group that runs, as its peers must see it, with the settings of its unit.
cpu::GatherPost post_of(const ParamGroup& group);

// Whether a group has such a slot is the same on all ranks; whether this rank's shards rest there at the moment, or lie
// in a pool and are copied, is its own affair.
class RestingSlot {
 public:
  // Null where shards have to be cast, permuted or filled in by Python. Called for the same groups in the same order on
  // every rank.
  static std::unique_ptr<RestingSlot> make(const std::shared_ptr<cpu::ShmGroup>& memory, SlotLedger& ledger,
                                           ParamGroup& group);

  // A gather begins: where it is, and how often there was one. It ends.
  const Slot& begin_use();
  void end_use() { is_used_ = false; }
  bool is_used() const { return is_used_; }
  std::byte* shared() const { return views_->shared(); }
  // Before `post` is told to the peers: this rank's rows are there. Waits, when there is something to write, until
  // nobody reads what was gathered before.
  void write_rows(ParamGroup& group, const cpu::GatherPost& post);

  // For an optimizer's step: shards are written where peers will read them. False, and
  // nothing has changed, while somebody may read them, this rank among them, or knows an address of them.
  bool open(ParamGroup& group) const;
  // The shards lie in a pool again.
  void give_back(ParamGroup& group) const;

 private:
  RestingSlot(std::shared_ptr<cpu::ShmGroup> memory, const Slot& slot, const ParamGroup& group);
  // By any rank, this one among them; and this process is the rank that writes.
  bool is_unread() const {
    return memory_->is_here() && memory_->slot_is_released(static_cast<uint32_t>(slot_.id), slot_.num_uses);
  }

  std::shared_ptr<cpu::ShmGroup> memory_;
  Slot slot_;
  bool is_used_ = false;
  std::shared_ptr<cpu::ShardViews> views_;
};

}  // namespace fsdp2x
