// The transport on an accelerator: reductions.
//
//   compute     .. backward | wait buffer.ready | pack, zero gaps | packed ........................ wait done
//   reduce                                        wait packed | reduce-scatter | buffer.ready | rows -> .grad | done
//   all_reduce  (replicas, hooks)                                    wait buffer.ready | all-reduce | rows -> .grad |
//   done
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "core/error.hpp"
#include "engine/memory/device_copy.hpp"
#include "engine/memory/storage.hpp"
#include "engine/params/param_group.hpp"
#include "engine/schedule/root.hpp"
#include "engine/transport/device/device_transport.hpp"

namespace fsdp2x {

namespace {

std::vector<MemoryRange> range_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {{tensor.const_data_ptr(), tensor.nbytes()}};
}

std::vector<MemoryRange> ranges_of(const std::vector<at::Tensor>& tensors) {
  std::vector<MemoryRange> ranges;
  for (const at::Tensor& tensor : tensors) ranges.push_back({tensor.const_data_ptr(), tensor.nbytes()});
  return ranges;
}

// For Python, with the GIL.
PyRef one_or_list(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) return PyRef::steal(THPVariable_Wrap(tensors[0]));
  PyRef list = PyRef::steal(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(tensors[i]));
  }
  return list;
}

}  // namespace

std::shared_ptr<const Layout> DeviceTransport::segment_layout(ParamGroup& group) { return plan_of(group).layout; }

void DeviceTransport::note_rows(const char* operation, const ParamGroup& group, const at::Tensor& input,
                                const at::Tensor& output) {
  if (layer_->is_recorder()) layer_->note(operation, group.name, range_of(input), range_of(output));
}

// --- the collective ---

at::Tensor DeviceTransport::rows_for(ParamGroup& group, Running& running) {
  PerGroup& mine = per_group(group);
  const size_t bytes = mine.reduce->rows_bytes;
  const bool is_plain =
      !group.calls.reduce_scatter && !group.calls.all_reduce_hook && !collectives_.allocate && !group.offloads();
  const bool stays = !group.has_replicas() || (group.options().requires_all_reduce && mine.partial < 0);
  if (is_plain && stays && group.layout.world() > 1 && mine.reduce->is_pool(group.layout)) {
    pybind11::gil_scoped_acquire gil;
    if (const auto pool = group.gradients.take_pool(group.root().blocks)) {
      follow_blocks(Lane::reduce);
      return pool->narrow(0, 0, static_cast<int64_t>(bytes));
    }
  }
  bool is_new = false;
  running.segment = segments_.acquire(bytes, group.name, &is_new);
  return segments_[running.segment].memory.narrow(0, 0, static_cast<int64_t>(bytes));
}

void DeviceTransport::begin_reduce(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  Scratch& scratch = group.scratch;
  if (!scratch.open) open_scratch(group);
  Running running;
  running.gradients = take_direct(group);
  const at::Tensor packed = pack_held(group, /*for_reduction=*/true);
  scratch.posted = true;

  SegmentPlan& plan = *mine.reduce;
  running.plan = &plan;
  if (mine.buffer < 0) {  // in the gradient pool
    running.rows = packed.narrow(0, 0, static_cast<int64_t>(plan.segment_bytes));
    running.lane = Lane::compute;
    mine.running = std::move(running);
    return;
  }
  for (size_t i = 0; i < scratch.filled.size(); ++i) {
    if (plan.layout->params()[i].shape.trainable && !scratch.filled[i] && !group.options().reduce_unused_params) {
      running.is_certain = is_alone(group);
    }
  }
  const int world = group.layout.world();
  const DType type = group.reduce_type();
  DeviceBuffer& buffer = buffers_[mine.buffer];
  const at::Tensor input = typed(buffer.memory, type, 0, plan.segment_bytes * static_cast<size_t>(world));
  running.divisor = group.averages() ? 1.0 : group.divisor();
  if (world > 1 && group.reduce_type() == DType::f16) {
    const double before = pre_divisor(group);
    if (before != 1.0) layer_->divide(input, before);
    running.divisor /= before;
  }
  if (world == 1) {
    running.rows = buffer.memory.narrow(0, 0, static_cast<int64_t>(plan.segment_bytes));
    running.buffer = mine.buffer;
  } else {
    running.rows = rows_for(group, running);  // memory that is new is so in the order of the compute lane
  }
  // A user's collective may allocate and copy as it likes.
  running.lane = group.calls.reduce_scatter ? Lane::compute : Lane::reduce;
  mine.running = running;  // should a collective raise, abandon_reduce gives back what it has
  if (running.lane != Lane::compute) follow_compute(running.lane);
  if (running.segment >= 0) layer_->wait(running.lane, *segments_[running.segment].free);
  if (world > 1) {
    const LaneScope scope(*layer_, running.lane);
    call_reduce_scatter(group, running, input);
  }
  layer_->record(*buffer.ready, running.lane);
  running.number = ++num_reductions_;
  in_flight_.push_back({running.number,
                        std::exchange(mine.buffer, -1),
                        {},
                        std::exchange(running.gradients, {}),
                        layer_->current_stream()});
  if (group.has_replicas()) {
    reduce_over_replicas(group, running);
  } else if (group.calls.all_reduce_hook) {
    layer_->wait(Lane::all_reduce, *buffer.ready);
    running.lane = Lane::all_reduce;
  }
  mine.running = std::move(running);
  // While this one runs behind it, the compute lane waits for the one before.
  retire_reductions(group, window_.beside());
}

