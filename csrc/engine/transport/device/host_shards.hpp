// Shards and gradients of the device transport in CPU memory.
//
//   host       optimizer | enqueue .............................................. wait done | .grad | optimizer
//   copy_in                wait free | shard pool -> device | cast own rows | ..
//   reduce                                                     .. reduce-scatter |
//   copy_out                                                                       rows -> host | done
//
// Each group has one copy each way, of its complete pool. It goes to the device before each gather, or, if the device
// keeps it (Offload::gradients), before the first gather of a forward. Rows arrive in the reduce dtype. CPU kernels
// cast, divide, and accumulate them, unless they already are the gradient pool. The host takes them two units later
// (the number of reduction buffers), while the device continues, or when backward ends. User hooks run at that point.
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
  // Returns whether a group offloads.
  bool exist() const { return exist_; }
  void set_keeps(bool keeps) { uploads_->set_keeps(keeps); }
  void release_idle();
  const DeviceBuffers& residents() const { return *residents_; }

  // The device's copy of a pool, for one gather.
  struct Upload {
    DeviceBuffer* buffer = nullptr;  // null: the pool is on the device
    bool is_current = false;         // already holds the shards
    bool stays_current = false;      // valid for the next gather
    bool is_new = false;
  };
  Upload open(ParamGroup& group, bool pools_stand_still);
  void upload(ParamGroup& group, const Upload& target, Lane lane);
  // Call it after the compute lane has waited for the gather.
  void close(const ParamGroup& group);
  // Notes that the user may write to the shards next.
  void may_change();

  // Starts to copy reduced rows, complete on `lane`, to the host.
  std::unique_ptr<ReducedRows> download(const Gil& gil, ParamGroup& group, const at::Tensor& rows,
                                        const SegmentPlan& plan, std::vector<uint8_t> has_gradient, double divisor,
                                        Lane lane);

 private:
  struct PerGroup {
    int upload = -1;                   // in uploads_, for the running gather
    int resident = -1;                 // in residents_, after the first upload
    bool resident_is_current = false;  // no write to the shards is possible since
    std::unique_ptr<DeviceEvent> downloaded;
  };

  DeviceContext& context_;
  std::unique_ptr<DeviceBuffers> uploads_;    // copies of shard pools in CPU memory
  std::unique_ptr<DeviceBuffers> residents_;  // likewise, kept by their groups
  bool exist_ = false;
  std::vector<PerGroup> groups_;
};

}  // namespace fsdp2x
