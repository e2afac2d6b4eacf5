// Gathers in a wire format.
#include "engine/transport/gather_program.hpp"

namespace fsdp2x {

GatherProgram::GatherProgram(const Layout& layout, WireFormat format) {
  const WireLayout wire = WireLayout::of_weights(layout, format);
  segment_bytes = wire.segment_bytes();
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamPlace& param = layout.params()[i];
    const WirePlace& place = wire.places()[i];
    if (!place.travels || param.shard_numel == 0) continue;
    if (place.is_coded) {
      const cuda::WireSegment codes = wire_segment(place, format, 0);
      codes_to_segment.segments.push_back(dense(codes, param.shard_offset, param.shard_numel, param.shape.orig));
    } else {
      to_segment.copies.push_back({param.shard_offset, place.offset, 1, param.shard_numel, param.shard_numel,
                                   param.shard_numel, param.shape.orig, param.shape.compute});
    }
  }
  for (const WireRows& rows : wire_rows(layout, wire)) {
    const WirePlace& place = wire.places()[rows.param];
    if (place.is_coded) {
      cuda::WireSegment codes = wire_segment(place, format, rows.segment_offset);
      codes.values_offset = static_cast<int64_t>(rows.copy.dst_offset);
      codes.numel = rows.copy.count * rows.copy.piece_numel;
      codes.piece_numel = rows.copy.piece_numel;
      codes.stride = rows.copy.dst_stride;
      codes.type = rows.copy.dst;
      codes_to_slot.segments.push_back(codes);
    } else {
      Copy copy = rows.copy;
      copy.src_offset += rows.segment_offset + place.offset;
      copy_out.copies.push_back(copy);
    }
  }
}

}  // namespace fsdp2x
