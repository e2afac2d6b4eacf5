// Memory rules of the transports.
#include "core/schedule/transport_memory.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/dtype.hpp"
#include "core/layout.hpp"

namespace fsdp2x {

namespace {

int acquire(BufferLedger& buffers, size_t bytes) {
  return buffers.acquire(bytes, [](int, size_t size) { return size; }).id;
}

void release(BufferLedger& buffers, int& id) {
  if (id >= 0) buffers.release(std::exchange(id, -1), [&buffers](int unkept) { buffers.close(unkept); });
}

}  // namespace

// --- shared memory ---

SharedTransportMemory::SharedTransportMemory(const PlannedRanks& ranks, size_t page_bytes)
    : world_(ranks.world), slots_(page_bytes), scratches_(page_bytes) {}

void SharedTransportMemory::begin_gather(const PlannedGroup& group) {
  if (!group.bytes.rests)
    slot_of_[group.number] = slots_.acquire(std::max<size_t>(group.bytes.slot, 1), group.name()).id;
}

void SharedTransportMemory::release_gather(const PlannedGroup& group) {
  const auto found = slot_of_.extract(group.number);
  if (!found.empty()) slots_.release(found.mapped());
}

void SharedTransportMemory::open(const PlannedGroup& group, bool syncs) {
  if (scratch_of_.contains(group.number)) return;
  const size_t bytes = syncs ? group.bytes.scratch : group.bytes.wide_scratch;
  scratch_of_[group.number] = scratches_.acquire(bytes, group.name()).id;
}

bool SharedTransportMemory::needs_room(const PlannedGroup& group, bool /*for_gradient*/) {
  return !scratch_of_.contains(group.number);
}

void SharedTransportMemory::finish_reduce(const PlannedGroup& group) {
  scratches_.release(scratch_of_.extract(group.number).mapped());
}

// --- a process group of the CPU ---

GroupTransportMemory::GroupTransportMemory(const PlannedRanks& ranks) : world_(ranks.world), slots_(kAlignBytes) {}

void GroupTransportMemory::hold(size_t& place, size_t bytes) {
  tally_.take(bytes);
  place = bytes;
}

void GroupTransportMemory::open_slot(const PlannedGroup& group) {
  Held& held = held_[group.number];
  const Slot slot = slots_.acquire(std::max<size_t>(group.bytes.slot, 1), group.name());
  held.slot = slot.id;
  hold(held.slot_bytes, slot.bytes);
}

void GroupTransportMemory::begin_gather(const PlannedGroup& group) {
  if (world_ == 1 || group.bytes.gather_segment == 0) return open_slot(group);
  if (may_overlap(group)) open_slot(group);
  hold(held_[group.number].gathered, group.bytes.staging);
}

void GroupTransportMemory::finish_gather(const PlannedGroup& group) {
  Held& held = held_[group.number];
  if (held.slot < 0) open_slot(group);
  drop(held.gathered);
}

void GroupTransportMemory::release_gather(const PlannedGroup& group) {
  Held& held = held_[group.number];
  drop(held.gathered);
  drop(held.slot_bytes);
  if (held.slot >= 0) slots_.release(std::exchange(held.slot, -1));
}

void GroupTransportMemory::open(const PlannedGroup& group, bool /*syncs*/) {
  Held& held = held_[group.number];
  if (held.packed == 0) hold(held.packed, group.bytes.reduce_segment * world_);
}

bool GroupTransportMemory::needs_room(const PlannedGroup& group, bool /*for_gradient*/) {
  return held_[group.number].packed == 0;
}

bool GroupTransportMemory::begin_reduce(const PlannedGroup& group, size_t) {
  open(group, /*syncs=*/true);
  if (world_ == 1) return false;
  Held& held = held_[group.number];
  if (group.bytes.coded_reduce == 0) {
    hold(held.received, group.bytes.received);
    return false;
  }
  hold(held.sent, group.bytes.coded_reduce * world_);
  drop(held.packed);
  hold(held.received, group.bytes.coded_reduce * world_);
  return false;
}

void GroupTransportMemory::finish_reduce(const PlannedGroup& group) {
  Held& held = held_[group.number];
  if (group.bytes.coded_reduce != 0) hold(held.rows, group.bytes.reduce_segment);
  for (size_t* const place : {&held.packed, &held.sent, &held.received, &held.rows}) drop(*place);
}

// --- a process group of an accelerator ---

DeviceTransportMemory::DeviceTransportMemory(const PlannedRanks& ranks, MemoryTally& whole)
    : world_(ranks.world),
      replicas_(ranks.replicas),
      whole_(whole),
      tally_(&whole),
      slots_(ranks.registers_memory, &whole),
      residents_(ranks.registers_memory, nullptr),
      pools_(ranks.registers_memory, &tally_) {
  if (ranks.max_reduce_buffers) queue_.set_max_buffers(*ranks.max_reduce_buffers);
}

void DeviceTransportMemory::begin_gather(const PlannedGroup& group) {
  Held& held = held_[group.number];
  if (!group.bytes.rests) held.slot = acquire(slots_, std::max<size_t>(group.bytes.slot, 1));
  if (group.bytes.shard_pool != 0 && group.bytes.keeps_shards) {
    if (!std::exchange(held.is_resident, true)) acquire(residents_, group.bytes.shard_pool);
  } else if (group.bytes.shard_pool != 0 && group.bytes.offloads) {
    held.upload = acquire(pools_.uploads, group.bytes.shard_pool);
  }
  if (world_ > 1 && group.bytes.gather_segment != 0 && group.bytes.staging != 0) {
    held.staging = acquire(pools_.staging, group.bytes.staging);
  }
}

void DeviceTransportMemory::finish_gather(const PlannedGroup& group) {
  Held& held = held_[group.number];
  release(pools_.uploads, held.upload);
  release(pools_.staging, held.staging);
}

void DeviceTransportMemory::release_gather(const PlannedGroup& group) {
  finish_gather(group);
  release(slots_, held_[group.number].slot);
}

bool DeviceTransportMemory::pack_pending(const PlannedGroup& group) {
  Held& held = held_[group.number];
  if (held.packed < 0) held.packed = acquire(pools_.buffers, packed_bytes(group));
  return true;
}

bool DeviceTransportMemory::ends_in_pool(const PlannedGroup& group) const {
  const auto found = held_.find(group.number);
  const bool has_partial = found != held_.end() && found->second.partial >= 0;
  return group.bytes.reduces_in_place && !keeps_partial() && !has_partial && !summed_.contains(group.number);
}

bool DeviceTransportMemory::packs_into_pool(const PlannedGroup& group) const {
  const auto found = held_.find(group.number);
  const bool is_packed = found != held_.end() && found->second.packed >= 0;
  return world_ == 1 && replicas_ == 1 && ends_in_pool(group) && !is_packed;
}

bool DeviceTransportMemory::packs_pieces(const PlannedGroup& group) {
  return group.bytes.reduce_buffer < packed_bytes(group) && held_[group.number].packed < 0;
}

size_t DeviceTransportMemory::allowed_before(const PlannedGroup& group) {
  std::optional<size_t> given_back;
  if (held_[group.number].slot < 0 && !group.bytes.rests) given_back = group.bytes.slot;
  const bool in_pieces = packs_pieces(group);
  const size_t bytes = in_pieces ? group.bytes.reduce_buffer + group.bytes.gradient : packed_bytes(group);
  return queue_.allowed_before(bytes, given_back);
}

bool DeviceTransportMemory::needs_room(const PlannedGroup& group, bool for_gradient) {
  if (group.is_posted()) return queue_.size() > queue_.allowed_beside();
  if (for_gradient || held_[group.number].packed >= 0) return false;
  return queue_.size() > allowed_before(group);
}

void DeviceTransportMemory::make_room(const PlannedGroup& group) {
  retire(group.is_posted() ? queue_.allowed_beside() : allowed_before(group));
}

void DeviceTransportMemory::retire(size_t num) {
  while (queue_.size() > num) {
    ReductionQueue::Reduction oldest = queue_.pop();
    if (const auto found = gradients_.extract(oldest.number); !found.empty()) whole_.give_back(found.mapped());
    release(pools_.buffers, oldest.buffer);
    for (int& segment : oldest.segments) release(pools_.segments, segment);
  }
}

bool DeviceTransportMemory::begin_reduce(const PlannedGroup& group, size_t gradient_bytes) {
  if (packs_into_pool(group)) return false;
  const bool in_pieces = packs_pieces(group);
  Held& held = held_[group.number];
  const size_t bytes = in_pieces ? group.bytes.reduce_buffer : packed_bytes(group);
  const int buffer = held.packed >= 0 ? std::exchange(held.packed, -1) : acquire(pools_.buffers, bytes);
  held.number = queue_.begin(buffer, pools_.buffers.bytes_of(buffer) + (in_pieces ? gradient_bytes : 0));
  if (in_pieces) gradients_[held.number] = gradient_bytes;
  return in_pieces;
}

void DeviceTransportMemory::take_rows(const PlannedGroup& group) {
  Held& held = held_[group.number];
  if ((world_ > 1 && !ends_in_pool(group)) || keeps_partial()) {
    held.rows = acquire(pools_.segments, group.bytes.reduce_segment);
  }
  if (const int partial = std::exchange(held.partial, -1); partial >= 0) queue_.add_segment(held.number, partial);
  if (keeps_partial()) held.partial = std::exchange(held.rows, -1);
  if (group.bytes.coded_reduce != 0) {  // sent and received codes
    queue_.add_segment(held.number, acquire(pools_.segments, 2 * group.bytes.coded_reduce * world_));
  }
}

void DeviceTransportMemory::finish_reduce(const PlannedGroup& group) {
  Held& held = held_[group.number];
  int rows = std::exchange(held.rows, -1);
  if (rows >= 0 && !queue_.add_segment(held.number, rows)) release(pools_.segments, rows);
}

void DeviceTransportMemory::begin_download(const PlannedGroup& group) {
  size_t& landing = held_[group.number].landing;
  landing = group.bytes.landing;
  if (landing == 0 && summed_.contains(group.number)) landing = group.bytes.reduced;
  const auto found = std::find(blocks_.begin(), blocks_.end(), landing);
  if (found != blocks_.end()) {
    blocks_.erase(found);
  } else {
    landing_bytes_ += landing;
  }
}

void DeviceTransportMemory::finish_download(const PlannedGroup& group) {
  if (const size_t landing = std::exchange(held_[group.number].landing, 0)) blocks_.push_back(landing);
}

std::unique_ptr<TransportMemory> make_transport_memory(const std::string& name, const PlannedRanks& ranks,
                                                       size_t page_bytes, MemoryTally& whole) {
  if (name == "local" || name == "shm") return std::make_unique<SharedTransportMemory>(ranks, page_bytes);
  if (name == "process_group") return std::make_unique<GroupTransportMemory>(ranks);
  if (name == "device") return std::make_unique<DeviceTransportMemory>(ranks, whole);
  throw std::invalid_argument("no memory rules for transport " + name);
}

}  // namespace fsdp2x
