// The transport on an accelerator: reductions.
//
//   compute     .. backward | wait buffer.ready | pack, zero gaps | packed ........................ wait done
//   reduce                                        wait packed | reduce-scatter | buffer.ready | rows -> .grad | done
//   all_reduce  (replicas, hooks)                                    wait buffer.ready | all-reduce | rows -> .grad |
//   done
//
// Gradients die on the compute lane, where they were born: they are packed there, so the allocator needs no record of
// other streams. A reduction buffer is written again two units later, when `ready` has long passed. One rank alone
// packs into its gradient pool, where nothing else is to be done with them.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "core/error.hpp"
#include "engine/device_copy.hpp"
#include "engine/device_transport.hpp"
#include "engine/group.hpp"
#include "engine/root.hpp"

namespace fsdp2x {

namespace {

// Patterns of flags that are kept on the device. A model that uses other parameters in every step makes many.
constexpr size_t kMaxFlagPatterns = 64;

at::Tensor typed(const at::Tensor& memory, DType type, size_t offset, size_t bytes) {
  return memory.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(bytes)).view(torch_dtype(type));
}

// No other rank has gradients of these parameters.
bool is_alone(const Group& group) { return group.layout.world() == 1 && !group.has_replicas(); }

std::vector<MemoryRange> range_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {{tensor.const_data_ptr(), tensor.nbytes()}};
}

}  // namespace

std::shared_ptr<const Layout> DeviceTransport::reduce_plan(Group& group) {
  return per_group(group).plans.of(group).layout;
}

void DeviceTransport::note_rows(const char* operation, const Group& group, const at::Tensor& input,
                                const at::Tensor& output) {
  if (layer_->is_recorder()) layer_->note(operation, group.name, range_of(input), range_of(output));
}

// --- packing, on the compute lane ---

void DeviceTransport::pack(Group& group, size_t i, const at::Tensor& gradient) {
  Scratch& scratch = group.scratch;
  if (scratch.posted) finish_reduce(group, /*flush=*/true);
  PerGroup& mine = per_group(group);
  if (!scratch.open) {
    mine.reduce = &mine.plans.of(group);
    std::fill(scratch.filled.begin(), scratch.filled.end(), uint8_t{0});
    scratch.open = true;
    ++num_scratches_;
  }
  if (!mine.reduce->layout->params()[i].shape.trainable) {
    throw Error(
        "fsdp2x: '" + group.params[i].fqn() +
        "' was unfrozen while its unit holds unreduced gradients; change requires_grad between optimizer steps");
  }
  if (mine.held[i].defined()) pack_held(group, /*for_reduction=*/false);  // the second one is added
  mine.held[i] = gradient;
}

void DeviceTransport::settle(Group& group) {
  if (group.scratch.open && !group.scratch.posted) pack_held(group, /*for_reduction=*/false);
}

void DeviceTransport::open_buffer(Group& group) {
  PerGroup& mine = per_group(group);
  if (mine.buffer >= 0) return;
  // With the buffer that is packed now, no more than the limit.
  if (in_flight_.size() >= max_reduce_buffers_) group.root().finish_pending();
  while (in_flight_.size() >= max_reduce_buffers_) {
    const ProfileRange range(group.unit->ranges.post_backward_rs_wait);
    buffers_.release(in_flight_.front());
    in_flight_.pop_front();
  }
  bool is_new = false;
  const auto world = static_cast<size_t>(group.layout.world());
  mine.buffer = buffers_.acquire(mine.reduce->segment_bytes * world, group.name, &is_new);
  layer_->wait(Lane::compute, *buffers_[mine.buffer].ready);
  if (group.calls.all_reduce_hook) buffers_[mine.buffer].memory.zero_();  // the user sees what lies between the rows
}

at::Tensor DeviceTransport::pool_to_pack(Group& group) {
  const PerGroup& mine = per_group(group);
  const bool is_plain = is_alone(group) && !group.calls.reduce_scatter && !group.calls.all_reduce_hook;
  const bool is_whole = group.averages() || group.divisor() == 1.0;
  // What is in a buffer already came without gradient sync: it is added to there.
  if (!is_plain || !is_whole || group.offloads() || mine.buffer >= 0) return {};
  if (!mine.reduce->is_pool(group.layout)) return {};
  pybind11::gil_scoped_acquire gil;
  return group.gradients.take_pool(group.root().blocks).value_or(at::Tensor());
}

at::Tensor DeviceTransport::pack_held(Group& group, bool for_reduction) {
  PerGroup& mine = per_group(group);
  const bool has_held = std::any_of(mine.held.begin(), mine.held.end(), [](const auto& g) { return g.defined(); });
  if (!has_held && !for_reduction) return {};
  const at::Tensor pool = for_reduction ? pool_to_pack(group) : at::Tensor();
  if (!pool.defined()) open_buffer(group);
  const at::Tensor buffer = pool.defined() ? pool : buffers_[mine.buffer].memory;
  const Layout& layout = *mine.reduce->layout;
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
  if (!items.empty()) layer_->pack(*mine.reduce, items, buffer);
  if (for_reduction && !is_alone(group)) {
    const at::Tensor& flags = flags_of(group);
    layer_->copy(mine.reduce->flags_to_segments, flags.const_data_ptr(), buffer.data_ptr());
  }
  return buffer;
}

