// Reductions of the device transport: the collectives over shards and replicas, and their result rows.
//
//   compute     .. backward | wait buffer.free | pack, zero gaps | packed ........................ wait done
//   reduce                                        wait packed | reduce-scatter | buffer.free | rows -> .grad | done
//     where a gradient is missing                 wait packed | reduce-scatter | flags -> host | ..
//     in a wire format                            wait packed | encode | all-to-all | sum | ..
//   all_reduce  (replicas, hooks)                                    wait reduced | all-reduce | rows -> .grad | done
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/params/param_group.hpp"
#include "engine/transport/device/device_packing.hpp"
#include "engine/transport/device/host_shards.hpp"
#include "engine/transport/device/reduce_memory.hpp"
#include "engine/transport/wire_gradients.hpp"

namespace fsdp2x {

class DeviceReductions {
 public:
  DeviceReductions(DeviceContext& context, ReduceMemory& memory, HostShards& host_shards);

  void register_group() { groups_.emplace_back(); }
  // Enqueues the reduction of packed gradients.
  void begin(ParamGroup& group, DevicePacking::Packed packed);
  // Returns the rows of the enqueued reduction. Null: they wait for an all-reduce.
  std::unique_ptr<ReducedRows> finish(ParamGroup& group);
  // Drops the enqueued reduction.
  void drop(const ParamGroup& group);
  bool has_partial(const ParamGroup& group) const { return groups_[group.index()].partial.has_value(); }
  std::unique_ptr<SegmentRows> partial(const ParamGroup& group);
  void drop_partial(const ParamGroup& group);
  // Orders the compute lane after all reductions, and gives their memory back if all rows are written.
  void end();
  // Frees what wire formats keep between steps.
  void release_idle();
  size_t wire_bytes() const;

 private:
  friend class DeviceRows;
  // A reduction that is enqueued and not written.
  struct Reduction {
    at::Tensor rows;                   // this rank's segment, undefined: kept as a partial sum
    std::optional<SegmentId> segment;  // of `rows`, none: they are in `buffer` or the group's gradient pool
    std::optional<BufferId> buffer;    // of a single rank, whose packed gradients are its rows
    std::optional<SegmentId> codes;    // sent and received segments in a wire format
    uint64_t number = 0;               // in ReduceMemory, 0: none on its way
    SegmentPlan* plan = nullptr;
    Lane lane = Lane::reduce;
    double divisor = 1.0;               // what remains to divide by
    std::vector<uint8_t> has_gradient;  // by parameter, replaced by the flags unless `is_certain`
    bool is_certain = true;             // no other rank can have a gradient that this one lacks, so flags are not read
  };
  struct PerGroup {
    Reduction running;
    std::optional<BufferId> unsent;    // a buffer that no collective reads yet
    std::optional<SegmentId> partial;  // reduced over the shards, waits for the all-reduce
    std::shared_ptr<const Layout> partial_plan;
    std::unique_ptr<WireGradients> wire;  // while gradients travel in a wire format
    at::Tensor flags;                     // sums of all ranks' flags in CPU memory, once requested
    std::unique_ptr<DeviceEvent> flags_there;
  };
  PerGroup& per_group(const ParamGroup& group) { return groups_[group.index()]; }
  // The steps of begin(): the rows and codes that the reduction writes, the collective over the shards, and the work
  // that follows it.
  void take_memory(ParamGroup& group, const DevicePacking::Packed& packed, Reduction& running);
  void reduce_over_shards(ParamGroup& group, const DevicePacking::Packed& packed, const Reduction& running);
  // Packs each piece and reduces it, on the lane of the reduction.
  void reduce_pieces(ParamGroup& group, const DevicePacking::Packed& packed, const Reduction& running);
  // fp16 is divided before the sum, too.
  void divide_before(const ParamGroup& group, const at::Tensor& input);
  void end_collective(ParamGroup& group, Reduction& running);
  // Returns the packed gradients in the reduce dtype.
  static at::Tensor input_of(const ParamGroup& group, const DevicePacking::Packed& packed);
  at::Tensor rows_for(ParamGroup& group, Reduction& running);
  void call_reduce_scatter(ParamGroup& group, const Reduction& running, const Piece& piece, const at::Tensor& input);
  // Null: gradients are sent in the reduce dtype.
  WireGradients* wire_of(ParamGroup& group, const SegmentPlan& plan);
  void reduce_coded(ParamGroup& group, WireGradients& wire, const Reduction& running, const at::Tensor& packed,
                    const std::vector<uint8_t>& filled);
  void reduce_over_replicas(ParamGroup& group, Reduction& running);
  void keep_partial(ParamGroup& group, Reduction& running);
  // Copies the sums of the flags to the host after the last collective, if this rank lacks gradients that others may
  // have.
  void ask_for_flags(const ParamGroup& group, const Reduction& running);
  // Reads the flags. Only here does the host wait for the device: until that collective is done, not for later work.
  void read_flags(const ParamGroup& group, Reduction& running);

  DeviceContext& context_;
  ReduceMemory& memory_;
  HostShards& host_shards_;
  std::vector<at::Tensor> foreign_sums_;  // of this backward, added to gradients in the user's memory
  std::vector<PerGroup> groups_;
};

}  // namespace fsdp2x
