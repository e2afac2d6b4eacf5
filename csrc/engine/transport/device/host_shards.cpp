// Uploads shards to the device and downloads reduced rows to the host.
#include "engine/transport/device/host_shards.hpp"

#include <algorithm>
#include <utility>

namespace fsdp2x {

namespace {

// Reduced rows on their way to the host.
class HostRows final : public ReducedRows {
 public:
  HostRows(DeviceLayer& layer, ParamGroup& group, DeviceEvent& downloaded, std::shared_ptr<const Layout> layout,
           std::vector<uint8_t> has_gradient, double divisor)
      : layer_(layer),
        group_(group),
        downloaded_(downloaded),
        layout_(std::move(layout)),
        has_gradient_(std::move(has_gradient)),
        divisor_(divisor) {}
  ~HostRows() override {
    if (!memory.defined()) return;
    layer_.synchronize(downloaded_);  // its memory is used again
    give_back();
  }
  std::vector<uint8_t> has_gradient() override { return has_gradient_; }
  void run_hook(const Gil&, const PyRef&) override {}  // it has already run, on the device
  void write(const GradientTargets& targets) override;

  at::Tensor memory;     // CPU memory
  bool in_pool = false;  // `memory` is the gradient pool

 private:
  void give_back() {
    if (!in_pool) group_.gradients().give_back(memory);
    memory = at::Tensor();
  }

  DeviceLayer& layer_;
  ParamGroup& group_;
  DeviceEvent& downloaded_;
  std::shared_ptr<const Layout> layout_;
  std::vector<uint8_t> has_gradient_;
  double divisor_;  // what remains to divide by
};

void HostRows::write(const GradientTargets& targets) {
  layer_.synchronize(downloaded_);
  layer_.write_host_rows(*layout_, memory, targets, divisor_);
  give_back();
}

}  // namespace

HostShards::HostShards(DeviceContext& context)
    : context_(context),
      uploads_(context.make_buffers("uploaded shards")),
      residents_(context.make_buffers("resident shards", /*tallied=*/false)) {}

void HostShards::register_group(ParamGroup& group) {
  PerGroup& state = groups_.emplace_back();
  if (group.offloads()) state.downloaded = context_.layer().make_event(group.name() + ".downloaded");
  exist_ = exist_ || group.offloads();
}

void HostShards::release_idle() {
  may_change();
  for (PerGroup& state : groups_) {
    if (state.resident >= 0) residents_->release(std::exchange(state.resident, -1));
  }
}

HostShards::Upload HostShards::open(ParamGroup& group, bool pools_stand_still) {
  PerGroup& state = groups_[group.index()];
  Upload target;
  if (!group.offloads() || group.pool().nbytes() == 0) return target;
  if (group.offload() == Offload::everything) {
    state.upload = uploads_->acquire(group.pool().nbytes(), group.name(), &target.is_new);
    target.buffer = &(*uploads_)[state.upload];
    return target;
  }
  if (state.resident < 0) state.resident = residents_->acquire(group.pool().nbytes(), group.name(), &target.is_new);
  target.buffer = &(*residents_)[state.resident];
  target.is_current = state.resident_is_current && pools_stand_still;
  target.stays_current = pools_stand_still;
  return target;
}

void HostShards::upload(ParamGroup& group, const Upload& target, Lane lane) {
  DeviceLayer& layer = context_.layer();
  DeviceBuffer& buffer = *target.buffer;
  if (target.is_current) {
    layer.wait(lane, *buffer.ready);
    return;
  }
  layer.wait(lane, *buffer.free);
  {
    const LaneScope scope(layer, lane);
    layer.transfer(buffer.memory.narrow(0, 0, group.pool().numel()), group.pool());
  }
  layer.record(*buffer.ready, lane);
  groups_[group.index()].resident_is_current = target.stays_current;
  // A wait for copy_in must cover all uploads.
  if (lane != Lane::copy_in) layer.wait(Lane::copy_in, *buffer.ready);
}

void HostShards::close(const ParamGroup& group) {
  PerGroup& state = groups_[group.index()];
  if (state.upload >= 0) uploads_->release(std::exchange(state.upload, -1), /*has_waited=*/true);
}

void HostShards::may_change() {
  for (PerGroup& state : groups_) state.resident_is_current = false;
}

std::unique_ptr<ReducedRows> HostShards::download(const Gil& gil, ParamGroup& group, const at::Tensor& rows,
                                                  const SegmentPlan& plan, std::vector<uint8_t> has_gradient,
                                                  double divisor, Lane lane) {
  DeviceLayer& layer = context_.layer();
  DeviceEvent& downloaded = *groups_[group.index()].downloaded;
  Gradients& gradients = group.gradients();
  const bool all = std::all_of(has_gradient.begin(), has_gradient.end(), [](uint8_t flag) { return flag != 0; });
  auto result = std::make_unique<HostRows>(layer, group, downloaded, plan.layout, std::move(has_gradient), divisor);
  const size_t bytes = plan.layout->reduce_segment_bytes();
  const size_t num_allocations = gradients.num_allocations();
  at::Tensor memory;
  if (all && divisor == 1.0 && plan.layout->can_reduce_in_place()) {
    if (const auto pool = gradients.take_pool(gil, plan.layout)) {
      memory = *pool;
      result->in_pool = true;
    }
  }
  if (!memory.defined()) memory = gradients.take_block(std::max<size_t>(bytes, 1));
  if (gradients.num_allocations() != num_allocations) context_.follow_compute(Lane::copy_out);
  context_.follow(Lane::copy_out, lane);
  if (bytes > 0) {
    const LaneScope scope(layer, Lane::copy_out);
    const auto numel = static_cast<int64_t>(bytes);
    layer.transfer(memory.narrow(0, 0, numel), rows.narrow(0, 0, numel));
  }
  layer.record(downloaded, Lane::copy_out);
  result->memory = std::move(memory);
  return result;
}

}  // namespace fsdp2x
