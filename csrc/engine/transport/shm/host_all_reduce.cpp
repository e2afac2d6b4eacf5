// All-reduce over the replicas of one host.
#include "engine/transport/shm/host_all_reduce.hpp"

#include <algorithm>
#include <vector>

#include "core/error.hpp"
#include "engine/memory/device_copy.hpp"
#include "engine/memory/local_tensor.hpp"
#include "engine/memory/storage.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/parallel.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x {

HostAllReduce::HostAllReduce(std::shared_ptr<cpu::ShmGroup> group)
    : group_(std::move(group)), ledger_(cpu::ShmGroup::page_bytes()) {
  for (size_t unit = 0; unit < turns_.size(); ++unit) {
    group_->set_unit_name(static_cast<uint32_t>(unit), "all-reduce over the replicas");
  }
}

void HostAllReduce::run(const at::Tensor& values, bool average) {
  const DType type = engine_dtype(values.scalar_type());
  if (!is_plain_memory(values) || type == DType::byte) {
    throw Error("fsdp2x: the all-reduce over replicas of one host expects dense floating-point values on the CPU");
  }
  const ReleaseGil released;
  const int64_t numel = values.numel();
  const auto unit = static_cast<uint32_t>(num_runs_++ % turns_.size());
  Turn& turn = turns_[unit];
  if (turn.slot >= 0) {
    group_->wait_consumed(unit, turn.epoch);
    ledger_.release(turn.slot);
  }
  const Slot slot = ledger_.acquire(std::max<size_t>(values.nbytes(), 1), "all-reduce");
  turn = {turn.epoch + 1, slot.id};
  Copy copy;
  copy.count = 1;
  copy.piece_numel = numel;
  copy.src = copy.dst = type;
  void* const data = values.mutable_data_ptr();
  run_copies_on(at::kCPU, {copy}, data, group_->scratch_window(group_->rank(), slot.offset, slot.bytes));
  // The tag of a post lets ranks compare their sizes and dtypes.
  const uint64_t tag = static_cast<uint64_t>(numel) << 8 | static_cast<uint64_t>(type);
  group_->post_reduction(unit, turn.epoch, tag, slot.offset);
  group_->join_reduction(unit, turn.epoch, tag, /*position=*/0, /*flush=*/true);
  std::vector<const void*> sources;
  for (int rank = 0; rank < group_->world(); ++rank) {
    sources.push_back(group_->scratch_window(rank, group_->peer_scratch_offset(unit, rank), slot.bytes));
  }
  cpu::ReducePiece piece;
  piece.src_type = piece.dst_type = type;
  piece.sources = sources.data();
  piece.num_sources = static_cast<int>(sources.size());
  piece.dst = data;
  piece.numel = numel;
  if (average) piece.divisor = static_cast<double>(group_->world());
  run_parallel(numel, kGrainNumel, [&](int64_t begin, int64_t end) { cpu::reduce(piece, begin, end); });
  group_->consume_reduction(unit, turn.epoch);
}

size_t HostAllReduce::scratch_bytes(const std::vector<size_t>& sizes, size_t page_bytes) {
  SlotLedger ledger(page_bytes);
  std::array<int, kNumTurns> slots;
  slots.fill(-1);
  for (size_t i = 0; i < sizes.size(); ++i) {
    int& slot = slots[i % kNumTurns];
    if (slot >= 0) ledger.release(slot);
    slot = ledger.acquire(std::max<size_t>(sizes[i], 1), "all-reduce").id;
  }
  return ledger.arena_bytes();
}

}  // namespace fsdp2x
