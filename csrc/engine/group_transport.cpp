// The transport over a torch.distributed process group.
#include "engine/group_transport.hpp"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "engine/device_copy.hpp"
#include "engine/root.hpp"
#include "engine/unit.hpp"

namespace fsdp2x {

namespace {

// fp16 sums overflow early: divide by about sqrt(factor) before and by the rest after, as upstream does.
double pre_divisor(DType reduce, double factor) {
  if (reduce != DType::f16) return 1.0;
  double before = 1.0;
  while (std::fmod(factor, before) == 0.0 && factor / before > before) before *= 2.0;
  return before;
}

DType reduce_type(const Unit& unit) { return unit.layout.params().front().shape.reduce; }

}  // namespace

GroupTransport::GroupTransport(Collectives collectives, at::Device device)
    : collectives_(std::move(collectives)), device_(device), gather_ledger_(kAlignBytes) {}

GroupTransport::PerUnit& GroupTransport::per_unit(const Unit& unit) { return units_[unit.index]; }

void GroupTransport::register_unit(const Unit& unit) {
  PerUnit& mine = per_unit(unit);
  for (int rank = 0; rank < unit.layout.world(); ++rank) {
    mine.segment_to_slot.push_back(unit.layout.segment_to_slot(rank));
  }
}

at::Tensor GroupTransport::take(size_t bytes) {
  const auto found = free_.lower_bound(bytes);
  if (found != free_.end() && found->first <= 2 * bytes) {
    at::Tensor memory = std::move(found->second);
    free_.erase(found);
    return memory;
  }
  ++num_allocations_;
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device_));
}

void GroupTransport::give_back(Staging& staging) {
  if (!staging.memory.defined()) return;
  const size_t bytes = staging.memory.nbytes();
  free_.emplace(bytes, std::move(staging.memory));
  staging.memory = at::Tensor();
}

void GroupTransport::wait(Staging& staging) {
  if (!staging.work) return;
  pybind11::gil_scoped_acquire gil;
  const PyRef work = std::move(staging.work);
  const PyRef done = PyRef::steal(PyObject_CallFunctionObjArgs(collectives_.wait.get(), work.get(), nullptr));
  if (!done) throw_python_error();
}

at::Tensor GroupTransport::as_type(const at::Tensor& memory, at::ScalarType type, size_t offset, size_t bytes) const {
  return memory.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(bytes)).view(type);
}

void GroupTransport::begin_gather(Unit& unit) {
  PerUnit& mine = per_unit(unit);
  unit.gather.slot = gather_ledger_.acquire(std::max<size_t>(unit.layout.slot_bytes(), 1), unit.name);
  const auto id = static_cast<size_t>(unit.gather.slot.id);
  if (gather_memory_.size() <= id) gather_memory_.resize(id + 1);
  if (!gather_memory_[id].defined()) {
    ++num_allocations_;
    gather_memory_[id] =
        at::empty({static_cast<int64_t>(unit.gather.slot.bytes)}, at::TensorOptions().dtype(at::kByte).device(device_));
  }
  unit.gather.write = unit.gather.read = static_cast<std::byte*>(gather_memory_[id].data_ptr());
  if (unit.layout.world() == 1) {
    run_copies_on(device_, unit.layout.shard_to_slot(), unit.pool.const_data_ptr(), unit.gather.write);
    return;
  }
  const size_t segment = unit.layout.gather_segment_bytes();
  const auto rank = static_cast<size_t>(unit.layout.rank());
  mine.gather.memory = take(std::max<size_t>(segment * static_cast<size_t>(unit.layout.world()), 1));
  run_copies_on(device_, unit.layout.shard_to_segment(), unit.pool.const_data_ptr(),
                static_cast<std::byte*>(mine.gather.memory.data_ptr()) + rank * segment);
  pybind11::gil_scoped_acquire gil;
  const at::Tensor output =
      as_type(mine.gather.memory, at::kByte, 0, segment * static_cast<size_t>(unit.layout.world()));
  const PyRef py_output = PyRef::steal(THPVariable_Wrap(output));
  const PyRef py_input =
      PyRef::steal(THPVariable_Wrap(as_type(mine.gather.memory, at::kByte, rank * segment, segment)));
  mine.gather.work = PyRef::steal(
      PyObject_CallFunctionObjArgs(collectives_.all_gather.get(), py_output.get(), py_input.get(), nullptr));
  if (!mine.gather.work) throw_python_error();
  ++unit.root->counters.python_calls;
}

