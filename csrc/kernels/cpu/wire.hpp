// Wire formats (core/wire_format.hpp) on raw pointers. Each has a scalar reference in tests/cpp.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "core/wire_format.hpp"

namespace fsdp2x::cpu {

// Values in f32, bf16 or f16 -> codes, from the beginning of a block on. Formats without scales do not look at them.
void encode_wire(WireFormat format, void* codes, float* scales, DType type, const void* values, int64_t numel);

// Elements [first, first + numel) of what begins with a block at `codes` and `scales` -> `values`, rounded to `type`.
void decode_wire(WireFormat format, DType type, void* values, const void* codes, const float* scales, int64_t first,
                 int64_t numel);

// sums += codes, from the beginning of a block on; not of fp8.
void add_wire(WireFormat format, float* sums, const void* codes, const float* scales, int64_t numel);

// Values plus the errors of the last call -> int8 codes; what they round away -> the errors. Zeros, and scales of zero,
// are no errors.
void encode_int8_with_errors(uint8_t* codes, float* scales, uint8_t* errors, float* error_scales, const float* values,
                             int64_t numel);

}  // namespace fsdp2x::cpu
