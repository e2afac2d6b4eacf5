// Weights in a wire format.
#include "engine/transport/process_group/wire_gather.hpp"

#include <algorithm>

#include "engine/torch/parallel.hpp"
#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/wire.hpp"

namespace fsdp2x {

namespace {

const float* scales_at(const std::byte* segment, const WirePlace& place) {
  return reinterpret_cast<const float*>(segment + place.scales_offset);
}

size_t bytes_of(int64_t numel, DType type) { return static_cast<size_t>(numel) * dtype_bytes(type); }

}  // namespace

WireGather::WireGather(const Layout& layout, WireFormat format)
    : layout_(layout), wire_(WireLayout::of_weights(layout, format)), rows_(wire_rows(layout, wire_)) {}

const at::Tensor& WireGather::segment(const Gil& gil, const ParamGroup& group, uint64_t forward) {
  const uint64_t versions = group.shard_versions(gil);
  if (forward != kNoForward && forward == kept_for_ && versions == kept_versions_) return kept_;
  // The bytes between the pieces are sent too, so they must be initialized.
  if (!kept_.defined()) kept_ = at::zeros({static_cast<int64_t>(segment_bytes())}, at::kByte);
  encode(group.pool().const_data_ptr(), static_cast<std::byte*>(kept_.mutable_data_ptr()));
  ++group.counters().wire_encodings;
  kept_for_ = forward;
  kept_versions_ = versions;
  return kept_;
}

void WireGather::encode(const void* pool, std::byte* segment) const {
  const auto* const shards = static_cast<const std::byte*>(pool);
  for (size_t i = 0; i < layout_.params().size(); ++i) {
    const ParamPlace& param = layout_.params()[i];
    const WirePlace& place = wire_.places()[i];
    if (!place.travels || param.shard_numel == 0) continue;
    const std::byte* const values = shards + param.shard_offset;
    std::byte* const codes = segment + place.offset;
    if (!place.is_coded) {
      cpu::cast_copy(param.shape.compute, codes, param.shape.orig, values, param.shard_numel);
      continue;
    }
    auto* const scales = reinterpret_cast<float*>(segment + place.scales_offset);
    run_parallel(num_wire_blocks(param.shard_numel), kGrainNumel / kWireBlock, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kWireBlock;
      cpu::encode_wire(format(), codes + first, scales + begin, param.shape.orig,
                       values + bytes_of(first, param.shape.orig),
                       std::min(end * kWireBlock, param.shard_numel) - first);
    });
  }
}

void WireGather::decode(const void* segments, void* slot) const {
  Items items;
  for (const WireRows& rows : rows_) items.add(rows.copy.count * rows.copy.piece_numel);
  items.for_each_range([&](size_t i, int64_t begin, int64_t end) {
    decode(rows_[i], begin, end, static_cast<const std::byte*>(segments), static_cast<std::byte*>(slot));
  });
}

void WireGather::decode(const WireRows& rows, int64_t begin, int64_t end, const std::byte* segments,
                        std::byte* slot) const {
  const WirePlace& place = wire_.places()[rows.param];
  const std::byte* const segment = segments + rows.segment_offset;
  if (!place.is_coded) return cpu::run_copy(rows.copy, begin, end, segment + place.offset, slot);
  const Copy& copy = rows.copy;
  while (begin < end) {
    const int64_t piece = begin / copy.piece_numel;
    const int64_t stop = std::min(end, (piece + 1) * copy.piece_numel);
    const int64_t target = piece * copy.dst_stride + begin - piece * copy.piece_numel;
    cpu::decode_wire(format(), copy.dst, slot + copy.dst_offset + bytes_of(target, copy.dst), segment + place.offset,
                     scales_at(segment, place), begin, stop - begin);
    begin = stop;
  }
}

}  // namespace fsdp2x
