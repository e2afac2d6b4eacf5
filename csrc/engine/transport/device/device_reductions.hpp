// Reductions of the device transport: the collectives over shards and replicas, and the rows that come of them.
//
//   compute     .. backward | wait buffer.free | pack, zero gaps | packed ........................ wait done
//   reduce                                        wait packed | reduce-scatter | buffer.free | rows -> .grad | done
//     where a gradient is missing                 wait packed | reduce-scatter | flags -> host | ..
//     in a wire format                            wait packed | encode | all-to-all | sum | ..
//   all_reduce  (replicas, hooks)                                    wait reduced | all-reduce | rows -> .grad | done
#pragma once

#include <memory>
#include <vector>

#include "engine/params/param_group.hpp"
#include "engine/transport/device/device_packing.hpp"
#include "engine/transport/device/device_wire.hpp"
#include "engine/transport/device/host_shards.hpp"
#include "engine/transport/device/reduce_memory.hpp"

namespace fsdp2x {

class DeviceReductions {
 public:
  DeviceReductions(DeviceContext& context, ReduceMemory& memory, HostShards& host_shards);

  void register_group() { groups_.emplace_back(); }
  // Enqueues the reduction of what was packed.
  void begin(ParamGroup& group, DevicePacking::Packed packed);
  // The rows of what was enqueued; null: they wait for an all-reduce.
  std::unique_ptr<ReducedRows> finish(ParamGroup& group);
  // What was enqueued is dropped.
  void drop(const ParamGroup& group);
  bool has_partial(const ParamGroup& group) const { return groups_[group.index()].partial >= 0; }
  std::unique_ptr<SegmentRows> partial(const ParamGroup& group);
  void drop_partial(const ParamGroup& group);
  // The compute lane goes on behind all reductions.
  void end();
  // What wire formats keep from step to step goes.
  void release_idle();
  size_t wire_bytes() const;

 private:
  friend class DeviceRows;
  // A reduction that is enqueued and not written.
  struct Reduction {
    at::Tensor rows;      // this rank's segment; undefined: kept as a partial sum
    int segment = -1;     // in ReduceMemory; else `rows` is in `buffer`, or the group's gradient pool
    int buffer = -1;      // in ReduceMemory: one rank alone, whose packed gradients are its rows
    int codes = -1;       // in ReduceMemory: what travels in a wire format, sent and received
    uint64_t number = 0;  // in ReduceMemory; 0: nothing is on its way
    SegmentPlan* plan = nullptr;
    Lane lane = Lane::reduce;
    double divisor = 1.0;               // left to divide by
    std::vector<uint8_t> has_gradient;  // by parameter, unless the flags tell
    bool is_certain = true;             // they do not: no other rank can have what this one lacks
  };
  struct PerGroup {
    Reduction running;
    int unsent = -1;   // in ReduceMemory: a buffer that no collective reads yet
    int partial = -1;  // in ReduceMemory: reduced over the shards, waits for the all-reduce
    std::shared_ptr<const Layout> partial_plan;
    std::unique_ptr<DeviceWireGradients> wire;  // while gradients travel in a wire format
    at::Tensor flags;                           // of the host: the sums of all ranks' flags, once they were asked for
    std::unique_ptr<DeviceEvent> flags_there;
  };
  PerGroup& per_group(const ParamGroup& group) { return groups_[group.index()]; }
  at::Tensor rows_for(ParamGroup& group, Reduction& running);
  void call_reduce_scatter(ParamGroup& group, const Reduction& running, const at::Tensor& input);
  // Null: they travel as they are.
  DeviceWireGradients* wire_of(ParamGroup& group, const SegmentPlan& plan);
  void reduce_coded(ParamGroup& group, DeviceWireGradients& wire, const Reduction& running, const at::Tensor& packed,
                    const std::vector<uint8_t>& filled);
  void reduce_over_replicas(ParamGroup& group, Reduction& running);
  void keep_partial(ParamGroup& group, Reduction& running);
  // This rank lacks gradients that others may have: the sums of the flags go to the host behind the last collective.
  void ask_for_flags(const ParamGroup& group, const Reduction& running);
  // The one place where the host waits for the device: until that collective is done, not for what came after it.
  void read_flags(const ParamGroup& group, Reduction& running);

  DeviceContext& context_;
  ReduceMemory& memory_;
  HostShards& host_shards_;
  std::vector<at::Tensor> foreign_sums_;  // of this backward, added to gradients that are not ours
  std::vector<PerGroup> groups_;
};

}  // namespace fsdp2x
