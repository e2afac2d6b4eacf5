// The transport on an accelerator: shards and gradients that lie in host memory.
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
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "engine/memory/device_copy.hpp"
#include "engine/params/param_group.hpp"
#include "engine/schedule/root.hpp"
#include "engine/transport/device/device_transport.hpp"

namespace fsdp2x {

DeviceTransport::Upload DeviceTransport::open_upload(ParamGroup& group, bool pools_stand_still) {
  PerGroup& mine = per_group(group);
  Upload target;
  if (!group.offloads() || group.pool.nbytes() == 0) return target;
  if (group.offload == Offload::everything) {
    mine.upload = uploads_.acquire(group.pool.nbytes(), group.name, &target.is_new);
    target.buffer = &uploads_[mine.upload];
    return target;
  }
  if (mine.resident < 0) mine.resident = residents_.acquire(group.pool.nbytes(), group.name, &target.is_new);
  target.buffer = &residents_[mine.resident];
  target.is_current = mine.resident_is_current && pools_stand_still;
  target.stays_current = pools_stand_still;
  return target;
}

void DeviceTransport::upload(ParamGroup& group, const Upload& target, Lane lane) {
  DeviceBuffer& buffer = *target.buffer;
  if (target.is_current) {
    layer_->wait(lane, *buffer.ready);
    return;
  }
  layer_->wait(lane, *buffer.free);
  {
    const LaneScope scope(*layer_, lane);
    layer_->transfer(buffer.memory.narrow(0, 0, group.pool.numel()), group.pool);
  }
  layer_->record(*buffer.ready, lane);
  per_group(group).resident_is_current = target.stays_current;
  // Who waits for copy_in waits for all uploads.
  if (lane != Lane::copy_in) layer_->wait(Lane::copy_in, *buffer.ready);
}

void DeviceTransport::shards_may_change() {
  for (auto& [index, mine] : groups_) mine.resident_is_current = false;
}

void DeviceTransport::host_waits_for(Lane lane) {
  DeviceEvent& event = *lane_events_[static_cast<size_t>(lane)];
  layer_->record(event, lane);
  layer_->synchronize(event);
}

void DeviceTransport::end_forward() {
  if (offloads_) host_waits_for(Lane::copy_in);
}

void DeviceTransport::download(ParamGroup& group, Running& running, std::vector<uint8_t> wanted) {
  if (per_group(group).download) land(group);  // of gradients that came in two parts
  if (downloads_.size() >= window_.max_buffers()) land(*downloads_.front().second);
  PerGroup& mine = per_group(group);
  const SegmentPlan& plan = *running.plan;
  Download download;
  download.plan = plan.layout;
  download.wanted = std::move(wanted);
  download.divisor = running.divisor;
  const size_t bytes = plan.layout->reduce_segment_bytes();
  BlockPool& blocks = group.root().blocks;
  const size_t num_allocations = blocks.num_allocations();
  const bool all = std::all_of(download.wanted.begin(), download.wanted.end(), [](uint8_t one) { return one != 0; });
  if (all && running.divisor == 1.0 && plan.is_pool(group.layout)) {
    if (const auto pool = group.gradients.take_pool(blocks)) {
      download.memory = *pool;
      download.in_pool = true;
    }
  }
  if (!download.in_pool) {
    download.memory = blocks.take(std::max<size_t>(bytes, 1), group.gradients.memory());
  }
  if (blocks.num_allocations() != num_allocations) follow_compute(Lane::copy_out);
  follow(Lane::copy_out, running.lane);
  if (bytes > 0) {
    const LaneScope scope(*layer_, Lane::copy_out);
    const auto numel = static_cast<int64_t>(bytes);
    layer_->transfer(download.memory.narrow(0, 0, numel), running.rows.narrow(0, 0, numel));
  }
  layer_->record(*mine.downloaded, Lane::copy_out);
  if (running.segment >= 0) {
    retire_segment(std::exchange(running.segment, -1), running.number, Lane::copy_out);
  }
  if (running.buffer >= 0) layer_->record(*buffers_[running.buffer].ready, Lane::copy_out);
  mine.download = std::move(download);
  downloads_.emplace_back(group.unit->shared_from_this(), &group);
}

void DeviceTransport::land(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  const Download download = *std::exchange(mine.download, std::nullopt);
  std::erase_if(downloads_, [&group](const auto& one) { return one.second == &group; });
  layer_->synchronize(*mine.downloaded);
  const Layout& plan = *download.plan;
  const DType type = group.reduce_type();
  pybind11::gil_scoped_acquire gil;
  std::vector<GradientTarget> targets(group.params.size());
  std::vector<MemoryRange> written;
  bool is_new = false;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!download.wanted[i]) continue;
    const ParamPlace& place = plan.params()[i];
    targets[i] = group.gradients.prepare(i, group.root().blocks);
    is_new = is_new || targets[i].is_new;
    const auto* rows = static_cast<const std::byte*>(download.memory.const_data_ptr()) + place.reduce_segment_offset;
    if (rows == targets[i].data || place.shard_numel == 0) continue;
    scale_into(at::kCPU, place.shape.orig, targets[i].data, type, rows, place.shard_numel, download.divisor,
               targets[i].accumulate);
    written.push_back({targets[i].data, static_cast<size_t>(place.shard_numel) * dtype_bytes(place.shape.orig)});
  }
  if (layer_->is_recorder()) {
    // A recorder's device is the CPU, where new memory of the host may just have been a gradient of the device.
    if (is_new) written.clear();
    const LaneScope scope(*layer_, Lane::host);
    layer_->note(download.in_pool ? "land in place" : "land by copy", group.name,
                 {{download.memory.const_data_ptr(), download.memory.nbytes()}}, written);
  }
  if (!download.in_pool) group.root().blocks.give_back(download.memory, group.gradients.memory());
  for (size_t i = 0; i < targets.size(); ++i) {
    if (download.wanted[i]) group.attach(i, targets[i]);
  }
  group.gradients.release_if_unused(group.root().blocks);
}

bool DeviceTransport::drop_download(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  if (group.offloads()) host_waits_for(Lane::copy_in);  // the user may write to the shards next
  if (!mine.download) return false;
  layer_->synchronize(*mine.downloaded);  // its memory is used again
  if (!mine.download->in_pool) group.root().blocks.give_back(mine.download->memory, group.gradients.memory());
  mine.download.reset();
  std::erase_if(downloads_, [&group](const auto& one) { return one.second == &group; });
  return true;
}

}  // namespace fsdp2x