void DeviceTransport::call_reduce_scatter(ParamGroup& group, const Running& running, const at::Tensor& packed) {
  const ProfileRange range(group.unit->ranges.reduce_scatter);
  const DType type = group.reduce_type();
  const SegmentPlan& plan = *running.plan;
  std::vector<at::Tensor> outputs{typed(running.rows, type, 0, plan.segment_bytes)};
  std::vector<at::Tensor> inputs{packed};
  for (size_t i = 0; i < plan.direct.size(); ++i) {
    const ParamPlace& place = plan.layout->params()[plan.direct[i]];
    const int64_t block_numel = place.shape.dim * place.shape.inner;
    const auto bytes = static_cast<size_t>(place.rows.size() * place.shape.inner) * dtype_bytes(type);
    for (int64_t block = 0; block < place.shape.outer; ++block) {
      const size_t offset = place.reduce_segment_offset + static_cast<size_t>(block) * bytes;
      outputs.push_back(typed(running.rows, type, offset, bytes));
      inputs.push_back(running.gradients[i].narrow(0, block * block_numel, block_numel));
    }
  }
  pybind11::gil_scoped_acquire gil;
  const PyRef py_output = one_or_list(outputs);
  const PyRef py_input = one_or_list(inputs);
  const bool is_custom = static_cast<bool>(group.calls.reduce_scatter);
  const bool is_separate = static_cast<bool>(group.calls.separate_reduce_scatter);
  const PyRef& function = is_custom     ? group.calls.reduce_scatter
                          : is_separate ? group.calls.separate_reduce_scatter
                                        : collectives_.reduce_scatter;
  const PyRef done = PyRef::steal(PyObject_CallFunctionObjArgs(function.get(), py_output.get(), py_input.get(),
                                                               group.averages() ? Py_True : Py_False, nullptr));
  if (!done) throw_collective_error(group, group.calls.explain, "reduction");
  ++group.root().counters.python_calls;
  if (!layer_->is_recorder()) return;
  layer_->note(group.averages() ? "reduce_scatter (average)" : "reduce_scatter (sum)", group.name, ranges_of(inputs),
               ranges_of(outputs));
}

void DeviceTransport::reduce_over_replicas(ParamGroup& group, Running& running) {
  PerGroup& mine = per_group(group);
  const DType type = group.reduce_type();
  const at::Tensor rows = typed(running.rows, type, 0, running.rows.nbytes());
  if (mine.partial >= 0) {
    DeviceBuffer& partial = segments_[mine.partial];
    if (mine.partial_plan != mine.reduce->layout) {
      throw Error("fsdp2x: parameters of unit '" + group.name +
                  "' were frozen or unfrozen while gradients wait for their all-reduce; change requires_grad after a "
                  "backward with set_requires_all_reduce(True)");
    }
    const LaneScope scope(*layer_, running.lane);
    layer_->add(rows, typed(partial.memory, type, 0, rows.nbytes()));
    retire_segment(std::exchange(mine.partial, -1), running.number, running.lane);
    group.note_merged_partial();
  }
  if (!group.options().requires_all_reduce) {
    keep_partial(group, running);
    return;
  }
  const ProfileRange range(group.unit->ranges.all_reduce);
  follow(Lane::all_reduce, running.lane);
  running.lane = Lane::all_reduce;
  const LaneScope scope(*layer_, running.lane);
  pybind11::gil_scoped_acquire gil;
  const PyRef tensor = PyRef::steal(THPVariable_Wrap(rows));
  const PyRef done = PyRef::steal(PyObject_CallFunctionObjArgs(group.calls.all_reduce.get(), tensor.get(),
                                                               group.averages() ? Py_True : Py_False, nullptr));
  if (!done) throw_collective_error(group, group.calls.explain_all_reduce, "all-reduce");
  ++group.root().counters.python_calls;
  note_rows("all_reduce", group, rows, rows);
}

