// Rows of resting shards: writes, publishes, opens, and gives them back.
#include "engine/transport/shm/resting_slot.hpp"

#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "engine/memory/device_copy.hpp"
#include "shm/huge_pages.hpp"

namespace fsdp2x {

namespace {

std::vector<cpu::SlotRows> rows_in_slot(const Layout& layout) {
  const std::vector<size_t> offsets = layout.offsets_in_slot();
  std::vector<cpu::SlotRows> rows;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const ParamPlace& place = layout.params()[i];
    if (place.shard_numel == 0) continue;
    rows.push_back({offsets[i], static_cast<size_t>(place.shard_numel) * dtype_bytes(place.shape.orig)});
  }
  return rows;
}

}  // namespace

cpu::GatherPost post_of(const ParamGroup& group) {
  const UnitOptions& options = group.unit().options;
  const UnitSettings settings{flags_of(options, group.pass().odd_steps), options.divide_factor.value_or(0.0)};
  return {group.gather().sequence,
          group.index(),
          static_cast<uint32_t>(group.gather().slot.id),
          group.gather().slot.offset,
          group.layout().slot_bytes(),
          settings.packed()};
}

std::unique_ptr<RestingSlot> RestingSlot::make(const std::shared_ptr<cpu::ShmGroup>& memory, SlotLedger& ledger,
                                               ParamGroup& group) {
  if (!group.shards().are_watched() || !group.layout().can_rest_in_slot()) return nullptr;
  const size_t bytes = group.layout().slot_bytes();
  if (ledger.reserved_bytes() + bytes > memory->reservable_bytes()) return nullptr;
  // Pages are allocated on the first write, so gaps cost nothing, and the slot may start on a huge page.
  const size_t alignment = bytes < cpu::kHugePageBytes ? cpu::page_bytes() : cpu::kHugePageBytes;
  const Slot slot = ledger.reserve(bytes, group.name(), alignment);
  return std::unique_ptr<RestingSlot>(new RestingSlot(memory, slot, group));
}

RestingSlot::RestingSlot(std::shared_ptr<cpu::ShmGroup> memory, const Slot& slot, const ParamGroup& group)
    : memory_(std::move(memory)),
      slot_(slot),
      views_(memory_->shard_views(slot.offset, slot.bytes, rows_in_slot(group.layout()))) {}

const Slot& RestingSlot::begin_use() {
  is_used_ = true;
  ++slot_.num_uses;
  return slot_;
}

void RestingSlot::write_rows(ParamGroup& group, const cpu::GatherPost& post) {
  if (group.shards().state() == ShardState::in_pool) {
    memory_->acquire_slot(post, slot_.num_uses);
    run_copies_on(at::kCPU, group.layout().shard_to_slot(), group.pool().const_data_ptr(), views_->shared());
    const pybind11::gil_scoped_acquire gil;
    group.shards().rest(views_);
    return;
  }
  const std::vector<cpu::PageRun> written = memory_->written(*views_);
  if (written.empty()) return;
  memory_->acquire_slot(post, slot_.num_uses);
  memory_->publish(*views_, written);
}

bool RestingSlot::open(ParamGroup& group) const {
  Shards& shards = group.shards();
  if (shards.state() != ShardState::resting || !shards.may_move() || !is_unread()) return false;
  const std::vector<cpu::PageRun> written = memory_->written(*views_);
  if (!written.empty()) memory_->publish(*views_, written);
  shards.open();
  return true;
}

void RestingSlot::give_back(ParamGroup& group) const {
  if (group.shards().state() == ShardState::in_pool) return;
  group.shards().leave();
  if (!memory_->is_here()) return;
  memory_->discard_private_pages(views_->isolated(), views_->bytes());  // they would hide the next gather's values
  if (is_unread()) memory_->give_back(*views_);
}

}  // namespace fsdp2x
