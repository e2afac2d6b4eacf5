// Gathers of the device transport: slots, staging, and the all-gathers into them.
//
//   compute   .. use of slot | free ............................ wait ready | use of slot ..
//   copy_in            wait for the compute lane | cast own rows | copied
//   gather                              wait copied | all-gathers in one launch, copy-out | ready
//
// A single rank that need not cast has no slot: its parameters are views of the shard pool.
//
// Extensions make the inputs of their gathers on the copy-in lane, in memory of that lane. Their outputs are in memory
// of the compute lane, which finishes them. Before that memory goes, the compute lane has waited for the gather, and
// the next gather of an extension follows the compute lane.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/params/param_group.hpp"
#include "engine/transport/device/device_context.hpp"
#include "engine/transport/device/host_shards.hpp"
#include "engine/transport/gather_program.hpp"

namespace fsdp2x {

class DeviceGathers {
 public:
  DeviceGathers(DeviceContext& context, HostShards& host_shards, size_t pack_below_bytes);

  void register_group(ParamGroup& group);
  // Gathers that follow only an event cannot use memory that the compute lane has just given back.
  void set_keeps(bool keeps);
  void begin(ParamGroup& group, bool pools_stand_still);
  void finish(ParamGroup& group);
  // See Transport::settle_gather.
  void settle(ParamGroup& group);
  void release(ParamGroup& group);
  void write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot);
  DeviceBuffers& slots() const { return *slots_; }
  bool has_views() const { return has_views_; }  // whether the compute lane reads pools

 private:
  using TensorLists = std::pair<PyRef, PyRef>;  // outputs, inputs
  struct Plan : GatherProgram {
    using GatherProgram::GatherProgram;
    std::map<std::pair<int, int>, TensorLists> lists;  // by slot and staging
  };
  struct PerGroup {
    Plan plan;
    std::optional<Plan> packed;               // for collectives that gather in one piece, made for the first
    std::optional<Plan> coded;                // likewise for a wire format
    WireFormat coded_as = WireFormat::plain;  // the format of `coded`
    CopyProgram own_rows;                     // for a single rank: its pool -> the slot
    std::unique_ptr<DeviceEvent> pool_event;  // the compute lane has written the pool
    at::Tensor viewed;                        // the pool, while the parameters are views of it
    bool in_one_piece = false;                // of the running gather
    int staging = -1;                         // likewise, in staging_
    bool is_enqueued = true;                  // completely
    bool is_finished = false;                 // the compute lane has waited for it
  };
  PerGroup& per_group(const ParamGroup& group) { return groups_[group.index()]; }
  // Returns the plan of a gather that begins now.
  Plan& plan_of(const ParamGroup& group);
  void enqueue(ParamGroup& group, bool pools_stand_still);
  void call_all_gather(ParamGroup& group, Plan& plan, DeviceBuffer& slot, DeviceBuffer* staging,
                       const TensorLists& extensions);
  static TensorLists gathers_of_extensions(ParamGroup& group);
  static TensorLists make_lists(const ParamGroup& group, const Plan& plan, const DeviceBuffer& slot,
                                const DeviceBuffer* staging);
  // Gives back everything of a gather except its slot, after the compute lane has waited for it.
  void close(const ParamGroup& group);

  DeviceContext& context_;
  HostShards& host_shards_;
  size_t pack_below_bytes_;
  std::unique_ptr<DeviceBuffers> slots_, staging_;
  bool has_views_ = false;
  std::vector<PerGroup> groups_;
};

}  // namespace fsdp2x
