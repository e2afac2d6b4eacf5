// Loops of moments in 8 bits; part of kernel_loops.hpp, with internal linkage in each table's source.
#pragma once

#include <cstdint>

#include "core/moment_codes.hpp"

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

// The lanes are vectors of every set, and a maximum does not depend on which lane an element is compared in.
inline constexpr int kPeakLanes = 16;

inline float peak_of(const float* values, int64_t numel) {
  float lanes[kPeakLanes] = {};
  int64_t i = 0;
  for (; i + kPeakLanes <= numel; i += kPeakLanes) {
    for (int lane = 0; lane < kPeakLanes; ++lane) {
      const float value = values[i + lane];
      lanes[lane] = larger_peak(lanes[lane], value < 0.0f ? -value : value);
    }
  }
  for (int lane = 0; i < numel; ++i, ++lane) {
    lanes[lane] = larger_peak(lanes[lane], values[i] < 0.0f ? -values[i] : values[i]);
  }
  float peak = lanes[0];
  for (int lane = 1; lane < kPeakLanes; ++lane) peak = larger_peak(peak, lanes[lane]);
  return peak;
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
