// The CPU transport over shared memory (or private memory for a single rank): the gather and reduction protocols of
// docs/engine/shared_memory.md.
#include "engine/transport/shm/shared_memory_transport.hpp"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "core/error.hpp"
#include "core/layout.hpp"
#include "engine/memory/device_copy.hpp"
#include "engine/memory/storage.hpp"
#include "engine/torch/gil.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x {

// The rows of a reduction that all ranks have posted. Writing them sums over the ranks' scratches.
class SummedRows final : public ReducedRows {
 public:
  SummedRows(SharedMemoryTransport& transport, ParamGroup& group, SharedMemoryTransport::Sources sources);
  ~SummedRows() override;
  std::vector<uint8_t> has_gradient() override;
  void run_hook(const Gil&, const PyRef&) override;
  void write(const GradientTargets& targets) override;

 private:
  SharedMemoryTransport& transport_;
  ParamGroup& group_;
  SharedMemoryTransport::Sources sources_;
  bool is_read_ = false;
};

namespace {

uint64_t hashed(uint64_t hash, uint64_t value) { return (hash ^ value) * 1099511628211ULL; }  // FNV-1a

uint64_t tag_of(const Layout& layout) {
  uint64_t tag = 1469598103934665603ULL;
  for (const ParamPlace& place : layout.params()) {
    for (const int64_t value :
         {place.shape.outer, place.shape.dim, place.shape.inner, static_cast<int64_t>(place.shape.reduce)}) {
      tag = hashed(tag, static_cast<uint64_t>(value));
    }
  }
  return tag;
}

}  // namespace

SharedMemoryTransport::SharedMemoryTransport(std::shared_ptr<cpu::ShmGroup> group)
    : group_(std::move(group)),
      gather_ledger_(cpu::ShmGroup::page_bytes()),
      scratch_ledger_(cpu::ShmGroup::page_bytes()) {}

SharedMemoryTransport::~SharedMemoryTransport() = default;

void SharedMemoryTransport::register_group(const std::shared_ptr<ParamGroup>& group) {
  group->set_index(static_cast<uint32_t>(scratches_.size()));
  gathers_of_.emplace_back();
  Scratch& scratch = scratches_.emplace_back();
  scratch.filled.assign(group->params().size(), kNotPacked);
  scratch.layout_tag = tag_of(group->layout());
  if (group_) group_->set_unit_name(group->index(), group->name());
}

std::byte* SharedMemoryTransport::private_memory(std::vector<at::Tensor>& memory, const Slot& slot) {
  const auto id = static_cast<size_t>(slot.id);
  if (memory.size() <= id) memory.resize(id + 1);
  if (!memory[id].defined()) {
    memory[id] = pool_memory(static_cast<int64_t>(slot.bytes), at::TensorOptions());
    ++private_.num_allocations;
  }
  return static_cast<std::byte*>(memory[id].data_ptr());
}

void SharedMemoryTransport::begin_gather(ParamGroup& group, bool /*pools_stand_still*/) {
  if (group_ && gathers_.exchange(true)) {
    throw Error("fsdp2x: unit '" + group.name() +
                "' cannot be gathered while another thread of this rank gathers a unit of the same root. All ranks "
                "must gather in the same order. Call the units of a root from one thread.");
  }
  const auto ends = c10::make_scope_exit([this] { gathers_ = false; });
  try {
    post_rows(group);
  } catch (const std::bad_alloc& error) {
    // Peers wait for a gather that this rank cannot post.
    if (!group_) throw;
    group_->give_up("the all-gather of unit '" + group.name() + "' failed (" + error.what() + ")");
  }
}

RestingSlot* SharedMemoryTransport::resting_slot(ParamGroup& group) {
  Gathers& gathers = gathers_of_[group.index()];
  if (!std::exchange(gathers.have_begun, true) && group_) {
    gathers.resting = RestingSlot::make(group_, gather_ledger_, group);
  }
  return gathers.resting.get();
}

