// Gradients in a wire format.
#include "engine/transport/process_group/wire_reduction.hpp"

#include <algorithm>
#include <cstring>

#include "engine/torch/parallel.hpp"
#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/wire.hpp"

namespace fsdp2x {

namespace {

float* floats_at(std::byte* memory) { return reinterpret_cast<float*>(memory); }
const float* floats_at(const std::byte* memory) { return reinterpret_cast<const float*>(memory); }

}  // namespace

WireReduction::WireReduction(const SegmentPlan& plan, WireFormat format)
    : plan_(plan), wire_(WireLayout::of_gradients(*plan.layout, format, plan.flags_numel() * sizeof(float))) {}

void WireReduction::encode(const void* packed, const std::vector<uint8_t>& filled, void* segments) {
  const Layout& layout = *plan_.layout;
  const auto* const from = static_cast<const std::byte*>(packed);
  auto* const to = static_cast<std::byte*>(segments);
  if (format() == WireFormat::int8 && !errors_.defined()) {
    errors_ = at::zeros({static_cast<int64_t>(segment_bytes()) * layout.world()}, at::kByte);
  }
  for (int rank = 0; rank < layout.world(); ++rank) {
    const std::byte* const source = from + static_cast<size_t>(rank) * plan_.segment_bytes;
    std::byte* const target = to + static_cast<size_t>(rank) * segment_bytes();
    for (size_t i = 0; i < layout.params().size(); ++i) encode(i, rank, source, target, filled[i] != 0);
    std::memcpy(target + wire_.tail_offset(), source + layout.reduce_segment_bytes(),
                plan_.flags_numel() * sizeof(float));
  }
}

void WireReduction::encode(size_t param, int rank, const std::byte* packed, std::byte* segment, bool is_filled) {
  const ParamPlace& place = plan_.layout->params()[param];
  const WirePlace& wire = wire_.places()[param];
  const int64_t numel = rows_numel(place.shape, plan_.layout->world(), rank);
  if (!wire.travels || numel == 0) return;
  const float* const values = floats_at(packed + place.reduce_segment_offset);
  std::byte* const codes = segment + wire.offset;
  if (!wire.is_coded) {
    std::memcpy(codes, values, static_cast<size_t>(numel) * sizeof(float));
    return;
  }
  if (format() == WireFormat::bf16) {
    run_parallel(numel, kGrainNumel, [&](int64_t begin, int64_t end) {
      cpu::cast_copy(DType::bf16, codes + 2 * begin, DType::f32, values + begin, end - begin);
    });
    return;
  }
  float* const scales = floats_at(segment + wire.scales_offset);
  if (!is_filled) {
    std::memset(codes, 0, static_cast<size_t>(numel));
    std::fill_n(scales, num_wire_blocks(numel), 1.0F);
    return;
  }
  std::byte* const errors =
      static_cast<std::byte*>(errors_.mutable_data_ptr()) + static_cast<size_t>(rank) * segment_bytes();
  run_parallel(num_wire_blocks(numel), kGrainNumel / kWireBlock, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kWireBlock;
    cpu::encode_int8_with_errors(reinterpret_cast<uint8_t*>(codes) + first, scales + begin,
                                 reinterpret_cast<uint8_t*>(errors + wire.offset) + first,
                                 floats_at(errors + wire.scales_offset) + begin, values + first,
                                 std::min(end * kWireBlock, numel) - first);
  });
}

void WireReduction::sum(const void* segments, void* rows) const {
  const Layout& layout = *plan_.layout;
  auto* const to = static_cast<std::byte*>(rows);
  const auto* const from = static_cast<const std::byte*>(segments);
  const auto add = [&](const WirePlace& wire, float* sums, int64_t first, int64_t numel) {
    std::memset(sums, 0, static_cast<size_t>(numel) * sizeof(float));
    for (int rank = 0; rank < layout.world(); ++rank) {
      const std::byte* const segment = from + static_cast<size_t>(rank) * segment_bytes();
      if (wire.is_coded) {
        const size_t element = format() == WireFormat::bf16 ? 2 : 1;
        cpu::add_wire(format(), sums, segment + wire.offset + static_cast<size_t>(first) * element,
                      floats_at(segment + wire.scales_offset) + first / kWireBlock, numel);
      } else {
        cpu::add(DType::f32, sums, DType::f32, floats_at(segment + wire.offset) + first, numel);
      }
    }
  };
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamPlace& place = layout.params()[i];
    const WirePlace& wire = wire_.places()[i];
    if (!wire.travels || place.shard_numel == 0) continue;
    float* const sums = floats_at(to + place.reduce_segment_offset);
    run_parallel(num_wire_blocks(place.shard_numel), kGrainNumel / kWireBlock, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kWireBlock;
      add(wire, sums + first, first, std::min(end * kWireBlock, place.shard_numel) - first);
    });
  }
  WirePlace tail;
  tail.offset = wire_.tail_offset();
  add(tail, floats_at(to + layout.reduce_segment_bytes()), 0, static_cast<int64_t>(plan_.flags_numel()));
}

void WireReduction::forget_errors() { errors_ = at::Tensor(); }

}  // namespace fsdp2x