const at::Tensor& DeviceTransport::flags_of(const Group& group) {
  std::vector<bool> pattern(group.scratch.filled.begin(), group.scratch.filled.end());
  const Layout& layout = *groups_.at(group.index).reduce->layout;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (layout.params()[i].shape.trainable && group.options().reduce_unused_params) pattern[i] = true;
  }
  if (const auto found = flags_.find(pattern); found != flags_.end()) return found->second;
  if (flags_.size() >= kMaxFlagPatterns) flags_.clear();  // freed in the order of the compute lane, which reads them
  const std::vector<float> values(pattern.begin(), pattern.end());
  const at::Tensor flags =
      at::from_blob(const_cast<float*>(values.data()), {static_cast<int64_t>(values.size())}, at::kFloat);
  return flags_
      .emplace(std::move(pattern), flags.to(layer_->device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true))
      .first->second;
}

// --- the collective ---

at::Tensor DeviceTransport::rows_for(Group& group, Running& running) {
  PerGroup& mine = per_group(group);
  const size_t bytes = mine.reduce->segment_bytes;
  const bool is_plain =
      !group.calls.reduce_scatter && !group.calls.all_reduce_hook && !collectives_.allocate && !group.offloads();
  const bool stays = !group.has_replicas() || (group.options().requires_all_reduce && mine.partial < 0);
  if (is_plain && stays && group.layout.world() > 1 && mine.reduce->is_pool(group.layout)) {
    pybind11::gil_scoped_acquire gil;
    if (const auto pool = group.gradients.take_pool(group.root().blocks)) {
      return pool->narrow(0, 0, static_cast<int64_t>(bytes));
    }
  }
  bool is_new = false;
  running.segment = segments_.acquire(bytes, group.name, &is_new);
  return segments_[running.segment].memory.narrow(0, 0, static_cast<int64_t>(bytes));
}

void DeviceTransport::begin_reduce(Group& group) {
  PerGroup& mine = per_group(group);
  Scratch& scratch = group.scratch;
  if (!scratch.open) {
    mine.reduce = &mine.plans.of(group);
    std::fill(scratch.filled.begin(), scratch.filled.end(), uint8_t{0});
    scratch.open = true;
    ++num_scratches_;
  }
  const at::Tensor packed = pack_held(group, /*for_reduction=*/true);
  scratch.posted = true;

  Running running;
  ReducePlan& plan = *mine.reduce;
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
  mine.running = running;  // should a collective raise, abandon_reduce gives the segment back
  // A user's collective may allocate and copy as it likes.
  running.lane = group.calls.reduce_scatter ? Lane::compute : Lane::reduce;
  if (running.lane != Lane::compute) follow_compute(running.lane);
  if (running.segment >= 0) layer_->wait(running.lane, *segments_[running.segment].free);
  if (world > 1) {
    const LaneScope scope(*layer_, running.lane);
    call_reduce_scatter(group, typed(running.rows, type, 0, plan.segment_bytes), input, running);
  }
  layer_->record(*buffer.ready, running.lane);
  in_flight_.push_back(std::exchange(mine.buffer, -1));
  if (group.has_replicas()) {
    reduce_over_replicas(group, running);
  } else if (group.calls.all_reduce_hook) {
    layer_->wait(Lane::all_reduce, *buffer.ready);
    running.lane = Lane::all_reduce;
  }
  mine.running = std::move(running);
}

void DeviceTransport::call_reduce_scatter(Group& group, const at::Tensor& output, const at::Tensor& input,
                                          Running& running) {
  const ProfileRange range(group.unit->ranges.reduce_scatter);
  pybind11::gil_scoped_acquire gil;
  const PyRef py_output = PyRef::steal(THPVariable_Wrap(output));
  const PyRef py_input = PyRef::steal(THPVariable_Wrap(input));
  const bool is_custom = static_cast<bool>(group.calls.reduce_scatter);
  const bool is_separate = static_cast<bool>(group.calls.separate_reduce_scatter);
  const PyRef& scaled = is_separate ? group.calls.separate_reduce_scatter_scaled : collectives_.reduce_scatter_scaled;
  const bool scales = !is_custom && scaled && group.options().divide_factor && !group.options().force_sum_reduction &&
                      group.reduce_type() != DType::f16;
  PyRef done;
  if (scales) {
    const PyRef factor = PyRef::steal(PyFloat_FromDouble(1.0 / running.divisor));
    running.divisor = 1.0;
    done = PyRef::steal(
        PyObject_CallFunctionObjArgs(scaled.get(), py_output.get(), py_input.get(), factor.get(), nullptr));
  } else {
    const PyRef& function = is_custom     ? group.calls.reduce_scatter
                            : is_separate ? group.calls.separate_reduce_scatter
                                          : collectives_.reduce_scatter;
    done = PyRef::steal(PyObject_CallFunctionObjArgs(function.get(), py_output.get(), py_input.get(),
                                                     group.averages() ? Py_True : Py_False, nullptr));
  }
  if (!done) throw_python_error();
  ++group.root().counters.python_calls;
  note_rows(scales             ? "reduce_scatter (scaled)"
            : group.averages() ? "reduce_scatter (average)"
                               : "reduce_scatter (sum)",
            group, input, output);
}

