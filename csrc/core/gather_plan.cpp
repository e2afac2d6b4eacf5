// Chooses which parameters of a group a collective gathers in place.
#include "core/gather_plan.hpp"

#include <algorithm>
#include <utility>

namespace fsdp2x {
namespace {

size_t num_bytes(int64_t numel, DType dtype) { return static_cast<size_t>(numel) * dtype_bytes(dtype); }

// Limits the number of collectives. One takes the host about 5 us, in which a device copies 8 MiB. More collectives
// only pay off if each is that large. This is an estimate, not a measurement.
constexpr size_t kMaxDirect = 8;
constexpr size_t kLeastOfManyBytes = size_t{8} << 20;
// NCCL merges grouped collectives into one kernel if their sizes are within this factor of each other.
constexpr size_t kMaxSkew = 4;

// Returns the bytes of one rank in one collective.
size_t chunk_bytes(const ParamPlace& place, DType dtype) {
  return place.shape.outer == 0 ? 0 : num_bytes(place.padded_shard_numel / place.shape.outer, dtype);
}

bool can_be_gathered_directly(const Layout& layout, const ParamPlace& place) {
  const ParamShape& shape = place.shape;
  const bool has_room = (layout.has_whole_chunks() && shape.outer == 1) || shape.dim % layout.world() == 0;
  return shape.in_slot && has_room && shape.numel() > 0 &&
         chunk_bytes(place, shape.compute) % kCollectiveAlignBytes == 0;
}

// Chooses a few collectives of similar size, or many large ones, or none. `bytes`: by parameter, of all ranks in one of
// its collectives. 0: the parameter cannot be direct.
std::vector<bool> choose_direct(const Layout& layout, const std::vector<size_t>& bytes, size_t pack_below_bytes) {
  const size_t largest = bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
  const bool is_limited = pack_below_bytes > 0;
  const size_t least = std::max(pack_below_bytes, is_limited ? largest / kMaxSkew : 1);
  std::vector<bool> direct;
  size_t num_collectives = 0;
  size_t smallest = largest;
  for (size_t i = 0; i < bytes.size(); ++i) {
    direct.push_back(bytes[i] >= least);
    if (!direct[i]) continue;
    num_collectives += static_cast<size_t>(layout.params()[i].shape.outer);
    smallest = std::min(smallest, bytes[i]);
  }
  const bool is_many = num_collectives > kMaxDirect && smallest < kLeastOfManyBytes;
  if (is_limited && is_many) direct.assign(direct.size(), false);
  return direct;
}

}  // namespace

GatherPlan plan_gather(const Layout& layout, size_t pack_below_bytes) {
  GatherPlan plan;
  std::vector<size_t> segment_offsets(layout.params().size());
  std::vector<size_t> bytes;
  for (const ParamPlace& place : layout.params()) {
    const ParamShape& shape = place.shape;
    bytes.push_back(can_be_gathered_directly(layout, place) ? num_bytes(shape.dim * shape.inner, shape.compute) : 0);
  }
  const std::vector<bool> is_direct = choose_direct(layout, bytes, pack_below_bytes);
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamPlace& place = layout.params()[i];
    const ParamShape& shape = place.shape;
    if (!shape.in_slot) continue;
    const bool direct = is_direct[i];
    if (direct) {
      for (int64_t block = 0; block < shape.outer; ++block) {
        const size_t offset = place.slot_offset + num_bytes(block * shape.dim * shape.inner, shape.compute);
        plan.direct.push_back({i, offset, chunk_bytes(place, shape.compute)});
      }
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
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamPlace& place = layout.params()[i];
    const ParamShape& shape = place.shape;
    if (!shape.in_slot || is_direct[i]) continue;
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

GatherPlan plan_gather_on_cpu(const Layout& layout, size_t pack_below_bytes) {
  GatherPlan plan = plan_gather(layout, pack_below_bytes);
  const size_t staging_bytes = plan.segment_bytes * static_cast<size_t>(layout.world());
  const bool packs_most = pack_below_bytes > 0 && staging_bytes > layout.slot_bytes() / 2;
  return packs_most ? plan_gather(layout, kPackEverything) : plan;
}

size_t ReductionPlan::buffer_bytes(bool in_pieces) const {
  size_t largest = in_pieces ? 0 : segment_bytes;
  for (const Piece& piece : pieces) largest = std::max(largest, in_pieces ? piece.size() : 0);
  return largest * static_cast<size_t>(layout->world());
}

namespace {

constexpr int64_t kMaxStrided = int64_t{1} << 31;  // elements that kernels pack as one strided piece

bool is_narrow(DType type) { return type == DType::f32 || type == DType::bf16 || type == DType::f16; }

// Returns where a segment may be cut at or before `cut`, but after `from`. 0: nowhere.
size_t place_of_cut(const Layout& layout, size_t from, size_t cut) {
  if (cut >= layout.reduce_segment_bytes()) cut = layout.reduce_segment_bytes();  // flags stay together
  for (const ParamPlace& place : layout.params()) {
    const ParamShape& shape = place.shape;
    const size_t begin = place.reduce_segment_offset;
    const bool is_inside = begin < cut && cut < begin + num_bytes(place.padded_shard_numel, shape.reduce);
    if (shape.trainable && is_inside && shape.outer > 1) cut = begin;
  }
  return cut > from ? cut : 0;
}

}  // namespace

ReductionPlan plan_reduction(const Layout& layout, const std::vector<bool>& trains, PieceSizes sizes) {
  ReductionPlan plan;
  plan.layout = std::make_shared<const Layout>(layout.training(trains));
  plan.segment_bytes = plan.layout->flagged_segment_bytes();
  bool can_be_cut = layout.world() > 1;
  for (const ParamPlace& place : plan.layout->params()) {
    const ParamShape& shape = place.shape;
    if (!shape.trainable) continue;
    plan.gradient_bytes += num_bytes(shape.numel(), shape.compute);
    const bool is_countable = shape.outer == 1 || shape.dim * shape.inner <= kMaxStrided;
    can_be_cut = can_be_cut && is_countable && is_narrow(shape.compute) && is_narrow(shape.reduce);
  }
  const size_t bytes = plan.segment_bytes * static_cast<size_t>(layout.world());
  // Gradients stay until the last piece is sent, so they must be narrower than what is reduced.
  can_be_cut = can_be_cut && bytes > sizes.whole_bytes && plan.gradient_bytes + sizes.piece_bytes <= bytes;
  size_t begin = 0;
  if (can_be_cut) {
    const size_t num_pieces = (bytes + sizes.piece_bytes - 1) / sizes.piece_bytes;
    const size_t step = align_up((plan.segment_bytes + num_pieces - 1) / num_pieces);
    for (size_t cut = step; cut < plan.segment_bytes; cut += step) {
      const size_t end = place_of_cut(*plan.layout, begin, cut);
      if (end != 0) plan.pieces.push_back({begin, end});
      if (end != 0) begin = end;
    }
  }
  plan.pieces.push_back({begin, plan.segment_bytes});
  return plan;
}

}  // namespace fsdp2x
