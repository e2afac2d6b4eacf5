// The transport over a torch.distributed process group.
#include "engine/transport/process_group/process_group_transport.hpp"

#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.hpp"
#include "engine/memory/device_copy.hpp"
#include "engine/memory/local_tensor.hpp"
#include "engine/memory/storage.hpp"
#include "engine/transport/agreement.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x {

namespace {

// Returns the common dtype of a group's parameters for the collective, or bytes if they differ.
DType wire_type(const Layout& layout) {
  const DType type = layout.params().front().shape.compute;
  for (const ParamPlace& place : layout.params()) {
    if (place.shape.compute != type) return DType::byte;
  }
  return type;
}

// `collectives_` count what they post. Others do not know the agreement.
Counts counts(const PyRef& replacement) { return replacement ? Counts::now : Counts::at_post; }

}  // namespace

ProcessGroupTransport::ProcessGroupTransport(Collectives collectives)
    : CpuTransport(kAlignBytes), collectives_(std::move(collectives)), kept_(collectives_.message_bytes) {}

void ProcessGroupTransport::register_group(const std::shared_ptr<ParamGroup>& group) {
  CpuTransport::register_group(group);
  PerGroup& state = groups_.emplace_back();
  state.group = group.get();
  state.whole = GatherProgram(plan_gather(group->layout(), kPackEverything));
  state.in_place = GatherProgram(plan_gather_on_cpu(group->layout(), collectives_.pack_below_bytes));
}

bool ProcessGroupTransport::may_replace(const ParamGroup& group) {
  if (!collectives_.may_replace) return false;
  const Pass& pass = group.pass();
  if (pass.kind == PassKind::outside || pass != asked_in_) {
    const pybind11::gil_scoped_acquire gil;
    may_replace_ = call(gil, collectives_.may_replace.get()).get() == Py_True;
    asked_in_ = pass;
  }
  return may_replace_;
}

bool ProcessGroupTransport::may_overlap(const ParamGroup& group) {
  const bool has_large = !group.gathers_alone() && !per_group(group).in_place.direct.empty();
  const bool is_plain = group.options().wire_weights == WireFormat::plain;
  return has_large && is_plain && !group.calls().all_gather && !group.calls().reduce_scatter && may_replace(group);
}

ProcessGroupTransport::Route ProcessGroupTransport::gather_route(ParamGroup& group) {
  std::optional<Coded>& coded = per_group(group).coded;
  const WireFormat format = group.options().wire_weights;
  if (format != WireFormat::plain) {
    if (!coded || coded->format != format) coded = Coded{GatherProgram(group.layout(), format), format};
    return Route::coded;
  }
  coded.reset();
  return may_overlap(group) ? Route::messages : Route::collective;
}

ProcessGroupTransport::Route ProcessGroupTransport::reduce_route(ParamGroup& group) {
  if (group.layout().world() == 1) return Route::collective;
  if (group.options().wire_gradients != WireFormat::plain) return Route::coded;
  per_group(group).wire.reset();
  return !group.calls().reduce_scatter && may_replace(group) ? Route::messages : Route::collective;
}

std::vector<size_t> ProcessGroupTransport::message_parts(const ParamGroup& group, size_t segment_bytes) {
  const bool is_large = segment_bytes >= collectives_.message_bytes;
  if (group.calls().all_gather || !is_large || !may_replace(group)) return {};
  return {segment_bytes};
}

at::Tensor ProcessGroupTransport::take(size_t bytes) {
  tally_.take(bytes);
  return kept_.take(bytes);
}