void DeviceTransport::keep_partial(ParamGroup& group, Running& running) {
  PerGroup& mine = per_group(group);
  if (running.segment < 0) {  // one rank: what was packed is what stays
    bool is_new = false;
    const auto bytes = running.rows.nbytes();
    running.segment = segments_.acquire(bytes, group.name, &is_new);
    DeviceBuffer& segment = segments_[running.segment];
    if (is_new) follow_compute(running.lane);
    layer_->wait(running.lane, *segment.free);
    const DType type = group.reduce_type();
    const LaneScope scope(*layer_, running.lane);
    layer_->assign(typed(segment.memory, type, 0, bytes), typed(running.rows, type, 0, bytes));
    layer_->record(*buffers_[running.buffer].ready, running.lane);
  }
  mine.partial = std::exchange(running.segment, -1);
  mine.partial_plan = mine.reduce->layout;
  layer_->record(*segments_[mine.partial].ready, running.lane);
  group.note_partial();
  running = Running();
}

// --- attaching ---

bool DeviceTransport::needs_empty_reduction(const ParamGroup& group) const {
  if (group.scratch.reduced_this_backward) return false;
  // Rows that wait for the all-reduce, and parameters that are reduced as zeros, do not need a gradient of this
  // backward.
  const bool has_partial = groups_.at(group.index).partial >= 0 && group.options().requires_all_reduce;
  return has_partial || group.reduces_unused();
}

bool DeviceTransport::finish_reduce(ParamGroup& group, bool /*flush*/) {
  if (!group.scratch.posted) return true;
  PerGroup& mine = per_group(group);
  Running running = std::exchange(mine.running, Running());
  const std::shared_ptr<const Layout> plan = mine.reduce->layout;
  std::vector<uint8_t> wanted = flags_of(group, *plan);
  close_scratch(group);
  group.scratch.reduced_this_backward = true;
  if (!running.rows.defined()) return true;  // waits for an all-reduce
  if (!running.is_certain) {
    // The one place where the host waits for the device: this rank lacks gradients that others may have.
    const LaneScope scope(*layer_, running.lane);
    const DType type = group.reduce_type();
    const at::Tensor flags = typed(running.rows, type, plan->reduce_segment_bytes(), wanted.size() * dtype_bytes(type))
                                 .to(at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
    note_rows("read flags", group, running.rows, at::Tensor());
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = flags.const_data_ptr<float>()[i] > 0.0F ? 1 : 0;
  }
  try {
    attach(group, running, *plan, std::move(wanted));
  } catch (...) {
    if (running.segment >= 0) retire_segment(running.segment, running.number, running.lane);
    throw;
  }
  return true;
}

void DeviceTransport::attach(ParamGroup& group, Running& running, const Layout& plan, std::vector<uint8_t> wanted) {
  const DType type = group.reduce_type();
  pybind11::gil_scoped_acquire gil;
  if (group.calls.all_reduce_hook) {
    const LaneScope scope(*layer_, running.lane);
    const at::Tensor rows = typed(running.rows, type, 0, plan.reduce_segment_bytes());
    const PyRef object = PyRef::steal(THPVariable_Wrap(rows));
    const PyRef done =
        PyRef::steal(PyObject_CallFunctionObjArgs(group.calls.all_reduce_hook.get(), object.get(), nullptr));
    if (!done) throw_python_error();
    note_rows("hook", group, rows, rows);
  }
  if (group.offloads()) {
    download(group, running, std::move(wanted));
    return;
  }
  std::vector<GradientTarget> targets(group.params.size());
  std::vector<RowItem> items;
  auto* const rows = static_cast<std::byte*>(running.rows.data_ptr());
  bool is_new = false;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!wanted[i]) continue;
    const ParamPlace& place = plan.params()[i];
    targets[i] = group.gradients.prepare(i, group.root().blocks);
    is_new = is_new || targets[i].is_new;
    std::byte* const source = rows + place.reduce_segment_offset;
    if (source == targets[i].data && running.divisor == 1.0) continue;  // reduced in place
    if (place.shard_numel == 0) continue;
    if (source == targets[i].data) {
      const LaneScope scope(*layer_, running.lane);
      const auto bytes = static_cast<size_t>(place.shard_numel) * dtype_bytes(type);
      layer_->divide(typed(running.rows, type, place.reduce_segment_offset, bytes), running.divisor);
      continue;
    }
    items.push_back({i, targets[i].data, targets[i].accumulate});
  }
  if (is_new) follow_blocks(running.lane);
  if (is_new && running.lane != Lane::compute) follow_compute(running.lane);
  const LaneScope scope(*layer_, running.lane);
  if (!items.empty()) layer_->write_rows(*running.plan, items, running.rows, running.divisor);
  if (running.segment >= 0) {
    retire_segment(std::exchange(running.segment, -1), running.number, running.lane);
  }
  if (running.buffer >= 0) layer_->record(*buffers_[running.buffer].ready, running.lane);
  // Users' hooks, an optimizer in backward for one, run where the gradient is complete.
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!wanted[i]) continue;
    group.attach(i, targets[i]);
    // It was taken in the order of the compute lane, and must not go back before that has waited for this one.
    if (targets[i].foreign.defined()) foreign_sums_.push_back(std::move(targets[i].foreign));
  }
  if (group.gradients.release_if_unused(group.root().blocks)) gave_blocks_[static_cast<size_t>(running.lane)] = true;
}

