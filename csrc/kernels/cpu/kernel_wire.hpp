// Loops of wire formats. Part of kernel_loops.hpp, with internal linkage in each table's source.
#pragma once

#include <cstdint>

#include "core/wire_format.hpp"
#include "kernels/cpu/kernel_moments.hpp"

namespace fsdp2x::cpu {
namespace {

inline int64_t end_of_block(int64_t begin, int64_t numel) {
  return numel - begin < kWireBlock ? numel : begin + kWireBlock;
}

template <WireFormat kFormat>
void encode_wire(uint8_t* __restrict codes, float* __restrict scales, const float* __restrict values, int64_t numel) {
  constexpr float kTop = top_wire_code(kFormat);
  for (int64_t begin = 0; begin < numel; begin += kWireBlock, ++scales) {
    const int64_t end = end_of_block(begin, numel);
    const float scale = wire_scale(peak_of(values + begin, end - begin), kTop);
    for (int64_t i = begin; i < end; ++i) codes[i] = encoded_wire<kFormat>(values[i], scale);
    *scales = scale;
  }
}

// `first`: the first element, counted from the beginning of a block. `codes` begin with that element, `scales` with its
// block.
template <WireFormat kFormat>
void decode_wire(float* __restrict values, const uint8_t* __restrict codes, const float* __restrict scales,
                 int64_t first, int64_t numel) {
  int64_t begin = 0;
  for (int64_t end = kWireBlock - first; begin < numel; end += kWireBlock, ++scales) {
    if (end > numel) end = numel;
    const float scale = *scales;
    for (int64_t i = begin; i < end; ++i) values[i] = decoded_wire<kFormat>(codes[i], scale);
    begin = end;
  }
}

void add_int8(float* __restrict sums, const uint8_t* __restrict codes, const float* __restrict scales, int64_t numel) {
  for (int64_t begin = 0; begin < numel; begin += kWireBlock, ++scales) {
    const int64_t end = end_of_block(begin, numel);
    const float scale = *scales;
    for (int64_t i = begin; i < end; ++i) sums[i] += decoded_int8(codes[i], scale);
  }
}

void encode_int8_with_errors(uint8_t* __restrict codes, float* __restrict scales, uint8_t* __restrict errors,
                             float* __restrict error_scales, const float* __restrict values, int64_t numel) {
  constexpr float kTop = top_wire_code(WireFormat::int8);
  float wanted[kWireBlock];
  for (int64_t begin = 0; begin < numel; begin += kWireBlock, ++scales, ++error_scales) {
    const int64_t size = end_of_block(begin, numel) - begin;
    const float error_scale = *error_scales;
    for (int64_t i = 0; i < size; ++i) wanted[i] = values[begin + i] + decoded_int8(errors[begin + i], error_scale);
    const float scale = wire_scale(peak_of(wanted, size), kTop);
    const float left_scale = wire_error_scale(scale);
    // Two separate loops, because a combined one would not vectorize.
    for (int64_t i = 0; i < size; ++i) codes[begin + i] = encoded_int8(wanted[i], scale);
    for (int64_t i = 0; i < size; ++i) wanted[i] -= decoded_int8(codes[begin + i], scale);
    for (int64_t i = 0; i < size; ++i) errors[begin + i] = encoded_int8(wanted[i], left_scale);
    *scales = scale;
    *error_scales = left_scale;
  }
}

}  // namespace
}  // namespace fsdp2x::cpu