void GroupTransport::finish_gather(Unit& unit) {
  if (unit.layout.world() == 1) return;
  PerUnit& mine = per_unit(unit);
  wait(mine.gather);
  const size_t segment = unit.layout.gather_segment_bytes();
  for (size_t rank = 0; rank < mine.segment_to_slot.size(); ++rank) {
    run_copies_on(device_, mine.segment_to_slot[rank],
                  static_cast<const std::byte*>(mine.gather.memory.const_data_ptr()) + rank * segment,
                  unit.gather.write);
  }
  give_back(mine.gather);
}

void GroupTransport::release_gather(Unit& unit) {
  PerUnit& mine = per_unit(unit);
  wait(mine.gather);
  give_back(mine.gather);
  gather_ledger_.release(unit.gather.slot.id);
  unit.gather = GatherSlot();
}

void GroupTransport::open_scratch(Unit& unit) {
  PerUnit& mine = per_unit(unit);
  std::vector<bool> trainable(unit.params.size());
  std::vector<ParamShape> shapes;
  for (size_t i = 0; i < trainable.size(); ++i) {
    trainable[i] = unit.params[i].unsharded().requires_grad();
    shapes.push_back(unit.layout.params()[i].shape);
    shapes.back().trainable = trainable[i];
  }
  auto found = mine.plans.find(trainable);
  if (found == mine.plans.end()) {
    Layout layout(std::move(shapes), unit.layout.world(), unit.layout.rank());
    // One flag per parameter follows a rank's segment: after the sum it says whether any rank had a gradient.
    const size_t flags = align_up(trainable.size() * dtype_bytes(reduce_type(unit)));
    const size_t bytes = layout.reduce_segment_bytes() + flags;
    found = mine.plans.emplace(trainable, ReducePlan{std::move(layout), bytes, {}}).first;
  }
  mine.plan = &found->second;
  mine.reduction.memory = take(mine.plan->segment_bytes * static_cast<size_t>(unit.layout.world()));
  unit.scratch.data = static_cast<std::byte*>(mine.reduction.memory.data_ptr());
  std::fill(unit.scratch.filled.begin(), unit.scratch.filled.end(), uint8_t{0});
  unit.scratch.open = true;
  ++num_scratches_;
}

void GroupTransport::pack(Unit& unit, size_t i, const at::Tensor& gradient) {
  Scratch& scratch = unit.scratch;
  if (scratch.posted) finish_reduce(unit, /*flush=*/true);
  if (!scratch.open) open_scratch(unit);
  ReducePlan* plan = per_unit(unit).plan;
  if (!plan->layout.params()[i].shape.trainable) {
    throw Error(
        "fsdp2x: '" + unit.params[i].fqn() +
        "' was unfrozen while its unit holds unreduced gradients; change requires_grad between optimizer steps");
  }
  at::Tensor dense = gradient.contiguous();
  if (engine_dtype(dense.scalar_type()) == DType::byte) dense = dense.to(at::kFloat);
  const DType type = engine_dtype(dense.scalar_type());
  auto& copies = plan->gradient_to_segments[{i, type}];
  if (copies.empty()) {
    copies = plan->layout.gradient_to_segments(i, type);
    // The layout's segments lie end to end; ours have the flags between them.
    const size_t segment = plan->layout.reduce_segment_bytes();
    for (Copy& copy : copies) copy.dst_offset += copy.dst_offset / segment * (plan->segment_bytes - segment);
  }
  if (scratch.filled[i]) {
    add_on(device_, copies, dense.const_data_ptr(), scratch.data);
  } else {
    run_copies_on(device_, copies, dense.const_data_ptr(), scratch.data);
    scratch.filled[i] = 1;
  }
}

