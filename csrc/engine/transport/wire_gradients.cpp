// Programs of gradients in a wire format.
#include "engine/transport/wire_gradients.hpp"

#include "core/error.hpp"
#include "engine/params/param_group.hpp"

namespace fsdp2x {

WireGradients& WireGradients::of(std::unique_ptr<WireGradients>& kept, const ParamGroup& group,
                                 const SegmentPlan& plan) {
  const WireFormat format = group.options().wire_gradients;
  if (group.reduce_type() != DType::f32) {
    throw Error("fsdp2x: gradients of unit '" + group.name() + "' are reduced in " +
                std::string(dtype_name(group.reduce_type())) +
                ", but wire formats need float32. Use MixedPrecisionPolicy(reduce_dtype=torch.float32).");
  }
  if (!kept || kept->format_ != format || &kept->plan_ != &plan) kept = std::make_unique<WireGradients>(plan, format);
  return *kept;
}

WireGradients::WireGradients(const SegmentPlan& plan, WireFormat format) : plan_(plan), format_(format) {
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
      auto segment = dense(wire_segment(place, format, codes), values + param.reduce_segment_offset, numel, DType::f32);
      segment.source = static_cast<int32_t>(i);
      to_segments_.segments.push_back(segment);
    }
    to_segments_.segments.push_back(
        dense(wire_segment(tail, format, codes), values + layout.reduce_segment_bytes(), tail_numel, DType::f32));
  }
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamPlace& param = layout.params()[i];
    const WirePlace& place = wire.places()[i];
    if (!place.travels || param.shard_numel == 0) continue;
    to_rows_.segments.push_back(
        dense(wire_segment(place, format, 0), param.reduce_segment_offset, param.shard_numel, DType::f32));
  }
  to_rows_.segments.push_back(
      dense(wire_segment(tail, format, 0), layout.reduce_segment_bytes(), tail_numel, DType::f32));
}

void* WireGradients::errors(at::Device device) {
  if (format_ != WireFormat::int8) return nullptr;
  if (!errors_.defined()) {
    errors_ = at::zeros({static_cast<int64_t>(bytes())}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  return errors_.mutable_data_ptr();
}

}  // namespace fsdp2x
