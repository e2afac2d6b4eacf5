// Gathers of the device transport.
#include "engine/transport/device/device_gathers.hpp"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "engine/memory/storage.hpp"
#include "engine/transport/agreement.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

namespace {

PyRef joined(const PyRef& list, const PyRef& other) {
  if (!other) return PyRef::borrow(list.get());
  PyRef both = PyRef::steal(PySequence_Concat(list.get(), other.get()));
  if (!both) throw_python_error();
  return both;
}

PyRef list_of(const std::vector<at::Tensor>& tensors) { return PyRef::steal(pybind11::cast(tensors).release().ptr()); }

}  // namespace

DeviceGathers::DeviceGathers(DeviceContext& context, HostShards& host_shards, size_t pack_below_bytes)
    : context_(context),
      host_shards_(host_shards),
      pack_below_bytes_(context.collectives().all_gather_group ? pack_below_bytes : kPackEverything),
      slots_(context.make_buffers("slot", /*tallied=*/false)),
      staging_(context.make_buffers("staging")) {}

void DeviceGathers::register_group(ParamGroup& group) {
  PerGroup& state = groups_.emplace_back();
  state.plan = Plan(plan_gather(group.layout(), pack_below_bytes_));
  state.own_rows = CopyProgram(group.layout().shard_to_slot());
  state.pool_event = context_.layer().make_event(group.name() + ".pool");
  has_views_ = has_views_ || reads_pool(group);
}

void DeviceGathers::set_keeps(bool keeps) {
  slots_->set_keeps(keeps);
  staging_->set_keeps(keeps);
}

void DeviceGathers::write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) {
  context_.layer().copy(rows, slot, group.pool().data_ptr());
  context_.layer().record(*per_group(group).pool_event, Lane::compute);
}

void DeviceGathers::begin(ParamGroup& group, bool pools_stand_still) {
  PerGroup& state = per_group(group);
  if (reads_pool(group)) {
    // The optimizer writes the pool on the compute lane, where the parameters are read.
    state.viewed = group.pool();
    group.gather().write = group.gather().read = static_cast<std::byte*>(state.viewed.data_ptr());
    return;
  }
  state.is_enqueued = false;
  enqueue(group, pools_stand_still);
  state.is_enqueued = true;
}

DeviceGathers::Plan& DeviceGathers::plan_of(const ParamGroup& group) {
  PerGroup& state = per_group(group);
  const WireFormat format = group.options().wire_weights;
  if (format != state.coded_as) {
    state.coded.reset();
    state.coded_as = format;
    if (format != WireFormat::plain) state.coded.emplace(group.layout(), format);
  }
  if (state.coded && !state.coded->codes_to_slot.empty()) return *state.coded;
  if (!state.in_one_piece || state.plan.direct.empty()) return state.plan;
  if (!state.packed) state.packed.emplace(plan_gather(group.layout(), kPackEverything));
  return *state.packed;
}

