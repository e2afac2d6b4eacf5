// The transport on an accelerator: gathers. Reductions are in device_reduce.cpp.
//
//   compute   .. use of slot | free ............................ wait ready | use of slot ..
//   copy_in            wait for the compute lane | cast own rows | copied
//   gather                              wait copied | all-gathers in one launch, copy-out | ready
#include "engine/transport/device/device_transport.hpp"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "core/error.hpp"
#include "engine/params/param_group.hpp"
#include "engine/schedule/root.hpp"

namespace fsdp2x {

namespace {

PyRef bytes_of(const at::Tensor& memory, size_t offset, size_t bytes) {
  return PyRef::steal(THPVariable_Wrap(memory.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(bytes))));
}

void append(const PyRef& list, const PyRef& item) {
  if (PyList_Append(list.get(), item.get()) != 0) throw_python_error();
}

}  // namespace

DeviceTransport::DeviceTransport(DeviceCollectives collectives, std::shared_ptr<DeviceLayer> layer,
                                 size_t pack_below_bytes, size_t pack_gradients_below_bytes)
    : collectives_(std::move(collectives)),
      layer_(std::move(layer)),
      pack_below_bytes_(pack_below_bytes),
      pack_gradients_below_bytes_(pack_gradients_below_bytes),
      slots_(
          "slot", layer_, [this](size_t bytes) { return allocate(bytes); }, keeps(), nullptr),
      staging_(
          "staging", layer_, [this](size_t bytes) { return allocate(bytes); }, keeps(), &tally_),
      buffers_(
          "reduce buffer", layer_, [this](size_t bytes) { return allocate(bytes); }, keeps(), &tally_),
      segments_(
          "segment", layer_, [this](size_t bytes) { return allocate(bytes); }, keeps(), &tally_),
      uploads_(
          "uploaded shards", layer_, [this](size_t bytes) { return allocate(bytes); }, keeps(), &tally_),
      residents_(
          "resident shards", layer_, [this](size_t bytes) { return allocate(bytes); }, keeps(), nullptr) {
  for (size_t lane = 0; lane < kNumLanes; ++lane) {
    lane_events_.push_back(layer_->make_event(lane_name(static_cast<Lane>(lane))));
  }
}

DeviceTransport::~DeviceTransport() {
  // Shard and gradient pools die after us: whoever gets their memory must find the lanes behind him.
  try {
    for (const Lane lane : {Lane::copy_in, Lane::gather, Lane::reduce, Lane::all_reduce, Lane::copy_out}) join(lane);
  } catch (const std::exception&) {
    // The device is gone, and its memory with it.
  }
}

void DeviceTransport::follow(Lane lane, Lane other) {
  DeviceEvent& event = *lane_events_[static_cast<size_t>(other)];
  layer_->record(event, other);
  layer_->wait(lane, event);
}

void DeviceTransport::follow_blocks(Lane lane) {
  for (const Lane other : {Lane::reduce, Lane::all_reduce}) {
    if (other != lane && gave_blocks_[static_cast<size_t>(other)]) follow(lane, other);
  }
}

DeviceTransport::PerGroup& DeviceTransport::per_group(const ParamGroup& group) { return groups_.at(group.index); }

void DeviceTransport::register_group(ParamGroup& group) {
  group.index = static_cast<uint32_t>(groups_.size());
  PerGroup& mine = groups_[group.index];
  if (layer_->is_recorder()) mine.pool = group.pool;
  if (group.unit != nullptr) mine.unit = group.unit->weak_from_this();
  mine.gather = Gather(plan_gather(group.layout, collectives_.all_gather_group ? pack_below_bytes_ : kPackEverything));
  mine.own_rows = CopyProgram(group.layout.shard_to_slot());
  mine.pool_event = layer_->make_event(group.name + ".pool");
  mine.held.resize(group.params.size());
  mine.offload = group.offload;
  if (group.offloads()) mine.downloaded = layer_->make_event(group.name + ".downloaded");
  group.gradients.set_blocks_stay(group.offloads());
  offloads_ = offloads_ || group.offloads();
  // A segment may be the pool itself, with the flags behind it.
  group.gradients.reserve(group.layout.flagged_segment_bytes());
}

