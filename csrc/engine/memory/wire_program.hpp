// Segments that are coded or decoded repeatedly (core/wire_format.hpp): with what a device has prepared for it, and on
// the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/wire_layout.hpp"
#include "kernels/cuda/plan.hpp"

namespace fsdp2x {

struct WireProgram {
  bool empty() const { return segments.empty(); }

  std::vector<cuda::WireSegment> segments;  // `source`: the parameter, however many there are
  mutable std::shared_ptr<void> prepared;   // made at the first run by the one layer that runs it
};

// Returns a piece of a rank's segment at `base`, without its values.
cuda::WireSegment wire_segment(const WirePlace& place, WireFormat format, size_t base);
// Adds its `numel` consecutive values.
cuda::WireSegment dense(cuda::WireSegment segment, size_t values_offset, int64_t numel, DType type);

// Run a program on CPU memory, on torch's threads. DeviceLayer has the same functions. Values that are encoded or
// summed are consecutive.
void encode_on_host(const WireProgram& program, const void* values, void* segments, void* errors,
                    const std::vector<uint8_t>& filled);
void decode_on_host(const WireProgram& program, const void* segments, void* values);
void sum_codes_on_host(const WireProgram& program, const void* segments, size_t segment_bytes, int num_ranks,
                       double divisor, void* values);

}  // namespace fsdp2x
