// Memory of reductions.
#include "engine/transport/device/reduce_memory.hpp"

#include <optional>

namespace fsdp2x {

ReduceMemory::ReduceMemory(DeviceContext& context)
    : context_(context), buffers_(context.make_buffers("reduce buffer")), segments_(context.make_buffers("segment")) {}

BufferId ReduceMemory::take_buffer(const ParamGroup& group, size_t buffer_bytes) {
  bool is_new = false;
  const BufferId id{buffers_->acquire(buffer_bytes, group.name(), &is_new)};
  context_.layer().wait(Lane::compute, *buffer(id).free);
  return id;
}

void ReduceMemory::give_back_buffer(BufferId id) {
  context_.layer().record(*buffer(id).free, Lane::compute);
  buffers_->release(static_cast<int>(id));
}

SegmentId ReduceMemory::take_segment(const ParamGroup& group, size_t bytes, bool* is_new) {
  bool unused = false;
  return SegmentId{segments_->acquire(bytes, group.name(), is_new != nullptr ? is_new : &unused)};
}

void ReduceMemory::give_back_segment(SegmentId id, Lane lane) {
  context_.layer().record(*segment(id).free, lane);
  segments_->release(static_cast<int>(id));
}

uint64_t ReduceMemory::begin(BufferId id, Lane lane) {
  context_.layer().record(*buffer(id).free, lane);
  size_t bytes = buffers_->ledger().bytes_of(static_cast<int>(id));
  for (const at::Tensor& tenant : buffer(id).tenants) bytes += tenant.nbytes();
  return queue_.begin(static_cast<int>(id), bytes);
}

size_t ReduceMemory::allowed_before(const ParamGroup& group, size_t bytes) const {
  const bool has_slot = group.gather().slot.id >= 0 || reads_pool(group);
  const bool gave_slot_back = !has_slot && group.options().unshard_in_backward;
  return queue_.allowed_before(bytes, gave_slot_back ? std::optional(group.layout().slot_bytes()) : std::nullopt);
}

bool ReduceMemory::needs_room(const ParamGroup& group, size_t bytes) const {
  return queue_.size() > allowed_before(group, bytes);
}

void ReduceMemory::make_room(const ParamGroup& group, size_t bytes) { retire(allowed_before(group, bytes)); }

void ReduceMemory::retire(size_t num) {
  while (queue_.size() > num) give_back(queue_.pop(), /*has_waited=*/false);
}

void ReduceMemory::give_back(const ReductionQueue::Reduction& reduction, bool has_waited) {
  buffers_->release(reduction.buffer, has_waited);
  for (const int id : reduction.segments) segments_->release(id, has_waited);
}

void ReduceMemory::retire_segment(SegmentId id, uint64_t number, Lane lane) {
  context_.layer().record(*segment(id).free, lane);
  if (!queue_.add_segment(number, static_cast<int>(id))) segments_->release(static_cast<int>(id));
}

void ReduceMemory::end() {
  for (const Lane lane : {Lane::reduce, Lane::all_reduce}) context_.join(lane);
  context_.forget_freed_blocks();
  while (queue_.size() > 0) give_back(queue_.pop(), /*has_waited=*/true);
}

}  // namespace fsdp2x