void SharedMemoryTransport::post_rows(ParamGroup& group) {
  GatherSlot& gather = group.gather();
  RestingSlot* const resting = resting_slot(group);
  if (resting == nullptr) {
    group.open_slot(gather_ledger_);
  } else {
    gather.slot = resting->begin_use();
  }
  gather.sequence = ++gather_sequence_;
  if (!group_) {
    // A single rank keeps the GIL if it has it, so threads may call units of one root concurrently.
    gather.write = gather.read = private_memory(private_.gathers, gather.slot);
    return write_rows(group);
  }
  const ReleaseGil released;
  if (resting != nullptr) {
    gather.write = resting->shared();
    gather.read = group_->isolated_window(gather.slot.offset, gather.slot.bytes);
    resting->write_rows(group, post_of(group));
  } else {
    const cpu::GatherWindow window = group_->gather_window(gather.slot.offset, gather.slot.bytes);
    gather.write = window.shared;
    gather.read = window.isolated;
    group_->acquire_slot(post_of(group), gather.slot.num_uses);
    write_rows(group);
  }
  group_->post_gather(post_of(group));
}

void SharedMemoryTransport::write_rows(ParamGroup& group) {
  run_copies_on(at::kCPU, group.layout().shard_to_slot(), group.pool().const_data_ptr(), group.gather().write);
}

void SharedMemoryTransport::finish_gather(ParamGroup& group) {
  if (!group_) return;
  const cpu::GatherPost post = post_of(group);
  if (group_->gather_is_complete(post)) {
    group_->join_gather(post);  // compares the entries, does not wait
    return;
  }
  const ReleaseGil released;
  group_->join_gather(post);
}

void SharedMemoryTransport::release_gather(ParamGroup& group) {
  const Slot& slot = group.gather().slot;
  if (slot.id < 0) return;
  if (group_ && group.gather().read != nullptr) {
    group_->discard_private_pages(group.gather().read,
                                  group.layout().slot_bytes());  // what users wrote to the parameters
    group_->release_slot(static_cast<uint32_t>(slot.id), slot.num_uses);
  }
  if (RestingSlot* const resting = gathers_of_[group.index()].resting.get()) {
    resting->end_use();
    group.gather() = GatherSlot();
  } else {
    group.close_slot(gather_ledger_);
  }
}

bool SharedMemoryTransport::open_shards(ParamGroup& group) {
  const RestingSlot* const resting = gathers_of_[group.index()].resting.get();
  return resting != nullptr && resting->open(group);
}

void SharedMemoryTransport::give_back_shards(ParamGroup& group) {
  const RestingSlot* const resting = gathers_of_[group.index()].resting.get();
  if (resting != nullptr) resting->give_back(group);
}

void SharedMemoryTransport::sweep_closing() {
  while (!closing_.empty()) {
    const Closing& front = closing_.front();
    if (group_ && !group_->reduction_is_consumed(front.group, front.epoch)) return;
    scratch_ledger_.release(front.slot);
    closing_.pop_front();
  }
}

// Allows one scratch at a time: the previous unit is reduced, and read by the peers, before this one takes memory.
// Ranks are about that close anyway, since they gather together.
bool SharedMemoryTransport::needs_room(const ParamGroup& group, std::optional<size_t>) {
  return scratches_[group.index()].data == nullptr;
}

void SharedMemoryTransport::make_room(ParamGroup&) {
  sweep_closing();
  if (closing_.empty()) return;
  const ReleaseGil released;
  const Closing last = closing_.back();
  group_->wait_consumed_in_order(last.group, last.epoch, last.position);
  sweep_closing();
}

void SharedMemoryTransport::open_scratch(ParamGroup& group) {
  Scratch& scratch = scratch_of(group);
  if (scratch.data != nullptr) return;
  // Without a reduction at the end of this backward, the next backward adds to the packed gradients.
  acquire_scratch(group, /*wide=*/!group.options().requires_gradient_sync);
  std::fill(scratch.filled.begin(), scratch.filled.end(), uint8_t{kNotPacked});
}

void SharedMemoryTransport::acquire_scratch(ParamGroup& group, bool wide) {
  Scratch& scratch = scratch_of(group);
  scratch.wide = wide;
  scratch.slot = scratch_ledger_.acquire(wide ? group.layout().wide_scratch_bytes() : group.layout().scratch_bytes(),
                                         group.name());
  scratch.data = group_ ? group_->scratch_window(group_->rank(), scratch.slot.offset, scratch.slot.bytes)
                        : private_memory(private_.scratches, scratch.slot);
}

void SharedMemoryTransport::widen_scratch(ParamGroup& group) {
  Scratch& scratch = scratch_of(group);
  const Scratch narrow = scratch;
  acquire_scratch(group, /*wide=*/true);
  for (size_t i = 0; i < group.params().size(); ++i) {
    if (!scratch.filled[i]) continue;
    const ParamShape& shape = group.layout().params()[i].shape;
    const PackedGradient from = packed_gradient(group, i, narrow.data, narrow.filled[i]);
    scratch.filled[i] = kPackedWide;
    const PackedGradient to = packed_gradient(group, i, scratch.data, scratch.filled[i]);
    cpu::cast_copy(to.type, to.data, from.type, from.data, shape.numel());
  }
  scratch_ledger_.release(narrow.slot.id);
}

