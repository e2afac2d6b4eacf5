// The CPU transport over shared memory (or one rank's own): the gather and reduction protocols of csrc/README.md.
#include "engine/host_transport.hpp"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>

#include "core/error.hpp"
#include "cpu/kernels.hpp"
#include "engine/root.hpp"
#include "engine/unit.hpp"

namespace fsdp2x {

namespace {

// Waits and long copies let other Python threads run. No-op on threads that do not hold the GIL (backward).
class ReleaseGil {
 public:
  ReleaseGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~ReleaseGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

cpu::GatherPost post_of(const Unit& unit) {
  return {unit.gather.sequence, unit.index, static_cast<uint32_t>(unit.gather.slot.id), unit.gather.slot.offset,
          unit.layout.slot_bytes()};
}

// Ranks must mean the same thing by unit number n: its layout is compared through this number.
uint64_t tag_of(const Unit& unit) {
  uint64_t tag = 1469598103934665603ULL;  // FNV-1a
  for (const ParamPlace& place : unit.layout.params()) {
    for (const int64_t value :
         {place.shape.outer, place.shape.dim, place.shape.inner, static_cast<int64_t>(place.shape.reduce)}) {
      tag = (tag ^ static_cast<uint64_t>(value)) * 1099511628211ULL;
    }
  }
  return tag;
}

}  // namespace

HostTransport::HostTransport(std::unique_ptr<cpu::ShmGroup> group)
    : group_(std::move(group)),
      gather_ledger_(cpu::ShmGroup::page_bytes()),
      scratch_ledger_(cpu::ShmGroup::page_bytes()) {}

HostTransport::~HostTransport() = default;

void HostTransport::register_unit(const Unit& unit) {
  if (group_) group_->set_unit_name(unit.index, unit.name);
  if (epochs_.size() <= unit.index) epochs_.resize(unit.index + 1, 0);
}

std::byte* HostTransport::private_memory(std::vector<at::Tensor>& memory, const Slot& slot) {
  const auto id = static_cast<size_t>(slot.id);
  if (memory.size() <= id) memory.resize(id + 1);
  if (!memory[id].defined()) {
    memory[id] = at::empty({static_cast<int64_t>(slot.bytes)}, at::kByte);
    ++num_allocations_;
  }
  return static_cast<std::byte*>(memory[id].data_ptr());
}

void HostTransport::begin_gather(Unit& unit) {
  const ReleaseGil released;
  GatherSlot& gather = unit.gather;
  gather.slot = gather_ledger_.acquire(std::max<size_t>(unit.layout.slot_bytes(), 1), unit.name);
  gather.sequence = ++gather_sequence_;
  if (!group_) {
    gather.write = gather.read = private_memory(gather_memory_, gather.slot);
  } else {
    const cpu::GatherWindow window = group_->gather_window(gather.slot.offset, gather.slot.bytes);
    gather.write = window.shared;
    gather.read = window.isolated;
    group_->acquire_slot(post_of(unit), gather.slot.num_uses);
  }
  cpu::run_copies(unit.layout.shard_to_slot(), unit.pool.const_data_ptr(), gather.write);
  if (group_) group_->post_gather(post_of(unit));
}

void HostTransport::finish_gather(Unit& unit) {
  if (!group_) return;
  const cpu::GatherPost post = post_of(unit);
  if (group_->gather_is_complete(post)) {
    group_->join_gather(post);  // compares the entries, does not wait
    return;
  }
  const ReleaseGil released;
  group_->join_gather(post);
}

void HostTransport::release_gather(Unit& unit) {
  const Slot& slot = unit.gather.slot;
  if (group_) group_->release_slot(static_cast<uint32_t>(slot.id), slot.num_uses);
  gather_ledger_.release(slot.id);
  unit.gather = GatherSlot();
}

void HostTransport::discard_writes(std::byte* data, size_t bytes) {
  if (group_) cpu::ShmGroup::discard_private_pages(data, bytes);
}

void HostTransport::sweep_closing() {
  while (!closing_.empty()) {
    const Closing& front = closing_.front();
    if (group_ && !group_->reduction_is_consumed(front.unit, front.epoch)) return;
    scratch_ledger_.release(front.slot);
    closing_.pop_front();
  }
}

void HostTransport::open_scratch(Unit& unit) {
  Scratch& scratch = unit.scratch;
  // Gradients that arrive after the unit was posted (a weight used outside its unit) must not change what peers read.
  if (scratch.posted) finish_reduce(unit, /*flush=*/true);
  if (scratch.open) return;
  sweep_closing();
  scratch.slot = scratch_ledger_.acquire(unit.layout.scratch_bytes(), unit.name);
  scratch.data = group_ ? group_->scratch_window(group_->rank(), scratch.slot.offset, scratch.slot.bytes)
                        : private_memory(scratch_memory_, scratch.slot);
  std::fill(scratch.filled.begin(), scratch.filled.end(), uint8_t{0});
  scratch.open = true;
}

void HostTransport::pack(Unit& unit, size_t i, const at::Tensor& gradient) {
  open_scratch(unit);
  Scratch& scratch = unit.scratch;
  const ParamPlace& place = unit.layout.params()[i];
  DType type = engine_dtype(gradient.scalar_type());
  at::Tensor dense = gradient.contiguous();
  if (type == DType::byte) {
    dense = dense.to(at::kFloat);
    type = DType::f32;
  }
  void* target = scratch.data + place.scratch_offset;
  if (scratch.filled[i]) {
    cpu::add(place.shape.reduce, target, type, dense.const_data_ptr(), place.shape.numel());
  } else {
    cpu::cast_copy(place.shape.reduce, target, type, dense.const_data_ptr(), place.shape.numel());
    scratch.filled[i] = 1;
  }
}

void HostTransport::begin_reduce(Unit& unit) {
  if (!unit.scratch.open) open_scratch(unit);
  Scratch& scratch = unit.scratch;
  scratch.posted = true;
  scratch.pending_flush = false;
  scratch.epoch = ++epochs_[unit.index];
  if (!group_) return;
  std::memcpy(scratch.data, scratch.filled.data(), scratch.filled.size());
  group_->post_reduction(unit.index, scratch.epoch, tag_of(unit), scratch.slot.offset);
}

bool HostTransport::needs_empty_reduction(const Unit& unit) const {
  return group_ && unit.armed && !unit.scratch.reduced_this_backward && unit.has_params();
}

bool HostTransport::finish_reduce(Unit& unit, bool flush) {
  Scratch& scratch = unit.scratch;
  if (!scratch.posted) return true;
  if (group_) {
    const ReleaseGil released;
    const cpu::Joined joined =
        group_->join_reduction(unit.index, scratch.epoch, tag_of(unit), unit.backward_position, flush);
    if (joined == cpu::Joined::later) return false;
  }
  sum(unit);
  close_scratch(unit);
  scratch.reduced_this_backward = true;
  return true;
}

void HostTransport::sum(Unit& unit) {
  const size_t num_params = unit.params.size();
  const int world = unit.layout.world();
  std::vector<const std::byte*> scratches(static_cast<size_t>(world), unit.scratch.data);
  for (int r = 0; group_ && r < world; ++r) {
    if (r == group_->rank()) continue;
    const size_t bytes = (unit.layout.scratch_bytes() + cpu::ShmGroup::page_bytes() - 1) / cpu::ShmGroup::page_bytes() *
                         cpu::ShmGroup::page_bytes();
    scratches[static_cast<size_t>(r)] = group_->scratch_window(r, group_->peer_scratch_offset(unit.index, r), bytes);
  }
  const auto filled = [&](size_t rank, size_t i) {
    return group_ ? std::to_integer<int>(scratches[rank][i]) != 0 : unit.scratch.filled[i] != 0;
  };
  std::vector<GradientTarget> targets(num_params);
  std::vector<uint8_t> wanted(num_params, 0);
  {
    pybind11::gil_scoped_acquire gil;
    for (size_t i = 0; i < num_params; ++i) {
      for (size_t r = 0; r < scratches.size(); ++r) wanted[i] |= static_cast<uint8_t>(filled(r, i));
      if (wanted[i]) targets[i] = unit.gradients.prepare(i, unit.root->blocks);
    }
  }
  {
    const ReleaseGil released;
    std::vector<const void*> sources;
    for (size_t i = 0; i < num_params; ++i) {
      const ParamPlace& place = unit.layout.params()[i];
      if (!wanted[i] || place.shard_numel == 0) continue;
      sources.clear();
      const size_t first_row =
          static_cast<size_t>(place.rows.begin * place.shape.inner) * dtype_bytes(place.shape.reduce);
      for (size_t r = 0; r < scratches.size(); ++r) {
        if (filled(r, i)) sources.push_back(scratches[r] + place.scratch_offset + first_row);
      }
      cpu::ReducePiece piece;
      piece.src_type = place.shape.reduce;
      piece.dst_type = place.shape.orig;
      piece.sources = sources.data();
      piece.num_sources = static_cast<int>(sources.size());
      piece.dst = targets[i].data;
      piece.count = place.shape.outer;
      piece.piece_numel = place.rows.size() * place.shape.inner;
      piece.src_stride = place.shape.dim * place.shape.inner;
      piece.divisor = unit.divisor();
      piece.accumulate = targets[i].accumulate;
      cpu::reduce(piece);
    }
    if (group_) group_->consume_reduction(unit.index, unit.scratch.epoch);
  }
  pybind11::gil_scoped_acquire gil;
  for (size_t i = 0; i < num_params; ++i) {
    if (wanted[i]) unit.gradients.attach(i, targets[i]);
  }
  unit.gradients.release_if_unused(unit.root->blocks);
}

void HostTransport::close_scratch(Unit& unit) {
  Scratch& scratch = unit.scratch;
  if (group_) {
    closing_.push_back({unit.index, scratch.epoch, scratch.slot.id});
  } else {
    scratch_ledger_.release(scratch.slot.id);
  }
  scratch.open = scratch.posted = scratch.pending_flush = false;
  scratch.data = nullptr;
}

void HostTransport::abandon_reduce(Unit& unit) {
  Scratch& scratch = unit.scratch;
  if (!scratch.open) return;
  if (scratch.posted && group_) {
    group_->consume_reduction(unit.index, scratch.epoch);
    close_scratch(unit);
    return;
  }
  scratch_ledger_.release(scratch.slot.id);
  scratch.open = scratch.posted = scratch.pending_flush = false;
  scratch.data = nullptr;
}

void HostTransport::publish_progress(uint64_t position) {
  if (group_) group_->publish_progress(position);
}

TransportStats HostTransport::stats() const {
  TransportStats stats;
  stats.gather_slots_owned = gather_ledger_.num_owned();
  stats.gather_slot_bytes = gather_ledger_.arena_bytes();
  stats.peak_gather_bytes = gather_ledger_.peak_owned_bytes();
  stats.scratch_slots_owned = scratch_ledger_.num_owned() - closing_.size();
  stats.scratch_bytes = scratch_ledger_.arena_bytes();
  stats.num_allocations = num_allocations_ + (group_ ? group_->num_windows() : 0);
  stats.owners = gather_ledger_.owners();
  return stats;
}

}  // namespace fsdp2x
