// Packing of the device transport.
#include "engine/transport/device/device_packing.hpp"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "engine/memory/device_copy.hpp"
#include "engine/memory/storage.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

DevicePacking::DevicePacking(DeviceContext& context, ReduceMemory& memory, PieceSizes pieces)
    : context_(context), memory_(memory), pieces_(context.layer().has_kernels() ? pieces : kOnePiece) {}

void DevicePacking::register_group(const ParamGroup& group) {
  PerGroup& state = groups_.emplace_back();
  state.plans = SegmentPlans(pieces_);
  state.held.resize(group.params().size());
  state.filled.assign(group.params().size(), 0);
}

SegmentPlan& DevicePacking::plan_of(const ParamGroup& group) { return per_group(group).plans.of(group); }

void DevicePacking::open(const ParamGroup& group) {
  PerGroup& state = per_group(group);
  if (state.plan != nullptr) return;
  state.plan = &plan_of(group);
  std::fill(state.filled.begin(), state.filled.end(), uint8_t{0});
  ++num_open_;
}

void DevicePacking::close(PerGroup& state) {
  std::fill(state.held.begin(), state.held.end(), at::Tensor());
  state.buffer.reset();
  state.plan = nullptr;
  --num_open_;
}

bool DevicePacking::needs_room(const ParamGroup& group, std::optional<size_t> param) {
  const PerGroup& state = per_group(group);
  if (state.buffer) return false;
  if (param && !state.held[*param].defined()) return false;  // held, but not this parameter
  return memory_.needs_room(group, held_bytes(group));
}

void DevicePacking::make_room(const ParamGroup& group) { memory_.make_room(group, held_bytes(group)); }

size_t DevicePacking::held_bytes(const ParamGroup& group) {
  const PerGroup& state = per_group(group);
  const SegmentPlan& plan = state.plan != nullptr ? *state.plan : plan_of(group);
  const bool in_pieces = packs_pieces(group, plan);
  return plan.buffer_bytes(in_pieces) + (in_pieces ? plan.gradient_bytes : 0);
}

bool DevicePacking::packs_pieces(const ParamGroup& group, const SegmentPlan& plan) {
  const bool is_plain = !group.calls().reduce_scatter && !group.calls().all_reduce_hook && !context_.keeps() &&
                        group.options().wire_gradients == WireFormat::plain;
  // A buffer that is already open holds gradients from backwards without gradient sync.
  return is_plain && plan.pieces.size() > 1 && !per_group(group).buffer;
}

void DevicePacking::pack_into_segment(ParamGroup& group, size_t i, const at::Tensor& gradient) {
  open(group);
  PerGroup& state = per_group(group);
  if (!state.plan->layout->params()[i].shape.trainable) throw_unfrozen(group, i);
  if (state.held[i].defined()) pack_held(group, /*for_reduction=*/false);  // the second one is added
  state.held[i] = gradient;
}

void DevicePacking::pack_pending(ParamGroup& group) {
  if (per_group(group).plan != nullptr) pack_held(group, /*for_reduction=*/false);
}

std::vector<at::Tensor> DevicePacking::take_whole(ParamGroup& group) {
  pack_pending(group);
  PerGroup& state = per_group(group);
  std::vector<at::Tensor> taken(state.filled.size());
  if (state.plan == nullptr) return taken;
  const at::Tensor& packed = memory_.buffer(*state.buffer).memory;
  for (size_t i = 0; i < taken.size(); ++i) {
    if (state.filled[i]) {
      taken[i] = state.plan->unpacked(i, group.reduce_type(), packed.const_data_ptr(), packed.device());
    }
  }
  drop(group);
  return taken;
}

DevicePacking::Packed DevicePacking::take(ParamGroup& group) {
  open(group);
  PerGroup& state = per_group(group);
  Packed packed;
  packed.plan = state.plan;
  if (packs_pieces(group, *state.plan)) {
    state.buffer = memory_.take_buffer(group, state.plan->buffer_bytes(/*in_pieces=*/true));
    DeviceBuffer& buffer = memory_.buffer(*state.buffer);
    packed.items = take_held(state, /*for_reduction=*/true, buffer.tenants);
    packed.memory = buffer.memory;
  } else {
    packed.memory = pack_held(group, /*for_reduction=*/true);
  }
  packed.buffer = state.buffer;
  packed.filled = state.filled;
  packed.has_gradient = flags_of(group);
  for (size_t i = 0; i < packed.has_gradient.size(); ++i) {
    if (state.plan->layout->params()[i].shape.trainable && !packed.has_gradient[i]) packed.is_certain = is_alone(group);
  }
  close(state);
  return packed;
}