SharedMemoryTransport::PackedGradient SharedMemoryTransport::packed_gradient(const ParamGroup& group, size_t i,
                                                                             std::byte* scratch, uint8_t how) {
  const ParamPlace& place = group.layout().params()[i];
  if (how == kPackedWide) return {place.shape.reduce, scratch + place.wide_scratch_offset};
  return {place.shape.packed(), scratch + place.scratch_offset};
}

void SharedMemoryTransport::write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) {
  run_copies_on(at::kCPU, rows.copies, slot, group.pool().data_ptr());
}

void SharedMemoryTransport::pack_into_segment(ParamGroup& group, size_t i, const at::Tensor& gradient) {
  open_scratch(group);
  Scratch& scratch = scratch_of(group);
  const ParamPlace& place = group.layout().params()[i];
  DType type = engine_dtype(gradient.scalar_type());
  at::Tensor dense = gradient.contiguous();
  if (type == DType::byte) {
    dense = dense.to(at::kFloat);
    type = DType::f32;
  }
  const bool adds = scratch.filled[i] != kNotPacked;
  const bool is_narrow = !scratch.wide && place.shape.packed() != place.shape.reduce;
  if (is_narrow && (adds || type != place.shape.packed())) widen_scratch(group);
  scratch.filled[i] = scratch.wide ? kPackedWide : kPacked;
  const PackedGradient target = packed_gradient(group, i, scratch.data, scratch.filled[i]);
  const auto* source = static_cast<const std::byte*>(dense.const_data_ptr());
  run_parallel(place.shape.numel(), kGrainNumel, [&](int64_t begin, int64_t end) {
    const auto at = static_cast<size_t>(begin);
    (adds ? cpu::add : cpu::cast_copy)(target.type, target.data + at * dtype_bytes(target.type), type,
                                       source + at * dtype_bytes(type), end - begin);
  });
}

std::vector<at::Tensor> SharedMemoryTransport::take_packed(ParamGroup& group) {
  Scratch& scratch = scratch_of(group);
  std::vector<at::Tensor> taken(group.params().size());
  for (size_t i = 0; i < taken.size(); ++i) {
    if (scratch.data == nullptr || !scratch.filled[i]) continue;
    const ParamShape& shape = group.layout().params()[i].shape;
    taken[i] = at::empty({shape.numel()}, torch_dtype(shape.reduce));
    const PackedGradient from = packed_gradient(group, i, scratch.data, scratch.filled[i]);
    cpu::cast_copy(shape.reduce, taken[i].mutable_data_ptr(), from.type, from.data, shape.numel());
  }
  abandon_reduce(group);
  return taken;
}

uint64_t SharedMemoryTransport::tag_of_reduction(const ParamGroup& group) {
  const double divisor = group.options().divide_factor.value_or(0.0);
  return hashed(scratch_of(group).layout_tag, std::bit_cast<uint64_t>(divisor));
}

void SharedMemoryTransport::begin_reduce(ParamGroup& group, ForwardCounts forwards) {
  open_scratch(group);
  if (group.options().reduce_unused_params) fill_unused(group);
  predivide(group);
  Scratch& scratch = scratch_of(group);
  ++scratch.epoch;
  if (!group_) return;
  std::memcpy(scratch.data, scratch.filled.data(), scratch.filled.size());
  group_->post_reduction(group.index(), scratch.epoch, tag_of_reduction(group), scratch.slot.offset, forwards);
}

double SharedMemoryTransport::before_sum(const ParamGroup& group) const { return group_ ? group.pre_divisor() : 1.0; }

void SharedMemoryTransport::predivide(ParamGroup& group) {
  const double before = before_sum(group);
  if (before == 1.0) return;
  const Scratch& scratch = scratch_of(group);
  for (size_t i = 0; i < group.params().size(); ++i) {
    if (!scratch.filled[i]) continue;
    const PackedGradient packed = packed_gradient(group, i, scratch.data, scratch.filled[i]);
    cpu::divide(packed.type, packed.data, group.layout().params()[i].shape.numel(), before);
  }
}

