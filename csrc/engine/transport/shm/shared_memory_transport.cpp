// The transport over shared memory: the gather and reduction protocols of docs/engine/shared_memory.md.
#include "engine/transport/shm/shared_memory_transport.hpp"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <bit>
#include <new>
#include <optional>
#include <utility>

#include "core/error.hpp"
#include "core/layout.hpp"
#include "engine/torch/gil.hpp"

namespace fsdp2x {

namespace {

// A rank's flag of a parameter in its scratch. Gradients are packed in ParamShape::packed(), or in the reduce dtype.
enum Flag : uint8_t { kNotPacked = 0, kPacked = 1, kPackedWide = 2 };

uint64_t hashed(uint64_t hash, uint64_t value) { return (hash ^ value) * 1099511628211ULL; }  // FNV-1a

uint64_t tag_of(const Layout& layout) {
  uint64_t tag = 1469598103934665603ULL;
  for (const ParamPlace& place : layout.params()) {
    for (const int64_t value :
         {place.shape.outer, place.shape.dim, place.shape.inner, static_cast<int64_t>(place.shape.reduce)}) {
      tag = hashed(tag, static_cast<uint64_t>(value));
    }
  }
  return tag;
}

}  // namespace

SharedMemoryTransport::SharedMemoryTransport(std::shared_ptr<cpu::ShmGroup> group)
    : CpuTransport(cpu::ShmGroup::page_bytes()), group_(std::move(group)) {}

void SharedMemoryTransport::register_group(const std::shared_ptr<ParamGroup>& group) {
  CpuTransport::register_group(group);
  groups_.emplace_back().layout_tag = tag_of(group->layout());
  group_->set_unit_name(group->index(), group->name());
}

void SharedMemoryTransport::begin_gather(ParamGroup& group, bool /*pools_stand_still*/) {
  if (gathers_.exchange(true)) {
    throw Error("fsdp2x: unit '" + group.name() +
                "' cannot be gathered while another thread of this rank gathers a unit of the same root. All ranks "
                "must gather in the same order. Call the units of a root from one thread.");
  }
  const auto ends = c10::make_scope_exit([this] { gathers_ = false; });
  try {
    post_rows(group);
  } catch (const std::bad_alloc& error) {
    // Peers wait for a gather that this rank cannot post.
    group_->give_up("the all-gather of unit '" + group.name() + "' failed (" + error.what() + ")");
  }
}

RestingSlot* SharedMemoryTransport::resting_slot(ParamGroup& group) {
  PerGroup& state = groups_[group.index()];
  if (!std::exchange(state.has_gathered, true)) state.resting = RestingSlot::make(group_, gather_ledger_, group);
  return state.resting.get();
}

void SharedMemoryTransport::post_rows(ParamGroup& group) {
  GatherSlot& gather = group.gather();
  RestingSlot* const resting = resting_slot(group);
  if (resting == nullptr) {
    group.open_slot(gather_ledger_);
  } else {
    gather.slot = resting->begin_use();
  }
  gather.sequence = ++gather_sequence_;
  const ReleaseGil released;
  if (resting != nullptr) {
    gather.write = resting->shared();
    gather.read = group_->isolated_window(gather.slot.offset, gather.slot.bytes);
    resting->write_rows(group, post_of(group));
  } else {
    const cpu::GatherWindow window = group_->gather_window(gather.slot.offset, gather.slot.bytes);
    gather.write = window.shared;
    gather.read = window.isolated;
    group_->acquire_slot(post_of(group), gather.slot.num_uses);
    write_rows(group);
  }
  group_->post_gather(post_of(group));
}

void SharedMemoryTransport::finish_gather(ParamGroup& group) {
  const cpu::GatherPost post = post_of(group);
  if (group_->gather_is_complete(post)) {
    group_->join_gather(post);  // compares the entries, does not wait
    return;
  }
  const ReleaseGil released;
  group_->join_gather(post);
}

void SharedMemoryTransport::release_gather(ParamGroup& group) {
  const Slot& slot = group.gather().slot;
  if (slot.id < 0) return;
  if (group.gather().read != nullptr) {
    group_->discard_private_pages(group.gather().read,
                                  group.layout().slot_bytes());  // what users wrote to the parameters
    group_->release_slot(static_cast<uint32_t>(slot.id), slot.num_uses);
  }
  if (RestingSlot* const resting = groups_[group.index()].resting.get()) {
    resting->end_use();
    group.gather() = GatherSlot();
  } else {
    group.close_slot(gather_ledger_);
  }
}

bool SharedMemoryTransport::open_shards(ParamGroup& group) {
  const RestingSlot* const resting = groups_[group.index()].resting.get();
  return resting != nullptr && resting->open(group);
}

void SharedMemoryTransport::give_back_shards(ParamGroup& group) {
  const RestingSlot* const resting = groups_[group.index()].resting.get();
  if (resting != nullptr) resting->give_back(group);
}

void SharedMemoryTransport::sweep_closing() {
  while (!closing_.empty()) {
    const Closing& front = closing_.front();
    if (!group_->reduction_is_consumed(front.group, front.epoch)) return;
    scratch_ledger_.release(front.slot);
    closing_.pop_front();
  }
}

void SharedMemoryTransport::make_room(ParamGroup&) {
  sweep_closing();
  if (closing_.empty()) return;
  const ReleaseGil released;
  const Closing last = closing_.back();
  group_->wait_consumed_in_order(last.group, last.epoch, last.position);
  sweep_closing();
}

std::byte* SharedMemoryTransport::scratch_memory(const Slot& slot) {
  return group_->scratch_window(group_->rank(), slot.offset, slot.bytes);
}

uint64_t SharedMemoryTransport::tag_of_reduction(const ParamGroup& group) const {
  const double divisor = group.options().divide_factor.value_or(0.0);
  return hashed(groups_[group.index()].layout_tag, std::bit_cast<uint64_t>(divisor));
}

void SharedMemoryTransport::post_reduce(ParamGroup& group, ForwardCounts forwards) {
  const Packed& packed = packed_of(group);
  std::byte* const flags = packed.data - group.layout().scratch_flags_bytes();
  const Flag how = packed.is_wide ? kPackedWide : kPacked;
  std::ranges::transform(packed.sent, reinterpret_cast<uint8_t*>(flags),
                         [how](uint8_t sent) { return sent != 0 ? how : kNotPacked; });
  group_->post_reduction(group.index(), ++groups_[group.index()].epoch, tag_of_reduction(group), packed.slot.offset,
                         forwards);
}

bool SharedMemoryTransport::needs_empty_reduction(const ParamGroup& group) const {
  return group.reduces_unused() || group.unit().awaits_reduction();
}

std::optional<CpuTransport::Joined> SharedMemoryTransport::join_reduce(ParamGroup& group, bool flush) {
  {
    const ReleaseGil released;
    const cpu::Joined joined = group_->join_reduction(group.index(), groups_[group.index()].epoch,
                                                      tag_of_reduction(group), group.unit().backward_position(), flush);
    if (joined == cpu::Joined::later) return std::nullopt;
  }
  Packed& packed = packed_of(group);
  Joined result;
  const size_t flags_bytes = group.layout().scratch_flags_bytes();
  const size_t bytes = align_up(group.layout().wide_scratch_bytes(), cpu::ShmGroup::page_bytes());
  for (int rank = 0; rank < group_->world(); ++rank) {
    const std::byte* const scratch =
        rank == group_->rank() ? packed.data - flags_bytes
                               : group_->scratch_window(rank, group_->peer_scratch_offset(group.index(), rank), bytes);
    const auto* const flags = reinterpret_cast<const uint8_t*>(scratch);
    const bool is_wide = std::find(flags, flags + packed.sent.size(), kPackedWide) != flags + packed.sent.size();
    const SegmentPlan& plan = packed.plans.of_all(group, is_wide);
    const size_t own_rows = static_cast<size_t>(group_->rank()) * plan.segment_bytes;
    result.sources.push_back({scratch + flags_bytes + own_rows, plan.layout.get(), flags});
  }
  result.memory = posted_memory(group);
  return result;
}

void SharedMemoryTransport::close_posted(ParamGroup& group) {
  Packed& packed = packed_of(group);
  const uint64_t epoch = groups_[group.index()].epoch;
  group_->consume_reduction(group.index(), epoch);
  closing_.push_back({group.index(), epoch, packed.slot.id, group.unit().backward_position()});
  packed.plan = nullptr;
}

TransportStats SharedMemoryTransport::stats() const {
  TransportStats stats = CpuTransport::stats();
  stats.scratch_slots_owned -= closing_.size();
  for (const PerGroup& state : groups_) stats.gather_slots_owned += state.resting && state.resting->is_used();
  stats.num_allocations += group_->num_windows();
  return stats;
}

}  // namespace fsdp2x
