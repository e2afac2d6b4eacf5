// Memory of the device transport's reductions: buffers that gradients are packed into, segments that rows come out in,
// and what a reduction that is on its way holds until the compute lane has waited for it.
//
// A buffer is given back when the next reduction is on its way.
#pragma once

#include <memory>

#include "core/reduction_queue.hpp"
#include "engine/params/param_group.hpp"
#include "engine/transport/device/device_context.hpp"

namespace fsdp2x {

class ReduceMemory {
 public:
  explicit ReduceMemory(DeviceContext& context);

  DeviceBuffer& buffer(int id) { return (*buffers_)[id]; }
  DeviceBuffer& segment(int id) { return (*segments_)[id]; }
  // A buffer that the compute lane may write to, where needs_room() is false.
  int take_buffer(const ParamGroup& group, size_t buffer_bytes);
  // The compute lane is behind its last use.
  void give_back_buffer(int id);
  int take_segment(const ParamGroup& group, size_t bytes, bool* is_new);
  void give_back_segment(int id, Lane lane);

  // A reduction on `lane` reads the buffer. Returns its number.
  uint64_t begin(int buffer, Lane lane);
  bool are_on_their_way() const { return queue_.size() > 0; }
  // Whether more are on their way than may be when `bytes` of the group's gradients are packed for one more, or beside
  // the last one.
  bool needs_room(const ParamGroup& group, size_t bytes) const;
  bool needs_room_beside() const { return queue_.size() > queue_.allowed_beside(); }
  // Gives back what the oldest ones hold, until needs_room() is false; the compute lane waits for them.
  void make_room(const ParamGroup& group, size_t bytes);
  void make_room_beside() { retire(queue_.allowed_beside()); }
  // Rows that are written, by the lane that is given to do that: their memory goes with the reduction's buffer.
  void retire_segment(int id, uint64_t reduction, Lane lane);
  // The compute lane goes on behind all reductions, whose memory is given back.
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
