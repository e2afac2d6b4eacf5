// The transport on an accelerator: packing.
//
// Gradients die on the compute lane, where they were born: they are packed there, so the allocator needs no record of
// other streams. A reduction buffer is given back when the next one is on its way. One rank alone packs into its
// gradient pool, where nothing else is to be done with them.
//
// Gradients that are not packed are read on the reduce lane where autograd made them. They are held until the compute
// lane has waited for their reduction, so that their memory goes back in its order, too.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "core/error.hpp"
#include "engine/memory/device_copy.hpp"
#include "engine/params/param_group.hpp"
#include "engine/schedule/root.hpp"
#include "engine/transport/device/device_transport.hpp"

namespace fsdp2x {

bool DeviceTransport::is_alone(const ParamGroup& group) { return group.layout.world() == 1 && !group.has_replicas(); }

void DeviceTransport::pack(ParamGroup& group, size_t i, const at::Tensor& gradient) {
  Scratch& scratch = group.scratch;
  PerGroup& mine = per_group(group);
  if (!scratch.open) open_scratch(group);
  if (!mine.reduce->layout->params()[i].shape.trainable) {
    throw Error(
        "fsdp2x: '" + group.params[i].fqn() +
        "' was unfrozen while its unit holds unreduced gradients; change requires_grad between optimizer steps");
  }
  if (mine.held[i].defined()) pack_held(group, /*for_reduction=*/false);  // the second one is added
  mine.held[i] = gradient;
}

void DeviceTransport::settle(ParamGroup& group) {
  if (group.scratch.open && !group.scratch.posted) pack_held(group, /*for_reduction=*/false);
}

void DeviceTransport::open_scratch(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  mine.reduce = &plan_of(group);
  std::fill(group.scratch.filled.begin(), group.scratch.filled.end(), uint8_t{0});
  group.scratch.open = true;
  ++num_scratches_;
}

SegmentPlan& DeviceTransport::plan_of(ParamGroup& group) {
  // Users read what they reduce, and what they are shown behind it, in one piece; fp16 is divided in place beforehand.
  const bool is_plain = !group.calls.reduce_scatter && !group.calls.all_reduce_hook && !group.offloads();
  const bool packs = !is_plain || group.layout.world() == 1 || group.reduce_type() == DType::f16;
  return per_group(group).plans.of(group, packs ? kPackEverything : pack_gradients_below_bytes_);
}

void DeviceTransport::open_buffer(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  if (mine.buffer >= 0) return;
  const auto world = static_cast<size_t>(group.layout.world());
  // Gradients that are not packed take memory as long as if they were.
  const size_t bytes = mine.reduce->rows_bytes * world;
  retire_reductions(group, reductions_before(group, bytes));
  bool is_new = false;
  mine.buffer = buffers_.acquire(mine.reduce->segment_bytes * world, group.name, &is_new);
  layer_->wait(Lane::compute, *buffers_[mine.buffer].ready);
  if (group.calls.all_reduce_hook) buffers_[mine.buffer].memory.zero_();  // the user sees what lies between the rows
}

size_t DeviceTransport::reductions_before(const ParamGroup& group, size_t bytes) {
  const bool gave_slot_back = group.gather.slot.id < 0 && group.unit->options.unshard_in_backward;
  size_t in_flight = 0;
  for (const InFlight& one : in_flight_) {
    in_flight += buffers_.ledger().bytes_of(one.buffer);
    for (const at::Tensor& gradient : one.gradients) in_flight += gradient.nbytes();
  }
  return window_.before(bytes, in_flight, gave_slot_back ? std::optional(group.layout.slot_bytes()) : std::nullopt);
}

void DeviceTransport::retire_reductions(ParamGroup& group, size_t num) {
  if (in_flight_.size() <= num) return;
  group.root().finish_pending();
  const ProfileRange range(group.unit->ranges.post_backward_rs_wait);
  while (in_flight_.size() > num) {
    InFlight oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    drop_gradients(oldest);
    buffers_.release(oldest.buffer);
    for (const int segment : oldest.segments) segments_.release(segment);
  }
}

void DeviceTransport::retire_segment(int id, uint64_t reduction, Lane lane) {
  layer_->record(*segments_[id].free, lane);
  for (InFlight& one : in_flight_) {
    if (one.number == reduction) return one.segments.push_back(id);
  }
  segments_.release(id);
}

at::Tensor DeviceTransport::pool_to_pack(ParamGroup& group) {
  const PerGroup& mine = per_group(group);
  const bool is_plain = is_alone(group) && !group.calls.reduce_scatter && !group.calls.all_reduce_hook;
  const bool is_whole = group.averages() || group.divisor() == 1.0;
  // What is in a buffer already came without gradient sync: it is added to there.
  if (!is_plain || !is_whole || group.offloads() || mine.buffer >= 0) return {};
  if (!mine.reduce->is_pool(group.layout)) return {};
  pybind11::gil_scoped_acquire gil;
  const auto pool = group.gradients.take_pool(group.root().blocks);
  if (!pool) return {};
  follow_blocks(Lane::compute);
  return *pool;
}

at::Tensor DeviceTransport::pack_held(ParamGroup& group, bool for_reduction) {
  PerGroup& mine = per_group(group);
  if (!for_reduction) add_to_sums(group);
  const bool has_held = std::any_of(mine.held.begin(), mine.held.end(), [](const auto& g) { return g.defined(); });
  if (!has_held && !for_reduction) return {};
  const at::Tensor pool = for_reduction ? pool_to_pack(group) : at::Tensor();
  if (!pool.defined()) open_buffer(group);
  const at::Tensor buffer = pool.defined() ? pool : buffers_[mine.buffer].memory;
  const Layout& layout = *mine.reduce->packed;
  std::vector<PackItem> items;
  std::vector<at::Tensor> alive;
  for (size_t i = 0; i < mine.held.size(); ++i) {
    uint8_t& filled = group.scratch.filled[i];
    if (!mine.held[i].defined()) {
      if (for_reduction && !filled && layout.params()[i].shape.trainable) items.push_back({.param = i});
      continue;
    }
    at::Tensor dense = std::exchange(mine.held[i], at::Tensor()).contiguous();
    if (engine_dtype(dense.scalar_type()) == DType::byte) dense = dense.to(at::kFloat);
    items.push_back({i, engine_dtype(dense.scalar_type()), dense.const_data_ptr(), dense.nbytes(), filled != 0});
    filled = 1;
    alive.push_back(std::move(dense));
  }
  if (!items.empty() || for_reduction) {
    layer_->pack(*mine.reduce, items, flags_of(group, *mine.reduce->layout), buffer);
  }
  return buffer;
}

void DeviceTransport::add_to_sums(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  for (const size_t i : mine.reduce->direct) {
    if (!mine.held[i].defined()) continue;
    const at::Tensor gradient = std::exchange(mine.held[i], at::Tensor()).reshape(-1);
    group.scratch.filled[i] = 1;
    if (mine.sums.contains(i)) {
      layer_->add(mine.sums.at(i), gradient);
    } else {  // a copy: whoever else has the gradient may write to it behind this backward
      mine.sums.emplace(i, gradient.to(torch_dtype(group.reduce_type()), /*non_blocking=*/false, /*copy=*/true));
    }
  }
}

std::vector<at::Tensor> DeviceTransport::take_direct(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  const at::ScalarType type = torch_dtype(group.reduce_type());
  std::vector<at::Tensor> taken;
  std::vector<MemoryRange> ranges;
  for (const size_t i : mine.reduce->direct) {
    if (mine.sums.contains(i)) {
      add_to_sums(group);
      taken.push_back(std::move(mine.sums.extract(i).mapped()));
    } else if (mine.held[i].defined()) {
      taken.push_back(std::exchange(mine.held[i], at::Tensor()).contiguous().view(-1).to(type));
      group.scratch.filled[i] = 1;
    } else {
      const int64_t numel = mine.reduce->layout->params()[i].shape.numel();
      taken.push_back(at::zeros({numel}, at::TensorOptions().dtype(type).device(layer_->device())));
    }
    ranges.push_back({taken.back().const_data_ptr(), taken.back().nbytes()});
  }
  // Of memory that autograd has taken, in the order of this stream, the past was judged when it was given back.
  if (layer_->is_recorder() && !taken.empty()) layer_->note("take", "gradients", {}, ranges);
  return taken;
}

void DeviceTransport::drop_gradients(InFlight& reduction) {
  if (reduction.gradients.empty()) return;
  // The current stream may be another one by now.
  std::optional<StreamScope> home;
  if (reduction.home && reduction.home != layer_->current_stream()) home.emplace(*layer_, *reduction.home);
  layer_->wait(Lane::compute, *buffers_[reduction.buffer].ready);
  if (layer_->is_recorder()) {
    std::vector<MemoryRange> ranges;
    for (const at::Tensor& one : reduction.gradients) ranges.push_back({one.const_data_ptr(), one.nbytes()});
    layer_->note("give_back", "gradients", {}, ranges);
  }
  reduction.gradients.clear();
}

std::vector<uint8_t> DeviceTransport::flags_of(const ParamGroup& group, const Layout& plan) {
  std::vector<uint8_t> flags = group.scratch.filled;
  for (size_t i = 0; i < flags.size(); ++i) {
    if (plan.params()[i].shape.trainable && group.options().reduce_unused_params) flags[i] = 1;
  }
  return flags;
}

}  // namespace fsdp2x
