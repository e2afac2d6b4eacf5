// Reductions of the device transport.
#include "engine/transport/device/device_reductions.hpp"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.hpp"
#include "engine/memory/storage.hpp"
#include "engine/transport/agreement.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

DeviceReductions::DeviceReductions(DeviceContext& context, ReduceMemory& memory, HostShards& host_shards)
    : context_(context), memory_(memory), host_shards_(host_shards) {}

// --- the collective ---

at::Tensor DeviceReductions::rows_for(ParamGroup& group, Reduction& running) {
  PerGroup& state = per_group(group);
  const size_t bytes = running.plan->segment_bytes;
  const bool is_plain =
      !group.calls().reduce_scatter && !group.calls().all_reduce_hook && !context_.keeps() && !group.offloads();
  const bool stays = !group.has_replicas() || (group.options().requires_all_reduce && !state.partial);
  if (is_plain && stays && group.layout().world() > 1 && running.plan->layout->can_reduce_in_place()) {
    pybind11::gil_scoped_acquire gil;
    if (const auto pool = group.gradients().take_pool(gil, running.plan->layout)) {
      context_.follow_blocks(Lane::reduce);
      return pool->narrow(0, 0, static_cast<int64_t>(bytes));
    }
  }
  running.segment = memory_.take_segment(group, bytes);
  return memory_.segment(*running.segment).memory.narrow(0, 0, static_cast<int64_t>(bytes));
}

void DeviceReductions::begin(ParamGroup& group, DevicePacking::Packed packed) {
  PerGroup& state = per_group(group);
  Reduction running;
  running.plan = packed.plan;
  running.has_gradient = std::move(packed.has_gradient);
  running.is_certain = packed.is_certain;
  if (!packed.buffer) {  // in the gradient pool
    running.rows = packed.memory.narrow(0, 0, static_cast<int64_t>(packed.plan->segment_bytes));
    running.lane = Lane::compute;
    state.running = std::move(running);
    return;
  }
  state.unsent = packed.buffer;
  if (!running.is_certain && context_.layer().in_capture()) {
    throw Error("fsdp2x: the backward of unit '" + group.name() +
                "' is captured into a CUDA graph and gives some parameters no gradient, so the host would have to wait "
                "for the flags of the other ranks. Use all parameters, freeze the unused ones, or call "
                "set_reduce_scatter_unused_params(True) on the unit.");
  }
  take_memory(group, packed, running);
  reduce_over_shards(group, packed, running);
  end_collective(group, running);
  state.running = std::move(running);
}

void DeviceReductions::take_memory(ParamGroup& group, const DevicePacking::Packed& packed, Reduction& running) {
  PerGroup& state = per_group(group);
  DeviceLayer& layer = context_.layer();
  const SegmentPlan& plan = *packed.plan;
  const int world = group.layout().world();
  const WireGradients* const wire = world > 1 ? wire_of(group, plan) : nullptr;
  running.divisor = group.averages() ? 1.0 : group.divisor();
  if (world == 1) {
    running.rows = packed.memory.narrow(0, 0, static_cast<int64_t>(plan.segment_bytes));
    running.buffer = packed.buffer;
  } else {
    agree_on_shards(group, wire == nullptr ? Operation::reduce_scatter : Operation::all_to_all,
                    wire == nullptr ? plan.segment_bytes : wire->bytes(), group.reduce_type(), Counts::now);
    if (packed.items.empty()) divide_before(group, input_of(group, packed));
    running.divisor /= group.pre_divisor();
    running.rows = rows_for(group, running);  // new memory is new in the order of the compute lane
  }
  state.running = running;  // if the rest raises, drop() gives back what it has
  if (wire != nullptr) state.running.codes = running.codes = memory_.take_segment(group, 2 * wire->bytes());
  context_.follow_compute(running.lane);
  for (const auto segment : {running.segment, running.codes}) {
    if (segment) layer.wait(running.lane, *memory_.segment(*segment).free);
  }
}

void DeviceReductions::divide_before(const ParamGroup& group, const at::Tensor& input) {
  if (const double before = group.pre_divisor(); before != 1.0) context_.layer().divide(input, before);
}

at::Tensor DeviceReductions::input_of(const ParamGroup& group, const DevicePacking::Packed& packed) {
  const size_t bytes = packed.plan->segment_bytes * static_cast<size_t>(group.layout().world());
  return typed(packed.memory, group.reduce_type(), 0, bytes);
}