at::Tensor ProcessGroupTransport::allocate(const ParamGroup& group, const PyRef& memory, DType type, size_t bytes,
                                           const char* operation) {
  pybind11::gil_scoped_acquire gil;
  static PyObject* const allocate_name = interned("allocate");
  static PyObject* const names = Py_BuildValue("(ss)", "dtype", "device");
  static PyObject* const cpu = THPDevice_New(at::kCPU);
  const auto numel = static_cast<Py_ssize_t>(bytes / dtype_bytes(type));
  const pybind11::object dtype = pybind11::cast(torch_dtype(type));
  const PyRef size = PyRef::steal(Py_BuildValue("(n)", numel));
  const std::array arguments{PyTuple_GET_ITEM(memory.get(), 0), size.get(), dtype.ptr(), cpu};
  PyRef made = PyRef::steal(PyObject_VectorcallMethod(allocate_name, arguments.data(), 2, names));
  const auto fits = [&](PyObject* object) {
    if (!THPVariable_Check(object)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(object);
    const bool is_flat = tensor.dim() == 1 && tensor.size(0) == numel && tensor.is_contiguous();
    return is_flat && tensor.is_cpu() && tensor.scalar_type() == torch_dtype(type);
  };
  if (made && !fits(made.get())) {
    PyObject* const check = PyTuple_GET_ITEM(memory.get(), 1);
    const PyRef checked = PyRef::steal(PyObject_CallFunction(check, "OnO", made.get(), numel, dtype.ptr()));
    if (!checked) made = PyRef();
  }
  if (!made) throw_collective_error(gil, group, group.calls().explain, operation);
  return THPVariable_Unpack(made.get());
}

void ProcessGroupTransport::give_back(at::Tensor& memory, bool keeps) {
  if (!memory.defined()) return;
  tally_.give_back(memory.nbytes());
  if (keeps) kept_.keep(memory);
  memory = at::Tensor();
}

void ProcessGroupTransport::wait(const ParamGroup& group, Posted& posted, const char* operation) {
  if (!posted.work) return;
  pybind11::gil_scoped_acquire gil;
  const PyRef work = std::move(posted.work);
  if (work.get() != Py_None) {  // which is the work of a synchronous collective
    const PyRef done = PyRef::steal(PyObject_CallFunctionObjArgs(collectives_.wait.get(), work.get(), nullptr));
    if (!done) throw_collective_error(gil, group, group.calls().explain, operation);
  }
  posted.is_open = false;
}

template <typename Close>
void ProcessGroupTransport::end(const ParamGroup& group, Posted& posted, const char* operation, const Close& close) {
  const std::shared_ptr<Agreement>& agreement = group.shard_seat().agreement;
  if (agreement && agreement->is_broken()) posted.work = PyRef();
  try {
    wait(group, posted, operation);
  } catch (...) {
    close();
    throw;
  }
  close();
}

void ProcessGroupTransport::begin_forward(const PyRef& /*after*/) {
  ++num_forwards_;
  is_in_forward_ = true;
}

void ProcessGroupTransport::start(ParamGroup& group, const PyRef& collective, Posted& posted, const at::Tensor& output,
                                  const at::Tensor& input, const char* operation, PyObject* option) {
  const pybind11::gil_scoped_acquire gil;
  posted.is_open = true;
  posted.work = call_collective(gil, group, collective, output, input, operation, option);
}

const GatherProgram& ProcessGroupTransport::gather_of(const PerGroup& state) const {
  if (state.gather.route == Route::coded) return state.coded->program;
  return state.gather.route == Route::messages ? state.in_place : state.whole;
}

const at::Tensor& ProcessGroupTransport::coded_segment(ParamGroup& group, bool pools_stand_still) {
  const pybind11::gil_scoped_acquire gil;
  Coded& coded = *per_group(group).coded;
  const uint64_t versions = group.shard_versions(gil);
  const uint64_t forward = pools_stand_still ? num_forwards_ : 0;
  if (forward != 0 && forward == coded.for_forward && versions == coded.shard_versions) return coded.segment;
  // The bytes between the pieces are sent too, so they must be initialized.
  const auto bytes = static_cast<int64_t>(coded.program.segment_bytes);
  if (!coded.segment.defined()) coded.segment = at::zeros({bytes}, at::kByte);
  const void* const pool = group.pool().const_data_ptr();
  void* const segment = coded.segment.mutable_data_ptr();
  run_copies_on(at::kCPU, coded.program.to_segment.copies, pool, segment);
  encode_on_host(coded.program.codes_to_segment, pool, segment, nullptr, {});
  ++group.counters().wire_encodings;
  coded.for_forward = forward;
  coded.shard_versions = versions;
  return coded.segment;
}

bool ProcessGroupTransport::can_send_pool(const ParamGroup& group) const {
  const auto& direct = groups_.at(group.index()).in_place.direct;
  return std::ranges::all_of(direct, [&](const DirectGather& one) {
    const ParamPlace& place = group.layout().params()[one.param];
    return place.shape.orig == place.shape.compute && place.shape.outer == 1 &&
           place.shard_numel == place.padded_shard_numel;
  });
}

void ProcessGroupTransport::begin_gather_in_place(ParamGroup& group, bool pools_stand_still) {
  PerGroup& state = per_group(group);
  const GatherProgram& plan = state.in_place;
  const auto world = static_cast<size_t>(group.layout().world());
  const auto rank = static_cast<size_t>(group.layout().rank());
  std::vector<size_t> parts;
  for (const DirectGather& direct : plan.direct) parts.push_back(direct.chunk_bytes);
  if (plan.segment_bytes > 0) parts.push_back(plan.segment_bytes);
  agree_on_shards(group, Operation::all_gather, group.layout().gather_segment_bytes(), DType::byte, Counts::at_post,
                  parts);
  open_slot(group);
  const at::Tensor& pool = group.pool();
  const at::Tensor& slot = slot_memory_[static_cast<size_t>(group.gather().slot.id)];
  const auto fill_own_rows = [&] {
    run_copies_on(at::kCPU, plan.to_slot.copies, pool.const_data_ptr(), group.gather().write);
  };
  // A model's forward may write the shards of a unit that is gathered ahead. Without a copy, ranks would send a mix.
  const bool from_pool = pools_stand_still && !is_in_forward_ && can_send_pool(group);
  if (!from_pool) fill_own_rows();
  std::vector<at::Tensor> outputs, sources;
  for (const auto& [param, offset, bytes] : plan.direct) {
    outputs.push_back(typed(slot, DType::byte, offset, bytes * world));
    sources.push_back(from_pool ? typed(pool, DType::byte, group.layout().params()[param].shard_offset, bytes)
                                : typed(slot, DType::byte, offset + rank * bytes, bytes));
  }
  if (plan.segment_bytes > 0) {
    state.gather.memory = take(plan.segment_bytes * world);
    auto* const own = static_cast<std::byte*>(state.gather.memory.data_ptr()) + rank * plan.segment_bytes;
    run_copies_on(at::kCPU, plan.to_segment.copies, pool.const_data_ptr(), own);
    outputs.push_back(state.gather.memory);
    sources.push_back(typed(state.gather.memory, DType::byte, rank * plan.segment_bytes, plan.segment_bytes));
  }
  {
    const pybind11::gil_scoped_acquire gil;
    const pybind11::object py_outputs = pybind11::cast(outputs);
    const pybind11::object py_sources = pybind11::cast(sources);
    state.gather.is_open = true;
    state.gather.work =
        call_collective(gil, group, collectives_.gather_in_place, py_outputs.ptr(), py_sources.ptr(), "all-gather");
  }
  if (from_pool) fill_own_rows();  // while gloo's threads send
}

void ProcessGroupTransport::begin_gather(ParamGroup& group, bool pools_stand_still) {
  PerGroup& state = per_group(group);
  if (group.gathers_alone()) return CpuTransport::begin_gather(group, pools_stand_still);
  ahead_ = &state;
  state.gather.route = gather_route(group);
  if (state.gather.route == Route::messages) return begin_gather_in_place(group, pools_stand_still);
  begin_packed_gather(group, pools_stand_still);
}

void ProcessGroupTransport::begin_packed_gather(ParamGroup& group, bool pools_stand_still) {
  PerGroup& state = per_group(group);
  const GroupCalls& calls = group.calls();
  const bool is_coded = state.gather.route == Route::coded;
  const size_t segment = gather_of(state).segment_bytes;
  const size_t bytes = segment * static_cast<size_t>(group.layout().world());
  const DType type = is_coded ? DType::byte : wire_type(group.layout());
  agree_on_shards(group, Operation::all_gather, segment, type, counts(calls.all_gather), message_parts(group, segment));
  const bool is_custom = !is_coded && calls.gather_memory;
  if (is_custom) {
    state.gather.memory = allocate(group, calls.gather_memory, type, bytes, "all-gather");
    tally_.take(bytes);
  } else {
    state.gather.memory = take(bytes);
  }
  const at::Tensor output = is_custom ? state.gather.memory : typed(state.gather.memory, type, 0, bytes);
  at::Tensor input;
  if (is_coded) {
    input = coded_segment(group, pools_stand_still);
  } else {
    const size_t own = static_cast<size_t>(group.layout().rank()) * segment;
    run_copies_on(at::kCPU, state.whole.to_segment.copies, group.pool().const_data_ptr(),
                  static_cast<std::byte*>(state.gather.memory.data_ptr()) + own);
    input = typed(state.gather.memory, type, own, segment);
  }
  start(group, calls.all_gather ? calls.all_gather : collectives_.all_gather, state.gather, output, input,
        "all-gather");
}

void ProcessGroupTransport::finish_gather(ParamGroup& group) {
  if (group.gathers_alone()) return;
  PerGroup& state = per_group(group);
  if (ahead_ == &state) ahead_ = nullptr;
  wait(group, state.gather, "all-gather");
  // Not before, because a prefetched unit holds its staging only, unless it was gathered straight into the slot.
  if (state.gather.route != Route::messages) open_slot(group);
  const GatherProgram& program = gather_of(state);
  if (state.gather.memory.defined()) {
    const void* const segments = state.gather.memory.const_data_ptr();
    run_copies_on(at::kCPU, program.copy_out.copies, segments, group.gather().write);
    decode_on_host(program.codes_to_slot, segments, group.gather().write);
  }
  give_back(state.gather.memory);
}

void ProcessGroupTransport::release_gather(ParamGroup& group) {
  PerGroup& state = per_group(group);
  if (ahead_ == &state) ahead_ = nullptr;
  end(group, state.gather, "all-gather", [&] {  // not before, because peers may still send into the slot
    give_back(state.gather.memory);
    const int id = group.gather().slot.id;
    if (id < 0) return;
    // gloo may still write into a slot that the group keeps for its next gather.
    const bool is_spoiled = state.gather.route == Route::messages && std::exchange(state.gather.is_open, false);
    const bool is_free = group.close_slot(gather_ledger_);
    // The group's own reduction follows, or the use of a unit that is gathered ahead.
    const bool reduces = packed_of(group).plan != nullptr && !is_in_forward_;
    const bool keeps = (reduces || ahead_ != nullptr) && !is_spoiled;
    if (is_free || is_spoiled) give_back(slot_memory_[static_cast<size_t>(id)], keeps);
    if (!keeps) kept_.clear();
  });
}

void ProcessGroupTransport::make_room(ParamGroup&) {
  for (PerGroup& other : groups_) {
    if (other.gather.route != Route::messages) wait(*other.group, other.gather, "all-gather");
  }
}

SegmentPlan& ProcessGroupTransport::plan_of(ParamGroup& group, bool /*is_wide*/) {
  return packed_of(group).plans.of(group);
}

std::byte* ProcessGroupTransport::open_packed(ParamGroup& group, size_t bytes) {
  PerGroup& state = per_group(group);
  state.packed = take(bytes);
  if (group.calls().all_reduce_hook) state.packed.zero_();  // the user's hook sees the pads
  ++num_scratches_;
  return static_cast<std::byte*>(state.packed.mutable_data_ptr());
}

void ProcessGroupTransport::close_packed(ParamGroup& group) {
  PerGroup& state = per_group(group);
  // Next, the sharded gradients take memory. If gradients are reduced in a wider dtype than the parameters', the peak
  // would then be higher than without kept memory.
  const bool is_wide = !KeptMemory::is_alike(state.packed.nbytes(), group.layout().slot_bytes());
  const bool is_open = std::exchange(state.reduced.is_open, false);  // gloo may still use the memory
  const bool keeps = ahead_ != nullptr && !is_wide && !is_open && !group.calls().reduce_memory;
  give_back(state.reduced.memory, keeps);
  give_back(state.packed, keeps);
  if (!keeps) kept_.clear();
  state.reduced.route = Route::collective;
  packed_of(group).plan = nullptr;
  --num_scratches_;
}

void ProcessGroupTransport::begin_coded_reduce(ParamGroup& group) {
  PerGroup& state = per_group(group);
  const Packed& packed = packed_of(group);
  WireGradients& wire = WireGradients::of(state.wire, group, *packed.plan);
  agree_on_shards(group, Operation::all_to_all, wire.segment_bytes(), DType::byte, Counts::at_post);
  at::Tensor sent = take(wire.bytes());
  encode_on_host(wire.to_segments(), packed.data, sent.mutable_data_ptr(), wire.errors(at::kCPU), packed.filled);
  give_back(state.packed);
  state.packed = std::move(sent);
  state.reduced.memory = take(wire.bytes());
  start(group, collectives_.all_to_all, state.reduced, state.reduced.memory, state.packed, "reduction");
}

void ProcessGroupTransport::begin_exchange(ParamGroup& group) {
  PerGroup& state = per_group(group);
  const size_t segment = packed_of(group).plan->segment_bytes;
  const PyRef& separate = group.calls().separate_all_to_all;
  agree_on_shards(group, Operation::all_to_all, segment, group.reduce_type(), counts(separate));
  state.reduced.memory = take(segment * static_cast<size_t>(group.layout().world()));
  start(group, separate ? separate : collectives_.all_to_all, state.reduced, state.reduced.memory, state.packed,
        "reduction");
}

void ProcessGroupTransport::post_reduce(ParamGroup& group, ForwardCounts) {
  PerGroup& state = per_group(group);
  state.reduced.route = reduce_route(group);
  if (group.layout().world() == 1) return;
  switch (state.reduced.route) {
    case Route::coded:
      return begin_coded_reduce(group);
    case Route::messages:
      return begin_exchange(group);
    case Route::collective:
      return begin_reduce_scatter(group);
  }
}

void ProcessGroupTransport::begin_reduce_scatter(ParamGroup& group) {
  PerGroup& state = per_group(group);
  const DType type = group.reduce_type();
  const size_t segment = packed_of(group).plan->segment_bytes;
  at::Tensor input = typed(state.packed, type, 0, segment * static_cast<size_t>(group.layout().world()));
  const GroupCalls& calls = group.calls();
  agree_on_shards(group, Operation::reduce_scatter, segment, type,
                  counts(calls.reduce_scatter ? calls.reduce_scatter : calls.separate_reduce_scatter));
  at::Tensor output;
  if (calls.reduce_memory) {
    at::Tensor copy = allocate(group, calls.reduce_memory, type, input.nbytes(), "reduction");
    state.reduced.memory = output = allocate(group, calls.reduce_memory, type, segment, "reduction");
    copy.copy_(input);
    state.packed = input = std::move(copy);  // same size
    tally_.take(segment);
  } else {
    state.reduced.memory = take(segment);
    output = typed(state.reduced.memory, type, 0, segment);
  }
  const PyRef& own = calls.separate_reduce_scatter ? calls.separate_reduce_scatter : collectives_.reduce_scatter;
  start(group, calls.reduce_scatter ? calls.reduce_scatter : own, state.reduced, output, input, "reduction",
        group.averages() ? Py_True : Py_False);
}

void ProcessGroupTransport::sum_coded(ParamGroup& group) {
  PerGroup& state = per_group(group);
  const WireGradients& wire = *state.wire;
  const int world = group.layout().world();
  at::Tensor rows = take(packed_of(group).plan->segment_bytes);
  const size_t own = static_cast<size_t>(group.layout().rank()) * wire.segment_bytes();
  std::memcpy(static_cast<std::byte*>(state.reduced.memory.mutable_data_ptr()) + own,
              static_cast<const std::byte*>(state.packed.const_data_ptr()) + own, wire.segment_bytes());
  // The user's hook sees the pads, and the all-reduce sends them.
  if (group.calls().all_reduce_hook || group.has_replicas()) rows.zero_();
  // If a plain collective would average, the all-reduce over the replicas will.
  sum_codes_on_host(wire.to_rows(), state.reduced.memory.const_data_ptr(), wire.segment_bytes(), world,
                    group.averages() ? world : 1.0, rows.mutable_data_ptr());
  give_back(state.reduced.memory);
  state.reduced.memory = std::move(rows);
}

std::optional<CpuTransport::Joined> ProcessGroupTransport::join_reduce(ParamGroup& group, bool /*flush*/) {
  PerGroup& state = per_group(group);
  wait(group, state.reduced, "reduction");
  if (state.reduced.route == Route::coded) sum_coded(group);
  Joined joined;
  const SegmentPlan& plan = *packed_of(group).plan;
  if (state.reduced.route == Route::messages) {
    for (int rank = 0; rank < group.layout().world(); ++rank) {
      const at::Tensor& memory = rank == group.layout().rank() ? state.packed : state.reduced.memory;
      const auto* const segments = static_cast<const std::byte*>(memory.const_data_ptr());
      joined.sources.push_back({segments + static_cast<size_t>(rank) * plan.segment_bytes, plan.layout.get(), nullptr});
    }
    joined.memory = std::make_shared<std::array<at::Tensor, 2>>(std::array{state.packed, state.reduced.memory});
  } else {
    joined.summed = group.layout().world() == 1 ? state.packed : state.reduced.memory;
  }
  close_packed(group);
  return joined;
}

bool ProcessGroupTransport::abandon_reduce(ParamGroup& group) {
  PerGroup& state = per_group(group);
  // The errors belong to the dropped gradients.
  if (state.wire && state.wire->kept_errors().defined()) state.wire->kept_errors().zero_();
  if (packed_of(group).plan == nullptr) return false;
  end(group, state.reduced, "reduction", [&] { close_packed(group); });  // or the next gradients are added to these
  return true;
}

void ProcessGroupTransport::end_prefetch() {
  if (ahead_ == nullptr) kept_.clear();
}

void ProcessGroupTransport::end_forward() {
  is_in_forward_ = false;
  kept_.clear();
}

void ProcessGroupTransport::release_idle() {
  kept_.clear();
  for (PerGroup& state : groups_) {
    if (state.gather.route != Route::coded || !state.gather.memory.defined()) state.coded.reset();
    if (state.reduced.route != Route::coded) state.wire.reset();
  }
}

TransportStats ProcessGroupTransport::stats() const {
  TransportStats stats = CpuTransport::stats();
  for (const PerGroup& state : groups_) {
    if (state.coded && state.coded->segment.defined()) stats.wire_bytes += state.coded->segment.nbytes();
    if (state.wire) stats.wire_bytes += state.wire->error_bytes();
  }
  stats.scratch_slots_owned = num_scratches_;
  stats.scratch_bytes = tally_.peak_bytes();
  stats.num_allocations = kept_.num_allocations();
  return stats;
}

std::vector<Transport::Loan> ProcessGroupTransport::loans() const {
  std::vector<Loan> found;
  for (const at::Tensor& slot : slot_memory_) {
    if (slot.defined()) found.push_back({"slot", "", slot.const_data_ptr(), slot.nbytes()});
  }
  return found;
}

}  // namespace fsdp2x