bool DeviceTransport::abandon_reduce(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  const bool is_open = group.scratch.open;
  if (group.scratch.posted) join(mine.running.lane);  // it writes to memory that may be freed next
  if (mine.running.segment >= 0) {
    layer_->record(*segments_[mine.running.segment].free, mine.running.lane);
    segments_.release(mine.running.segment);
  }
  mine.running = Running();
  const bool was_on_its_way = drop_download(group);
  close_scratch(group);
  return is_open || was_on_its_way;
}

void DeviceTransport::drop_partial(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  if (mine.partial < 0) return;
  layer_->record(*segments_[mine.partial].free, Lane::reduce);
  segments_.release(std::exchange(mine.partial, -1));
}

void DeviceTransport::close_scratch(ParamGroup& group) {
  PerGroup& mine = per_group(group);
  std::fill(mine.held.begin(), mine.held.end(), at::Tensor());
  mine.sums.clear();
  Scratch& scratch = group.scratch;
  if (!scratch.open) return;
  if (mine.buffer >= 0) {
    layer_->record(*buffers_[mine.buffer].ready, Lane::compute);
    buffers_.release(std::exchange(mine.buffer, -1));
  }
  scratch.open = scratch.posted = scratch.pending_flush = false;
  scratch.data = nullptr;
  mine.reduce = nullptr;
  --num_scratches_;
}

void DeviceTransport::end_reductions() {
  for (const Lane lane : {Lane::reduce, Lane::all_reduce}) join(lane);
  foreign_sums_.clear();
  gave_blocks_.fill(false);
  for (InFlight& one : in_flight_) {
    drop_gradients(one);
    buffers_.release(one.buffer, /*has_waited=*/true);
    for (const int segment : one.segments) segments_.release(segment, /*has_waited=*/true);
  }
  in_flight_.clear();
}

void DeviceTransport::end_backward() {
  while (!downloads_.empty()) land(*downloads_.front().second);
  if (offloads_) host_waits_for(Lane::copy_in);  // gathers of this backward have read the shards
  shards_may_change();
  end_reductions();
  note_optimizer(/*with_shards=*/false);
}

void DeviceTransport::check_collectives() {
  if (!collectives_.check) return;
  for (const Lane lane : {Lane::gather, Lane::reduce}) host_waits_for(lane);
  pybind11::gil_scoped_acquire gil;
  const PyRef done = PyRef::steal(PyObject_CallNoArgs(collectives_.check.get()));
  if (!done) throw_python_error();
}

}  // namespace fsdp2x