void DeviceReductions::reduce_over_shards(ParamGroup& group, const DevicePacking::Packed& packed,
                                          const Reduction& running) {
  if (group.layout().world() == 1) return;
  const LaneScope scope(context_.layer(), running.lane);
  if (running.codes) {
    reduce_coded(group, *per_group(group).wire, running, input_of(group, packed), packed.filled);
  } else if (packed.items.empty()) {
    call_reduce_scatter(group, running, packed.plan->whole(), input_of(group, packed));
  } else {
    reduce_pieces(group, packed, running);
  }
}

void DeviceReductions::reduce_pieces(ParamGroup& group, const DevicePacking::Packed& packed, const Reduction& running) {
  for (const Piece& piece : packed.plan->pieces) {
    const size_t bytes = piece.size() * static_cast<size_t>(group.layout().world());
    const at::Tensor input = typed(packed.memory, group.reduce_type(), 0, bytes);
    context_.layer().launch_pack(*packed.plan, piece, packed.items, running.has_gradient, packed.memory);
    divide_before(group, input);
    call_reduce_scatter(group, running, piece, input);
  }
}

void DeviceReductions::end_collective(ParamGroup& group, Reduction& running) {
  PerGroup& state = per_group(group);
  running.number = memory_.begin(*std::exchange(state.unsent, std::nullopt), running.lane);
  if (running.codes) {
    state.running.codes.reset();
    memory_.retire_segment(*std::exchange(running.codes, std::nullopt), running.number, running.lane);
  }
  if (group.has_replicas()) {
    reduce_over_replicas(group, running);
  } else if (group.calls().all_reduce_hook) {
    context_.follow(Lane::all_reduce, running.lane);
    running.lane = Lane::all_reduce;
  }
  if (!running.is_certain && running.rows.defined()) ask_for_flags(group, running);
}

void DeviceReductions::call_reduce_scatter(ParamGroup& group, const Reduction& running, const Piece& piece,
                                           const at::Tensor& input) {
  const ProfileRange range(group.unit().ranges.reduce_scatter);
  const at::Tensor output = typed(running.rows, group.reduce_type(), piece.begin, piece.size());
  const GroupCalls& calls = group.calls();
  const PyRef& own =
      calls.separate_reduce_scatter ? calls.separate_reduce_scatter : context_.collectives().reduce_scatter;
  const pybind11::gil_scoped_acquire gil;
  call_collective(gil, group, calls.reduce_scatter ? calls.reduce_scatter : own, output, input, "reduction",
                  group.averages() ? Py_True : Py_False);
}

WireGradients* DeviceReductions::wire_of(ParamGroup& group, const SegmentPlan& plan) {
  PerGroup& state = per_group(group);
  if (group.options().wire_gradients != WireFormat::plain) return &WireGradients::of(state.wire, group, plan);
  state.wire.reset();
  return nullptr;
}

void DeviceReductions::reduce_coded(ParamGroup& group, WireGradients& wire, const Reduction& running,
                                    const at::Tensor& packed, const std::vector<uint8_t>& filled) {
  const ProfileRange range(group.unit().ranges.reduce_scatter);
  DeviceLayer& layer = context_.layer();
  const auto bytes = static_cast<int64_t>(wire.bytes());
  const at::Tensor& codes = memory_.segment(*running.codes).memory;
  const at::Tensor sent = codes.narrow(0, 0, bytes), received = codes.narrow(0, bytes, bytes);
  layer.encode(wire.to_segments(), packed.const_data_ptr(), sent.data_ptr(), wire.errors(layer.device()), filled);
  {
    const pybind11::gil_scoped_acquire gil;
    call_collective(gil, group, context_.collectives().all_to_all, received, sent, "reduction");
  }
  // The user's hook sees the pads, and the all-reduce sends them.
  if (group.calls().all_reduce_hook || group.has_replicas()) layer.zero(running.rows);
  // If a plain collective would average, the all-reduce over the replicas will.
  layer.sum_codes(wire.to_rows(), received.const_data_ptr(), wire.segment_bytes(), group.layout().world(),
                  group.averages() ? group.layout().world() : 1.0, running.rows.data_ptr());
}