void DeviceGathers::enqueue(ParamGroup& group, bool pools_stand_still) {
  PerGroup& state = per_group(group);
  state.in_one_piece = static_cast<bool>(group.calls().all_gather);
  state.is_finished = false;
  Plan& gather = plan_of(group);
  const bool extends = static_cast<bool>(group.calls().prepare_extensions);
  const bool refreshes = static_cast<bool>(group.calls().begin_extension_gather);  // on the compute lane

  if (!group.gathers_alone()) {
    size_t bytes = gather.segment_bytes;
    for (const DirectGather& direct : gather.direct) bytes += direct.chunk_bytes;
    agree_on_shards(group, Operation::all_gather, bytes, DType::byte, Counts::now);
  }
  bool is_new = false;
  bool staging_is_new = false;
  const int kept = group.gather().kept.id;
  const int id =
      kept >= 0 ? kept : slots_->acquire(std::max<size_t>(group.layout().slot_bytes(), 1), group.name(), &is_new);
  DeviceBuffer& slot = (*slots_)[id];
  group.gather().slot.id = id;
  group.gather().write = group.gather().read = slot.data();
  const auto world = static_cast<size_t>(group.layout().world());
  const auto* pool = static_cast<const std::byte*>(group.pool().const_data_ptr());
  const HostShards::Upload uploaded = host_shards_.open(group, pools_stand_still);
  if (uploaded.buffer != nullptr) pool = uploaded.buffer->data();
  DeviceBuffer* staging = nullptr;
  if (!group.gathers_alone() && gather.segment_bytes > 0) {
    state.staging = staging_->acquire(gather.segment_bytes * world, group.name(), &staging_is_new);
    staging = &(*staging_)[state.staging];
  }
  if (is_new || staging_is_new || uploaded.is_new || refreshes || !pools_stand_still) {
    context_.follow_compute(Lane::copy_in);
  }
  context_.layer().wait(Lane::copy_in, *state.pool_event);
  // New memory is ordered by the compute lane.
  if (!is_new) context_.layer().wait(Lane::copy_in, *slot.free);
  if (staging != nullptr && !staging_is_new) context_.layer().wait(Lane::copy_in, *staging->free);
  if (uploaded.buffer != nullptr) host_shards_.upload(group, uploaded, Lane::copy_in);
  {
    const LaneScope scope(context_.layer(), Lane::copy_in);
    if (group.gathers_alone()) {
      context_.layer().copy(state.own_rows, pool, slot.data());
    } else {
      if (!gather.to_slot.empty()) context_.layer().copy(gather.to_slot, pool, slot.data());
      if (staging != nullptr) {
        const size_t own = static_cast<size_t>(group.layout().rank()) * gather.segment_bytes;
        context_.layer().copy(gather.to_segment, pool, staging->data() + own);
        if (!gather.codes_to_segment.empty()) {
          context_.layer().encode(gather.codes_to_segment, pool, staging->data() + own, nullptr, {});
        }
        if (!gather.codes_to_slot.empty()) ++group.counters().wire_encodings;
      }
    }
    if (extends) {
      const pybind11::gil_scoped_acquire gil;
      call(gil, group.calls().prepare_extensions.get());
    }
  }
  context_.layer().record(*slot.ready, Lane::copy_in);
  if (uploaded.buffer != nullptr) {
    context_.layer().record(*uploaded.buffer->free, Lane::copy_in);
    if (!pools_stand_still) context_.host_waits_for(Lane::copy_in);  // the user may write to the shards next
  }
  if (group.gathers_alone() && !extends) return;
  const TensorLists extensions = extends ? gathers_of_extensions(group) : TensorLists();
  if (extends) context_.follow_compute(Lane::gather);  // their outputs were taken just now
  context_.layer().wait(Lane::gather, *slot.ready);
  {
    const LaneScope scope(context_.layer(), Lane::gather);
    call_all_gather(group, gather, slot, staging, extensions);
    if (staging != nullptr) context_.layer().copy(gather.copy_out, staging->data(), slot.data());
    if (!gather.codes_to_slot.empty()) context_.layer().decode(gather.codes_to_slot, staging->data(), slot.data());
  }
  context_.layer().record(*slot.ready, Lane::gather);
  if (staging != nullptr) context_.layer().record(*staging->free, Lane::gather);
}

void DeviceGathers::close(const ParamGroup& group) {
  PerGroup& state = per_group(group);
  if (state.staging >= 0) staging_->release(std::exchange(state.staging, -1), /*has_waited=*/true);
  host_shards_.close(group);
}

