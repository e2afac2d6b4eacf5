// Memory of reductions.
#include "engine/transport/device/reduce_memory.hpp"

#include <utility>

namespace fsdp2x {

ReduceMemory::ReduceMemory(DeviceContext& context)
    : context_(context), buffers_(context.make_buffers("reduce buffer")), segments_(context.make_buffers("segment")) {}

int ReduceMemory::take_buffer(const ParamGroup& group, size_t buffer_bytes) {
  bool is_new = false;
  const int id = buffers_->acquire(buffer_bytes, group.name(), &is_new);
  context_.layer().wait(Lane::compute, *buffer(id).free);
  return id;
}

void ReduceMemory::give_back_buffer(int id) {
  context_.layer().record(*buffer(id).free, Lane::compute);
  buffers_->release(id);
}

int ReduceMemory::take_segment(const ParamGroup& group, size_t bytes, bool* is_new) {
  return segments_->acquire(bytes, group.name(), is_new);
}

void ReduceMemory::give_back_segment(int id, Lane lane) {
  context_.layer().record(*segment(id).free, lane);
  segments_->release(id);
}

uint64_t ReduceMemory::begin(int buffer_id, std::vector<at::Tensor> gradients, Lane lane) {
  context_.layer().record(*buffer(buffer_id).free, lane);
  in_flight_.push_back({++num_reductions_, buffer_id, {}, std::move(gradients), context_.layer().current_stream()});
  return num_reductions_;
}

size_t ReduceMemory::allowed_before(const ParamGroup& group, size_t bytes) const {
  const bool gave_slot_back = group.gather().slot.id < 0 && group.options().unshard_in_backward;
  size_t bytes_in_flight = 0;
  for (const InFlight& reduction : in_flight_) {
    bytes_in_flight += buffers_->ledger().bytes_of(reduction.buffer);
    for (const at::Tensor& gradient : reduction.gradients) bytes_in_flight += gradient.nbytes();
  }
  return window_.before(bytes, bytes_in_flight,
                        gave_slot_back ? std::optional(group.layout().slot_bytes()) : std::nullopt);
}

bool ReduceMemory::needs_room(const ParamGroup& group, size_t bytes) const {
  return in_flight_.size() > allowed_before(group, bytes);
}

void ReduceMemory::make_room(const ParamGroup& group, size_t bytes) { retire(allowed_before(group, bytes)); }

void ReduceMemory::retire(size_t num) {
  while (in_flight_.size() > num) {
    InFlight oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    drop_gradients(oldest);
    buffers_->release(oldest.buffer);
    for (const int id : oldest.segments) segments_->release(id);
  }
}

void ReduceMemory::retire_segment(int id, uint64_t number, Lane lane) {
  context_.layer().record(*segment(id).free, lane);
  for (InFlight& reduction : in_flight_) {
    if (reduction.number == number) return reduction.segments.push_back(id);
  }
  segments_->release(id);
}

void ReduceMemory::drop_gradients(InFlight& reduction) {
  if (reduction.gradients.empty()) return;
  DeviceLayer& layer = context_.layer();
  // The current stream may be another one by now.
  std::optional<StreamScope> home;
  if (reduction.home && reduction.home != layer.current_stream()) home.emplace(layer, *reduction.home);
  layer.wait(Lane::compute, *buffer(reduction.buffer).free);
  if (layer.is_recorder()) layer.note("give_back", "gradients", {}, ranges_of(reduction.gradients));
  reduction.gradients.clear();
}

void ReduceMemory::end() {
  for (const Lane lane : {Lane::reduce, Lane::all_reduce}) context_.join(lane);
  context_.forget_freed_blocks();
  for (InFlight& reduction : in_flight_) {
    drop_gradients(reduction);
    buffers_->release(reduction.buffer, /*has_waited=*/true);
    for (const int id : reduction.segments) segments_->release(id, /*has_waited=*/true);
  }
  in_flight_.clear();
}

}  // namespace fsdp2x