void DeviceReductions::reduce_over_replicas(ParamGroup& group, Reduction& running) {
  PerGroup& state = per_group(group);
  const DType type = group.reduce_type();
  const at::Tensor rows = typed(running.rows, type, 0, running.rows.nbytes());
  if (state.partial) {
    DeviceBuffer& partial = memory_.segment(*state.partial);
    if (state.partial_plan != running.plan->layout) {
      throw_frozen_while_partial(group);
    }
    const LaneScope scope(context_.layer(), running.lane);
    context_.layer().add(rows, typed(partial.memory, type, 0, rows.nbytes()));
    memory_.retire_segment(*std::exchange(state.partial, std::nullopt), running.number, running.lane);
    group.note_merged_partial();
  }
  if (!group.options().requires_all_reduce) {
    keep_partial(group, running);
    return;
  }
  const ProfileRange range(group.unit().ranges.all_reduce);
  agree_on_replicas(group, rows.nbytes(), type, Counts::now);
  context_.follow(Lane::all_reduce, running.lane);
  running.lane = Lane::all_reduce;
  const LaneScope scope(context_.layer(), running.lane);
  call_all_reduce(group, rows);
}

void DeviceReductions::keep_partial(ParamGroup& group, Reduction& running) {
  PerGroup& state = per_group(group);
  if (!running.segment) {  // one rank: the packed gradients are the rows
    bool is_new = false;
    const auto bytes = running.rows.nbytes();
    running.segment = memory_.take_segment(group, bytes, &is_new);
    DeviceBuffer& segment = memory_.segment(*running.segment);
    if (is_new) context_.follow_compute(running.lane);
    context_.layer().wait(running.lane, *segment.free);
    const DType type = group.reduce_type();
    const LaneScope scope(context_.layer(), running.lane);
    context_.layer().assign(typed(segment.memory, type, 0, bytes), typed(running.rows, type, 0, bytes));
    context_.layer().record(*memory_.buffer(*running.buffer).free, running.lane);
  }
  state.partial = std::exchange(running.segment, std::nullopt);
  state.partial_plan = running.plan->layout;
  context_.layer().record(*memory_.segment(*state.partial).ready, running.lane);
  group.note_partial();
  running = Reduction();
}

// --- its rows ---

// The rows of a reduction, written from where the last collective left them.
class DeviceRows final : public ReducedRows {
 public:
  DeviceRows(DeviceReductions& reductions, ParamGroup& group, DeviceReductions::Reduction reduction)
      : reductions_(reductions), group_(group), reduction_(std::move(reduction)) {}
  ~DeviceRows() override { retire(reduction_.lane); }
  std::vector<uint8_t> has_gradient() override { return reduction_.has_gradient; }
  void run_hook(const Gil& gil, const PyRef& hook) override;
  std::unique_ptr<ReducedRows> to_host(const Gil& gil) override;
  void write(const GradientTargets& targets) override;
  void note_block_given_back() override { reductions_.context_.note_freed_block(reduction_.lane); }

 private:
  // Notes that `lane` is the last lane with work on the rows.
  void retire(Lane lane);

  DeviceReductions& reductions_;
  ParamGroup& group_;
  DeviceReductions::Reduction reduction_;
  std::optional<LaneScope> scope_;  // user hooks run where the gradient is complete
};

void DeviceRows::retire(Lane lane) {
  if (!reduction_.segment) return;
  reductions_.memory_.retire_segment(*std::exchange(reduction_.segment, std::nullopt), reduction_.number, lane);
}

void DeviceRows::run_hook(const Gil& gil, const PyRef& hook) {
  const LaneScope scope(reductions_.context_.layer(), reduction_.lane);
  call_hook(gil, hook,
            typed(reduction_.rows, group_.reduce_type(), 0, reduction_.plan->layout->reduce_segment_bytes()));
}

std::unique_ptr<ReducedRows> DeviceRows::to_host(const Gil& gil) {
  auto rows =
      reductions_.host_shards_.download(gil, group_, reduction_.rows, *reduction_.plan,
                                        std::move(reduction_.has_gradient), reduction_.divisor, reduction_.lane);
  retire(Lane::copy_out);
  if (reduction_.buffer) {
    reductions_.context_.layer().record(*reductions_.memory_.buffer(*reduction_.buffer).free, Lane::copy_out);
  }
  return rows;
}

