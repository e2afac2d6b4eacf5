// Offsets in segments of a wire format.
#include "core/wire_layout.hpp"

#include <algorithm>

namespace fsdp2x {

namespace {

bool is_coded(const ParamShape& shape, DType type) {
  const bool is_vector = shape.outer == 1 && shape.inner == 1;
  return !is_vector && (type == DType::f32 || type == DType::bf16 || type == DType::f16);
}

}  // namespace

int64_t rows_numel(const ParamShape& shape, int world, int rank) {
  return shape.outer * shard_rows(shape.dim, world, rank).size() * shape.inner;
}

bool WireLayout::has_codes() const {
  return std::any_of(places_.begin(), places_.end(), [](const WirePlace& place) { return place.is_coded; });
}

std::vector<WireRows> wire_rows(const Layout& layout, const WireLayout& wire) {
  std::vector<WireRows> found;
  for (int rank = 0; rank < layout.world(); ++rank) {
    for (size_t i = 0; i < layout.params().size(); ++i) {
      const ParamShape& shape = layout.params()[i].shape;
      if (!wire.places()[i].travels || rows_numel(shape, layout.world(), rank) == 0) continue;
      const RowRange range = shard_rows(shape.dim, layout.world(), rank);
      found.push_back({i, static_cast<size_t>(rank) * wire.segment_bytes(),
                       shard_to_whole(shape, range, 0, shape.compute, layout.params()[i].slot_offset, shape.compute)});
    }
  }
  return found;
}

WireLayout WireLayout::of_weights(const Layout& layout, WireFormat format) { return {layout, format, false, 0}; }

WireLayout WireLayout::of_gradients(const Layout& layout, WireFormat format, size_t tail_bytes) {
  return {layout, format, true, tail_bytes};
}

WireLayout::WireLayout(const Layout& layout, WireFormat format, bool of_gradients, size_t tail_bytes)
    : format_(format) {
  for (const ParamPlace& param : layout.params()) {
    const ParamShape& shape = param.shape;
    const DType type = of_gradients ? shape.reduce : shape.compute;
    WirePlace place;
    place.travels = of_gradients ? shape.trainable : shape.in_slot;
    if (place.travels) {
      place.is_coded = is_coded(shape, type);
      place.offset = segment_bytes_;
      const auto numel = static_cast<size_t>(param.padded_shard_numel);
      const size_t element = place.is_coded ? (format == WireFormat::bf16 ? 2 : 1) : dtype_bytes(type);
      segment_bytes_ += align_up(numel * element);
      if (place.is_coded && has_scales(format)) {
        place.scales_offset = segment_bytes_;
        segment_bytes_ += align_up(static_cast<size_t>(num_wire_blocks(param.padded_shard_numel)) * sizeof(float));
      }
    }
    places_.push_back(place);
  }
  tail_offset_ = segment_bytes_;
  segment_bytes_ += align_up(tail_bytes);
}

}  // namespace fsdp2x
