// What the transports of a CPU share.
#include "engine/transport/cpu_transport.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/memory/device_copy.hpp"
#include "engine/memory/storage.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x {

namespace {

double before_sum(const ParamGroup& group) { return group.layout().world() == 1 ? 1.0 : group.pre_divisor(); }

// Calls run(part) for the place of a parameter in each of the W segments, with its pad.
template <typename Run>
void for_each_part(const SegmentPlan& plan, const ParamPlace& place, std::byte* data, const Run& run) {
  for (int rank = 0; rank < plan.layout->world(); ++rank) {
    run(data + static_cast<size_t>(rank) * plan.segment_bytes + place.reduce_segment_offset);
  }
}

}  // namespace

CpuTransport::CpuTransport(size_t alignment) : gather_ledger_(alignment), scratch_ledger_(alignment) {}

void CpuTransport::register_group(const std::shared_ptr<ParamGroup>& group) {
  group->set_index(static_cast<uint32_t>(packed_.size()));
  packed_.emplace_back().filled.assign(group->params().size(), 0);
}

// --- slots ---

at::Tensor CpuTransport::take(size_t bytes) {
  ++num_allocations_;
  return pool_memory(static_cast<int64_t>(bytes), at::TensorOptions());
}

void CpuTransport::open_slot(ParamGroup& group) {
  const Slot& slot = group.open_slot(gather_ledger_);
  const auto id = static_cast<size_t>(slot.id);
  if (slot_memory_.size() <= id) slot_memory_.resize(id + 1);
  if (!slot_memory_[id].defined()) slot_memory_[id] = take(slot.bytes);
  group.gather().write = group.gather().read = static_cast<std::byte*>(slot_memory_[id].data_ptr());
}

void CpuTransport::write_rows(ParamGroup& group) {
  run_copies_on(at::kCPU, group.layout().shard_to_slot(), group.pool().const_data_ptr(), group.gather().write);
}

// A single rank keeps the GIL if it has it, so threads may call units of one root concurrently.
void CpuTransport::begin_gather(ParamGroup& group, bool /*pools_stand_still*/) {
  open_slot(group);
  write_rows(group);
}

void CpuTransport::release_gather(ParamGroup& group) {
  if (group.gather().slot.id >= 0) group.close_slot(gather_ledger_);
}

void CpuTransport::write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) {
  run_copies_on(at::kCPU, rows.copies, slot, group.pool().data_ptr());
}

// --- packed gradients ---

std::byte* CpuTransport::scratch_memory(const Slot& slot) {
  const auto id = static_cast<size_t>(slot.id);
  if (scratch_memory_.size() <= id) scratch_memory_.resize(id + 1);
  if (!scratch_memory_[id].defined()) scratch_memory_[id] = CpuTransport::take(slot.bytes);
  return static_cast<std::byte*>(scratch_memory_[id].data_ptr());
}

std::byte* CpuTransport::open_packed(ParamGroup& group, size_t bytes) {
  const size_t flags = group.layout().scratch_flags_bytes();
  Packed& packed = packed_of(group);
  packed.slot = scratch_ledger_.acquire(flags + bytes, group.name());
  return scratch_memory(packed.slot) + flags;
}

void CpuTransport::close_packed(ParamGroup& group) {
  Packed& packed = packed_of(group);
  scratch_ledger_.release(packed.slot.id);
  packed.plan = nullptr;
}

void CpuTransport::open(ParamGroup& group, bool is_wide) {
  SegmentPlan& plan = plan_of(group, is_wide);
  Packed& packed = packed_of(group);
  packed.data = open_packed(group, plan.segment_bytes * static_cast<size_t>(group.layout().world()));
  packed.is_wide = is_wide;
  packed.plan = &plan;
}

void CpuTransport::open_scratch(ParamGroup& group) {
  Packed& packed = packed_of(group);
  if (packed.plan != nullptr) return;
  std::fill(packed.filled.begin(), packed.filled.end(), uint8_t{0});
  // Without a reduction at the end of this backward, the next backward adds to the packed gradients.
  open(group, /*is_wide=*/!group.options().requires_gradient_sync);
}

void CpuTransport::widen(ParamGroup& group) {
  Packed& packed = packed_of(group);
  const SegmentPlan& narrow = *packed.plan;
  const auto [slot, data] = std::pair{packed.slot, packed.data};
  open(group, /*is_wide=*/true);
  for (size_t i = 0; i < packed.filled.size(); ++i) {
    if (packed.filled[i] == 0) continue;
    const ParamPlace& from = narrow.layout->params()[i];
    const ParamPlace& to = packed.plan->layout->params()[i];
    std::byte* target = packed.data + to.reduce_segment_offset;
    for_each_part(narrow, from, data, [&](const std::byte* source) {
      cpu::cast_copy(to.shape.reduce, target, from.shape.reduce, source, to.padded_shard_numel);
      target += packed.plan->segment_bytes;
    });
  }
  scratch_ledger_.release(slot.id);
}

// One group's gradients are packed at a time: the previous ones are reduced, and read by the peers, before these take
// memory. Ranks are about that close anyway, since they gather together.
bool CpuTransport::needs_room(const ParamGroup& group, std::optional<size_t>) {
  return packed_of(group).plan == nullptr;
}