at::Tensor DeviceTransport::allocate(size_t bytes) {
  if (!collectives_.allocate) {
    return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(layer_->device()));
  }
  pybind11::gil_scoped_acquire gil;
  const PyRef size = PyRef::steal(PyLong_FromSize_t(bytes));
  const PyRef memory = PyRef::steal(PyObject_CallFunctionObjArgs(collectives_.allocate.get(), size.get(), nullptr));
  if (!memory) throw_python_error();
  return THPVariable_Unpack(memory.get());
}

void DeviceTransport::begin_forward(const PyRef& after) {
  if (!in_flight_.empty()) end_reductions();  // of a backward that raised
  // What users do between two forwards: an optimizer step, new values, gradients read and set to None.
  note_optimizer(/*with_shards=*/true);
  shards_may_change();
  // Gathers that follow an event alone cannot have memory that the compute lane has just given back.
  for (DeviceBuffers* buffers : {&slots_, &staging_, &uploads_}) buffers->set_keeps(keeps() || after);
  if (!after) {
    follow_compute(Lane::copy_in);
    return;
  }
  const LaneScope scope(*layer_, Lane::copy_in);
  pybind11::gil_scoped_acquire gil;
  const PyRef done = PyRef::steal(PyObject_CallMethod(after.get(), "wait", nullptr));
  if (!done) throw_python_error();
}

void DeviceTransport::note_optimizer(bool with_shards) {
  if (!layer_->is_recorder()) return;
  for (const bool of_host : {false, true}) {
    std::vector<MemoryRange> pools;
    for (const auto& [index, mine] : groups_) {
      const auto unit = mine.unit.lock();
      // Who starts a gather ahead of forward does not write to its shards before it has ended.
      const bool is_on_its_way = unit && unit->param_state() == ParamState::gathering;
      if (with_shards && !is_on_its_way && (mine.offload != Offload::nothing) == of_host)
        pools.push_back({mine.pool.const_data_ptr(), mine.pool.nbytes()});
      if (!unit) continue;
      for (const auto& group : unit->groups) {
        if (group->scratch.posted) continue;  // manual finalization: gradients are nobody's until their reduction ends
        const at::Tensor& pool = group->gradients.pool();
        if (pool.defined() && group->offloads() == of_host) pools.push_back({pool.const_data_ptr(), pool.nbytes()});
      }
    }
    if (of_host && !offloads_) return;
    const LaneScope scope(*layer_, of_host ? Lane::host : Lane::compute);
    layer_->note("optimizer", "", pools, pools);
  }
}

void DeviceTransport::write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) {
  layer_->copy(rows, slot, group.pool.data_ptr());
  layer_->record(*per_group(group).pool_event, Lane::compute);
}

void DeviceTransport::begin_gather(ParamGroup& group) {
  try {
    enqueue_gather(group);
  } catch (...) {
    release_gather(group);
    throw;
  }
}

