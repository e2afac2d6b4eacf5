// The transport on an accelerator: gathers and reductions on separate lanes next to the compute lane, ordered by
// events. The host only waits for the device if it must `check` a collective. Collectives are issued through
// torch.distributed in the order of the current lane. So libnccl is not linked, and patches, counters, and custom
// groups see them.
//
// Each call is handled by one part that can be read alone: see the README.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/transport/device/device_context.hpp"
#include "engine/transport/device/device_gathers.hpp"
#include "engine/transport/device/device_packing.hpp"
#include "engine/transport/device/device_reductions.hpp"
#include "engine/transport/device/host_shards.hpp"
#include "engine/transport/device/reduce_memory.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

class DeviceTransport final : public Transport {
 public:
  // Smaller parameters are gathered packed: all of them with kPackEverything. `pieces`: sizes of reductions.
  DeviceTransport(DeviceCollectives collectives, std::shared_ptr<DeviceLayer> layer, size_t pack_below_bytes,
                  PieceSizes pieces);
  ~DeviceTransport() override;

  const char* name() const override { return "device"; }
  bool has_streams() const override { return true; }
  void register_group(const std::shared_ptr<ParamGroup>& group) override;
  void begin_forward(const PyRef& after) override;
  void end_forward() override;
  void end_backward() override;

  void begin_gather(ParamGroup& group, bool pools_stand_still) override {
    const HomeScope home(context_);
    gathers_.begin(group, pools_stand_still);
  }
  void finish_gather(ParamGroup& group) override {
    const HomeScope home(context_);
    gathers_.finish(group);
  }
  void settle_gather(ParamGroup& group) override {
    const HomeScope home(context_);
    gathers_.settle(group);
  }
  void release_gather(ParamGroup& group) override {
    const HomeScope home(context_);
    gathers_.release(group);
  }
  void write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) override {
    gathers_.write_pool(group, rows, slot);
  }

  bool needs_room(const ParamGroup& group, std::optional<size_t> param) override;
  void make_room(ParamGroup& group) override;
  void pack_into_segment(ParamGroup& group, size_t param, const at::Tensor& gradient) override {
    packing_.pack_into_segment(group, param, gradient);
  }
  void pack_pending(ParamGroup& group) override { packing_.pack_pending(group); }
  std::vector<at::Tensor> take_packed(ParamGroup& group) override { return packing_.take_whole(group); }
  void begin_reduce(ParamGroup& group, ForwardCounts) override { reductions_.begin(group, packing_.take(group)); }
  bool needs_empty_reduction(const ParamGroup& group) const override;
  Finished finish_reduce(ParamGroup& group, bool flush) override;
  std::shared_ptr<const Layout> segment_layout(ParamGroup& group) override { return packing_.plan_of(group).layout; }
  bool abandon_reduce(ParamGroup& group) override;
  std::unique_ptr<SegmentRows> partial(ParamGroup& group) override { return reductions_.partial(group); }
  void drop_partial(ParamGroup& group) override { reductions_.drop_partial(group); }

  void set_max_reduce_buffers(size_t num) override { memory_.set_max_buffers(num); }
  size_t max_reduce_buffers() const override { return memory_.max_buffers(); }
  void release_idle() override;
  bool frees_gradients(const ParamGroup& group) override;
  void publish_progress(uint64_t) override {}
  TransportStats stats() const override;
  std::vector<Loan> loans() const override;

 private:
  DeviceContext context_;
  ReduceMemory memory_;
  HostShards host_shards_;
  DeviceGathers gathers_;
  DevicePacking packing_;
  DeviceReductions reductions_;
  std::vector<std::weak_ptr<ParamGroup>> groups_;
};

}  // namespace fsdp2x