void DeviceTransport::reduce_over_replicas(Group& group, Running& running) {
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
    layer_->record(*partial.free, running.lane);
    segments_.release(std::exchange(mine.partial, -1));
  }
  if (!group.options().requires_all_reduce) {
    keep_partial(group, running);
    return;
  }
  const ProfileRange range(group.unit->ranges.all_reduce);
  DeviceEvent& before = *lane_events_[static_cast<size_t>(running.lane)];
  layer_->record(before, running.lane);
  layer_->wait(Lane::all_reduce, before);
  running.lane = Lane::all_reduce;
  const LaneScope scope(*layer_, running.lane);
  pybind11::gil_scoped_acquire gil;
  const PyRef tensor = PyRef::steal(THPVariable_Wrap(rows));
  const PyRef done = PyRef::steal(PyObject_CallFunctionObjArgs(group.calls.all_reduce.get(), tensor.get(),
                                                               group.averages() ? Py_True : Py_False, nullptr));
  if (!done) throw_python_error();
  ++group.root().counters.python_calls;
  note_rows("all_reduce", group, rows, rows);
}

void DeviceTransport::keep_partial(Group& group, Running& running) {
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
  running = Running();
}

// --- attaching ---

bool DeviceTransport::needs_empty_reduction(const Group& group) const {
  if (group.scratch.reduced_this_backward) return false;
  // Rows that wait for the all-reduce, and parameters that are reduced as zeros, do not need a gradient of this
  // backward.
  const bool has_partial = groups_.at(group.index).partial >= 0 && group.options().requires_all_reduce;
  return has_partial || (group.options().reduce_unused_params && group.unit->armed);
}

bool DeviceTransport::finish_reduce(Group& group, bool /*flush*/) {
  if (!group.scratch.posted) return true;
  PerGroup& mine = per_group(group);
  Running running = std::exchange(mine.running, Running());
  const std::shared_ptr<const Layout> plan = mine.reduce->layout;
  std::vector<uint8_t> wanted = group.scratch.filled;
  if (group.options().reduce_unused_params) {
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = plan->params()[i].shape.trainable ? 1 : 0;
  }
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
  attach(group, running, *plan, std::move(wanted));
  return true;
}

void DeviceTransport::attach(Group& group, Running& running, const Layout& plan, std::vector<uint8_t> wanted) {
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
  if (is_new && running.lane != Lane::compute) follow_compute(running.lane);
  const LaneScope scope(*layer_, running.lane);
  if (!items.empty()) layer_->write_rows(*running.plan, items, running.rows, running.divisor);
  if (running.segment >= 0) {
    layer_->record(*segments_[running.segment].free, running.lane);
    segments_.release(running.segment);
  }
  if (running.buffer >= 0) layer_->record(*buffers_[running.buffer].ready, running.lane);
  // Users' hooks, an optimizer in backward for one, run where the gradient is complete.
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!wanted[i]) continue;
    group.gradients.attach(i, targets[i]);
    // It was taken in the order of the compute lane, and must not go back before that has waited for this one.
    if (targets[i].foreign.defined()) foreign_sums_.push_back(std::move(targets[i].foreign));
  }
  group.gradients.release_if_unused(group.root().blocks);
}

void DeviceTransport::abandon_reduce(Group& group) {
  PerGroup& mine = per_group(group);
  if (group.scratch.posted) join(mine.running.lane);  // it writes to memory that may be freed next
  if (mine.running.segment >= 0) {
    layer_->record(*segments_[mine.running.segment].free, mine.running.lane);
    segments_.release(mine.running.segment);
  }
  mine.running = Running();
  drop_download(group);
  if (mine.partial >= 0) {
    layer_->record(*segments_[mine.partial].free, Lane::reduce);
    segments_.release(std::exchange(mine.partial, -1));
  }
  close_scratch(group);
}

void DeviceTransport::close_scratch(Group& group) {
  PerGroup& mine = per_group(group);
  std::fill(mine.held.begin(), mine.held.end(), at::Tensor());
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

void DeviceTransport::end_backward() {
  for (const Lane lane : {Lane::reduce, Lane::all_reduce}) join(lane);
  foreign_sums_.clear();
  while (!downloads_.empty()) land(*downloads_.front().second);
  if (offloads_) host_waits_for(Lane::copy_in);  // gathers of this backward have read the shards
  shards_may_change();
  while (!in_flight_.empty()) {
    buffers_.release(in_flight_.front());
    in_flight_.pop_front();
  }
  note_optimizer(/*with_shards=*/false);
}

}  // namespace fsdp2x
