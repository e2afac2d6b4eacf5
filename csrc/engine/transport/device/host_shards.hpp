// Shards and gradients of the device transport that lie in host memory.
//
//   host       optimizer | enqueue .............................................. wait done | .grad | optimizer
//   copy_in                wait free | shard pool -> device | cast own rows | ..
//   reduce                                                     .. reduce-scatter |
//   copy_out                                                                       rows -> host | done
//
// One copy per group each way, of its whole pool: to the device before each gather, or, where the device keeps it
// (Offload::gradients), before the first one of a forward. Rows come in the dtype of the reduction: they are cast,
// divided and accumulated by the host's kernels, unless they are the gradient pool as they are. The host takes them two
// units later (the number of reduction buffers), while the device goes on, or when backward ends; that is where users'
// hooks run.
#pragma once

#include <memory>
#include <vector>

#include "engine/params/param_group.hpp"
#include "engine/transport/device/device_context.hpp"

namespace fsdp2x {

class HostShards {
 public:
  explicit HostShards(DeviceContext& context);

  void register_group(ParamGroup& group);
  // Whether some group offloads.
  bool exist() const { return exist_; }
  void set_keeps(bool keeps) { uploads_->set_keeps(keeps); }
  void release_idle();
  const DeviceBuffers& residents() const { return *residents_; }

  // The device's copy of a pool, for one gather.
  struct Upload {
    DeviceBuffer* buffer = nullptr;  // null: the pool is the device's
    bool is_current = false;         // holds the shards already
    bool stays_current = false;      // for the next gather
    bool is_new = false;
  };
  Upload open(ParamGroup& group, bool pools_stand_still);
  void upload(ParamGroup& group, const Upload& target, Lane lane);
  // The compute lane is behind the gather.
  void close(const ParamGroup& group);
  // The user may write to the shards next.
  void may_change();

  // Reduced rows that are complete on `lane` begin to go to the host.
  std::unique_ptr<ReducedRows> download(const Gil& gil, ParamGroup& group, const at::Tensor& rows,
                                        const SegmentPlan& plan, std::vector<uint8_t> has_gradient, double divisor,
                                        Lane lane);

 private:
  struct PerGroup {
    int upload = -1;                   // in uploads_, of the running gather
    int resident = -1;                 // in residents_, once it was uploaded
    bool resident_is_current = false;  // nobody may have written to the shards since
    std::unique_ptr<DeviceEvent> downloaded;
  };

  DeviceContext& context_;
  std::unique_ptr<DeviceBuffers> uploads_;    // shard pools that lie on the host
  std::unique_ptr<DeviceBuffers> residents_;  // likewise, kept by their groups
  bool exist_ = false;
  std::vector<PerGroup> groups_;
};

}  // namespace fsdp2x