void DeviceTransport::enqueue_gather(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  // A user's collective, and extensions, may allocate and copy as they like: in the order of the compute lane.
  mine.in_one_piece = static_cast<bool>(group.calls.all_gather);
  mine.is_finished = false;
  if (mine.in_one_piece && !mine.packed && !mine.gather.direct.empty()) {
    mine.packed.emplace(plan_gather(group.layout, kPackEverything));
  }
  const Gather& gather = mine.running_gather();
  const Lane copy_lane = mine.in_one_piece ? Lane::compute : Lane::copy_in;
  const Lane gather_lane = mine.in_one_piece ? Lane::compute : Lane::gather;

  bool is_new = false;
  bool staging_is_new = false;
  const int kept = group.gather.kept.id;
  const int id = kept >= 0 ? kept : slots_.acquire(std::max<size_t>(group.layout.slot_bytes(), 1), group.name, &is_new);
  DeviceBuffer& slot = slots_[id];
  group.gather.slot.id = id;
  group.gather.write = group.gather.read = slot.data();
  const auto world = static_cast<size_t>(group.layout.world());
  const auto* pool = static_cast<const std::byte*>(group.pool.const_data_ptr());
  // Within forward and backward the pools stand still; otherwise a user may just have written to them.
  const bool pools_stand_still = group.root().in_forward() || group.root().in_backward();
  const Upload uploaded = open_upload(group, pools_stand_still);
  if (uploaded.buffer != nullptr) pool = uploaded.buffer->data();
  DeviceBuffer* staging = nullptr;
  if (!group.gathers_alone() && gather.segment_bytes > 0) {
    mine.staging = staging_.acquire(gather.segment_bytes * world, group.name, &staging_is_new);
    staging = &staging_[mine.staging];
  }
  if (is_new || staging_is_new || uploaded.is_new || !pools_stand_still) follow_compute(copy_lane);
  layer_->wait(copy_lane, *mine.pool_event);
  layer_->wait(copy_lane, *slot.free);
  if (staging != nullptr) layer_->wait(copy_lane, *staging->free);
  if (uploaded.buffer != nullptr) upload(group, uploaded, copy_lane);
  {
    const LaneScope scope(*layer_, copy_lane);
    if (group.gathers_alone()) {
      layer_->copy(mine.own_rows, pool, slot.data());
    } else {
      if (!gather.to_slot.empty()) layer_->copy(gather.to_slot, pool, slot.data());
      if (staging != nullptr) {
        const size_t own = static_cast<size_t>(group.layout.rank()) * gather.segment_bytes;
        layer_->copy(gather.to_segment, pool, staging->data() + own);
      }
    }
  }
  layer_->record(*slot.ready, copy_lane);
  if (uploaded.buffer != nullptr) {
    layer_->record(*uploaded.buffer->free, copy_lane);
    if (!pools_stand_still) host_waits_for(copy_lane);  // the user may write to the shards next
  }
  if (group.gathers_alone()) return;
  layer_->wait(gather_lane, *slot.ready);
  {
    const LaneScope scope(*layer_, gather_lane);
    call_all_gather(group, mine, slot, staging);
    if (staging != nullptr) layer_->copy(gather.copy_out, staging->data(), slot.data());
  }
  layer_->record(*slot.ready, gather_lane);
  if (staging != nullptr) layer_->record(*staging->free, gather_lane);
}

void DeviceTransport::close_gather(PerGroup& mine) {
  if (mine.staging >= 0) staging_.release(std::exchange(mine.staging, -1), /*has_waited=*/true);
  if (mine.upload >= 0) uploads_.release(std::exchange(mine.upload, -1), /*has_waited=*/true);
}

DeviceTransport::TensorLists DeviceTransport::make_lists(const ParamGroup& group, const PerGroup& mine,
                                                         const DeviceBuffer& slot, const DeviceBuffer* staging) const {
  const Gather& plan = mine.running_gather();
  const auto world = static_cast<size_t>(group.layout.world());
  const auto rank = static_cast<size_t>(group.layout.rank());
  TensorLists lists{PyRef::steal(PyList_New(0)), PyRef::steal(PyList_New(0))};
  for (const DirectGather& one : plan.direct) {
    append(lists.first, bytes_of(slot.memory, one.slot_offset, world * one.chunk_bytes));
    append(lists.second, bytes_of(slot.memory, one.slot_offset + rank * one.chunk_bytes, one.chunk_bytes));
  }
  if (staging != nullptr) {
    append(lists.first, bytes_of(staging->memory, 0, world * plan.segment_bytes));
    append(lists.second, bytes_of(staging->memory, rank * plan.segment_bytes, plan.segment_bytes));
  }
  return lists;
}

void DeviceTransport::call_all_gather(ParamGroup& group, PerGroup& mine, DeviceBuffer& slot, DeviceBuffer* staging) {
  pybind11::gil_scoped_acquire gil;
  const std::pair key(group.gather.slot.id, mine.staging);
  TensorLists once;  // a user's collective may keep what it is given
  if (mine.in_one_piece) {
    once = make_lists(group, mine, slot, staging);
  } else if (!mine.lists.contains(key)) {
    mine.lists.emplace(key, make_lists(group, mine, slot, staging));
  }
  const TensorLists& lists = mine.in_one_piece ? once : mine.lists.at(key);
  PyRef done;
  if (PyList_GET_SIZE(lists.first.get()) == 1) {
    PyObject* const output = PyList_GET_ITEM(lists.first.get(), 0);
    PyObject* const input = PyList_GET_ITEM(lists.second.get(), 0);
    const PyRef& all_gather = group.calls.all_gather ? group.calls.all_gather : collectives_.all_gather;
    done = PyRef::steal(PyObject_CallFunctionObjArgs(all_gather.get(), output, input, nullptr));
  } else {
    done = PyRef::steal(PyObject_CallFunctionObjArgs(collectives_.all_gather_group.get(), lists.first.get(),
                                                     lists.second.get(), nullptr));
  }
  if (!done) throw_collective_error(group, group.calls.explain, "all-gather");
  ++group.root().counters.python_calls;
  note_collective("all_gather", group, lists);
}