bool DevicePacking::drop(const ParamGroup& group) {
  PerGroup& state = per_group(group);
  if (state.plan == nullptr) return false;
  if (state.buffer) memory_.give_back_buffer(*state.buffer);
  close(state);
  return true;
}

void DevicePacking::open_buffer(const ParamGroup& group) {
  PerGroup& state = per_group(group);
  if (state.buffer) return;
  state.buffer = memory_.take_buffer(group, state.plan->buffer_bytes(/*in_pieces=*/false));
  // The user's hook sees the bytes between the rows.
  if (group.calls().all_reduce_hook) memory_.buffer(*state.buffer).memory.zero_();
}

at::Tensor DevicePacking::pool_to_pack(ParamGroup& group) {
  const PerGroup& state = per_group(group);
  const bool is_plain = is_alone(group) && !group.calls().reduce_scatter && !group.calls().all_reduce_hook;
  const bool is_whole = group.averages() || group.divisor() == 1.0;
  // A buffer that is already open holds gradients from backwards without gradient sync, so add to it there.
  if (!is_plain || !is_whole || group.offloads() || state.buffer) return {};
  if (!state.plan->layout->can_reduce_in_place()) return {};
  pybind11::gil_scoped_acquire gil;
  const auto pool = group.gradients().take_pool(gil, state.plan->layout);
  if (!pool) return {};
  context_.follow_blocks(Lane::compute);
  return *pool;
}

at::Tensor DevicePacking::pack_held(ParamGroup& group, bool for_reduction) {
  PerGroup& state = per_group(group);
  const bool has_held = std::any_of(state.held.begin(), state.held.end(), [](const auto& g) { return g.defined(); });
  if (!has_held && !for_reduction) return {};
  const at::Tensor pool = for_reduction ? pool_to_pack(group) : at::Tensor();
  if (!pool.defined()) open_buffer(group);
  const at::Tensor target = pool.defined() ? pool : memory_.buffer(*state.buffer).memory;
  std::vector<at::Tensor> gradients;
  const std::vector<PackItem> items = take_held(state, for_reduction, gradients);
  if (!items.empty() || for_reduction) {
    context_.layer().launch_pack(*state.plan, state.plan->whole(), items, flags_of(group), target);
  }
  return target;
}

std::vector<PackItem> DevicePacking::take_held(PerGroup& state, bool for_reduction,
                                               std::vector<at::Tensor>& gradients) {
  std::vector<PackItem> items;
  for (size_t i = 0; i < state.held.size(); ++i) {
    uint8_t& filled = state.filled[i];
    if (!state.held[i].defined()) {
      const bool is_trainable = state.plan->layout->params()[i].shape.trainable;
      if (for_reduction && !filled && is_trainable) items.push_back({.param = i});
      continue;
    }
    at::Tensor dense = std::exchange(state.held[i], at::Tensor()).contiguous();
    if (engine_dtype(dense.scalar_type()) == DType::byte) dense = dense.to(at::kFloat);
    items.push_back({i, engine_dtype(dense.scalar_type()), dense.const_data_ptr(), dense.nbytes(), filled != 0});
    filled = 1;
    gradients.push_back(std::move(dense));
  }
  return items;
}

std::vector<uint8_t> DevicePacking::flags_of(const ParamGroup& group) {
  const PerGroup& state = per_group(group);
  std::vector<uint8_t> flags = state.filled;
  for (size_t i = 0; i < flags.size(); ++i) {
    const bool is_trainable = state.plan->layout->params()[i].shape.trainable;
    if (is_trainable && group.options().reduce_unused_params) flags[i] = 1;
  }
  return flags;
}

}  // namespace fsdp2x
