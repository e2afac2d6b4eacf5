// Packing of the device transport: copies gradients from autograd into the buffer of a reduction.
//
// Autograd makes gradients on the compute lane. They are packed and freed there, so the allocator needs no record of
// other streams. A single rank packs into its gradient pool if no other work on them remains.
//
// If the buffer of all segments would be large, gradients are packed piece by piece on the lane of the reduction, which
// keeps them until the compute lane has waited for it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/params/param_group.hpp"
#include "engine/transport/device/reduce_memory.hpp"
#include "engine/transport/segment_plans.hpp"

namespace fsdp2x {

class DevicePacking {
 public:
  // `pieces`: sizes from which on a group is reduced in pieces.
  DevicePacking(DeviceContext& context, ReduceMemory& memory, PieceSizes pieces);

  void register_group(const ParamGroup& group);
  // Returns the plan of a reduction of the group that begins now.
  SegmentPlan& plan_of(const ParamGroup& group);
  // See Transport::needs_room.
  bool needs_room(const ParamGroup& group, std::optional<size_t> param);
  void make_room(const ParamGroup& group);
  void pack_into_segment(ParamGroup& group, size_t param, const at::Tensor& gradient);
  void pack_pending(ParamGroup& group);
  // See Transport::take_packed.
  std::vector<at::Tensor> take_whole(ParamGroup& group);

  // Everything that a reduction reads. Taking it empties the group's held state.
  struct Packed {
    SegmentPlan* plan = nullptr;
    std::optional<BufferId> buffer;     // none: `memory` is the gradient pool
    at::Tensor memory;                  // W segments, laid end to end, or room for a piece of them
    std::vector<PackItem> items;        // not packed yet: the reduction packs its pieces. The buffer owns them
    std::vector<uint8_t> filled;        // by parameter: it has a gradient here
    std::vector<uint8_t> has_gradient;  // likewise, or is reduced as zeros
    bool is_certain = true;             // every trainable parameter has one
  };
  Packed take(ParamGroup& group);
  // Drops held gradients. Returns whether there were any.
  bool drop(const ParamGroup& group);
  // Returns whether no other rank has gradients of these parameters.
  static bool is_alone(const ParamGroup& group) { return group.layout().world() == 1 && !group.has_replicas(); }
  size_t num_open() const { return num_open_; }

 private:
  struct PerGroup {
    SegmentPlans plans;
    SegmentPlan* plan = nullptr;   // of the held gradients, null: none
    std::vector<at::Tensor> held;  // gradients that are not packed yet
    std::vector<uint8_t> filled;   // by parameter: packed
    std::optional<BufferId> buffer;
  };
  PerGroup& per_group(const ParamGroup& group) { return groups_[group.index()]; }
  void open(const ParamGroup& group);
  void close(PerGroup& state);
  void open_buffer(const ParamGroup& group);
  // Returns the gradient pool if a single rank packs into it. Undefined: pack into a buffer.
  at::Tensor pool_to_pack(ParamGroup& group);
  // Returns the destination, undefined if there was nothing to pack.
  at::Tensor pack_held(ParamGroup& group, bool for_reduction);
  // Takes the held gradients. `gradients` keeps them alive.
  std::vector<PackItem> take_held(PerGroup& state, bool for_reduction, std::vector<at::Tensor>& gradients);
  // Returns whether a reduction of the group that begins now packs its pieces.
  bool packs_pieces(const ParamGroup& group, const SegmentPlan& plan);
  // Returns the bytes that it holds until it is done.
  size_t held_bytes(const ParamGroup& group);
  std::vector<uint8_t> flags_of(const ParamGroup& group);

  DeviceContext& context_;
  ReduceMemory& memory_;
  PieceSizes pieces_;
  std::vector<PerGroup> groups_;
  size_t num_open_ = 0;
};

}  // namespace fsdp2x
