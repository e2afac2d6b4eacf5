// Loops of 8-bit moments. Part of kernel_loops.hpp, with internal linkage in each table's source.
#pragma once

#include <cstdint>

#include "kernels/rules/moment_codes.hpp"

namespace fsdp2x::cpu {
namespace {

template <bool kSigned>
void load_moments(float* __restrict values, const uint8_t* __restrict codes, const float* __restrict scales,
                  int64_t numel) {
  for (int64_t begin = 0; begin < numel; begin += kMomentBlock, ++scales) {
    const int64_t end = numel - begin < kMomentBlock ? numel : begin + kMomentBlock;
    const float scale = *scales;
    for (int64_t i = begin; i < end; ++i) values[i] = decoded_moment<kSigned>(codes[i], scale);
  }
}

// Bits of magnitudes have the order of the magnitudes, with NaN above all, as in larger_peak(). The maximum of integers
// vectorizes.
inline float peak_of(const float* values, int64_t numel) {
  int32_t peak = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const int32_t magnitude = __builtin_bit_cast(int32_t, values[i]) & 0x7fffffff;
    peak = magnitude > peak ? magnitude : peak;
  }
  return __builtin_bit_cast(float, peak);
}

template <bool kSigned, bool kStochastic>
void store_moments(uint8_t* __restrict codes, float* __restrict scales, const float* __restrict values,
                   const uint16_t* __restrict bits, int64_t numel) {
  for (int64_t begin = 0; begin < numel; begin += kMomentBlock, ++scales) {
    const int64_t end = numel - begin < kMomentBlock ? numel : begin + kMomentBlock;
    *scales = moment_scale(peak_of(values + begin, end - begin));
    const float inverse = inverse_moment_scale(*scales);
    for (int64_t i = begin; i < end; ++i) {
      codes[i] = encoded_moment<kSigned, kStochastic>(values[i], inverse, kStochastic ? bits[i] : 0);
    }
  }
}

}  // namespace
}  // namespace fsdp2x::cpu