DeviceGathers::TensorLists DeviceGathers::make_lists(const ParamGroup& group, const Plan& plan,
                                                     const DeviceBuffer& slot, const DeviceBuffer* staging) {
  const auto world = static_cast<size_t>(group.layout().world());
  const auto rank = static_cast<size_t>(group.layout().rank());
  std::vector<at::Tensor> outputs, inputs;
  const auto add = [&](const at::Tensor& memory, size_t offset, size_t bytes) {
    outputs.push_back(typed(memory, DType::byte, offset, world * bytes));
    inputs.push_back(typed(memory, DType::byte, offset + rank * bytes, bytes));
  };
  for (const DirectGather& direct : plan.direct) add(slot.memory, direct.slot_offset, direct.chunk_bytes);
  if (staging != nullptr) add(staging->memory, 0, plan.segment_bytes);
  return {list_of(outputs), list_of(inputs)};
}

DeviceGathers::TensorLists DeviceGathers::gathers_of_extensions(ParamGroup& group) {
  const pybind11::gil_scoped_acquire gil;
  const PyRef pair = call(gil, group.calls().extension_gathers.get());
  return {PyRef::borrow(PyTuple_GET_ITEM(pair.get(), 0)), PyRef::borrow(PyTuple_GET_ITEM(pair.get(), 1))};
}

void DeviceGathers::call_all_gather(ParamGroup& group, Plan& plan, DeviceBuffer& slot, DeviceBuffer* staging,
                                    const TensorLists& extensions) {
  const PerGroup& state = per_group(group);
  pybind11::gil_scoped_acquire gil;
  const std::pair key(group.gather().slot.id, state.staging);
  TensorLists once;  // not cached: a user's collective may keep its arguments
  if (state.in_one_piece) {
    once = make_lists(group, plan, slot, staging);
  } else if (!plan.lists.contains(key)) {
    plan.lists.emplace(key, make_lists(group, plan, slot, staging));
  }
  const TensorLists& lists = state.in_one_piece ? once : plan.lists.at(key);
  const PyRef outputs = joined(lists.first, extensions.first), inputs = joined(lists.second, extensions.second);
  const Py_ssize_t num = PyList_GET_SIZE(outputs.get());
  const PyRef& grouped = context_.collectives().all_gather_group;
  if (num > 1 && grouped && !state.in_one_piece) {
    call_collective(gil, group, grouped, outputs.get(), inputs.get(), "all-gather");
    return;
  }
  const PyRef& all_gather = state.in_one_piece ? group.calls().all_gather : context_.collectives().all_gather;
  for (Py_ssize_t i = 0; i < num; ++i) {
    call_collective(gil, group, all_gather, PyList_GET_ITEM(outputs.get(), i), PyList_GET_ITEM(inputs.get(), i),
                    "all-gather");
  }
}

void DeviceGathers::finish(ParamGroup& group) {
  if (per_group(group).viewed.defined()) return;
  context_.layer().wait(Lane::compute, *(*slots_)[group.gather().slot.id].ready);
  close(group);
  per_group(group).is_finished = true;
}

void DeviceGathers::settle(ParamGroup& group) {
  PerGroup& state = per_group(group);
  if (!std::exchange(state.is_enqueued, true)) {  // after an exception, enqueued work may still use the memory
    for (const Lane lane : {Lane::copy_in, Lane::gather}) context_.join(lane);
  }
  const int id = group.gather().slot.id;
  if (id < 0 || std::exchange(state.is_finished, true)) return;
  // Unused, but its gather may still read the pool that an optimizer writes next.
  context_.layer().wait(Lane::compute, *(*slots_)[id].ready);
  close(group);
}

void DeviceGathers::release(ParamGroup& group) {
  PerGroup& state = per_group(group);
  if (state.viewed.defined()) {
    group.gather() = GatherSlot();
    state.viewed.reset();
    return;
  }
  settle(group);
  const int id = group.gather().slot.id;
  if (id < 0) return close(group);
  context_.layer().record(*(*slots_)[id].free, Lane::compute);
  group.gather() = GatherSlot();
  if (group.options().keep_unsharded_storage) {
    group.gather().kept.id = id;
  } else {
    slots_->release(id, /*has_waited=*/true);
  }
}

}  // namespace fsdp2x
