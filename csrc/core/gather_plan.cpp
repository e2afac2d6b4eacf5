// Chooses which parameters of a group a collective gathers in place.
#include "core/gather_plan.hpp"

#include <algorithm>
#include <utility>

namespace fsdp2x {
namespace {

size_t num_bytes(int64_t numel, DType dtype) { return static_cast<size_t>(numel) * dtype_bytes(dtype); }

// More collectives than these cost the host more than packing costs the device.
constexpr size_t kMaxDirect = 8;
// NCCL makes one kernel of grouped collectives whose sizes are within this factor of each other.
constexpr size_t kMaxSkew = 4;

bool can_be_direct(const Layout& layout, const ParamPlace& place) {
  const ParamShape& shape = place.shape;
  const bool has_room = layout.has_whole_chunks() || shape.dim % layout.world() == 0;
  return shape.in_slot && shape.outer == 1 && has_room && shape.numel() > 0 &&
         num_bytes(place.padded_shard_numel, shape.compute) % kCollectiveAlignBytes == 0;
}

// Few large parameters of similar size; of many, none.
std::vector<bool> choose_direct(const Layout& layout, size_t pack_below_bytes) {
  std::vector<size_t> bytes;
  for (const ParamPlace& place : layout.params()) {
    bytes.push_back(can_be_direct(layout, place) ? num_bytes(place.shape.numel(), place.shape.compute) : 0);
  }
  const size_t largest = bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
  const bool is_limited = pack_below_bytes > 0;
  const size_t least = std::max(pack_below_bytes, is_limited ? largest / kMaxSkew : 1);
  std::vector<bool> direct;
  for (const size_t num : bytes) direct.push_back(num >= least);
  const auto num_direct = static_cast<size_t>(std::count(direct.begin(), direct.end(), true));
  if (is_limited && num_direct > kMaxDirect) direct.assign(direct.size(), false);
  return direct;
}

}  // namespace

GatherPlan plan_gather(const Layout& layout, size_t pack_below_bytes) {
  GatherPlan plan;
  std::vector<size_t> segment_offsets(layout.params().size());
  const std::vector<bool> is_direct = choose_direct(layout, pack_below_bytes);
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamPlace& place = layout.params()[i];
    const ParamShape& shape = place.shape;
    if (!shape.in_slot) continue;
    const bool direct = is_direct[i];
    if (direct) {
      plan.direct.push_back({i, place.slot_offset, num_bytes(place.padded_shard_numel, shape.compute)});
    } else {
      segment_offsets[i] = plan.segment_bytes;
      plan.segment_bytes += align_up(num_bytes(place.padded_shard_numel, shape.compute));
    }
    if (place.shard_numel == 0) continue;
    if (direct) {
      plan.shard_to_slot.push_back(
          shard_to_whole(shape, place.rows, place.shard_offset, shape.orig, place.slot_offset, shape.compute));
    } else {
      plan.shard_to_segment.push_back({.src_offset = place.shard_offset,
                                       .dst_offset = segment_offsets[i],
                                       .count = 1,
                                       .piece_numel = place.shard_numel,
                                       .src_stride = place.shard_numel,
                                       .dst_stride = place.shard_numel,
                                       .src = shape.orig,
                                       .dst = shape.compute});
    }
  }
  size_t next_direct = 0;
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamPlace& place = layout.params()[i];
    const ParamShape& shape = place.shape;
    if (!shape.in_slot) continue;
    if (next_direct < plan.direct.size() && plan.direct[next_direct].param == i) {
      ++next_direct;
      continue;
    }
    for (int rank = 0; rank < layout.world(); ++rank) {
      const RowRange rows = shard_rows(shape.dim, layout.world(), rank);
      if (shape.outer * rows.size() * shape.inner == 0) continue;
      const size_t segment = static_cast<size_t>(rank) * plan.segment_bytes + segment_offsets[i];
      plan.staging_to_slot.push_back(
          shard_to_whole(shape, rows, segment, shape.compute, place.slot_offset, shape.compute));
    }
  }
  plan.staging_to_slot = joined(std::move(plan.staging_to_slot));
  return plan;
}

}  // namespace fsdp2x
