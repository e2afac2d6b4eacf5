// Memory of the device transport's reductions: buffers for packed gradients, segments for result rows, and the memory
// that a running reduction holds until the compute lane has waited for it.
//
// A buffer is given back once the next reduction is enqueued.
#pragma once

#include <memory>

#include "core/reduction_queue.hpp"
#include "engine/params/param_group.hpp"
#include "engine/transport/device/device_context.hpp"

namespace fsdp2x {

// Packed gradients of all ranks, and segments of one rank: indices into different pools.
enum class BufferId : int {};
enum class SegmentId : int {};

class ReduceMemory {
 public:
  explicit ReduceMemory(DeviceContext& context);

  DeviceBuffer& buffer(BufferId id) { return (*buffers_)[static_cast<int>(id)]; }
  DeviceBuffer& segment(SegmentId id) { return (*segments_)[static_cast<int>(id)]; }
  // Takes a buffer that the compute lane may write to. needs_room() must be false.
  BufferId take_buffer(const ParamGroup& group, size_t buffer_bytes);
  // Gives a buffer back after the compute lane has waited for its last use.
  void give_back_buffer(BufferId id);
  // `is_new`: see DeviceBuffers::acquire. Null: the lane that uses it follows the compute lane anyway.
  SegmentId take_segment(const ParamGroup& group, size_t bytes, bool* is_new = nullptr);
  void give_back_segment(SegmentId id, Lane lane);

  // Notes that a reduction on `lane` reads the buffer, and its tenants. Returns its number.
  uint64_t begin(BufferId buffer, Lane lane);
  bool are_on_their_way() const { return queue_.size() > 0; }
  // Returns whether too many reductions are on their way to pack `bytes` of the group's gradients for another one.
  // needs_room_beside() is for the backward that runs next to the last one.
  bool needs_room(const ParamGroup& group, size_t bytes) const;
  bool needs_room_beside() const { return queue_.size() > queue_.allowed_beside(); }
  // Gives back what the oldest reductions hold, until needs_room() is false. The compute lane waits for them.
  void make_room(const ParamGroup& group, size_t bytes);
  void make_room_beside() { retire(queue_.allowed_beside()); }
  // Gives back written rows together with the reduction's buffer. `lane` is the one that writes them.
  void retire_segment(SegmentId id, uint64_t reduction, Lane lane);
  // Orders the compute lane after all reductions and gives their memory back.
  void end();

  void set_max_buffers(size_t num) { queue_.set_max_buffers(num); }
  size_t max_buffers() const { return queue_.max_buffers(); }

 private:
  size_t allowed_before(const ParamGroup& group, size_t bytes) const;
  void retire(size_t num);
  void give_back(const ReductionQueue::Reduction& reduction, bool has_waited);

  DeviceContext& context_;
  std::unique_ptr<DeviceBuffers> buffers_, segments_;
  mutable ReductionQueue queue_;  // remembers the largest reduction that it was asked about
};

}  // namespace fsdp2x