void DeviceTransport::note_collective(const std::string& name, const ParamGroup& group, const TensorLists& lists) {
  if (!layer_->is_recorder()) return;
  const auto ranges = [](const PyRef& list) {
    std::vector<MemoryRange> found;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.get()); ++i) {
      const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(list.get(), i));
      found.push_back({tensor.const_data_ptr(), tensor.nbytes()});
    }
    return found;
  };
  layer_->note(name, group.name, ranges(lists.second), ranges(lists.first));
}

void DeviceTransport::finish_gather(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  DeviceBuffer& slot = slots_[group.gather.slot.id];
  layer_->wait(Lane::compute, *slot.ready);
  close_gather(mine);
  mine.is_finished = true;
  note_use(group, slot);
}

void DeviceTransport::note_use(const ParamGroup& group, const DeviceBuffer& slot) {
  if (layer_->is_recorder()) layer_->note("use", group.name, {{slot.data(), group.layout.slot_bytes()}}, {});
}

void DeviceTransport::release_gather(ParamGroup& group) {
  const int id = group.gather.slot.id;
  PerGroup& mine = per_group(group);
  if (id < 0) {  // an exception came before there was one
    join(Lane::copy_in);
    return close_gather(mine);
  }
  DeviceBuffer& slot = slots_[id];
  if (mine.is_finished) {
    note_use(group, slot);
  } else {  // nobody used it, but its gather may still read the pool that an optimizer writes next
    layer_->wait(Lane::compute, *slot.ready);
    close_gather(mine);
  }
  layer_->record(*slot.free, Lane::compute);
  group.gather = GatherSlot();
  if (group.options().keep_unsharded_storage) {
    group.gather.kept.id = id;
  } else {
    slots_.release(id, /*has_waited=*/true);
  }
}

void DeviceTransport::release_idle() {
  end_reductions();
  for (auto& [index, mine] : groups_) {
    mine.resident_is_current = false;
    if (mine.resident >= 0) residents_.release(std::exchange(mine.resident, -1));
  }
  for (DeviceBuffers* buffers : {&slots_, &staging_, &buffers_, &segments_, &uploads_, &residents_}) {
    buffers->drop_idle();
  }
  tally_.forget_peak();
  slots_.forget_peak();
}

TransportStats DeviceTransport::stats() const {
  TransportStats stats;
  stats.gather_slots_owned = slots_.ledger().num_owned();
  stats.gather_slot_bytes = slots_.ledger().standing_bytes();
  stats.peak_gather_bytes = slots_.ledger().peak_owned_bytes();
  stats.scratch_slots_owned = num_scratches_;
  stats.scratch_bytes = tally_.peak_bytes();
  stats.resident_shard_bytes = residents_.ledger().bytes();
  for (const DeviceBuffers* buffers : {&slots_, &staging_, &buffers_, &segments_, &uploads_, &residents_}) {
    stats.num_allocations += buffers->ledger().num_allocations();
  }
  stats.owners = slots_.owners();
  return stats;
}

std::vector<Transport::Loan> DeviceTransport::loans() const {
  std::vector<Loan> found;
  for (const DeviceBuffers* buffers : {&slots_, &staging_, &buffers_, &segments_, &uploads_, &residents_}) {
    for (const auto& buffer : buffers->all()) {
      if (buffer->memory.defined()) {
        found.push_back({buffers->name(), buffer->owner, buffer->memory.const_data_ptr(), buffer->memory.nbytes()});
      }
    }
  }
  return found;
}

}  // namespace fsdp2x