void DeviceRows::write(const GradientTargets& targets) {
  DeviceContext& context = reductions_.context_;
  DeviceLayer& layer = context.layer();
  const DType type = group_.reduce_type();
  std::vector<RowItem> items;
  auto* const rows = static_cast<std::byte*>(reduction_.rows.data_ptr());
  bool is_new = false;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    const ParamPlace& place = reduction_.plan->layout->params()[i];
    const GradientTarget& target = *targets[i];
    is_new = is_new || target.is_new;
    // It was taken in the order of the compute lane, which must wait for this lane before it goes back.
    if (target.foreign.defined()) reductions_.foreign_sums_.push_back(target.foreign);
    const bool is_in_place = rows + place.reduce_segment_offset == target.data;
    if (place.shard_numel == 0 || (is_in_place && reduction_.divisor == 1.0)) continue;
    if (is_in_place) {
      const LaneScope scope(layer, reduction_.lane);
      const auto bytes = static_cast<size_t>(place.shard_numel) * dtype_bytes(type);
      layer.divide(typed(reduction_.rows, type, place.reduce_segment_offset, bytes), reduction_.divisor);
      continue;
    }
    items.push_back({i, target.data, target.accumulate});
  }
  if (is_new) context.follow_blocks(reduction_.lane);
  if (is_new && reduction_.lane != Lane::compute) context.follow_compute(reduction_.lane);
  scope_.emplace(layer, reduction_.lane);
  if (!items.empty()) layer.write_rows(*reduction_.plan, items, reduction_.rows, reduction_.divisor);
  retire(reduction_.lane);
  if (reduction_.buffer) {
    layer.record(*reductions_.memory_.buffer(*reduction_.buffer).free, reduction_.lane);
  }
}

void DeviceReductions::ask_for_flags(const ParamGroup& group, const Reduction& running) {
  PerGroup& state = per_group(group);
  DeviceLayer& layer = context_.layer();
  const DType type = group.reduce_type();
  const size_t num = running.has_gradient.size();
  if (!state.flags.defined()) {
    state.flags = layer.host_memory(at::kFloat, num);
    state.flags_there = layer.make_event(group.name() + ".flags");
  }
  const LaneScope scope(layer, running.lane);
  layer.transfer(state.flags,
                 typed(running.rows, type, running.plan->layout->reduce_segment_bytes(), num * dtype_bytes(type)));
  layer.record(*state.flags_there, running.lane);
}

void DeviceReductions::read_flags(const ParamGroup& group, Reduction& running) {
  PerGroup& state = per_group(group);
  context_.layer().synchronize(*state.flags_there);
  for (size_t i = 0; i < running.has_gradient.size(); ++i) {
    running.has_gradient[i] = state.flags.const_data_ptr<float>()[i] > 0.0F ? 1 : 0;
  }
}

std::unique_ptr<ReducedRows> DeviceReductions::finish(ParamGroup& group) {
  Reduction running = std::exchange(per_group(group).running, Reduction());
  if (!running.rows.defined()) return nullptr;
  if (!running.is_certain) read_flags(group, running);
  return std::make_unique<DeviceRows>(*this, group, std::move(running));
}

void DeviceReductions::drop(const ParamGroup& group) {
  PerGroup& state = per_group(group);
  if (group.is_posted()) context_.join(state.running.lane);  // it writes to memory that may be freed next
  for (const auto segment : {state.running.segment, state.running.codes}) {
    if (segment) memory_.give_back_segment(*segment, state.running.lane);
  }
  if (state.wire && state.wire->kept_errors().defined()) {  // the errors belong to the dropped gradients
    const LaneScope scope(context_.layer(), Lane::reduce);
    context_.layer().zero(state.wire->kept_errors());  // a graph may own their memory
  }
  if (state.unsent) memory_.give_back_buffer(*std::exchange(state.unsent, std::nullopt));
  state.running = Reduction();
}

std::unique_ptr<SegmentRows> DeviceReductions::partial(const ParamGroup& group) {
  PerGroup& state = per_group(group);
  if (!state.partial) return nullptr;
  DeviceBuffer& segment = memory_.segment(*state.partial);
  context_.layer().wait(Lane::compute, *segment.ready);
  return std::make_unique<SegmentRows>(segment.memory, state.partial_plan, group.reduce_type(), 1.0);
}

void DeviceReductions::drop_partial(const ParamGroup& group) {
  PerGroup& state = per_group(group);
  if (state.partial) memory_.give_back_segment(*std::exchange(state.partial, std::nullopt), Lane::reduce);
}

void DeviceReductions::end() {
  // With manual finalization, the rows of a single rank wait in its buffers across forwards.
  if (std::ranges::any_of(groups_, [](const PerGroup& state) { return state.running.buffer.has_value(); })) return;
  memory_.end();
  foreign_sums_.clear();
}

void DeviceReductions::release_idle() {
  for (PerGroup& state : groups_) {
    if (!state.running.rows.defined()) state.wire.reset();
  }
}

size_t DeviceReductions::wire_bytes() const {
  size_t bytes = 0;
  for (const PerGroup& state : groups_) bytes += state.wire ? state.wire->error_bytes() : 0;
  return bytes;
}

}  // namespace fsdp2x