void SharedMemoryTransport::fill_unused(ParamGroup& group) {
  Scratch& scratch = scratch_of(group);
  for (size_t i = 0; i < group.params().size(); ++i) {
    const ParamPlace& place = group.layout().params()[i];
    if (scratch.filled[i] || !group.params()[i].trains(place)) continue;
    scratch.filled[i] = scratch.wide ? kPackedWide : kPacked;
    const PackedGradient packed = packed_gradient(group, i, scratch.data, scratch.filled[i]);
    std::memset(packed.data, 0, static_cast<size_t>(place.shape.numel()) * dtype_bytes(packed.type));
  }
}

bool SharedMemoryTransport::needs_empty_reduction(const ParamGroup& group) const {
  return group.reduces_unused() || (group_ && group.unit().awaits_reduction());
}

Transport::Finished SharedMemoryTransport::finish_reduce(ParamGroup& group, bool flush) {
  if (group_) {
    const ReleaseGil released;
    const cpu::Joined joined = group_->join_reduction(group.index(), scratch_of(group).epoch, tag_of_reduction(group),
                                                      group.unit().backward_position(), flush);
    if (joined == cpu::Joined::later) return {.is_later = true, .rows = nullptr};
  }
  Finished finished;
  if (group.is_staged()) {
    finished.rows = sum_into_segment(group);
  } else {
    finished.rows = std::make_unique<SummedRows>(*this, group, sources_of(group));
  }
  return finished;
}

SharedMemoryTransport::Sources SharedMemoryTransport::sources_of(const ParamGroup& group) {
  Scratch& own = scratch_of(group);
  const int world = group.layout().world();
  Sources sources{std::vector<std::byte*>(static_cast<size_t>(world), own.data), {}};
  const size_t bytes = align_up(group.layout().wide_scratch_bytes(), cpu::ShmGroup::page_bytes());
  for (int r = 0; group_ && r < world; ++r) {
    if (r == group_->rank()) continue;
    sources.scratches[static_cast<size_t>(r)] =
        group_->scratch_window(r, group_->peer_scratch_offset(group.index(), r), bytes);
  }
  for (std::byte* scratch : sources.scratches) {
    sources.filled.push_back(group_ ? reinterpret_cast<const uint8_t*>(scratch) : own.filled.data());
  }
  return sources;
}

bool SharedMemoryTransport::Sources::any_filled(size_t param) const {
  return std::any_of(filled.begin(), filled.end(),
                     [param](const uint8_t* flags) { return flags[param] != kNotPacked; });
}

void SharedMemoryTransport::add_rows(const ParamGroup& group, const Sources& sources, size_t i,
                                     cpu::ReducePiece piece) {
  const ParamPlace& place = group.layout().params()[i];
  if (place.shard_numel == 0) return;
  const auto first_row = static_cast<size_t>(place.rows.begin * place.shape.inner);
  piece.src_type = place.shape.reduce;
  piece.num_sources = 0;
  const void** pointers = row_sums_.pointers.data() + row_sums_.pieces.size() * sources.scratches.size();
  DType* types = row_sums_.types.data() + row_sums_.pieces.size() * sources.scratches.size();
  piece.sources = pointers;
  piece.source_types = types;
  for (size_t r = 0; r < sources.scratches.size(); ++r) {
    if (sources.filled[r][i] == kNotPacked) continue;
    const PackedGradient packed = packed_gradient(group, i, sources.scratches[r], sources.filled[r][i]);
    types[piece.num_sources] = packed.type;
    pointers[piece.num_sources++] = packed.data + first_row * dtype_bytes(packed.type);
  }
  piece.count = place.shape.outer;
  piece.piece_numel = place.rows.size() * place.shape.inner;
  piece.src_stride = place.shape.dim * place.shape.inner;
  row_sums_.items.add(piece.count * piece.piece_numel);
  row_sums_.pieces.push_back(piece);
}

void SharedMemoryTransport::begin_rows(const ParamGroup& group, const Sources& sources) {
  row_sums_.pieces.clear();
  row_sums_.items.clear();
  row_sums_.pointers.resize(group.params().size() * sources.scratches.size());
  row_sums_.types.resize(row_sums_.pointers.size());
}

void SharedMemoryTransport::sum_rows() {
  const ReleaseGil released;
  row_sums_.items.for_each_range(
      [&](size_t i, int64_t begin, int64_t end) { cpu::reduce(row_sums_.pieces[i], begin, end); });
}