void GroupTransport::begin_reduce(Unit& unit) {
  PerUnit& mine = per_unit(unit);
  Scratch& scratch = unit.scratch;
  scratch.posted = true;
  const int world = unit.layout.world();
  if (world == 1) return;
  const DType type = reduce_type(unit);
  const Layout& layout = mine.plan->layout;
  const size_t segment = mine.plan->segment_bytes;
  const size_t total = segment * static_cast<size_t>(world);
  std::vector<float> flags(scratch.filled.begin(), scratch.filled.end());
  const at::Tensor flag_values = at::from_blob(flags.data(), {static_cast<int64_t>(flags.size())}, at::kFloat)
                                     .to(at::TensorOptions().dtype(torch_dtype(type)).device(device_));
  for (int rank = 0; rank < world; ++rank) {
    const size_t start = static_cast<size_t>(rank) * segment;
    for (size_t i = 0; i < unit.params.size(); ++i) {
      const ParamPlace& place = layout.params()[i];
      if (scratch.filled[i] || !place.shape.trainable) continue;
      as_type(mine.reduction.memory, at::kByte, start + place.reduce_segment_offset,
              static_cast<size_t>(place.padded_shard_numel) * dtype_bytes(type))
          .zero_();
    }
    as_type(mine.reduction.memory, torch_dtype(type), start + layout.reduce_segment_bytes(),
            flags.size() * dtype_bytes(type))
        .copy_(flag_values);
  }
  const at::Tensor input = as_type(mine.reduction.memory, torch_dtype(type), 0, total);
  const double before = pre_divisor(type, unit.divisor());
  if (before != 1.0) input.div_(before);
  mine.reduced.memory = take(segment);
  const at::Tensor output = as_type(mine.reduced.memory, torch_dtype(type), 0, segment);
  const bool average = !unit.options.divide_factor && !unit.options.force_sum_reduction && type != DType::f16;
  pybind11::gil_scoped_acquire gil;
  const PyRef py_output = PyRef::steal(THPVariable_Wrap(output));
  const PyRef py_input = PyRef::steal(THPVariable_Wrap(input));
  mine.reduced.work = PyRef::steal(PyObject_CallFunctionObjArgs(collectives_.reduce_scatter.get(), py_output.get(),
                                                                py_input.get(), average ? Py_True : Py_False, nullptr));
  if (!mine.reduced.work) throw_python_error();
  ++unit.root->counters.python_calls;
}

bool GroupTransport::finish_reduce(Unit& unit, bool /*flush*/) {
  Scratch& scratch = unit.scratch;
  if (!scratch.posted) return true;
  PerUnit& mine = per_unit(unit);
  const bool alone = unit.layout.world() == 1;
  wait(mine.reduced);
  const DType type = reduce_type(unit);
  const at::Tensor& memory = alone ? mine.reduction.memory : mine.reduced.memory;
  const bool average = !unit.options.divide_factor && !unit.options.force_sum_reduction && type != DType::f16;
  const double divisor = average && !alone ? 1.0 : unit.divisor() / (alone ? 1.0 : pre_divisor(type, unit.divisor()));
  std::vector<uint8_t> wanted = scratch.filled;
  if (!alone) {
    const at::Tensor flags = as_type(memory, torch_dtype(type), mine.plan->layout.reduce_segment_bytes(),
                                     unit.params.size() * dtype_bytes(type))
                                 .to(at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = flags.const_data_ptr<float>()[i] > 0.0F;
  }
  pybind11::gil_scoped_acquire gil;
  std::vector<GradientTarget> targets(wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    const ParamPlace& place = mine.plan->layout.params()[i];
    if (!wanted[i]) continue;
    targets[i] = unit.gradients.prepare(i, unit.root->blocks);
    scale_into(device_, place.shape.orig, targets[i].data, type,
               static_cast<const std::byte*>(memory.const_data_ptr()) + place.reduce_segment_offset, place.shard_numel,
               divisor, targets[i].accumulate);
  }
  abandon_reduce(unit);
  scratch.reduced_this_backward = true;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i]) unit.gradients.attach(i, targets[i]);
  }
  unit.gradients.release_if_unused(unit.root->blocks);
  return true;
}

void GroupTransport::abandon_reduce(Unit& unit) {
  Scratch& scratch = unit.scratch;
  if (!scratch.open) return;
  PerUnit& mine = per_unit(unit);
  wait(mine.reduced);
  give_back(mine.reduced);
  give_back(mine.reduction);
  scratch.open = scratch.posted = scratch.pending_flush = false;
  scratch.data = nullptr;
  mine.plan = nullptr;
  --num_scratches_;
}

TransportStats GroupTransport::stats() const {
  TransportStats stats;
  stats.gather_slots_owned = gather_ledger_.num_owned();
  stats.gather_slot_bytes = gather_ledger_.arena_bytes();
  stats.peak_gather_bytes = gather_ledger_.peak_owned_bytes();
  stats.scratch_slots_owned = num_scratches_;
  for (const auto& [bytes, memory] : free_) stats.scratch_bytes += bytes;
  stats.num_allocations = num_allocations_;
  stats.owners = gather_ledger_.owners();
  return stats;
}

}  // namespace fsdp2x