void CpuTransport::pack_into_segment(ParamGroup& group, size_t i, const at::Tensor& gradient) {
  open_scratch(group);
  Packed& packed = packed_of(group);
  at::Tensor dense = gradient.contiguous();
  if (engine_dtype(dense.scalar_type()) == DType::byte) dense = dense.to(at::kFloat);
  const DType type = engine_dtype(dense.scalar_type());
  const ParamShape& shape = packed.plan->layout->params()[i].shape;
  if (!shape.trainable) throw_unfrozen(group, i);
  const bool is_narrow = shape.reduce != group.layout().params()[i].shape.reduce;
  if (is_narrow && (packed.filled[i] != 0 || type != shape.reduce)) widen(group);
  const std::vector<Copy>& copies = packed.plan->copies_of(i, type);
  (packed.filled[i] != 0 ? add_on : run_copies_on)(at::kCPU, copies, dense.const_data_ptr(), packed.data);
  packed.filled[i] = 1;
}

std::vector<at::Tensor> CpuTransport::take_packed(ParamGroup& group) {
  Packed& packed = packed_of(group);
  std::vector<at::Tensor> taken(packed.filled.size());
  if (packed.plan == nullptr) return taken;
  for (size_t i = 0; i < taken.size(); ++i) {
    const DType type = group.layout().params()[i].shape.reduce;
    if (packed.filled[i] != 0) taken[i] = packed.plan->unpacked(i, type, packed.data, at::kCPU);
  }
  close_packed(group);
  return taken;
}

void CpuTransport::fill_gaps(ParamGroup& group) {
  Packed& packed = packed_of(group);
  const SegmentPlan& plan = *packed.plan;
  packed.sent = packed.filled;
  for (size_t i = 0; i < packed.filled.size(); ++i) {
    const ParamPlace& place = plan.layout->params()[i];
    if (packed.filled[i] != 0 || !place.shape.trainable) continue;
    const bool is_unused = group.options().reduce_unused_params && group.params()[i].trains(place);
    if (is_unused) packed.sent[i] = 1;
    if (!is_unused && !plan.has_flags()) continue;
    const size_t bytes = static_cast<size_t>(place.padded_shard_numel) * dtype_bytes(place.shape.reduce);
    for_each_part(plan, place, packed.data, [bytes](std::byte* part) { std::memset(part, 0, bytes); });
  }
  if (!plan.has_flags()) return;
  std::vector<float> flags(packed.sent.begin(), packed.sent.end());
  flags.resize(plan.flags_numel());
  run_copies_on(at::kCPU, {plan.flags_to_segments}, flags.data(), packed.data);
}

void CpuTransport::pre_divide(ParamGroup& group, double divisor) {
  const Packed& packed = packed_of(group);
  for (size_t i = 0; i < packed.filled.size(); ++i) {
    const ParamPlace& place = packed.plan->layout->params()[i];
    if (packed.filled[i] == 0) continue;
    for_each_part(*packed.plan, place, packed.data,
                  [&](std::byte* part) { cpu::divide(place.shape.reduce, part, place.padded_shard_numel, divisor); });
  }
}

// --- a reduction ---

std::shared_ptr<const Layout> CpuTransport::segment_layout(ParamGroup& group) {
  return packed_of(group).plans.of(group).layout;
}

void CpuTransport::begin_reduce(ParamGroup& group, ForwardCounts forwards) {
  open_scratch(group);
  fill_gaps(group);
  if (const double before = before_sum(group); before != 1.0) pre_divide(group, before);
  post_reduce(group, forwards);
}

std::shared_ptr<void> CpuTransport::posted_memory(ParamGroup& group) {
  return {this, [this, &group](void*) { close_posted(group); }};
}

std::optional<CpuTransport::Joined> CpuTransport::join_reduce(ParamGroup& group, bool /*flush*/) {
  const Packed& packed = packed_of(group);
  return Joined{at::Tensor(), {{packed.data, packed.plan->layout.get(), packed.sent.data()}}, posted_memory(group)};
}

Transport::Finished CpuTransport::finish_reduce(ParamGroup& group, bool flush) {
  const std::shared_ptr<const Layout> layout =
      group.is_staged() ? segment_layout(group) : packed_of(group).plan->layout;
  const double divisor = group.averages() ? 1.0 : group.divisor() / before_sum(group);
  std::optional<Joined> joined = join_reduce(group, flush);
  if (!joined) return {.is_later = true, .rows = nullptr};
  std::unique_ptr<SegmentRows> rows;
  if (joined->summed.defined()) {
    rows = std::make_unique<SegmentRows>(std::move(joined->summed), layout, group.reduce_type(), divisor);
  } else {
    rows = std::make_unique<SegmentRows>(std::move(joined->sources), std::move(joined->memory), layout,
                                         group.reduce_type(), divisor, group.averages());
  }
  if (group.is_staged()) rows->sum();
  return {.is_later = false, .rows = std::move(rows)};
}

bool CpuTransport::abandon_reduce(ParamGroup& group) {
  if (packed_of(group).plan == nullptr) return false;
  if (group.is_posted()) {
    close_posted(group);
  } else {
    close_packed(group);
  }
  return true;
}

TransportStats CpuTransport::stats() const {
  TransportStats stats;
  stats.gather_slots_owned = gather_ledger_.num_owned();
  stats.gather_slot_bytes = gather_ledger_.arena_bytes();
  stats.peak_gather_bytes = gather_ledger_.peak_owned_bytes();
  stats.scratch_slots_owned = scratch_ledger_.num_owned();
  stats.scratch_bytes = scratch_ledger_.arena_bytes();
  stats.num_allocations = num_allocations_;
  stats.owners = gather_ledger_.owners();
  return stats;
}

}  // namespace fsdp2x