void SharedMemoryTransport::sum_into(const ParamGroup& group, const Sources& sources, const GradientTargets& targets) {
  begin_rows(group, sources);
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    cpu::ReducePiece piece;
    piece.dst_type = group.layout().params()[i].shape.grad();
    piece.dst = targets[i]->data;
    piece.divisor = group.divisor() / before_sum(group);
    piece.round = true;
    piece.accumulate = targets[i]->accumulate;
    add_rows(group, sources, i, piece);
  }
  sum_rows();
}

std::unique_ptr<ReducedRows> SharedMemoryTransport::sum_into_segment(ParamGroup& group) {
  const Sources sources = sources_of(group);
  const DType type = group.reduce_type();
  const double divisor = group.averages() ? 1.0 : group.divisor() / before_sum(group);
  const std::shared_ptr<const Layout> layout = segment_layout(group);
  auto segment = SegmentRows::zeros(layout, type, divisor);
  auto* const data = static_cast<std::byte*>(segment->values().data_ptr());
  auto* flags = data + layout->reduce_segment_bytes();
  begin_rows(group, sources);
  for (size_t i = 0; i < group.params().size(); ++i, flags += dtype_bytes(type)) {
    const ParamPlace& place = layout->params()[i];
    if (!place.shape.trainable) continue;
    const float flag = sources.any_filled(i) ? 1.0F : 0.0F;
    cpu::cast_copy(type, flags, DType::f32, &flag, 1);
    cpu::ReducePiece piece;
    piece.dst_type = type;
    piece.dst = data + place.reduce_segment_offset;
    if (group.averages()) piece.divisor = static_cast<double>(group.layout().world());
    add_rows(group, sources, i, piece);  // without sources: zeros
  }
  sum_rows();
  close_scratch(group);
  return segment;
}

SummedRows::SummedRows(SharedMemoryTransport& transport, ParamGroup& group, SharedMemoryTransport::Sources sources)
    : transport_(transport), group_(group), sources_(std::move(sources)) {}

SummedRows::~SummedRows() {
  if (!is_read_) transport_.close_scratch(group_);
}

std::vector<uint8_t> SummedRows::has_gradient() {
  std::vector<uint8_t> has_gradient(group_.params().size());
  for (size_t i = 0; i < has_gradient.size(); ++i) has_gradient[i] = sources_.any_filled(i) ? 1 : 0;
  return has_gradient;
}

void SummedRows::run_hook(const Gil&, const PyRef&) {}  // a group with a hook is staged

void SummedRows::write(const GradientTargets& targets) {
  transport_.sum_into(group_, sources_, targets);
  is_read_ = true;  // before user hooks, which may raise
  transport_.close_scratch(group_);
}

void SharedMemoryTransport::close_scratch(ParamGroup& group) {
  Scratch& scratch = scratch_of(group);
  if (group_) {
    group_->consume_reduction(group.index(), scratch.epoch);
    closing_.push_back({group.index(), scratch.epoch, scratch.slot.id, group.unit().backward_position()});
  } else {
    scratch_ledger_.release(scratch.slot.id);
  }
  scratch.data = nullptr;
}

bool SharedMemoryTransport::abandon_reduce(ParamGroup& group) {
  Scratch& scratch = scratch_of(group);
  if (scratch.data == nullptr) return false;
  if (group.is_posted()) {
    close_scratch(group);
    return true;
  }
  scratch_ledger_.release(scratch.slot.id);
  scratch.data = nullptr;
  return true;
}

void SharedMemoryTransport::publish_progress(uint64_t position) {
  if (group_) group_->publish_progress(position);
}

void SharedMemoryTransport::skip_reduce(ParamGroup& group) {
  if (group_) group_->skip_reduction(group.index());
}

TransportStats SharedMemoryTransport::stats() const {
  TransportStats stats;
  stats.gather_slots_owned = gather_ledger_.num_owned();
  stats.gather_slot_bytes = gather_ledger_.arena_bytes();
  stats.peak_gather_bytes = gather_ledger_.peak_owned_bytes();
  stats.scratch_slots_owned = scratch_ledger_.num_owned() - closing_.size();
  stats.scratch_bytes = scratch_ledger_.arena_bytes();
  for (const Gathers& gathers : gathers_of_) stats.gather_slots_owned += gathers.resting && gathers.resting->is_used();
  stats.num_allocations = private_.num_allocations + (group_ ? group_->num_windows() : 0);
  stats.owners = gather_ledger_.owners();
  return stats;
}

}  // namespace fsdp2x
