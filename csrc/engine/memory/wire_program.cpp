// Wire formats on the host.
#include "engine/memory/wire_program.hpp"

#include <algorithm>
#include <cstring>

#include "engine/torch/parallel.hpp"
#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/wire.hpp"

namespace fsdp2x {

namespace {

using cuda::WireSegment;

const std::byte* at(const void* base, int64_t bytes) { return static_cast<const std::byte*>(base) + bytes; }
std::byte* at(void* base, int64_t bytes) { return static_cast<std::byte*>(base) + bytes; }

int64_t bytes_of(int64_t numel, DType type) { return numel * static_cast<int64_t>(dtype_bytes(type)); }

int64_t code_offset(const WireSegment& one, int64_t i) {
  const DType type = one.format == WireFormat::bf16 ? DType::bf16 : DType::f32;
  return one.codes_offset + (has_scales(one.format) ? i : bytes_of(i, type));
}

int64_t scale_offset(const WireSegment& one, int64_t i) {
  return one.scales_offset + bytes_of(i / kWireBlock, DType::f32);
}

Items items_of(const WireProgram& program) {
  Items items;
  for (const WireSegment& one : program.segments) items.add(one.numel);
  return items;
}

// Calls run(segment, begin, end) for complete blocks.
template <class Run>
void for_each_blocks(const WireProgram& program, const Run& run) {
  items_of(program).for_each_range([&](size_t i, int64_t begin, int64_t end) {
    const WireSegment& one = program.segments[i];
    begin = num_wire_blocks(begin) * kWireBlock;  // a range takes the blocks that begin in it
    end = std::min(num_wire_blocks(end) * kWireBlock, one.numel);
    if (begin < end) run(one, begin, end);
  });
}

}  // namespace

WireSegment wire_segment(const WirePlace& place, WireFormat format, size_t base) {
  WireSegment segment;
  segment.codes_offset = static_cast<int64_t>(base + place.offset);
  segment.scales_offset = static_cast<int64_t>(base + place.scales_offset);
  segment.format = place.is_coded ? format : WireFormat::plain;
  return segment;
}

WireSegment dense(WireSegment segment, size_t values_offset, int64_t numel, DType type) {
  segment.values_offset = static_cast<int64_t>(values_offset);
  segment.numel = segment.piece_numel = numel;
  segment.type = type;
  return segment;
}

void encode_on_host(const WireProgram& program, const void* values, void* segments, void* errors,
                    const std::vector<uint8_t>& filled) {
  for_each_blocks(program, [&](const WireSegment& one, int64_t begin, int64_t end) {
    const std::byte* const from = at(values, one.values_offset + bytes_of(begin, one.type));
    auto* const codes = reinterpret_cast<uint8_t*>(at(segments, code_offset(one, begin)));
    auto* const scales = reinterpret_cast<float*>(at(segments, scale_offset(one, begin)));
    const int64_t numel = end - begin;
    if (one.format == WireFormat::plain) {
      std::memcpy(codes, from, static_cast<size_t>(numel) * sizeof(float));
    } else if (has_scales(one.format) && !filled.empty() && filled[static_cast<size_t>(one.source)] == 0) {
      std::memset(codes, 0, static_cast<size_t>(numel));
      std::fill_n(scales, num_wire_blocks(numel), 1.0F);
    } else if (one.format == WireFormat::int8 && errors != nullptr) {
      cpu::encode_int8_with_errors(codes, scales, reinterpret_cast<uint8_t*>(at(errors, code_offset(one, begin))),
                                   reinterpret_cast<float*>(at(errors, scale_offset(one, begin))),
                                   reinterpret_cast<const float*>(from), numel);
    } else {
      cpu::encode_wire(one.format, codes, scales, one.type, from, numel);
    }
  });
}

void decode_on_host(const WireProgram& program, const void* segments, void* values) {
  items_of(program).for_each_range([&](size_t i, int64_t begin, int64_t end) {
    const WireSegment& one = program.segments[i];
    while (begin < end) {
      const int64_t piece = begin / one.piece_numel;
      const int64_t stop = std::min(end, (piece + 1) * one.piece_numel);
      const int64_t place = piece * one.stride + begin - piece * one.piece_numel;
      cpu::decode_wire(one.format, one.type, at(values, one.values_offset + bytes_of(place, one.type)),
                       at(segments, one.codes_offset), reinterpret_cast<const float*>(at(segments, one.scales_offset)),
                       begin, stop - begin);
      begin = stop;
    }
  });
}

void sum_codes_on_host(const WireProgram& program, const void* segments, size_t segment_bytes, int num_ranks,
                       double divisor, void* values) {
  for_each_blocks(program, [&](const WireSegment& one, int64_t begin, int64_t end) {
    auto* const sums = reinterpret_cast<float*>(at(values, one.values_offset)) + begin;
    const int64_t numel = end - begin;
    std::memset(sums, 0, static_cast<size_t>(numel) * sizeof(float));
    for (int rank = 0; rank < num_ranks; ++rank) {
      const std::byte* const segment = at(segments, rank * static_cast<int64_t>(segment_bytes));
      const std::byte* const codes = at(segment, code_offset(one, begin));
      if (one.format == WireFormat::plain) {
        cpu::add(DType::f32, sums, DType::f32, codes, numel);
      } else {
        cpu::add_wire(one.format, sums, codes, reinterpret_cast<const float*>(at(segment, scale_offset(one, begin))),
                      numel);
      }
    }
    if (divisor != 1.0) cpu::divide(DType::f32, sums, numel, divisor);
  });
}

}  // namespace fsdp2x
