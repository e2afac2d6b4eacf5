// Plans of wire formats on a device.
#include "engine/transport/device/device_wire.hpp"

namespace fsdp2x {

namespace {

cuda::WireSegment segment_of(const WirePlace& place, WireFormat format, size_t base) {
  cuda::WireSegment segment;
  segment.codes_offset = static_cast<int64_t>(base + place.offset);
  segment.scales_offset = static_cast<int64_t>(base + place.scales_offset);
  segment.format = place.is_coded ? format : WireFormat::plain;
  return segment;
}

// Returns a segment of `numel` consecutive values.
cuda::WireSegment dense(cuda::WireSegment segment, size_t values_offset, int64_t numel, DType type) {
  segment.values_offset = static_cast<int64_t>(values_offset);
  segment.numel = segment.piece_numel = numel;
  segment.type = type;
  return segment;
}

}  // namespace

DeviceWireWeights::DeviceWireWeights(const Layout& layout, WireFormat format) {
  const WireLayout wire = WireLayout::of_weights(layout, format);
  segment_bytes = wire.segment_bytes();
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamPlace& param = layout.params()[i];
    const WirePlace& place = wire.places()[i];
    if (!place.travels || param.shard_numel == 0) continue;
    if (place.is_coded) {
      const cuda::WireSegment codes = segment_of(place, format, 0);
      to_segment.segments.push_back(dense(codes, param.shard_offset, param.shard_numel, param.shape.orig));
    } else {
      plain_to_segment.copies.push_back({param.shard_offset, place.offset, 1, param.shard_numel, param.shard_numel,
                                         param.shard_numel, param.shape.orig, param.shape.compute});
    }
  }
  for (const WireRows& rows : wire_rows(layout, wire)) {
    const WirePlace& place = wire.places()[rows.param];
    if (place.is_coded) {
      cuda::WireSegment codes = segment_of(place, format, rows.segment_offset);
      codes.values_offset = static_cast<int64_t>(rows.copy.dst_offset);
      codes.numel = rows.copy.count * rows.copy.piece_numel;
      codes.piece_numel = rows.copy.piece_numel;
      codes.stride = rows.copy.dst_stride;
      codes.type = rows.copy.dst;
      to_slot.segments.push_back(codes);
    } else {
      Copy copy = rows.copy;
      copy.src_offset += rows.segment_offset + place.offset;
      plain_to_slot.copies.push_back(copy);
    }
  }
}

DeviceWireGradients::DeviceWireGradients(const SegmentPlan& plan, WireFormat format) : plan_(plan), format_(format) {
  const Layout& layout = *plan.layout;
  const WireLayout wire = WireLayout::of_gradients(layout, format, plan.flags_numel() * sizeof(float));
  segment_bytes_ = wire.segment_bytes();
  WirePlace tail;
  tail.offset = wire.tail_offset();
  const auto tail_numel = static_cast<int64_t>(plan.flags_numel());
  for (int rank = 0; rank < layout.world(); ++rank) {
    const size_t values = static_cast<size_t>(rank) * plan.segment_bytes;
    const size_t codes = static_cast<size_t>(rank) * segment_bytes_;
    for (size_t i = 0; i < layout.params().size(); ++i) {
      const ParamPlace& param = layout.params()[i];
      const WirePlace& place = wire.places()[i];
      const int64_t numel = rows_numel(param.shape, layout.world(), rank);
      if (!place.travels || numel == 0) continue;
      auto segment = dense(segment_of(place, format, codes), values + param.reduce_segment_offset, numel, DType::f32);
      segment.source = static_cast<int32_t>(i);
      to_segments_.segments.push_back(segment);
    }
    to_segments_.segments.push_back(
        dense(segment_of(tail, format, codes), values + layout.reduce_segment_bytes(), tail_numel, DType::f32));
  }
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamPlace& param = layout.params()[i];
    const WirePlace& place = wire.places()[i];
    if (!place.travels || param.shard_numel == 0) continue;
    to_rows_.segments.push_back(
        dense(segment_of(place, format, 0), param.reduce_segment_offset, param.shard_numel, DType::f32));
  }
  to_rows_.segments.push_back(
      dense(segment_of(tail, format, 0), layout.reduce_segment_bytes(), tail_numel, DType::f32));
}

void DeviceWireGradients::encode(DeviceLayer& layer, const void* packed, const std::vector<uint8_t>& filled,
                                 void* segments) {
  if (format_ == WireFormat::int8 && !errors_.defined()) {
    errors_ = at::zeros({static_cast<int64_t>(bytes())}, at::TensorOptions().dtype(at::kByte).device(layer.device()));
  }
  layer.encode(to_segments_, packed, segments, errors_.defined() ? errors_.mutable_data_ptr() : nullptr, filled);
}

void DeviceWireGradients::sum(DeviceLayer& layer, const void* segments, double divisor, void* rows) const {
  layer.sum_codes(to_rows_, segments, segment_bytes_, plan_.layout->world(), divisor, rows);
}

void DeviceWireGradients::forget_errors(DeviceContext& context) {
  if (!errors_.defined()) return;
  context.layer().zero(errors_);
}

}  // namespace fsdp2x
