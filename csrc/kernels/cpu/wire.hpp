// Wire formats (core/wire_format.hpp) on raw pointers. Each has a scalar reference in tests/cpp.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "core/wire_format.hpp"

namespace fsdp2x::cpu {

// Encodes values in f32, bf16, or f16, from the beginning of a block on. Formats without scales ignore `scales`.
void encode_wire(WireFormat format, void* codes, float* scales, DType type, const void* values, int64_t numel);

// Decodes elements [first, first + numel), rounded to `type`. `codes` and `scales` begin with a block.
void decode_wire(WireFormat format, DType type, void* values, const void* codes, const float* scales, int64_t first,
                 int64_t numel);

// sums += codes, from the beginning of a block on. Not for fp8.
void add_wire(WireFormat format, float* sums, const void* codes, const float* scales, int64_t numel);

// Encodes values plus the errors of the last call to int8 codes, and stores the new rounding errors. Zero errors with
// zero scales mean none.
void encode_int8_with_errors(uint8_t* codes, float* scales, uint8_t* errors, float* error_scales, const float* values,
                             int64_t numel);

}  // namespace fsdp2x::cpu
